"""How long a batch takes: CAPS's model, and the calibrated step time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.batching.base import Loads
from coterie.costs.collectives import Traffic, all_to_all_us
from coterie.costs.moe import layer_us
from coterie.costs.step import Batch, StepModel
from coterie.errors import ConfigError
from coterie.types import Placement


class Execution(NamedTuple):
    """How one batch or step ran."""

    seconds: float
    imbalance: float
    """By the model that timed it: CAPS's factor of an uneven load, or the busiest over the mean rank."""
    distinct: float
    """Experts touched, mean over layers."""


def check_seconds(ran: Execution, requests: int) -> None:
    """Refuse a time that no batch can take, whoever's model it comes from."""
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
        if not 0 < self.base_s < np.inf:
            raise ConfigError(f"base_s={self.base_s} must be a finite number above 0")
        if not 0 <= self.sensitivity < np.inf:
            raise ConfigError(f"sensitivity={self.sensitivity} must be a finite number of at least 0")
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
    _slots: NDArray[np.int64] = field(init=False, repr=False)
    _turn: NDArray[np.int64] = field(init=False, repr=False)
    _replicas: NDArray[np.int64] = field(init=False, repr=False)
    _ranks: int = field(init=False)
    _dense_s: dict[tuple[int, int], float] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        spec, topology = self.model.spec, self.model.topology
        placement = self.placement or Placement.linear(spec.num_moe_layers, spec.num_experts, 1)
        if placement.num_ranks not in (1, topology.num_ranks):
            raise ConfigError(f"placement.num_ranks={placement.num_ranks} must equal {topology.num_ranks} of the model")
        if (placement.num_layers, placement.num_experts) != (spec.num_moe_layers, spec.num_experts):
            raise ConfigError(
                f"placement is for {placement.num_layers} layers of {placement.num_experts} experts; "
                f"{spec.name} has {spec.num_moe_layers} of {spec.num_experts}"
            )
        self._ranks = placement.num_ranks
        self._moe = self.model.moe.array()
        self._slots = placement.slot_experts.astype(np.int64)
        self._turn, self._replicas = np.zeros_like(self._slots), np.ones_like(self._slots)
        for layer, experts in enumerate(self._slots):
            seen = np.zeros(placement.num_experts, np.int64)
            for slot, expert in enumerate(experts):
                self._turn[layer, slot] = seen[expert]
                seen[expert] += 1
            self._replicas[layer] = seen[experts]
        one = Traffic.arriving(1.0, spec, topology)
        intra, inter = topology.intra, topology.inter
        self._links = np.array(
            [
                intra.latency_s * 1e6,
                one.intra_bytes / intra.bytes_per_s * 1e6,
                inter.latency_s * 1e6,
                one.inter_bytes / inter.bytes_per_s * 1e6,
            ]
        )
        assert self._ranks == 1 or abs(all_to_all_us(one, topology) - _exchange_us(self._links, 1.0)) < 1e-6

    def __call__(self, load: NDArray[np.int64], batch: Batch) -> Execution:
        """The step of `batch` on every rank whose tokens activate `load` [layer, expert] in all."""
        spec, model = self.model.spec, self.model
        if load.shape != (spec.num_moe_layers, spec.num_experts):
            raise ConfigError(f"load has shape {load.shape}; expected [{spec.num_moe_layers}, {spec.num_experts}]")
        if not batch.tokens:
            return Execution(0.0, 1.0, 0.0)
        tokens = model.options.padded(batch.tokens) if not batch.prefill_tokens else batch.tokens
        moe_us, imbalance, distinct = _layers_us(
            self._moe,
            load,
            self._slots,
            self._turn,
            self._replicas,
            self._ranks,
            float(tokens),
            spec.expert_bytes(model.dtype),
            2.0 * spec.expert_params,
            model.options.cache_resident,
            self._links,
            model.options.overlap,
        )
        outputs = batch.decode_requests + (batch.prefill_requests if batch.prefill_tokens else 0)
        dense = self._dense_s.get((tokens, outputs))
        if dense is None:
            dense = model.dense_s(tokens, outputs)
            dense += model.routing.us(tokens) * 1e-6 * spec.num_moe_layers if model.routing else 0.0
            self._dense_s[tokens, outputs] = dense
        return Execution(model.attention_s(batch) + dense + moe_us * 1e-6, imbalance, distinct)


@helper()
def _exchange_us(links: NDArray[np.float64], rows: float) -> float:
    intra = links[0] + rows * links[1] if links[1] > 0.0 and rows > 0.0 else 0.0
    inter = links[2] + rows * links[3] if links[3] > 0.0 and rows > 0.0 else 0.0
    return 2.0 * max(intra, inter)


@njit()
def _layers_us(
    moe: NDArray[np.float64],
    load: NDArray[np.int64],
    slots: NDArray[np.int64],
    turn: NDArray[np.int64],
    replicas: NDArray[np.int64],
    ranks: int,
    tokens: float,
    nbytes: float,
    flops: float,
    resident: bool,
    links: NDArray[np.float64],
    overlap: float,
) -> tuple[float, float, float]:
    """Microseconds of all MoE layers with their exchange, busiest over mean rank, and experts touched in a layer."""
    layers, each = len(slots), slots.shape[1] // ranks
    total, imbalance, distinct = 0.0, 0.0, 0.0
    counts = np.empty(each)
    for layer in range(layers):
        slowest, busiest, arrived = 0.0, 0.0, 0.0
        for rank in range(ranks):
            here = 0.0
            for at in range(each):
                slot = rank * each + at
                rows, share = load[layer, slots[layer, slot]], replicas[layer, slot]
                counts[at] = rows // share + (turn[layer, slot] < rows % share)
                here += counts[at]
            slowest = max(slowest, layer_us(moe, counts, tokens, nbytes, flops, resident))
            busiest = max(busiest, here)
            arrived += here
        exchange = _exchange_us(links, busiest) if ranks > 1 else 0.0
        total += slowest + max(0.0, exchange - overlap * slowest)
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
        if self.ranks < 1:
            raise ConfigError(f"ranks={self.ranks} must be at least 1")

    def __call__(self, requests: NDArray[np.int64]) -> Execution:
        tokens = int(self.prompt_tokens[requests].sum())
        batch = Batch(prefill_tokens=-(-tokens // self.ranks), prefill_requests=-(-len(requests) // self.ranks))
        return self.timer(self.loads[requests].sum(axis=0), batch)
