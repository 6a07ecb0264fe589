"""What a batch will cost, for a strategy that must compare thousands of them in microseconds.

Two models of a batch's time, from the load its requests are expected to bring:

* :class:`SpreadCost`: ``1 + sensitivity x CV``, CAPS's model of a straggler, by the load's coefficient of variation.
* :class:`StepCost`: the calibrated step time of :mod:`coterie.costs`, with experts that are touched by chance. A
  request that brings p < 1 tokens to an expert touches it with probability p, so an expert stays cold with
  probability ``prod(1 - p)``; the time of a rank is the sum over its experts of

      touched x first_us + (rows past a first tile) x row_us

  and a layer takes as long as its slowest rank, and its busiest one's rows to exchange.

The second is a linearised copy of :func:`coterie.costs.moe.layer_us`: same terms, no soft maximum, and tiles that are
half empty at an expert's end. It ranks batches; times that are reported come from the whole model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from coterie.costs.collectives import Traffic, all_to_all_us
from coterie.costs.step import Batch, StepModel
from coterie.errors import ConfigError
from coterie.types import Placement


@dataclass(frozen=True, slots=True)
class SpreadCost:
    """``1 + sensitivity x CV`` of the load over its columns; each request is one unit of work.

    Right across ranks, where the busiest one is waited for; inside one GPU imbalance is nearly free.
    """

    sensitivity: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.sensitivity < np.inf:
            raise ConfigError(f"sensitivity={self.sensitivity} must be a finite number of at least 0")


@dataclass(frozen=True, slots=True)
class StepCost:
    """Predicted microseconds of a step on one device or on the ranks of a placement. Make one with :meth:`of`."""

    fixed_us: float
    """Of a step whatever its requests are: attention, projections, overheads."""
    first_us: float
    """To bring a touched expert's weights in, with the first tile of its tokens."""
    tile_rows: float
    """Tokens that come with that: a first tile, less what the last one is empty on average."""
    row_us: float
    """Per token of an expert past them."""
    arrival_us: float
    """Per token that arrives at the busiest rank, both ways of the exchange."""
    num_ranks: int
    by_tokens: bool
    """Whether a request's tokens are its share of the work (prefill), or each request is one unit (decode)."""
    slots: NDArray[np.int64] | None = field(default=None, repr=False)
    """[layer, slot] expert, slots of a rank side by side; None where expert e is in slot e."""
    share: NDArray[np.float64] | None = field(default=None, repr=False)
    """[layer, slot] share of its expert's tokens that a slot computes."""

    @classmethod
    def of(
        cls, model: StepModel, batch: Batch, placement: Placement | None = None, rows_per_expert: float | None = None
    ) -> StepCost:
        """From a calibrated model, for steps about as large as `batch`, whose experts get `rows_per_expert` each."""
        spec, moe = model.spec, model.moe
        ranks = 1 if placement is None else placement.num_ranks
        if rows_per_expert is None:
            rows_per_expert = batch.tokens * spec.top_k / spec.num_experts
        large = rows_per_expert > moe.switch_rows
        tile, rate = float(moe.tile_rows[large]), moe.tile_flops_per_us[large]
        compute = tile * 2.0 * spec.expert_params / rate
        first_rows = min(max(rows_per_expert, 1.0), tile)
        stream = spec.expert_bytes(model.dtype) / moe.stream_bytes_per_us
        stream *= 1.0 + moe.fill_penalty * max(0.0, 1.0 - first_rows / moe.tile_rows[0])
        weights = stream + moe.row_us * first_rows
        row_us = max(compute / tile, moe.row_us)
        # What overlaps between experts is hidden behind the larger of all streaming and all compute.
        behind = max(weights, compute + max(0.0, rows_per_expert / tile - 0.5) * compute)
        first = (1.0 - moe.overlap) * max(weights, compute)
        first += moe.overlap * (weights if behind == weights else compute)
        rest = model.attention_s(batch) + model.dense_s(batch.tokens, batch.decode_requests or batch.prefill_requests)
        routing = model.routing.us(batch.tokens) if model.routing else 0.0
        layers = spec.num_moe_layers
        fixed = rest * 1e6 + layers * (routing + moe.overhead_us + moe.token_us * batch.tokens)
        arrival = 0.0
        if ranks > 1:
            one, two = (all_to_all_us(Traffic.arriving(n, spec, model.topology), model.topology) for n in (1e4, 2e4))
            arrival = (two - one) / 1e4
        slots = share = None
        if placement is not None and not _is_linear(placement):
            slots = placement.slot_experts.astype(np.int64)
            replicas = np.stack([np.bincount(row, minlength=placement.num_experts) for row in slots])
            share = 1.0 / np.take_along_axis(replicas, slots, axis=1)
        return cls(
            # The last tile is half empty on average, which counts as rows that come sooner past the first.
            fixed_us=fixed,
            first_us=first,
            tile_rows=max(0.0, min(tile, first / row_us - tile / 2.0)),
            row_us=row_us,
            arrival_us=arrival,
            num_ranks=ranks,
            by_tokens=batch.prefill_tokens > 0,
            slots=slots,
            share=share,
        )

    @classmethod
    def for_phase(
        cls, model: StepModel, phase: str, requests: int, tokens: int, placement: Placement | None = None
    ) -> StepCost:
        """Of steps of about `requests` in all, over all ranks.

        Each brings `tokens` of prompt (phase "prefill"), or one token with that many cached (phase "decode").
        """
        ranks = 1 if placement is None else placement.num_ranks
        each = -(-requests // ranks)
        batch = Batch(decode_requests=each, decode_context=each * tokens)
        if phase == "prefill":
            batch = Batch(prefill_tokens=each * tokens, prefill_requests=each)
        return cls.of(model, batch, placement, batch.tokens * ranks * model.spec.top_k / model.spec.num_experts)

    def slot_loads(self, loads: NDArray[np.float64]) -> NDArray[np.float64]:
        """[…, layer, slot] from […, layer, expert]."""
        if self.slots is None or self.share is None:
            return loads
        layers = np.arange(len(self.slots))[:, None]
        return np.ascontiguousarray(loads[..., layers, self.slots] * self.share)

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ConfigError(f"num_ranks={self.num_ranks} must be at least 1")


def _is_linear(placement: Placement) -> bool:
    experts = np.arange(placement.num_experts)
    return placement.num_slots == placement.num_experts and bool((placement.slot_experts == experts).all())


BatchCost = SpreadCost | StepCost
