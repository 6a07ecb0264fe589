"""Whole steps of an engine: cells that were timed under imposed routing, and the fit to them.

A decode step is the sum of a time by rows (as measured at each batch size), a time per cached token, and the experts of
every layer: the first tile of each touched expert and its further tiles, or waves of tiles. Prompts were also timed
without their experts, which gives the rest of a step, and in several pieces, which gives the time of attention.

The kernel's tiles are facts of the kernel: they are chosen once, by the error on all steps. All else is judged on steps
that the fit has not seen: decode in folds, prefill on drawn prompts, since it is fitted to even ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from coterie.costs.attention import CACHED_BYTES, LAYERS, attention_shape, attention_us
from coterie.costs.cells import StepCell
from coterie.costs.experts import MoeParams, Waves, layer_us
from coterie.costs.fit import FOLDS, FitError, MoeFit
from coterie.costs.roofline import CurveLaw, Quality, RooflineLaw
from coterie.errors import check
from coterie.types import ModelSpec, WeightDtype

Floats = NDArray[np.float64]

BLOCK, ROWS_IN_WAVES = 256, 16
"""Columns and rows of a tile in Triton's kernels for mxfp4."""
UNALIGNED = 0.25
"""Pairs of token and expert per expert up to which vLLM gives every pair a tile of its own."""
SPLITS: tuple[tuple[int, ...], ...] = ((16, 32), (16,), (32,))
"""Tile sizes of decode to choose from: up to 32 rows in the batch, and above; none for kernels that run in waves."""
DECODE = 64
"""Largest decode batch that is timed; larger steps have the tiles of prefill."""
LARGE = (64, 128, 256)
"""Tile sizes of prefill to choose from."""
WAITING = 1.5
"""Times of output head and sampling from which a step waited for the host."""
FREE = RooflineLaw(1e-3, 1e12, 1e12, 30.0, Quality(0.0, 0.0, 0))


class EngineFit(msgspec.Struct, frozen=True):
    """Whole steps of a model in one weight dtype, as an engine runs them on the device; see docs/costs.md."""

    software: str
    """Versions of the engine and of torch."""
    moe: MoeFit
    """Experts; its error is that of whole decode steps held out."""
    rest: CurveLaw
    """Step without experts, attention and output head, by tokens; its error is that of prompts with drawn routing."""
    head: CurveLaw
    """Output head and sampling, by output tokens."""
    decode_attention: RooflineLaw
    prefill_attention: RooflineLaw


class _Decode(NamedTuple):
    """A fit of decode steps."""

    rest_us: dict[int, float]
    """By rows."""
    cached_us: float
    experts: Floats
    """Times of what :func:`_expert_work` counts."""
    quality: FitError


def fit_steps(spec: ModelSpec, dtype: WeightDtype, cells: Sequence[StepCell], software: str, places: int) -> EngineFit:
    """Fit the cells of one model and weight dtype; `places` are the multiprocessors of the device, 0 for a CPU."""
    decode = [cell for cell in cells if not cell.prompts]
    check(
        len({cell.tokens for cell in decode}) >= 2 and all(_prompts(cells, experts) for experts in (True, False)),
        "too few steps to fit: decode of two sizes, prompts, and prompts without experts are needed",
    )
    in_waves: list[tuple[int, ...]] = [()] if places else []
    fits = {split: _fit_decode(decode, spec, split, places) for split in (*in_waves, *SPLITS)}
    split = min(fits, key=lambda one: fits[one].quality.mape_pct)
    fit = fits[split]
    sizes = sorted(fit.rest_us)
    heads = [float(np.median([c.us - c.forward_us for c in decode if c.tokens == rows])) for rows in sizes]
    off = [100.0 * abs(heads[sizes.index(c.tokens)] / (c.us - c.forward_us) - 1.0) for c in decode]
    head = CurveLaw(tuple(map(float, sizes)), _rounded(heads), _quality(off))
    shape = attention_shape(spec)
    per_us = shape[CACHED_BYTES] * shape[LAYERS] / max(fit.cached_us, 1e-9)
    decode_law = RooflineLaw(1e-3, _short(min(per_us, 1e12)), 1e12, 30.0, _quality([fit.quality.mape_pct]))
    prompts, without = (_by_device(_prompts(cells, experts), head) for experts in (True, False))
    bare = {(cell.tokens, cell.prompts): cell.us for cell in without}
    prefill_law = _fit_attention(spec, bare)
    points = dict(fit.rest_us)
    for (tokens, parts), us in sorted(bare.items()):
        if parts == 1:
            left = us - _attention_us(spec, prefill_law, tokens, 1) - head.us(1)
            points[tokens] = max(*points.values(), left)
    rest = CurveLaw(tuple(map(float, points)), _rounded(list(points.values())), _quality([0.0]))
    others = [_attention_us(spec, prefill_law, c.tokens, c.prompts) + rest.us(c.tokens) for c in prompts]
    timed = [(c, max(1.0, c.us - us - head.us(c.prompts))) for c, us in zip(prompts, others, strict=True)]
    experts = _Experts(spec, dtype, split, fit.experts, places)
    params = experts.fit(timed)
    off = [100.0 * abs((experts.us(params, c) - us) / c.us) for c, us in timed if not c.even]
    rest = msgspec.structs.replace(rest, held_out=_quality(off))
    return EngineFit(software, MoeFit(params, fit.quality), rest, head, decode_law, prefill_law)


def _prompts(cells: Sequence[StepCell], experts: bool) -> list[StepCell]:
    """Return the prompts that ran with, or without, their experts."""
    return [cell for cell in cells if cell.prompts and bool(cell.load.any()) == experts]


def _by_device(cells: Sequence[StepCell], head: CurveLaw) -> list[StepCell]:
    """Return the cells whose time is the device's; where the host launches too slowly, output and sampling wait too."""
    kept = [cell for cell in cells if cell.us - cell.forward_us < WAITING * head.us(cell.prompts)]
    return kept or [max(cells, key=lambda cell: cell.tokens)]


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _rounded(times: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(us, 1) for us in times)


def _quality(off: Sequence[float]) -> Quality:
    return Quality(round(float(np.mean(off)), 2), round(float(max(off)), 2), len(off))


def _attention_us(spec: ModelSpec, law: RooflineLaw, tokens: int, prompts: int) -> float:
    none = np.zeros(1)
    return float(attention_us(attention_shape(spec), FREE.numbers(), law.numbers(), 0, none, tokens, none, prompts)[0])


def _fit_attention(spec: ModelSpec, bare: dict[tuple[int, int], float]) -> RooflineLaw:
    """Return the law by which one long prompt takes longer than as many tokens in several prompts."""
    for (tokens, prompts), us in bare.items():
        if prompts > 1 and bare[tokens, 1] > us:
            unit = msgspec.structs.replace(FREE, flops_per_us=1.0)
            flops = _attention_us(spec, unit, tokens, 1) - _attention_us(spec, unit, tokens, prompts)
            return msgspec.structs.replace(FREE, flops_per_us=_short(flops / (bare[tokens, 1] - us)))
    return FREE


def _columns(spec: ModelSpec) -> tuple[int, int]:
    """Return the columns of a tile in each product of a kernel that runs in waves."""
    return -(-2 * spec.expert_intermediate_size // BLOCK), -(-spec.hidden_size // BLOCK)


def _expert_work(cell: StepCell, spec: ModelSpec, split: tuple[int, ...], places: int) -> list[float]:
    """Return what the time of a decode step's experts is linear in, summed over layers."""
    touched, pairs = int((cell.load > 0).sum()), int(cell.load.sum())
    if not split:
        tiles = np.ceil(cell.load / ROWS_IN_WAVES).sum(axis=1)
        first, second = _columns(spec)
        return [float((np.maximum(2, np.ceil(tiles * first / places)) + np.ceil(tiles * second / places)).sum())]
    further = [0.0] * (1 + len(split))
    if pairs <= UNALIGNED * cell.load.size:
        further[0] = pairs - touched
    else:
        size = 0 if cell.tokens <= DECODE // 2 else len(split) - 1
        further[1 + size] = float(np.ceil(cell.load / split[size]).sum()) - touched
    return [touched, *further]


def _fit_decode(cells: Sequence[StepCell], spec: ModelSpec, split: tuple[int, ...], places: int) -> _Decode:
    from scipy.optimize import nnls  # slow to import

    sizes = sorted({cell.tokens for cell in cells})
    x = np.array(
        [[float(c.tokens == rows) for rows in sizes] + [c.cached, *_expert_work(c, spec, split, places)] for c in cells]
    )
    us = np.array([cell.forward_us for cell in cells])
    scale = np.maximum(np.abs(x).max(axis=0), 1e-12)

    def solve(keep: NDArray[np.bool_]) -> Floats:
        return np.asarray(nnls(x[keep] / us[keep, None] / scale, np.ones(keep.sum()))[0] / scale)

    fold, predicted = np.random.default_rng(0).permutation(len(cells)) % FOLDS, np.empty(len(cells))
    for number in np.unique(fold):
        predicted[fold == number] = x[fold == number] @ solve(fold != number)
    error = 100.0 * np.abs(predicted / us - 1.0)
    worst = cells[int(error.argmax())]
    said = f"{worst.tokens} rows, {worst.cached:.0f} cached tokens, {'even' if worst.even else 'drawn'} routing"
    quality = FitError(round(float(error.mean()), 2), round(float(error.max()), 2), len(cells), said)
    found = solve(np.ones(len(cells), bool))
    rest = dict(zip(sizes, found.tolist(), strict=False))
    return _Decode(rest, float(found[len(sizes)]), found[len(sizes) + 1 :], quality)


class _Experts(NamedTuple):
    """The experts' kernel: its tiles of decode, and how its parameters follow from times."""

    spec: ModelSpec
    dtype: WeightDtype
    split: tuple[int, ...]
    decode: Floats
    """Times of what :func:`_expert_work` counts."""
    places: int

    def us(self, params: MoeParams, cell: StepCell) -> float:
        p = params.array(self.spec.expert_bytes(self.dtype), 2.0 * self.spec.expert_params)
        return float(sum(layer_us(p, rows, float(cell.tokens)) for rows in cell.load.astype(float)))

    def fit(self, timed: Sequence[tuple[StepCell, float]]) -> MoeParams:
        """Return the parameters with the best two tile sizes for prompts; `timed` has the time of their experts.

        A tile's time is fitted to even prompts; sizes, and where the kernel changes to the larger, are chosen by the
        error on all.
        """
        best: tuple[float, MoeParams] | None = None
        changes = sorted({cell.tokens for cell, _ in timed})
        for (small, large), change in product(product((32, *LARGE), LARGE), changes):
            times: list[float] = []
            for rows, past in ((small, False), (large, True)):
                inside = [one for one in timed if one[0].even and (one[0].tokens > change) == past]
                implied = [self._tile_us(rows, cell, us) for cell, us in inside]
                times.append(float(np.median(implied)) if implied else 0.0)
            params = self._params((small, large), (times[0] or times[1], times[1] or times[0]), change)
            off = float(np.mean([abs(self.us(params, cell) / us - 1.0) for cell, us in timed]))
            if small <= large and (best is None or off < best[0]):
                best = off, params
        assert best is not None
        return best[1]

    def _tile_us(self, rows: int, cell: StepCell, us: float) -> float:
        """Return the time of a tile (or wave) of `rows` rows by which a prompt's experts take `us`."""
        tiles = np.ceil(cell.load / rows).sum(axis=1)
        if not self.split:
            first, second = _columns(self.spec)
            return us / float((np.ceil(tiles * first / self.places) + np.ceil(tiles * second / self.places)).sum())
        touched, total = float((cell.load > 0).sum()), float(tiles.sum())
        streamed = float(self.decode[0])  # the first tile takes as long as its expert's weights, at least
        whole = us / total
        return (
            whole if whole >= streamed or total == touched else max(1e-3, (us - touched * streamed) / (total - touched))
        )

    def _params(self, prefill_rows: tuple[int, int], prefill_us: tuple[float, float], change: int) -> MoeParams:
        spec, even, nbytes = self.spec, self.spec.top_k / self.spec.num_experts, self.spec.expert_bytes(self.dtype)
        shared: dict[str, Any] = {"overhead_us": 0.0, "token_us": 0.0, "row_us": 0.0, "sharpness": 30.0}
        shared |= {"fill_penalty": 0.0, "partial_penalty": 0.0}
        switches = [DECODE * even, change * even]
        if not self.split:
            columns, wave_us = _columns(spec), (float(self.decode[0]), *prefill_us)
            return MoeParams(
                stream_bytes_per_us=_short(nbytes / (wave_us[0] * sum(columns) / self.places)),
                tile_flops_per_us=(1.0, 1.0, 1.0),
                tile_rows=(ROWS_IN_WAVES, *prefill_rows),
                switch_rows=tuple(switches),
                waves=Waves(tuple(map(_short, wave_us)), columns, self.places, 2),
                **shared,
            )
        rows, times = (1, *self.split, *prefill_rows), (*self.decode[1:], *prefill_us)
        return MoeParams(
            stream_bytes_per_us=_short(nbytes / max(self.decode[0], 1e-9)),
            tile_flops_per_us=tuple(
                _short(n * 2.0 * spec.expert_params / max(us, 1e-3)) for n, us in zip(rows, times, strict=True)
            ),
            tile_rows=rows,
            switch_rows=(UNALIGNED, *([DECODE // 2 * even] if len(self.split) > 1 else []), *switches),
            **shared,
        )
