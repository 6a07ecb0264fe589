"""Items, co-clusters and their cost.

    cost = theta x sum over ranks of |tokens of its items - even share|  +  (1 - theta) x remote activations

in tokens and activations of the window that the items were counted in, summed over layers. Every item has one rank
(per layer, or one for all layers), every expert of a layer has one rank, and ranks hold equal numbers of experts.

The first term counts the tokens of items, not the load of experts: a placement with a low cost may still put all hot
experts on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.costs.exchange import first_rank
from coterie.errors import check, check_share
from coterie.placement.objective._arrays import Array
from coterie.types import Placement

Ranks = NDArray[np.int64]

ITEMS_HINT = "the experts that tokens or requests activate, as coterie.placement.Items: see docs/placement.md"
"""Error hint for planners that are made without items."""


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """How often each item was seen, and the experts it activates."""

    frequency: Array
    """[item] tokens: occurrences of a token id, or tokens of a request."""
    experts: NDArray[np.int32]
    """[item, layer, kept] experts that the item activates most."""
    weights: Array
    """[item, layer, kept] share of the item's tokens that activated the expert; 0 pads a row."""
    one_rank: bool = False
    """Whether an item has one rank for all layers (a request under data-parallel attention)."""

    def __post_init__(self) -> None:
        for name, dtype in (("frequency", np.float64), ("experts", np.int32), ("weights", np.float64)):
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name), dtype))
        shape = self.experts.shape
        check(
            len(shape) == 3 and 0 not in shape,
            f"experts of items has shape {shape}; it must be [item, layer, kept], none 0",
        )
        check(
            self.weights.shape == shape and self.frequency.shape == shape[:1],
            f"weights {self.weights.shape} and frequency {self.frequency.shape} of items must be {shape} and "
            f"{shape[:1]}, as their experts",
        )
        check(
            int(self.experts.min()) >= 0, f"experts of items holds {int(self.experts.min())}; it must not be negative"
        )
        for name, array in (("frequency", self.frequency), ("weights", self.weights)):
            check((array >= 0).all() and np.isfinite(array).all(), f"{name} of items must be finite and not negative")

    @classmethod
    def of_counts(
        cls, counts: NDArray[Any], frequency: NDArray[Any], *, kept: int | None = None, one_rank: bool = False
    ) -> Items:
        """Make items from activations [item, layer, expert]; keep the `kept` largest of a row (None: all above 0)."""
        most = int((counts > 0).sum(axis=2).max(initial=1))
        size = max(1, min(most, kept or most))
        experts = np.argsort(-counts, axis=2, kind="stable")[:, :, :size]
        tokens = np.maximum(np.asarray(frequency, np.float64), 1e-300)
        weights = np.take_along_axis(counts, experts, axis=2) / tokens[:, None, None]
        return cls(np.asarray(frequency, np.float64), experts.astype(np.int32), weights, one_rank)

    def __len__(self) -> int:
        return len(self.frequency)

    @property
    def num_layers(self) -> int:
        return int(self.experts.shape[1])

    @property
    def groups(self) -> int:
        """Number of layer groups: an item has one rank per group. One group per layer, or one for all layers."""
        return 1 if self.one_rank else self.num_layers

    @property
    def layers_each(self) -> int:
        """Number of layers in a group."""
        return self.num_layers // self.groups

    def layers(self, chosen: slice) -> Items:
        """Return the same items with some of the layers only."""
        return Items(self.frequency, self.experts[:, chosen], self.weights[:, chosen], self.one_rank)

    def load(self, num_experts: int) -> Array:
        """Return the tokens [layer, expert] of all items."""
        out = np.zeros((self.num_layers, num_experts))
        tokens = self.frequency[:, None, None] * self.weights
        np.add.at(out, (np.arange(self.num_layers)[:, None], self.experts), tokens)
        return out

    def check_fits(self, num_layers: int, num_experts: int) -> None:
        """Raise ConfigError if the items have other layers or experts than the model."""
        highest = int(self.experts.max())
        check(
            self.num_layers == num_layers and highest < num_experts,
            f"items have {self.num_layers} layers and experts up to {highest}; "
            f"the placement has {num_layers} layers of {num_experts} experts",
        )


class CoClusters(NamedTuple):
    """A placement of experts, and the ranks of the items."""

    placement: Placement
    """Placement with equal numbers of experts per rank; replicas fill spare slots."""
    ranks: Ranks
    """[layer, item] rank of the item; [1, item] if an item has one rank for all layers."""
    confidence: Array
    """Share of the item's activations that are local; the shape of `ranks`."""

    @property
    def expert_ranks(self) -> Ranks:
        """[layer, expert] rank of each expert's first slot."""
        return placed_ranks(self.placement)


def placed_ranks(placement: Placement) -> Ranks:
    """Return the rank of each expert's first slot, [layer, expert]."""
    return np.stack([first_rank(placement, layer) for layer in range(placement.num_layers)])


def local_activations(items: Items, expert_ranks: Ranks, ranks: Ranks) -> tuple[Array, Array]:
    """Return the local activations per token [group, item], and all activations per token [group, item]."""
    local, total = np.zeros((2, items.groups, len(items)))
    _count_local(items.experts, items.weights, expert_ranks, np.asarray(ranks, np.int64), local, total)
    return local, total


def cost(items: Items, expert_ranks: Ranks, ranks: Ranks, num_ranks: int, theta: float) -> Array:
    """Return the cost [group]: theta x imbalance of tokens + (1 - theta) x remote activations."""
    check_share(theta=theta)
    local, total = local_activations(items, expert_ranks, ranks)
    remote = (total - local) @ items.frequency
    tokens = np.stack([np.bincount(row, items.frequency, num_ranks) for row in np.asarray(ranks, np.int64)])
    uneven = np.abs(tokens - items.frequency.sum() / num_ranks).sum(axis=1) * items.layers_each
    return np.asarray(theta * uneven + (1 - theta) * remote)


@njit()
def _count_local(
    experts: NDArray[Any],
    weights: NDArray[Any],
    expert_ranks: NDArray[Any],
    ranks: NDArray[Any],
    local: NDArray[Any],
    total: NDArray[Any],
) -> None:
    count, layers, kept = experts.shape
    each = layers // len(ranks)
    for item in range(count):
        for layer in range(layers):
            group = layer // each
            for j in range(kept):
                weight = weights[item, layer, j]
                total[group, item] += weight
                if expert_ranks[layer, experts[item, layer, j]] == ranks[group, item]:
                    local[group, item] += weight


@helper()
def add_item(
    item: int,
    rank: int,
    first: int,
    frequency: NDArray[Any],
    experts: NDArray[Any],
    weights: NDArray[Any],
    activations: NDArray[Any],
) -> None:
    """Add an item's activations to `activations` [layer, expert, rank] if it is on this rank; `first` is layer 0."""
    for at in range(len(activations)):
        for j in range(experts.shape[2]):
            activations[at, experts[item, first + at, j], rank] += frequency[item] * weights[item, first + at, j]
