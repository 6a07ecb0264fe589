"""Basic values: models, links, topologies, placements. docs/glossary.md explains the words.

A value validates itself when constructed, so functions that take one need not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, check, check_at_least, check_not_negative, check_one_of

WeightDtype = Literal["fp32", "bf16", "fp16", "fp8", "mxfp4"]
Report = Callable[[str, int, int], None]
"""Progress callback, called as ``report(what, done, total)``."""

MAX_SLOTS = 1 << 20
"""Largest number of slots in a layer: far above any fleet, but a wrong number below it cannot exhaust memory."""
BYTES_PER_WEIGHT: dict[str, float] = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,  # block scales of DeepSeek's 128 x 128 add 0.02%: left out
    "mxfp4": 4.25 / 8,  # 4 bits a weight and one 8-bit scale for every 32
}
"""Bytes of one weight in memory, and so of reading it."""

PREFILL, DECODE = 0, 1
"""Phase of a token: part of the prompt, or generated."""


def check_dtype(dtype: str) -> None:
    check_one_of(get_args(WeightDtype), weight_dtype=dtype)


def narrowest_uint(largest: int) -> np.dtype[np.unsignedinteger]:
    """Return the smallest unsigned dtype that holds 0 … largest: uint8 for 256 experts, uint16 for more."""
    return np.dtype(np.min_scalar_type(largest))


class Interval(NamedTuple):
    """A mean and the ends of its 95% confidence interval, which are None if there is only one sample."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a Mixture-of-Experts model, as needed by costs and placements."""

    name: str
    num_layers: int
    """Transformer layers, dense ones included."""
    num_experts: int
    """Routed experts of one MoE layer."""
    top_k: int
    """Experts a token activates in one MoE layer."""
    hidden_size: int
    expert_intermediate_size: int
    """Inner width of one routed expert, which has three matrices of hidden_size x this width."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    first_moe_layer: int = 0
    moe_layer_step: int = 1
    """Distance between MoE layers, from first_moe_layer on; the other layers are dense."""
    shared_intermediate_size: int = 0
    """Summed inner width of the always-on experts (or parallel dense MLP) beside the routed ones."""
    dense_intermediate_size: int = 0
    """Inner width of the MLP in layers that are not MoE."""
    kv_lora_rank: int = 0
    """Latent width of multi-head latent attention; 0 means plain (grouped) heads."""
    rope_head_dim: int = 0
    """Width of the rotary part cached beside the latent."""
    weight_dtype: WeightDtype = "bf16"
    """Dtype of the routed experts as published: it sets the bytes to stream."""
    source: str = ""

    def __post_init__(self) -> None:
        for field in (
            "num_layers",
            "num_experts",
            "top_k",
            "hidden_size",
            "expert_intermediate_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
            "moe_layer_step",
        ):
            check(getattr(self, field) >= 1, f"{self.name}: {field}={getattr(self, field)} must be at least 1")
        name, layers = self.name, self.num_layers
        check(layers <= 10_000, f"{name}: num_layers={layers} must be at most 10000")
        check(
            self.top_k <= self.num_experts, f"{name}: top_k={self.top_k} must be at most num_experts={self.num_experts}"
        )
        check(
            0 <= self.first_moe_layer < layers,
            f"{name}: first_moe_layer={self.first_moe_layer} must be in 0 … {layers - 1}",
        )
        check_dtype(self.weight_dtype)

    @property
    def moe_layer_ids(self) -> tuple[int, ...]:
        return tuple(range(self.first_moe_layer, self.num_layers, self.moe_layer_step))

    @property
    def num_moe_layers(self) -> int:
        return len(self.moe_layer_ids)

    @property
    def expert_params(self) -> int:
        """Weights of one routed expert in one layer: gate, up and down."""
        return 3 * self.hidden_size * self.expert_intermediate_size

    def expert_bytes(self, dtype: WeightDtype | None = None) -> float:
        """Return the bytes of one routed expert in one layer."""
        return self.expert_params * BYTES_PER_WEIGHT[dtype or self.weight_dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's KV cache over all layers, in 16 bits."""
        width = self.kv_lora_rank + self.rope_head_dim if self.kv_lora_rank else 2 * self.num_kv_heads * self.head_dim
        return 2 * width * self.num_layers

    def slot_kv_tokens(self, dtype: WeightDtype | None = None) -> float:
        """Return the tokens whose KV cache takes as much memory as one expert in all MoE layers: a slot's price."""
        return self.num_moe_layers * self.expert_bytes(dtype) / self.kv_bytes_per_token


class Link(NamedTuple):
    """A connection: time = latency_s + bytes / bytes_per_s, in one direction."""

    name: str
    bytes_per_s: float
    latency_s: float


NVLINK4 = Link("nvlink4", 450e9, 2e-6)
"""Hopper: 18 links of 25 GB/s each way. Vendors' 900 GB/s counts both directions."""
NVLINK5 = Link("nvlink5", 900e9, 2e-6)
"""Blackwell: 18 links of 50 GB/s each way. Vendors' 1.8 TB/s counts both directions."""
INFINIBAND_400G = Link("infiniband-400g", 50e9, 5e-6)
PCIE5 = Link("pcie5-x16", 55e9, 5e-6)


@dataclass(frozen=True, slots=True)
class Topology:
    """The devices of an expert-parallel group and their links."""

    num_ranks: int
    ranks_per_node: int = 8
    intra: Link = NVLINK4
    """Link between ranks of one node."""
    inter: Link = INFINIBAND_400G
    """Link between nodes."""
    host: Link = PCIE5
    """Link between a device and its host's memory."""
    speeds: tuple[float, ...] = ()
    """[rank] speed relative to the calibrated device. A rank of speed 0 is gone: nothing is planned on it and nothing
    can be fetched from it. If empty, all speeds are 1."""
    exchange: tuple[Link, Link, Link] | None = None
    """Measured all-to-all: few rows inside a node, rows between nodes, many rows inside a node, where a token is sent
    once to a rank. None prices it by `intra` and `inter`."""
    bytes_per_s: tuple[tuple[float, ...], ...] = ()
    """[source][target] bytes per second from rank to rank, for moves and for rows between known ranks; the diagonal is
    not used. Latencies stay those of `intra` and `inter`, and so do the bytes per second if it is empty."""

    def __post_init__(self) -> None:
        check_at_least(1, num_ranks=self.num_ranks, ranks_per_node=self.ranks_per_node)
        count = len(self.speeds)
        check(count in (0, self.num_ranks), f"speeds has {count} values; num_ranks={self.num_ranks}")
        check_not_negative(**{f"speeds[{rank}]": speed for rank, speed in enumerate(self.speeds)})
        check(not count or any(self.speeds), "speeds are all 0; at least one rank must be alive")
        square = not self.bytes_per_s or {len(self.bytes_per_s), *map(len, self.bytes_per_s)} == {self.num_ranks}
        above = all(rate > 0 for at, row in enumerate(self.bytes_per_s) for rate in row[:at] + row[at + 1 :])
        check(square and above, f"bytes_per_s must be [{self.num_ranks}][{self.num_ranks}], above 0")

    @property
    def rank_speeds(self) -> NDArray[np.float64]:
        """[rank] speed relative to the calibrated device."""
        return np.array(self.speeds) if self.speeds else np.ones(self.num_ranks)

    @property
    def rank_nodes(self) -> NDArray[np.int64]:
        """[rank] node that holds the rank."""
        return np.arange(self.num_ranks) // self.ranks_per_node

    @property
    def near(self) -> NDArray[np.bool_]:
        """[source, target] whether both ranks are on one node."""
        return np.equal.outer(self.rank_nodes, self.rank_nodes)

    @property
    def rates(self) -> NDArray[np.float64]:
        """[source, target] bytes per second from rank to rank; that of `intra` from a rank to itself."""
        by_node = np.where(self.near, self.intra.bytes_per_s, self.inter.bytes_per_s)
        rates = np.array(self.bytes_per_s) if self.bytes_per_s else by_node
        np.fill_diagonal(rates, self.intra.bytes_per_s)
        return rates

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    @property
    def num_nodes(self) -> int:
        return -(-self.num_ranks // self.ranks_per_node)


@dataclass(frozen=True, slots=True)
class Placement:
    """Which expert each slot holds. Ranks own contiguous blocks of slots of equal size."""

    slot_experts: NDArray[np.int32]
    """[layer, slot] expert in the slot."""
    num_ranks: int
    num_experts: int

    def __post_init__(self) -> None:
        shape, ranks = self.slot_experts.shape, self.num_ranks
        check(len(shape) == 2, f"slot_experts has shape {shape}; it must be [layer, slot]")
        check_at_least(1, num_ranks=ranks)
        remainder = shape[1] % ranks
        check(not remainder, f"num_slots={shape[1]} must be a multiple of num_ranks={ranks} (remainder {remainder})")
        low, high = int(self.slot_experts.min(initial=0)), int(self.slot_experts.max(initial=0))
        check(
            low >= 0 and high < self.num_experts,
            f"slot_experts holds {low if low < 0 else high}; it must be in 0 … {self.num_experts - 1}",
        )
        held = np.zeros((self.num_layers, self.num_experts), np.bool_)
        held[np.arange(self.num_layers)[:, None], self.slot_experts] = True
        if not held.all():
            layer = int(np.argmin(held.all(axis=1)))
            missing = np.flatnonzero(~held[layer])
            raise ConfigError(f"layer {layer} has no slot for expert {missing[0]} ({missing.size} missing)")

    @classmethod
    def linear(cls, num_layers: int, num_experts: int, num_ranks: int, num_slots: int | None = None) -> Placement:
        """Place expert e in slot e and replicas of the first experts in the remaining slots: every engine's default."""
        count = num_experts if num_slots is None else num_slots
        check(num_slots is None or count <= MAX_SLOTS, f"num_slots={count} must be at most {MAX_SLOTS}")
        return cls(np.tile(np.arange(count, dtype=np.int32) % num_experts, (num_layers, 1)), num_ranks, num_experts)

    @property
    def num_layers(self) -> int:
        return int(self.slot_experts.shape[0])

    @property
    def num_slots(self) -> int:
        return int(self.slot_experts.shape[1])

    @property
    def slots_per_rank(self) -> int:
        return self.num_slots // self.num_ranks

    def widened(self, slots_per_rank: int) -> Placement:
        """Return the placement with more slots on each rank, which repeat the rank's first expert."""
        by_rank = self.slot_experts.reshape(self.num_layers, self.num_ranks, -1)
        more = np.repeat(by_rank[:, :, :1], slots_per_rank - self.slots_per_rank, axis=2)
        slots = np.concatenate([by_rank, more], axis=2).reshape(self.num_layers, -1)
        return Placement(slots, self.num_ranks, self.num_experts)

    @property
    def duplicates(self) -> int:
        """Slots whose expert another slot of the same rank holds too: wasted memory."""
        held = np.sort(self.slot_experts.reshape(self.num_layers, self.num_ranks, -1), axis=2)
        return int((held[:, :, 1:] == held[:, :, :-1]).sum())

    @property
    def replicas(self) -> NDArray[np.int64]:
        """[layer, expert] number of slots that hold the expert."""
        counts = np.zeros((self.num_layers, self.num_experts), np.int64)
        np.add.at(counts, (np.arange(self.num_layers)[:, None], self.slot_experts), 1)
        return counts

    @property
    def held(self) -> NDArray[np.bool_]:
        """[rank, layer, expert] whether a slot of the rank holds the expert."""
        held = np.zeros((self.num_ranks, self.num_layers, self.num_experts), np.bool_)
        rank = np.arange(self.num_slots) // self.slots_per_rank
        held[rank[None, :], np.arange(self.num_layers)[:, None], self.slot_experts] = True
        return held

    def rank_load(self, load: NDArray[np.integer] | NDArray[np.floating]) -> NDArray[np.float64]:
        """Return [layer, rank] tokens from `load` [layer, expert]; replicas share an expert's tokens equally."""
        per_slot = np.take_along_axis(load / self.replicas, self.slot_experts.astype(np.int64), axis=1)
        return np.asarray(per_slot.reshape(self.num_layers, self.num_ranks, -1).sum(axis=2), dtype=np.float64)


def balancedness(rank_load: NDArray[np.float64]) -> float:
    """Return the mean over layers of :func:`layer_balance`."""
    return float(layer_balance(rank_load).mean())


def layer_balance(rank_load: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [layer] mean ÷ max of [layer, rank] load, over the last axis: 1 is even; 1 for a layer without load."""
    peak = rank_load.max(axis=-1)
    return np.where(peak > 0, rank_load.mean(axis=-1) / np.where(peak > 0, peak, 1.0), 1.0)
