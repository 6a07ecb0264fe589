"""Sem-MoE's alternating co-clustering: place experts for given items, then items for given experts, repeatedly.

Items start in clusters of similar items. Then, in every iteration:

* Experts, hottest first, go to the rank with the highest score: the weighted affinity with the experts on the rank
  (tokens that activate both) and with its items (activations), divided by 1 + the rank's load ÷ an even load. Full
  ranks are left out.
* Random pairs of ranks swap the two experts whose swap raises the affinities most.
* Items, most frequent first, go to the rank with the highest score: the affinity with the items on the rank (shared
  experts) and with its experts. Ranks that already have their share of tokens are left out.
* Random items move, or change places with another item, if this lowers the cost.

The algorithm runs from several starts; the best iterate by :func:`~coterie.placement.co_clustering.base.cost` is kept.
The published text describes the steps, but not the scales of the affinities and the adjustment by load; these are
Coterie's.

Wrong if the load of experts must be balanced too: the load only divides the score and sets the order of placement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie._numba import helper, njit, side_by_side
from coterie.errors import check_at_least, check_not_negative, check_share
from coterie.placement.co_clustering.base import Items, Ranks, add_item, cost
from coterie.placement.planning.packing import room_of


@dataclass(frozen=True, slots=True)
class AlternatingSettings:
    """Settings of the alternating algorithm."""

    theta: float = 0.5
    """Weight of the imbalance of tokens in the cost; the rest weighs remote activations."""
    iterations: int = 8
    """Number of iterations; each places experts, then items."""
    starts: int = 4
    """Number of runs, each from other starting clusters of items."""
    swaps: int = 64
    """Random pairs per iteration: of ranks, in each layer, to swap experts; of items, in each group, to swap ranks."""
    expert_expert: float = 0.2
    """Weight of the affinity between experts."""
    expert_item: float = 1.0
    """Weight of the affinity between experts and items."""
    item_item: float = 0.2
    """Weight of the affinity between items."""
    slack: float = 0.3
    """Share by which the tokens of a rank's items may exceed an even share before the rank is left out."""

    def __post_init__(self) -> None:
        check_share(theta=self.theta)
        check_at_least(1, iterations=self.iterations, starts=self.starts)
        check_at_least(0, swaps=self.swaps)
        check_not_negative(
            expert_expert=self.expert_expert, expert_item=self.expert_item, item_item=self.item_item, slack=self.slack
        )


def alternate(
    items: Items, num_experts: int, num_ranks: int, rng: Generator, settings: AlternatingSettings | None = None
) -> tuple[Ranks, Ranks]:
    """Return ranks of experts [layer, expert] and of items [group, item].

    If ranks do not divide the experts, the first ranks hold one expert more.
    """
    chosen = AlternatingSettings() if settings is None else settings
    runs = [_run(items, num_experts, num_ranks, rng, chosen) for _ in range(chosen.starts)]
    expert_ranks = np.concatenate([run[0] for run in runs])  # [iterate, layer, expert]
    ranks = np.concatenate([run[1] for run in runs])
    costs = np.stack([cost(items, *at, num_ranks, chosen.theta) for at in zip(expert_ranks, ranks, strict=True)])
    best = costs.argmin(axis=0)  # [group] iterate
    by_layer = np.repeat(best, items.layers_each)
    return expert_ranks[by_layer, np.arange(items.num_layers)], ranks[best, np.arange(items.groups)]


def _run(
    items: Items, num_experts: int, num_ranks: int, rng: Generator, settings: AlternatingSettings
) -> tuple[Ranks, Ranks]:
    """Run from one start; return the ranks of all iterates, [iterate, layer, expert] and [iterate, group, item]."""
    groups, layers, turns = items.groups, items.num_layers, settings.iterations
    hot = items.load(num_experts)
    order = np.argsort(-hot, axis=1, kind="stable")
    by_frequency = np.argsort(-items.frequency, kind="stable")
    seeds = np.stack([_spread(items, group, num_ranks, rng) for group in range(groups)])
    pairs = rng.integers(0, num_ranks, (layers, turns, settings.swaps, 2))
    drawn = rng.integers(0, len(items), (groups, turns, settings.swaps, 2))
    expert_ranks = np.zeros((turns, layers, num_experts), np.int64)
    ranks = np.zeros((turns, groups, len(items)), np.int64)
    affinities = settings.expert_expert, settings.expert_item, settings.item_item
    scales = np.array([*affinities, 1.0 + settings.slack, settings.theta])
    side_by_side(
        _alternate, groups, items.layers_each, items.frequency, items.experts, items.weights, hot, order,
        by_frequency, seeds, pairs, drawn, room_of(num_experts, num_ranks), scales, expert_ranks, ranks,
    )  # fmt: skip
    return expert_ranks, ranks


def _spread(items: Items, group: int, num_ranks: int, rng: Generator) -> NDArray[np.int64]:
    """Draw one starting item per rank, by frequency and dissimilarity to the items drawn before (k-means++)."""
    part = items.layers(slice(group * items.layers_each, (group + 1) * items.layers_each))
    near = np.zeros(len(items))
    chosen: list[int] = []
    for _ in range(num_ranks):
        mass = items.frequency * np.maximum(1.0 - near, 0.0) ** 2
        mass[chosen] = 0.0
        total = float(mass.sum())
        pick = int(rng.choice(len(items), p=mass / total)) if total > 0 else int(rng.integers(len(items)))
        chosen.append(pick)
        near = np.maximum(near, _cosines(part.experts, part.weights, pick, int(part.experts.max()) + 1))
    return np.array(chosen, np.int64)


@njit()
def _cosines(experts: NDArray[Any], weights: NDArray[Any], pick: int, num_experts: int) -> NDArray[np.float64]:
    """Return the cosine similarity [item] of each item's weights with those of item `pick`."""
    count, layers, kept = experts.shape
    vector = np.zeros((layers, num_experts))
    norm = 0.0
    for layer in range(layers):
        for j in range(kept):
            vector[layer, experts[pick, layer, j]] += weights[pick, layer, j]
            norm += weights[pick, layer, j] ** 2
    out = np.zeros(count)
    for item in range(count):
        dot, own = 0.0, 0.0
        for layer in range(layers):
            for j in range(kept):
                dot += weights[item, layer, j] * vector[layer, experts[item, layer, j]]
                own += weights[item, layer, j] ** 2
        if own * norm > 0.0:
            out[item] = dot / np.sqrt(own * norm)
    return out


@njit()
def _alternate(
    which: NDArray[Any],
    each: int,
    frequency: NDArray[Any],
    experts: NDArray[Any],
    weights: NDArray[Any],
    hot: NDArray[Any],
    order: NDArray[Any],
    by_frequency: NDArray[Any],
    seeds: NDArray[Any],
    pairs: NDArray[Any],
    drawn: NDArray[Any],
    room: NDArray[Any],
    scales: NDArray[Any],
    expert_ranks: NDArray[Any],
    ranks: NDArray[Any],
) -> None:
    """Fill `expert_ranks` [iteration, layer, expert] and `ranks` [iteration, group, item] for the groups in `which`."""
    num_ranks, num_experts = len(room), hot.shape[1]
    for group in which:
        first, last = group * each, (group + 1) * each
        label = np.empty(len(frequency), np.int64)
        none = np.full((each, num_experts), -1, np.int64)
        _schedule(first, frequency, experts, weights, by_frequency, none, scales, seeds[group], label, num_ranks)
        together = np.zeros((each, num_experts, num_experts))
        _count_pairs(first, frequency, experts, weights, together)
        for turn in range(len(ranks)):
            activations = np.zeros((each, num_experts, num_ranks))
            for item in range(len(frequency)):
                add_item(item, label[item], first, frequency, experts, weights, activations)
            # Written in place: for an array assignment Numba compiles its error message for 9 s.
            placed, label = expert_ranks[turn, first:last], ranks[turn, group]
            for layer in range(first, last):
                at = layer - first
                _place(hot[layer], order[layer], together[at], activations[at], room, scales, placed[at])
                _swap(together[at], activations[at], pairs[layer, turn], scales, placed[at])
            nobody = np.full(num_ranks, -1, np.int64)
            _schedule(first, frequency, experts, weights, by_frequency, placed, scales, nobody, label, num_ranks)
            _tune(first, frequency, experts, weights, placed, drawn[group, turn], scales[4], label, num_ranks)


@helper()
def _count_pairs(
    first: int, frequency: NDArray[Any], experts: NDArray[Any], weights: NDArray[Any], out: NDArray[Any]
) -> None:
    """Add to `out` [layer, expert, expert] the tokens that activate both experts if chosen independently."""
    kept = experts.shape[2]
    for item in range(len(frequency)):
        for at in range(len(out)):
            layer = first + at
            for j in range(kept):
                share = frequency[item] * weights[item, layer, j]
                if share > 0.0:
                    for k in range(kept):
                        out[at, experts[item, layer, j], experts[item, layer, k]] += share * weights[item, layer, k]


@helper()
def _place(
    hot: NDArray[Any],
    order: NDArray[Any],
    together: NDArray[Any],
    activations: NDArray[Any],
    room: NDArray[Any],
    scales: NDArray[Any],
    placed: NDArray[Any],
) -> None:
    ranks = len(room)
    load, held = np.zeros(ranks), np.zeros(ranks, np.int64)
    even = max(hot.sum() / ranks, 1e-300)
    placed[:] = -1
    for expert in order:
        near = np.zeros(ranks)
        for other in range(len(placed)):
            if placed[other] >= 0:
                near[placed[other]] += together[expert, other]
        best, most = -1, -np.inf
        for rank in range(ranks):
            if held[rank] < room[rank]:
                affinity = scales[0] * near[rank] + scales[1] * activations[expert, rank]
                score = affinity / (1.0 + load[rank] / even)
                if score > most:
                    best, most = rank, score
        placed[expert] = best
        held[best] += 1
        load[best] += hot[expert]


@helper()
def _swap(
    together: NDArray[Any], activations: NDArray[Any], pairs: NDArray[Any], scales: NDArray[Any], placed: NDArray[Any]
) -> None:
    experts, ranks = activations.shape
    near = np.zeros((experts, ranks))  # tokens that an expert shares with the experts of a rank
    for expert in range(experts):
        for other in range(experts):
            if other != expert:
                near[expert, placed[other]] += together[expert, other]
    for turn in range(len(pairs)):
        a, b = pairs[turn]
        best, one, two = 1e-9, -1, -1
        for x in range(experts):
            if placed[x] != a or a == b:
                continue
            for y in range(experts):
                if placed[y] != b:
                    continue
                moved = activations[x, b] + activations[y, a] - activations[x, a] - activations[y, b]
                beside = near[x, b] + near[y, a] - near[x, a] - near[y, b] - 2.0 * together[x, y]
                gain = scales[1] * moved + scales[0] * beside
                if gain > best:
                    best, one, two = gain, x, y
        if one >= 0:
            placed[one], placed[two] = b, a
            for expert in range(experts):
                if expert != one:
                    near[expert, a] -= together[expert, one]
                    near[expert, b] += together[expert, one]
                if expert != two:
                    near[expert, b] -= together[expert, two]
                    near[expert, a] += together[expert, two]


@helper()
def _schedule(
    first: int,
    frequency: NDArray[Any],
    experts: NDArray[Any],
    weights: NDArray[Any],
    by_frequency: NDArray[Any],
    placed: NDArray[Any],
    scales: NDArray[Any],
    seeds: NDArray[Any],
    label: NDArray[Any],
    ranks: int,
) -> None:
    """Fill `label` [item] with ranks. `placed` [layer, expert] is the rank of each expert, or -1 if it has none yet;
    `seeds` [rank] is an item assigned to the rank first, or -1."""
    layers, kept = len(placed), experts.shape[2]
    profile = np.zeros((layers, placed.shape[1], ranks))  # [layer, expert, rank] activations by the items of a rank
    tokens = np.zeros(ranks)
    even = max(frequency.sum() / ranks, 1e-300)
    started = np.zeros(len(frequency), np.bool_)
    for rank in range(ranks):
        if seeds[rank] >= 0 and not started[seeds[rank]]:
            started[seeds[rank]] = True
            label[seeds[rank]] = rank
            tokens[rank] += frequency[seeds[rank]]
            add_item(seeds[rank], rank, first, frequency, experts, weights, profile)
    like, here = np.empty(ranks), np.empty(ranks)
    for item in by_frequency:
        if started[item]:
            continue
        like[:] = 0.0
        here[:] = 0.0
        for at in range(layers):
            for j in range(kept):
                weight = weights[item, first + at, j]
                if weight > 0.0:
                    expert = experts[item, first + at, j]
                    for rank in range(ranks):
                        like[rank] += weight * profile[at, expert, rank]
                    if placed[at, expert] >= 0:
                        here[placed[at, expert]] += weight
        best, most, least = -1, -np.inf, 0
        for rank in range(ranks):
            if tokens[rank] < tokens[least]:
                least = rank
            if tokens[rank] + frequency[item] <= scales[3] * even:
                affinity = scales[2] * like[rank] / max(tokens[rank], 1e-300) + scales[1] * here[rank]
                score = affinity / (1.0 + tokens[rank] / even)
                if score > most:
                    best, most = rank, score
        label[item] = best if best >= 0 else least
        tokens[label[item]] += frequency[item]
        add_item(item, label[item], first, frequency, experts, weights, profile)


@helper()
def _tune(
    first: int,
    frequency: NDArray[Any],
    experts: NDArray[Any],
    weights: NDArray[Any],
    placed: NDArray[Any],
    drawn: NDArray[Any],
    theta: float,
    label: NDArray[Any],
    ranks: int,
) -> None:
    """Move the drawn items, or let the two of a pair change places, if this lowers the cost."""
    tokens, layers = np.bincount(label, frequency, ranks), len(placed)
    even = frequency.sum() / ranks
    here = np.zeros((2, ranks))
    for turn in range(len(drawn)):
        here[:] = 0.0
        for side in range(2):
            item = drawn[turn, side]
            for at in range(layers):
                for j in range(experts.shape[2]):
                    here[side, placed[at, experts[item, first + at, j]]] += weights[item, first + at, j]
        one, two = drawn[turn]
        for side in range(2):
            item = drawn[turn, side]
            size = frequency[item]
            for rank in range(ranks):
                a = label[item]
                if rank != a:
                    uneven = abs(tokens[a] - size - even) + abs(tokens[rank] + size - even)
                    uneven -= abs(tokens[a] - even) + abs(tokens[rank] - even)
                    more = theta * layers * uneven - (1.0 - theta) * size * (here[side, rank] - here[side, a])
                    if more < -1e-9:
                        tokens[a] -= size
                        tokens[rank] += size
                        label[item] = rank
        a, b = label[one], label[two]
        if a != b:
            size = frequency[two] - frequency[one]  # tokens that rank a gains
            uneven = abs(tokens[a] + size - even) + abs(tokens[b] - size - even)
            uneven -= abs(tokens[a] - even) + abs(tokens[b] - even)
            local = frequency[one] * (here[0, b] - here[0, a]) + frequency[two] * (here[1, a] - here[1, b])
            if theta * layers * uneven - (1.0 - theta) * local < -1e-9:
                tokens[a] += size
                tokens[b] -= size
                label[one], label[two] = b, a
