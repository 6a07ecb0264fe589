"""Seeded synthetic activation traces whose true expert preferences are known.

Every domain has preferences over the experts of each layer: a Zipf popularity in its own order, mixed with a Zipf
popularity that all domains share. A request draws its own preferences around its domain's (Dirichlet), and each token
draws its top-k experts from them one after the other without replacement (Plackett-Luce). Preferences may drift over
time.

A synthetic trace does not reproduce these properties of real traces, so draw no conclusions about them: tokens of a
request are independent given its preferences, while real routing repeats from one token to the next; layers are
independent, while a real token's experts in one layer predict those in the next; two experts are drawn together no more
often than their weights imply; and experts do not depend on token ids. Use it to study the distinct experts of
*different* requests together, loads, and drift.

The same settings and seed give byte-identical files, whatever the number of threads.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie._numba import side_by_side
from coterie.errors import ConfigError, UnavailableError, check, check_share
from coterie.registry import Registry
from coterie.traces._sampling import draw_requests
from coterie.traces.activations import Activations, ActivationTrace, TraceMeta
from coterie.traces.arrivals import (
    ArrivalProcess,
    BurstyArrivals,
    LengthModel,
    LognormalLengths,
    PoissonArrivals,
    draw_arrivals,
)
from coterie.traces.requests import RequestTrace, check_new_folder, write_requests
from coterie.traces.segments import request_ranges
from coterie.traces.store import ArrayFileWriter, new_path, write_json
from coterie.types import DECODE, PREFILL, ModelSpec

CHUNK_BYTES = 64 << 20
"""Bytes of expert ids that are drawn and then written at a time."""


@dataclass(frozen=True, slots=True)
class SlowDrift:
    """All preferences move continuously from their initial values towards new values."""

    half_life_s: float
    """Seconds until the preferences are half-way to the new values."""

    def __post_init__(self) -> None:
        check(self.half_life_s > 0, f"slow drift: half_life_s={self.half_life_s} must be above 0")


@dataclass(frozen=True, slots=True, eq=False)
class SyntheticSettings:
    """Settings of a synthetic trace. `presets` has named settings; coterie.traces.fitting fits them to a recording."""

    model: str = "synthetic"
    num_experts: int = 32
    num_layers: int = 24
    """Number of MoE layers."""
    top_k: int = 4
    layer_ids: tuple[int, ...] | None = None
    """Index of each MoE layer in the model, dense layers counted."""
    domains: tuple[str, ...] = ("code", "math", "medical", "legal", "chat")
    mix: tuple[float, ...] | None = None
    """Each domain's share of the requests; None means equal shares."""
    zipf_exponent: float = 0.8
    """Exponent s of the Zipf popularity: the r-th most popular expert has weight r^-s; at 0 all are equal."""
    specialisation: float = 0.5
    """Difference between domains: at 0 all prefer the same experts, at 1 their preferences are unrelated."""
    concentration: float | tuple[float, ...] = 100.0
    """Dirichlet concentration of requests around their domain, one value or one per layer: inf makes them equal."""
    phase_correlation: float = 0.9
    """Correlation of a request's prefill and decode preferences, given its domain's; at 1 they are the same."""
    drift: SlowDrift | None = None
    arrivals: ArrivalProcess = field(default_factory=PoissonArrivals)
    lengths: LengthModel = field(default_factory=LognormalLengths)
    preferences: NDArray[np.float64] | None = None
    """[domain, layer, expert] preferences to use instead of zipf_exponent and specialisation."""

    def __post_init__(self) -> None:
        TraceMeta(self.model, self.num_experts, self.num_layers, self.top_k, self.layer_ids)  # checks the shape
        check(self.domains, "domains is empty; a trace needs at least one")
        check(
            self.mix is None or (len(self.mix) == len(self.domains) and min(self.mix) >= 0 and sum(self.mix) > 0),
            f"mix={self.mix} must hold a share of 0 or more for each of {len(self.domains)} domains",
        )
        check(0 <= self.zipf_exponent < 20, f"zipf_exponent={self.zipf_exponent} must be in 0 … 20")
        check_share(specialisation=self.specialisation, phase_correlation=self.phase_correlation)
        per_layer = self.concentrations()
        check(
            per_layer.shape == (self.num_layers,) and (per_layer > 0).all(),
            f"concentration={self.concentration} must be above 0, one or {self.num_layers}",
        )
        shape = (len(self.domains), self.num_layers, self.num_experts)
        if self.preferences is not None and (self.preferences.shape != shape or not (self.preferences > 0).all()):
            raise ConfigError(f"preferences has shape {self.preferences.shape}; expected {shape}, all above 0")

    def concentrations(self) -> NDArray[np.float64]:
        """Return the Dirichlet concentration of each layer, [layer]."""
        given = np.asarray(self.concentration, np.float64)
        return np.full(self.num_layers, given) if given.ndim == 0 else given

    def shares(self) -> NDArray[np.float64]:
        """Return each domain's share of the requests, [domain]; the shares sum to 1."""
        mix = np.ones(len(self.domains)) if self.mix is None else np.asarray(self.mix, np.float64)
        return np.asarray(mix / mix.sum(), np.float64)

    def shaped_like(self, spec: ModelSpec) -> SyntheticSettings:
        """Return the settings with a model's experts, MoE layers and top-k."""
        return replace(
            self,
            model=spec.name,
            num_experts=spec.num_experts,
            num_layers=spec.num_moe_layers,
            top_k=spec.top_k,
            layer_ids=spec.moe_layer_ids,
            preferences=None,
        )


presets: Registry[SyntheticSettings] = Registry("preset")
presets.add("balanced", SyntheticSettings(zipf_exponent=0.2, specialisation=0.3, concentration=300.0))
presets.add(
    "bursty", SyntheticSettings(zipf_exponent=1.1, specialisation=0.9, concentration=60.0, arrivals=BurstyArrivals())
)
presets.add("drifting", SyntheticSettings(zipf_exponent=1.0, specialisation=0.6, drift=SlowDrift(half_life_s=600.0)))


@dataclass(frozen=True, slots=True)
class Preferences:
    """True preferences behind a trace, of every domain at any time."""

    epochs: NDArray[np.float64]
    """[epoch, domain, layer, expert] preferences, which sum to 1 over experts: the initial ones and, with a drift,
    those that it moves to.
    """
    drift: SlowDrift | None = None

    def __post_init__(self) -> None:
        count = 1 if self.drift is None else 2
        check(
            self.epochs.ndim == 4 and len(self.epochs) == count,
            f"epochs has shape {self.epochs.shape}; {self.drift} needs {count} of them",
        )

    def blend(self, time_s: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Return, for requests that arrive at `time_s` [request], where their preferences are between two epochs.

        These are the epoch of origin, the target and the progress from the one (0) to the other (1), each [request].
        """
        first = np.zeros(len(time_s), np.int64)
        if self.drift is None:
            return first, first, np.zeros(len(time_s))
        return first, first + 1, 1.0 - 0.5 ** (time_s / self.drift.half_life_s)


def draw_preferences(settings: SyntheticSettings, rng: Generator) -> Preferences:
    """Draw the domains' preferences and those they drift to. Pass them to `generate` to know its trace's preferences.

    Drift permutes the experts of every layer, in the same way for all domains. So it changes which experts are popular,
    but neither the skew nor the similarity of the domains.
    """
    layers, experts = settings.num_layers, settings.num_experts
    first = settings.preferences
    if first is None:
        zipf = np.arange(1, experts + 1) ** -settings.zipf_exponent
        zipf /= zipf.sum()
        shared = rng.permuted(np.tile(zipf, (layers, 1)), axis=1)  # [layer, expert]
        own = rng.permuted(np.tile(zipf, (len(settings.domains), layers, 1)), axis=2)  # [domain, layer, expert]
        first = (1 - settings.specialisation) * shared + settings.specialisation * own
    first = first / first.sum(axis=2, keepdims=True)
    epochs = [first]
    if settings.drift is not None:
        roles = rng.permuted(np.tile(np.arange(experts), (layers, 1)), axis=1)  # [layer, expert]
        epochs.append(np.take_along_axis(first, roles[None], axis=2))
    return Preferences(np.stack(epochs), settings.drift)


def generate(
    settings: SyntheticSettings,
    rng: Generator,
    *,
    requests: int | None = None,
    tokens: int | None = None,
    preferences: Preferences | None = None,
) -> ActivationTrace:
    """Generate a trace in memory: `requests` requests, or exactly `tokens` tokens with the last request cut short."""
    work = _draw_workload(settings, rng, requests, tokens, preferences)
    (whole,) = work.chunks(work.num_tokens)
    return ActivationTrace.from_arrays(work.meta, whole.expert_ids, work.offsets, work.requests, whole.phase)


def generate_to(
    path: str | Path,
    settings: SyntheticSettings,
    rng: Generator,
    *,
    requests: int | None = None,
    tokens: int | None = None,
    nbytes: int | None = None,
    preferences: Preferences | None = None,
    source: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ActivationTrace:
    """Write a trace of any size with bounded memory, in one pass, and open it.

    `nbytes` sets the size on disk, without the request table. `source` is added to the trace's metadata. `progress` is
    called with the tokens written so far and the tokens in all. An interruption or error leaves no files behind.
    """
    specs = TraceMeta(settings.model, settings.num_experts, settings.num_layers, settings.top_k).specs(1, 0)
    token_bytes = specs["expert_ids"].nbytes + specs["phase"].nbytes
    if nbytes is not None:
        check(requests is None and tokens is None, "give one of requests, tokens and nbytes")
        tokens = max(1, nbytes // token_bytes)
    if tokens is not None:  # check before drawing requests: a far too large number would not fit in memory
        _require_space(Path(path), tokens * token_bytes)
    work = _draw_workload(settings, rng, requests, tokens, preferences, source)
    _require_space(Path(path), work.num_tokens * token_bytes)
    folder = check_new_folder(path)
    with new_path(folder) as part:
        part.mkdir()
        write_requests(part / "requests.parquet", work.requests)
        done, chunk_tokens = 0, max(1, CHUNK_BYTES // token_bytes)
        specs = work.meta.specs(work.num_tokens, len(work.requests))
        with ArrayFileWriter(part / "activations.safetensors", specs) as out:
            out.append("offsets", work.offsets)
            for chunk in work.chunks(chunk_tokens):
                out.append("expert_ids", chunk.expert_ids)
                out.append("phase", chunk.phase)
                done += len(chunk.phase)
                if progress is not None:
                    progress(done, work.num_tokens)
        write_json(
            part / "meta.json",
            work.meta.json(
                [{"activations": "activations.safetensors", "requests": "requests.parquet", "num_tokens": done}]
            ),
        )
    return ActivationTrace.open(folder)


def _require_space(path: Path, needed: int) -> None:
    free = shutil.disk_usage(next(p for p in (path, *path.absolute().parents) if p.exists())).free
    check(needed <= free, f"{path}: the trace needs {needed:,} bytes; the disk has {free:,} free", UnavailableError)


@dataclass(frozen=True, slots=True)
class _Workload:
    """Values drawn before the first token: arrivals and lengths of requests, and the domains' preferences."""

    meta: TraceMeta
    requests: RequestTrace
    offsets: NDArray[np.int64]  # [request + 1]
    domain: NDArray[np.int64]  # [request]
    preferences: Preferences
    concentrations: NDArray[np.float64]  # [layer]
    phase_correlation: float
    seed: np.uint64

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    def chunks(self, max_tokens: int) -> Iterator[Activations]:
        """Yield the tokens of all requests in order, in chunks of complete requests.

        A chunk's memory may be reused by the next chunk.
        """
        prompts, arrival_s = self.requests.prompt_tokens, self.requests.arrival_s
        assert arrival_s is not None
        origin, target, weight = self.preferences.blend(arrival_s)
        values = self.preferences.epochs.reshape(-1, self.meta.num_layers, self.meta.num_experts)
        domains = self.preferences.epochs.shape[1]
        origin, target = origin * domains + self.domain, target * domains + self.domain
        memory = np.empty(0, self.meta.specs(0, 0)["expert_ids"].dtype)
        for start, stop in request_ranges(self.offsets, max_tokens):
            rows, local = slice(start, stop), self.offsets[start : stop + 1] - self.offsets[start]
            spec = self.meta.specs(int(local[-1]), 0)["expert_ids"]
            if memory.nbytes < spec.nbytes:
                memory = np.empty(math.prod(spec.shape), spec.dtype)
            ids = memory[: math.prod(spec.shape)].reshape(spec.shape)
            side_by_side(
                draw_requests,
                stop - start,
                ids,
                local,
                prompts[rows],
                start,
                self.seed,
                values,
                origin[rows],
                target[rows],
                weight[rows],
                self.concentrations,
                self.phase_correlation,
            )
            position = np.arange(local[-1]) - np.repeat(local[:-1], np.diff(local))
            decode = position >= np.repeat(prompts[rows], np.diff(local))
            yield Activations(ids, np.where(decode, DECODE, PREFILL).astype(np.uint8))


def _draw_workload(
    settings: SyntheticSettings,
    rng: Generator,
    requests: int | None,
    tokens: int | None,
    preferences: Preferences | None,
    source: Mapping[str, Any] | None = None,
) -> _Workload:
    if preferences is None:
        preferences = draw_preferences(settings, rng)
    expected = (len(settings.domains), settings.num_layers, settings.num_experts)
    check(
        preferences.epochs.shape[1:] == expected,
        f"preferences has shape {preferences.epochs.shape[1:]} per epoch; expected {expected}",
    )
    seed = rng.integers(1 << 64, dtype=np.uint64)
    arrived, lengths = draw_arrivals(settings.arrivals, settings.lengths, settings.shares(), rng, requests, tokens)
    check(
        arrived.domain.max() < len(settings.domains),
        f"arrivals name domain {arrived.domain.max()}; the settings have {len(settings.domains)}",
    )
    table = RequestTrace(*lengths, arrived.arrival_s, domains=[settings.domains[d] for d in arrived.domain])
    meta = TraceMeta(
        settings.model,
        settings.num_experts,
        settings.num_layers,
        settings.top_k,
        settings.layer_ids,
        source={
            "generator": "coterie",
            "settings": {f.name: _describe(getattr(settings, f.name)) for f in fields(settings)},
            **(source or {}),
        },
    )
    offsets = np.concatenate([[0], np.cumsum(lengths.prompt_tokens + lengths.output_tokens)]).astype(np.int64)
    return _Workload(
        meta, table, offsets, arrived.domain, preferences, settings.concentrations(), settings.phase_correlation, seed
    )


def _describe(value: Any) -> Any:
    """Return a setting as JSON values, for meta.json; an array or recorded trace becomes the word "recorded"."""
    if isinstance(value, RequestTrace | np.ndarray):
        return "recorded"
    if is_dataclass(value):
        return {"kind": type(value).__name__} | {f.name: _describe(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple | list):
        return [_describe(item) for item in value]
    return str(value) if isinstance(value, float) and math.isinf(value) else value
