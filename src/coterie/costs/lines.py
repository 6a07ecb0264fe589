"""Straight-line forms of the step time, for policies that must compare thousands of choices in microseconds.

* :class:`StepCost` prices a batch for a strategy. Which experts are touched is random: a request that brings p < 1
  tokens to an expert touches it with probability p, so an expert stays idle with probability ``prod(1 - p)``. The time
  of a rank is the sum over its experts of ``touched x first_us + (rows past a first tile) x row_us``. A layer takes the
  time of its slowest rank plus the exchange of the busiest rank's rows.
* :class:`DecodeStepPrices` prices a decode step for a router, by its distinct experts, requests and cached tokens.
* :class:`ExpertLine` prices a slot for a planner, by the tokens it gets.

These forms only rank choices; reported times come from :mod:`coterie.costs.step`. The terms are the same, but with a
plain maximum in place of the smooth one, and with an expert's last tile taken as half empty.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper
from coterie.costs.exchange import arrival_links, exchange_us
from coterie.costs.experts import NBYTES, STREAM, TILE, arrival_us, fixed_us, tile_size, tile_us
from coterie.costs.replicas import Slots
from coterie.costs.step import Batch, PlacedStepModel, StepModel
from coterie.errors import check_at_least, check_not_negative, check_positive
from coterie.types import INFINIBAND_400G, Link, Placement

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepCost:
    """Predicted microseconds of a step on one device or on the ranks of a placement. Create it with :meth:`of`."""

    fixed_us: float
    """Fixed time of a step: attention, projections, overheads."""
    first_us: float
    """Time to stream a touched expert's weights, with the first tile of its tokens."""
    tile_rows: float
    """Tokens included in `first_us`: the first tile, minus the mean empty part of an expert's last tile."""
    row_us: float
    """Time per token of an expert past `tile_rows`."""
    arrival_us: float
    """Exchange time per token that arrives at the busiest rank, both directions."""
    num_ranks: int
    by_tokens: bool
    """Whether a request's work is its number of tokens (prefill) or 1 per request (decode)."""
    slots: NDArray[np.int64] | None = field(default=None, repr=False)
    """[layer, slot] expert; the slots of a rank are contiguous. None if expert e is in slot e."""
    share: NDArray[np.float64] | None = field(default=None, repr=False)
    """[layer, slot] share of the expert's tokens that the slot computes."""

    @classmethod
    def of(
        cls, model: StepModel, batch: Batch, placement: Placement | None = None, rows_per_expert: float | None = None
    ) -> StepCost:
        """Derive prices from a calibrated model, for steps about as large as `batch`.

        `rows_per_expert` is the mean number of rows per expert; by default that of uniform routing.
        """
        spec, moe = model.spec, model.moe
        ranks = 1 if placement is None else placement.num_ranks
        if rows_per_expert is None:
            rows_per_expert = batch.tokens * spec.top_k / spec.num_experts
        p = model.expert_prices()
        size = tile_size(p, rows_per_expert)
        tile = float(p[TILE + size])
        weights = float(arrival_us(p, max(rows_per_expert, 1.0), tile, p[NBYTES] / p[STREAM]))
        compute = weights if moe.waves else float(tile_us(p, size))  # in waves, every tile takes the same on average
        row_us = max(compute / tile, moe.row_us)
        # The overlapped share takes the larger of all streaming and all compute.
        behind = max(weights, compute + max(0.0, rows_per_expert / tile - 0.5) * compute)
        first = (1.0 - moe.overlap) * max(weights, compute)
        first += moe.overlap * (weights if behind == weights else compute)
        rest = model.attention_s(batch) + model.dense_s(batch.tokens, batch.decode_requests or batch.prefill_requests)
        fixed = rest * 1e6 + spec.num_moe_layers * (
            model.routing_us(batch.tokens) + moe.overhead_us + moe.token_us * batch.tokens
        )
        arrival = 0.0
        if ranks > 1:
            links = arrival_links(spec, model.topology)
            arrival = (exchange_us(links, 2e4) - exchange_us(links, 1e4)) / 1e4
        slots = share = None
        in_order = np.arange(spec.num_experts)  # prices of experts in order need no table of slots
        if placement is not None and not np.array_equal(placement.slot_experts, [in_order] * placement.num_layers):
            slots, _, replicas = Slots.of(placement)
            share = 1.0 / replicas
        return cls(
            # The last tile is half empty on average: subtract half a tile, so that `row_us` is charged earlier.
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
        """Prices for steps of about `requests` requests over all ranks.

        A request brings `tokens` prompt tokens (phase "prefill"), or one token with `tokens` cached (phase "decode").
        """
        ranks = 1 if placement is None else placement.num_ranks
        each = -(-requests // ranks)
        prompts = Batch(prefill_tokens=each * tokens, prefill_requests=each)
        batch = prompts if phase == "prefill" else Batch(decode_requests=each, decode_context=each * tokens)
        return cls.of(model, batch, placement, batch.tokens * ranks * model.spec.top_k / model.spec.num_experts)

    def slot_loads(self, loads: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return […, layer, slot] loads from […, layer, expert] loads."""
        if self.slots is None or self.share is None:
            return loads
        layers = np.arange(len(self.slots))[:, None]
        return np.ascontiguousarray(loads[..., layers, self.slots] * self.share)

    def numbers(self) -> Array:
        """Return [6] values for compiled loops: fixed_us, first_us, tile_rows, row_us, arrival_us, by_tokens."""
        return np.array(
            [self.fixed_us, self.first_us, self.tile_rows, self.row_us, self.arrival_us, float(self.by_tokens)]
        )

    def __post_init__(self) -> None:
        check_at_least(1, num_ranks=self.num_ranks)


@helper()
def rows_past(rows: float, tile_rows: float) -> float:
    """Return the rows of an expert past its first tile."""
    return max(0.0, rows - tile_rows)


@helper()
def line_us(line: Array, layers: int, ranks: int, touched: Array, past: Array, rows: Array, at: int) -> float:
    """Return microseconds of batch `at` by a :class:`StepCost`, whose :meth:`StepCost.numbers` are `line`.

    `touched`, `past` and `rows` are [layer x rank, batch]: slots touched, rows past first tiles, and all rows. As in
    :func:`~coterie.costs.composition.layers_us`, a layer is the slowest rank's experts plus the busiest's exchange.
    """
    time = line[0]
    for layer in range(layers):
        slowest, busiest = 0.0, 0.0
        for group in range(layer * ranks, (layer + 1) * ranks):
            slowest = max(slowest, touched[group, at] * line[1] + past[group, at] * line[3])
            busiest = max(busiest, rows[group, at])
        time += slowest + busiest * line[4]
    return float(time)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStepPrices:
    """Linear price of a decode step in microseconds. Create it with :meth:`of`."""

    fixed_us: float
    expert_us: float
    """Time per touched expert, counted in every layer."""
    request_us: float
    context_us: float
    """Time per cached token of a request."""
    prefill_us: float
    """Time per prompt token that the worker must compute, while all who run there wait."""
    transfer_us: float
    """Time per prompt token that was computed elsewhere and whose KV must come, while the request alone waits."""
    output_tokens: float
    """Typical tokens that a request decodes: one-time costs are spread over them."""
    line: NDArray[np.float64] = field(init=False, repr=False, compare=False)
    """All prices as one array for compiled loops, one-time costs spread over the output."""

    def __post_init__(self) -> None:
        names = ("fixed_us", "expert_us", "request_us", "context_us", "prefill_us", "transfer_us")
        line = np.array([getattr(self, name) for name in names], np.float64)
        check_not_negative(**dict(zip(names, line.tolist(), strict=True)))
        check_positive(output_tokens=self.output_tokens)
        line[PREFILL:] /= self.output_tokens
        object.__setattr__(self, "line", line)

    @classmethod
    def of(
        cls,
        model: StepModel,
        requests: int = 16,
        context: int = 1024,
        output_tokens: float = 256.0,
        placement: Placement | None = None,
        link: Link = INFINIBAND_400G,
    ) -> DecodeStepPrices:
        """Derive prices from a calibrated model for steps of about `requests` requests of `context` cached tokens.

        A worker with a `placement` is an expert-parallel group: its requests are spread over its ranks, and a step
        waits for the slowest. KV of prompts that were computed elsewhere comes over the `link`.
        """
        spec, chunk, placed = model.spec, 2048, PlacedStepModel(model, placement)
        ranks, rng = placed.num_ranks, np.random.default_rng(0)

        def rest_us(n: int, cached: int) -> float:
            each = Batch(decode_requests=-(-n // ranks), decode_context=cached // ranks)
            return 1e6 * (model.attention_s(each) + model.dense_s(each.decode_requests))

        def experts_us(active: int) -> float:
            """Mean of a layer whose experts' rows are equal; on several ranks of layers that touch random experts."""
            if ranks == 1:
                rows = np.zeros(spec.num_experts)
                rows[:active] = requests * spec.top_k / active
                return model.experts_us(rows, requests)
            load = np.zeros((spec.num_moe_layers, spec.num_experts), np.int64)
            load[:, :active] = max(1, round(requests * spec.top_k / active))
            drawn = placed.slot_rows(rng.permuted(load, axis=1))
            times = placed.layers_us(drawn, np.full(ranks, -(-requests // ranks)))
            return float(times.sum(axis=0).mean())

        few, many = max(1, spec.num_experts // 4), max(2, spec.num_experts * 3 // 4)
        expert = max(0.0, (experts_us(many) - experts_us(few)) / (many - few))
        cached = requests * context
        request = (rest_us(2 * requests, cached) - rest_us(requests, cached)) / requests
        per_token = (rest_us(requests, 2 * cached) - rest_us(requests, cached)) / cached
        rows = np.full((spec.num_moe_layers, spec.num_experts), -(-ranks * chunk * spec.top_k // spec.num_experts))
        prefill = placed.step(rows, Batch(prefill_tokens=chunk, prefill_requests=1))  # on every rank
        fixed = rest_us(requests, cached) - request * requests - per_token * cached
        fixed += spec.num_moe_layers * (experts_us(few) - expert * few)
        return cls(
            fixed_us=max(0.0, fixed),
            expert_us=expert,
            request_us=max(0.0, request),
            context_us=max(0.0, per_token),
            prefill_us=1e6 * prefill.total_s / (ranks * chunk),
            transfer_us=1e6 * spec.kv_bytes_per_token / link.bytes_per_s,
            output_tokens=output_tokens,
        )


FIXED, EXPERT, REQUEST, CONTEXT, PREFILL, TRANSFER = range(6)
"""Indices in :attr:`DecodeStepPrices.line`."""


@helper()
def added_us(line: Array, start: float, experts: float, requests: float, context: float) -> float:
    """Return `start` plus the price of experts, requests and cached tokens; `line` is :attr:`DecodeStepPrices.line`."""
    return float(start + line[EXPERT] * experts + line[REQUEST] * requests + line[CONTEXT] * context)


@helper()
def decode_us(line: Array, experts: float, requests: float, context: float) -> float:
    """Return microseconds of a decode step; `line` is :attr:`DecodeStepPrices.line`."""
    return added_us(line, line[FIXED], experts, requests, context)


class ExpertLine(NamedTuple):
    """Linear price of one slot in one step, in seconds: `row_s` per token, plus `touch_s` if the slot gets any."""

    row_s: float
    touch_s: float

    @classmethod
    def of(cls, model: StepModel, tokens: int) -> ExpertLine:
        """Derive prices from a calibrated model, for steps of about `tokens` tokens over all ranks.

        The line is fitted to the model's times of a rank whose experts get from 1/4 to 4 times the mean rows, since
        loads are that uneven. The part of a step that does not depend on the experts' loads is left out.
        """
        spec = model.spec
        held = max(1, spec.num_experts // model.topology.num_ranks)
        rows = max(1.0, tokens * spec.top_k / spec.num_experts) * np.array([0.25, 0.5, 1.0, 2.0, 4.0])
        rows = np.maximum(rows, 1.0)
        fixed = fixed_us(model.moe.array(), tokens)
        times = np.array([model.experts_us(np.full(held, n), tokens) - fixed for n in rows]) * 1e-6 / held
        row, touch = (float(value) for value in np.polyfit(rows, times, 1, w=1 / times))
        if touch < 0 or row <= 0:  # compute-bound (touch < 0) or streaming-bound (row <= 0): a line with one term
            row, touch = (float((times / rows).mean()), 0.0) if touch < 0 else (1e-12, float(times.mean()))
        return cls(row, touch)


@helper()
def slot_s(row_s: float, touch_s: float, tokens: Any) -> Any:
    """Return expected seconds per step of a slot that gets `tokens` per step on average, by an :class:`ExpertLine`.

    The number of tokens is taken as Poisson: a step touches the slot with probability 1 - exp(-tokens).
    """
    return touch_s * -np.expm1(-tokens) + row_s * tokens
