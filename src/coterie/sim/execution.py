"""How long a batch takes: CAPS's model, and the calibrated step time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.batching.base import Loads
from coterie.costs.exchange import arrival_links, exchange_us, exposed
from coterie.costs.experts import slowest_us
from coterie.costs.replicas import Slots, slot_rows
from coterie.costs.step import Batch, StepModel
from coterie.errors import ConfigError, check_at_least, check_not_negative, check_positive
from coterie.types import Placement


class Execution(NamedTuple):
    """How one batch or step ran."""

    seconds: float
    imbalance: float
    """Imbalance by the model that timed it: CAPS's factor of an uneven load, or busiest ÷ mean rank."""
    distinct: float
    """Experts touched, mean over layers."""


def check_seconds(ran: Execution, requests: int) -> None:
    """Refuse an impossible time from an execution model."""
    if not 0.0 <= ran.seconds < math.inf:
        raise ConfigError(
            f"execution model: seconds={ran.seconds} of a batch of {requests} must be a finite number of at least 0"
        )


@dataclass(frozen=True, slots=True)
class SpreadExecution:
    """CAPS's model: a base time, times ``1 + sensitivity x CV`` of the load the batch really brings.

    It stands for a straggler that everyone waits for. Right in form across ranks; inside one GPU imbalance is nearly
    free, and an even load in decode is even slower (docs/results/regimes.md).
    """

    loads: Loads
    """[request, layer, expert] tokens that each request brings."""
    base_s: float
    """Prefill and decode of one batch with an even load."""
    sensitivity: float

    def __post_init__(self) -> None:
        check_positive(base_s=self.base_s)
        check_not_negative(sensitivity=self.sensitivity)
        if self.loads.ndim != 3:
            raise ConfigError(f"loads has shape {self.loads.shape}; expected [request, layer, expert]")

    def __call__(self, requests: NDArray[np.int64]) -> Execution:
        cv, distinct = _spread(self.loads, requests)
        factor = 1.0 + self.sensitivity * cv
        return Execution(self.base_s * factor, factor, distinct)


@njit(fastmath=True)
def _spread(loads: Loads, requests: NDArray[np.int64]) -> tuple[float, float]:
    """Coefficient of variation over all columns, and the columns touched in a layer."""
    layers, experts = loads.shape[1], loads.shape[2]
    batch = np.zeros((layers, experts))
    for request in requests:
        if not 0 <= request < len(loads):
            raise IndexError("a request has no load")  # compiled code would read past the end
        batch += loads[request]
    mean = batch.mean()
    return (batch.std() / mean if mean > 0 else 0.0), (batch > 0).sum() / layers


@dataclass(slots=True)
class StepTimer:
    """Exact step times of the calibrated model, at the speed a simulation of many thousand steps needs."""

    model: StepModel
    placement: Placement | None = None
    _moe: NDArray[np.float64] = field(init=False, repr=False)
    _links: NDArray[np.float64] = field(init=False, repr=False)
    _slots: Slots = field(init=False, repr=False)
    _ranks: int = field(init=False)
    _dense_s: dict[tuple[int, int], float] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        placement = placement_for(self.model, self.placement)
        self._ranks = placement.num_ranks
        self._moe = self.model.moe.array()
        self._slots = Slots.of(placement)
        self._links = arrival_links(self.model.spec, self.model.topology)

    def __call__(self, load: NDArray[np.int64], batch: Batch) -> Execution:
        """The step of `batch` on every rank whose tokens activate `load` [layer, expert] in all."""
        spec, model = self.model.spec, self.model
        if load.shape != (spec.num_moe_layers, spec.num_experts):
            raise ConfigError(f"load has shape {load.shape}; expected [{spec.num_moe_layers}, {spec.num_experts}]")
        if not batch.tokens:
            return Execution(0.0, 1.0, 0.0)
        tokens = model.running_tokens(batch)
        moe_us, imbalance, distinct = _layers_us(
            self._moe,
            load,
            *self._slots,
            np.full(self._ranks, float(tokens)),
            spec.expert_bytes(model.dtype),
            2.0 * spec.expert_params,
            model.options.cache_resident,
            self._links,
            model.options.overlap,
        )
        dense = self._dense_s.get((tokens, batch.outputs))
        if dense is None:
            dense = model.dense_s(tokens, batch.outputs) + model.routing_us(tokens) * 1e-6 * spec.num_moe_layers
            self._dense_s[tokens, batch.outputs] = dense
        return Execution(model.attention_s(batch) + dense + moe_us * 1e-6, imbalance, distinct)


def placement_for(model: StepModel, placement: Placement | None) -> Placement:
    """The placement that steps of a model are timed on: as given, else all experts on one rank."""
    spec, ranks = model.spec, model.topology.num_ranks
    placement = placement or Placement.linear(spec.num_moe_layers, spec.num_experts, 1)
    if placement.num_ranks not in (1, ranks):
        raise ConfigError(f"placement.num_ranks={placement.num_ranks} must equal {ranks} of the model")
    if (placement.num_layers, placement.num_experts) != (spec.num_moe_layers, spec.num_experts):
        raise ConfigError(
            f"placement is for {placement.num_layers} layers of {placement.num_experts} experts; "
            f"{spec.name} has {spec.num_moe_layers} of {spec.num_experts}"
        )
    return placement


@njit()
def _layers_us(
    moe: NDArray[np.float64],
    load: NDArray[np.int64],
    slots: NDArray[np.int64],
    turn: NDArray[np.int64],
    replicas: NDArray[np.int64],
    tokens: NDArray[np.float64],
    nbytes: float,
    flops: float,
    resident: bool,
    links: NDArray[np.float64],
    overlap: float,
) -> tuple[float, float, float]:
    """Microseconds of all MoE layers with their exchange, busiest over mean rank, and experts touched in a layer.

    load [layer, expert] rows, tokens [rank].
    """
    layers, ranks = len(slots), len(tokens)
    per_rank = slots.shape[1] // ranks
    total, imbalance, distinct = 0.0, 0.0, 0.0
    counts = np.empty((ranks, per_rank))
    for layer in range(layers):
        busiest, arrived = 0.0, 0.0
        for rank in range(ranks):
            here = 0.0
            for at in range(per_rank):
                slot = rank * per_rank + at
                counts[rank, at] = slot_rows(load[layer, slots[layer, slot]], replicas[layer, slot], turn[layer, slot])
                here += counts[rank, at]
            busiest = max(busiest, here)
            arrived += here
        slowest = slowest_us(moe, counts, tokens, nbytes, flops, resident)
        exchange = exchange_us(links, busiest) if ranks > 1 else 0.0
        total += slowest + exposed(exchange, overlap, slowest)
        imbalance += busiest * ranks / arrived if arrived > 0.0 else 1.0
        for expert in range(load.shape[1]):
            distinct += load[layer, expert] > 0
    return total, imbalance / layers, distinct / layers


@dataclass(slots=True)
class PrefillExecution:
    """Prompts of a batch computed whole in one step of the calibrated model."""

    timer: StepTimer
    loads: NDArray[np.int64]
    """[request, layer, expert] tokens of each prompt."""
    prompt_tokens: NDArray[np.int64]
    """[request]"""
    ranks: int = 1
    """Ranks that share a batch's prompts evenly for attention and projections."""

    def __post_init__(self) -> None:
        if len(self.loads) != len(self.prompt_tokens):
            raise ConfigError(f"{len(self.loads)} loads must be as many as prompt_tokens ({len(self.prompt_tokens)})")
        check_at_least(1, ranks=self.ranks)

    def __call__(self, requests: NDArray[np.int64]) -> Execution:
        tokens = int(self.prompt_tokens[requests].sum())
        batch = Batch(prefill_tokens=-(-tokens // self.ranks), prefill_requests=-(-len(requests) // self.ranks))
        return self.timer(self.loads[requests].sum(axis=0), batch)
