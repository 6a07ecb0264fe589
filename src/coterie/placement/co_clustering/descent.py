"""Descent on remote activations, with the load of ranks and the tokens of their items held even.

For fixed experts, the best ranks of items are a transport problem: rank r may take an even share of the tokens. Its
dual has one price per rank, and an item goes where its local activations minus the price are highest. So the value of
a placement is that of its items' best answer, and two experts are swapped only where the answer to the swap is better:
the true objective, not an affinity. Swaps that fix the items' ranks come first, because they are cheap.

A rank's load may exceed its share by `load_slack` of it: an overload costs PENALTY activations per token, more than a
swap can gain. An item seen n times counts n / (n + shrink) of its activations: what a rare token did once is chance.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit, side_by_side
from coterie.placement.co_clustering.base import Array, Items, Ranks

PENALTY = 10.0
"""Price of a token above a rank's largest load, in activations."""
PRICE_STEPS = 40
"""Steps of the prices from 0; a quarter of them where the placement changed a little."""
TURNS = 20
"""Most rounds of items, then swaps."""
PASSES = 3
"""Most passes over all swaps with the items answering."""


def descend(
    items: Items, load: Array, most: Array, starts: list[Ranks], trust: Array, num_ranks: int
) -> tuple[Ranks, Array]:
    """The best placement [layer, expert] that is reached from the starts, and prices [group, rank] of its ranks.

    `load` [layer, expert] tokens, `most` [layer, rank] largest load of a rank, `trust` [item] share of an item's
    activations that counts.
    """
    groups, layers = items.groups, items.num_layers
    found = np.stack([np.ascontiguousarray(start, np.int64) for start in starts])
    values, prices = np.zeros((len(starts), groups)), np.zeros((len(starts), groups, num_ranks))
    arrays = (items.layers_each, items.frequency, trust, items.experts, items.weights, load, most)
    side_by_side(_descend, groups, *arrays, found, values, prices)
    best = values.argmax(axis=0)  # [group] start
    chosen = found[np.repeat(best, items.layers_each), np.arange(layers)]
    price = prices[best, np.arange(groups)]
    side_by_side(_answering_swaps, groups, *arrays, chosen, price)
    return chosen, price


def answer(items: Items, expert_ranks: Ranks, price: Array, trust: Array, slack: float) -> Ranks:
    """[group, item] ranks by price, the surest items first; a rank with its share of tokens takes no more."""
    out = np.zeros((items.groups, len(items)), np.int64)
    for group in range(items.groups):
        first = group * items.layers_each
        scores = np.zeros((len(items), price.shape[1]))
        placed = expert_ranks[first : first + items.layers_each]
        _local(first, trust, items.experts, items.weights, placed, scores)
        scores -= price[group]
        ordered = np.partition(scores, -2, axis=1) if scores.shape[1] > 1 else np.zeros((len(items), 2))
        regret = (ordered[:, -1] - ordered[:, -2]) * items.frequency
        _fill(np.argsort(-regret, kind="stable"), scores, items.frequency, 1.0 + slack, out[group])
    return out


@njit()
def _fill(
    order: NDArray[Any], scores: NDArray[Any], frequency: NDArray[Any], ratio: float, out: NDArray[Any]
) -> None:
    ranks = scores.shape[1]
    tokens, most = np.zeros(ranks), ratio * frequency.sum() / ranks
    for item in order:
        best, least = -1, 0
        for rank in range(ranks):
            if tokens[rank] < tokens[least]:
                least = rank
            fits = tokens[rank] + frequency[item] <= most
            if fits and (best < 0 or scores[item, rank] > scores[item, best]):
                best = rank
        out[item] = best if best >= 0 else least
        tokens[out[item]] += frequency[item]


@njit()
def _local(
    first: int,
    trust: NDArray[Any],
    experts: NDArray[Any],
    weights: NDArray[Any],
    placed: NDArray[Any],
    out: NDArray[Any],
) -> None:
    """[item, rank] local activations per token of the items, were they on the rank; what counts of them."""
    out[:] = 0.0
    for item in range(len(trust)):
        for at in range(len(placed)):
            for j in range(experts.shape[2]):
                out[item, placed[at, experts[item, first + at, j]]] += trust[item] * weights[item, first + at, j]


@njit()
def _descend(
    which: NDArray[Any],
    each: int,
    frequency: NDArray[Any],
    trust: NDArray[Any],
    experts: NDArray[Any],
    weights: NDArray[Any],
    load: NDArray[Any],
    most: NDArray[Any],
    found: NDArray[Any],
    values: NDArray[Any],
    prices: NDArray[Any],
) -> None:
    """Items answer, experts swap, until neither gains: from every start [start, layer, expert], in place."""
    ranks = most.shape[1]
    scores = np.empty((len(frequency), ranks))
    label = np.empty(len(frequency), np.int64)
    for group in which:
        first, last = group * each, (group + 1) * each
        for start in range(len(found)):
            placed, price = found[start, first:last], prices[start, group]
            best = -np.inf
            kept = placed.copy()
            for turn in range(TURNS):
                _local(first, trust, experts, weights, placed, scores)
                value = _set_prices(frequency, scores, price, label, PRICE_STEPS if turn == 0 else PRICE_STEPS // 4)
                for layer in range(first, last):
                    value -= PENALTY * _overload(load[layer], most[layer], placed[layer - first])
                if value <= best * (1 + 1e-6) and turn > 0:
                    break
                best = value
                kept[:] = placed
                activations = np.zeros((each, load.shape[1], ranks))
                for item in range(len(frequency)):
                    for at in range(each):
                        for j in range(experts.shape[2]):
                            activations[at, experts[item, first + at, j], label[item]] += (
                                frequency[item] * trust[item] * weights[item, first + at, j]
                            )
                moved = False
                for layer in range(first, last):
                    at = layer - first
                    moved = _fixed_swaps(activations[at], load[layer], most[layer], placed[at]) or moved
                if not moved:
                    break
            placed[:] = kept
            values[start, group] = best


@helper()
def _overload(load: NDArray[Any], most: NDArray[Any], placed: NDArray[Any]) -> float:
    total = np.zeros(len(most))
    for expert in range(len(placed)):
        total[placed[expert]] += load[expert]
    return float(np.maximum(total - most, 0.0).sum())


@helper()
def _over(load: float, most: float) -> float:
    return max(load - most, 0.0)


@helper()
def _set_prices(
    frequency: NDArray[Any], scores: NDArray[Any], price: NDArray[Any], label: NDArray[Any], steps: int
) -> float:
    """Move `price` [rank] until ranks have about the same tokens; fill label [item]. Returns the dual's value, which no
    even assignment of items exceeds."""
    ranks = len(price)
    even = max(frequency.sum() / ranks, 1e-300)
    tokens = np.empty(ranks)
    scale, best = 0.0, np.inf
    for item in range(len(frequency)):
        scale += frequency[item] * scores[item].max()
    step = 0.5 * scale / max(frequency.sum(), 1e-300)  # half of what an item's best rank is worth
    kept = price.copy()
    for turn in range(steps):
        tokens[:] = 0.0
        value = 0.0
        for item in range(len(frequency)):
            top, most = 0, scores[item, 0] - price[0]
            for rank in range(1, ranks):
                if scores[item, rank] - price[rank] > most:
                    top, most = rank, scores[item, rank] - price[rank]
            tokens[top] += frequency[item]
            value += frequency[item] * most
        value += even * price.sum()
        if value < best:
            best = value
            kept[:] = price
        price += step / (1.0 + 0.3 * turn) * (tokens / even - 1.0)
    price[:] = kept
    for item in range(len(frequency)):
        label[item] = np.argmax(scores[item] - price)
    return best


@helper()
def _fixed_swaps(activations: NDArray[Any], load: NDArray[Any], most: NDArray[Any], placed: NDArray[Any]) -> bool:
    """Swap experts of one layer while local activations gain, the items' ranks as they are; whether any moved."""
    experts, ranks = activations.shape
    total = np.zeros(ranks)
    for expert in range(experts):
        total[placed[expert]] += load[expert]
    tolerance = 1e-9 * (activations.sum() + 1.0)
    moved = False
    for _ in range(4 * experts):
        best, one, two = tolerance, -1, -1
        for x in range(experts):
            for y in range(x + 1, experts):
                a, b = placed[x], placed[y]
                if a == b:
                    continue
                gain = activations[x, b] + activations[y, a] - activations[x, a] - activations[y, b]
                more = load[y] - load[x]  # that rank a gets
                over = _over(total[a] + more, most[a]) + _over(total[b] - more, most[b])
                gain -= PENALTY * (over - _over(total[a], most[a]) - _over(total[b], most[b]))
                if gain > best:
                    best, one, two = gain, x, y
        if one < 0:
            break
        moved = True
        more = load[two] - load[one]
        total[placed[one]] += more
        total[placed[two]] -= more
        placed[one], placed[two] = placed[two], placed[one]
    return moved


@njit()
def _answering_swaps(
    which: NDArray[Any],
    each: int,
    frequency: NDArray[Any],
    trust: NDArray[Any],
    experts: NDArray[Any],
    weights: NDArray[Any],
    load: NDArray[Any],
    most: NDArray[Any],
    chosen: NDArray[Any],
    prices: NDArray[Any],
) -> None:
    """Swap experts wherever the items' best answer gains, prices as they are; then set these anew."""
    ranks, count = most.shape[1], len(frequency)
    scores, label = np.empty((count, ranks)), np.empty(count, np.int64)
    for group in which:
        first, last = group * each, (group + 1) * each
        placed, price = chosen[first:last], prices[group]
        _local(first, trust, experts, weights, placed, scores)
        for _ in range(PASSES):
            moved = False
            for rank in range(ranks):
                scores[:, rank] -= price[rank]
            for layer in range(first, last):
                at = layer - first
                moved = _answering_layer(
                    layer, frequency, trust, experts, weights, load[layer], most[layer], placed[at], scores
                ) or moved  # fmt: skip
            _local(first, trust, experts, weights, placed, scores)
            _set_prices(frequency, scores, price, label, PRICE_STEPS // 4)
            if not moved:
                break


@helper()
def _answering_layer(
    layer: int,
    frequency: NDArray[Any],
    trust: NDArray[Any],
    experts: NDArray[Any],
    weights: NDArray[Any],
    load: NDArray[Any],
    most: NDArray[Any],
    placed: NDArray[Any],
    scores: NDArray[Any],
) -> bool:
    """Swaps of one layer; `scores` [item, rank] are kept, prices taken off."""
    num_experts, ranks, count, kept = len(load), len(most), len(frequency), experts.shape[2]
    begin = np.zeros(num_experts + 1, np.int64)  # items of expert e are who[begin[e]:begin[e + 1]]
    for item in range(count):
        for j in range(kept):
            if weights[item, layer, j] > 0.0:
                begin[experts[item, layer, j] + 1] += 1
    begin = np.cumsum(begin)
    fill = begin.copy()
    who, what = np.empty(begin[-1], np.int64), np.empty(begin[-1])
    for item in range(count):
        for j in range(kept):
            if weights[item, layer, j] > 0.0:
                at = fill[experts[item, layer, j]]
                who[at], what[at] = item, trust[item] * weights[item, layer, j]
                fill[experts[item, layer, j]] += 1
    top = np.empty((count, 3), np.int64)  # the three best ranks of an item
    for item in range(count):
        _rank_top(scores[item], top[item])
    total = np.zeros(ranks)
    for expert in range(num_experts):
        total[placed[expert]] += load[expert]
    delta, touched = np.zeros(count), np.empty(count, np.int64)
    tolerance = 1e-9 * (frequency.sum() + 1.0)
    moved = False
    for x in range(num_experts):
        for y in range(num_experts):
            a, b = placed[x], placed[y]
            if a == b:
                continue
            more = load[y] - load[x]
            over = _over(total[a] + more, most[a]) + _over(total[b] - more, most[b])
            gain = -PENALTY * (over - _over(total[a], most[a]) - _over(total[b], most[b]))
            if gain < -0.5 * (load[x] + load[y]):
                continue  # a swap gains at most the activations of its two experts
            size = 0
            for at in range(begin[x], begin[x + 1]):
                delta[who[at]] = what[at]
                touched[size] = who[at]
                size += 1
            for at in range(begin[y], begin[y + 1]):
                if delta[who[at]] == 0.0:
                    touched[size] = who[at]
                    size += 1
                delta[who[at]] -= what[at]
            for at in range(size):
                item = touched[at]
                change = delta[item]
                if change != 0.0:
                    was = scores[item, top[item, 0]]
                    now = max(scores[item, a] - change, scores[item, b] + change)
                    for place in range(3):
                        rank = top[item, place]
                        if rank != a and rank != b and rank >= 0:
                            now = max(now, scores[item, rank])
                            break
                    gain += frequency[item] * (now - was)
            if gain > tolerance:
                moved = True
                total[a] += more
                total[b] -= more
                placed[x], placed[y] = b, a
                for at in range(size):
                    item = touched[at]
                    scores[item, a] -= delta[item]
                    scores[item, b] += delta[item]
                    _rank_top(scores[item], top[item])
            for at in range(size):
                delta[touched[at]] = 0.0
    return moved


@helper()
def _rank_top(scores: NDArray[Any], top: NDArray[Any]) -> None:
    top[:] = -1
    for rank in range(len(scores)):
        at = rank
        for place in range(3):
            if top[place] < 0:
                top[place] = at
                break
            if scores[at] > scores[top[place]]:
                top[place], at = at, top[place]
