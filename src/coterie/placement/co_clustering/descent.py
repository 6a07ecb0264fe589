"""Local search for few remote activations, with bounds on the load of ranks and on the tokens of their items.

For fixed experts, the best ranks of items are a transport problem: each rank may take an even share of the tokens. The
dual problem has one price per rank, and an item goes to the rank with the highest local activations minus price. The
value of a placement is that of its items' best ranks, and two experts are swapped only if this value rises: the search
uses the true objective, not an affinity. Swaps with fixed ranks of items come first, because they are cheap.

No swap may take a rank above its largest load. Starts above it pay a penalty for every excess token; the penalty rises
until swaps bring the load below. An item seen n times counts n / (n + shrink) of its activations, because the
activations of a rare token are mostly noise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit, side_by_side
from coterie.placement.co_clustering.base import Items, Ranks, add_item
from coterie.placement.objective._arrays import Array

PENALTY = 100.0
"""Penalty per token above a rank's largest load, in activations."""
RISES = 5
"""Rounds until the penalty reaches PENALTY; it starts at 4^-RISES of it. At the full penalty from the start, swaps that
shed most load would come first, whatever activations they lose."""
PRICE_STEPS = 40
"""Subgradient steps of the prices from 0; a fifth of these after a small change of the placement."""
SLACK = 0.05
"""Share by which the tokens of a rank's items may exceed an even share."""
TURNS = 14
"""Most rounds; each assigns items, then swaps experts."""
FEW_ITEMS = 512
"""Largest number of items for which pairs may change places; with few items, one may be as large as a rank's share."""
MANY_ITEMS = 4096
"""Number of items, most frequent first, whose new ranks are considered in a swap. Of 20,000 token ids these cover most
tokens, in a third of the time."""
PASSES = 3
"""Most passes over all swaps that consider new ranks of items."""


def descend_ranks(
    items: Items, load: Array, most: Array, starts: list[Ranks], trust: Array, slack: float = SLACK
) -> tuple[Ranks, Ranks]:
    """Return the best ranks of experts [layer, expert] and items [group, item] found from the starts.

    `load` [layer, expert] is in tokens; `most` [layer, rank] is the largest load of a rank; `trust` [item] is the share
    of an item's activations that counts; `slack` is the share by which the tokens of a rank's items may exceed an even
    share.
    """
    groups, layers = items.groups, items.num_layers
    tried = np.stack(starts).astype(np.int64)
    values = np.zeros((len(starts), groups))
    labels = np.zeros((len(starts), groups, len(items)), np.int64)
    arrays = (items.layers_each, items.frequency, trust, items.experts, items.weights, load, most, 1.0 + slack)
    side_by_side(_descend, groups, *arrays, tried, labels, values)
    best = values.argmax(axis=0)  # [group] start
    placed = tried[np.repeat(best, items.layers_each), np.arange(layers)]
    label = labels[best, np.arange(groups)]
    asked = np.zeros(len(items), np.bool_)
    asked[np.argsort(-items.frequency, kind="stable")[:MANY_ITEMS]] = True
    side_by_side(_answering_swaps, groups, *arrays, asked, placed, label)
    return placed, label


@njit()
def _local(
    first: int,
    trust: NDArray[Any],
    experts: NDArray[Any],
    weights: NDArray[Any],
    placed: NDArray[Any],
    out: NDArray[Any],
) -> None:
    """Fill `out` [item, rank] with the local activations per token if the item were on the rank, times its trust."""
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
    ratio: float,
    tried: NDArray[Any],
    labels: NDArray[Any],
    values: NDArray[Any],
) -> None:
    """Assign items and swap experts until neither gains, from every start; updates `tried` [start, layer, expert]."""
    ranks, counted = most.shape[1], frequency * trust
    scores, label = np.empty((len(frequency), ranks)), np.empty(len(frequency), np.int64)
    for group in which:
        first, last = group * each, (group + 1) * each
        for start in range(len(tried)):
            kept, price = tried[start, first:last], np.zeros(ranks)
            placed, best = kept.copy(), -np.inf
            for turn in range(TURNS):
                _local(first, trust, experts, weights, placed, scores)
                value = _assign(frequency, scores, price, label, ratio, PRICE_STEPS if turn == 0 else PRICE_STEPS // 5)
                value -= PENALTY * _overload(load[first:last], most[first:last], placed)
                if value > best + 1e-6 * abs(best) or turn == 0:
                    best = value
                    _keep(placed, label, kept, labels[start, group])
                elif turn > RISES:
                    break
                penalty = PENALTY * 0.25 ** max(RISES - turn, 0)
                activations = np.zeros((each, load.shape[1], ranks))
                for item in range(len(frequency)):
                    add_item(item, label[item], first, counted, experts, weights, activations)
                moved = False
                for at in range(each):
                    moved |= _fixed_swaps(activations[at], load[first + at], most[first + at], penalty, placed[at])
                if not moved and turn >= RISES:
                    break
            values[start, group] = best


@helper()
def _keep(placed: NDArray[Any], label: NDArray[Any], best_placed: NDArray[Any], best_label: NDArray[Any]) -> None:
    """Copy ranks of experts and items in loops: for an array assignment Numba compiles its error message for 9 s."""
    for layer in range(len(placed)):
        for expert in range(placed.shape[1]):
            best_placed[layer, expert] = placed[layer, expert]
    for item in range(len(label)):
        best_label[item] = label[item]


@helper()
def _overload(load: NDArray[Any], most: NDArray[Any], placed: NDArray[Any]) -> float:
    """Return the tokens above the largest loads, summed over layers and ranks."""
    above = 0.0
    for layer in range(len(placed)):
        total = np.bincount(placed[layer], load[layer], most.shape[1])
        for rank in range(len(total)):
            above += _over(total[rank], most[layer, rank])
    return above


@helper()
def _over(load: float, most: float) -> float:
    return max(load - most, 0.0)


@helper()
def _assign(
    frequency: NDArray[Any], scores: NDArray[Any], price: NDArray[Any], label: NDArray[Any], ratio: float, steps: int
) -> float:
    """Fill `label` [item] so that no rank exceeds `ratio` x an even share of tokens; return the local activations.

    Prices are adjusted until the demand for ranks is even. Then items choose a rank with room, those with the most to
    lose first; an item that fits nowhere goes to the rank with the fewest tokens. If there are at most FEW_ITEMS, items
    then move or change places as long as this gains.
    """
    count, ranks = scores.shape
    _set_prices(frequency, scores, price, steps)
    regret = np.zeros(count)
    for item in range(count):
        top, second = -np.inf, -np.inf
        for rank in range(ranks):
            worth = scores[item, rank] - price[rank]
            if worth > top:
                top, second = worth, top
            elif worth > second:
                second = worth
        if ranks > 1:
            regret[item] = frequency[item] * (top - second)
    tokens, most = np.zeros(ranks), ratio * frequency.sum() / ranks
    for item in np.argsort(-regret):
        best, least = -1, 0
        for rank in range(ranks):
            if tokens[rank] < tokens[least]:
                least = rank
            fits = tokens[rank] + frequency[item] <= most
            if fits and (best < 0 or scores[item, rank] - price[rank] > scores[item, best] - price[best]):
                best = rank
        label[item] = best if best >= 0 else least
        tokens[label[item]] += frequency[item]
    if count <= FEW_ITEMS:
        _change_places(frequency, scores, label, tokens, most)
    value = 0.0
    for item in range(count):
        value += frequency[item] * scores[item, label[item]]
    return value


@helper()
def _change_places(
    frequency: NDArray[Any], scores: NDArray[Any], label: NDArray[Any], tokens: NDArray[Any], most: float
) -> None:
    """Move items and swap pairs as long as local activations rise and no rank gets more than `most` tokens."""
    count, ranks = scores.shape
    for _ in range(count):
        moved = False
        for one in range(count):
            for rank in range(ranks):
                a = label[one]
                gain = frequency[one] * (scores[one, rank] - scores[one, a])
                if gain > 1e-9 and tokens[rank] + frequency[one] <= most:
                    tokens[a] -= frequency[one]
                    tokens[rank] += frequency[one]
                    label[one] = rank
                    moved = True
            for two in range(one):
                a, b = label[one], label[two]
                gain = frequency[one] * (scores[one, b] - scores[one, a])
                gain += frequency[two] * (scores[two, a] - scores[two, b])
                more = frequency[two] - frequency[one]  # tokens that rank a gains
                if (
                    gain > 1e-9
                    and tokens[a] + more <= max(most, tokens[a])
                    and tokens[b] - more <= max(most, tokens[b])
                ):
                    tokens[a] += more
                    tokens[b] -= more
                    label[one], label[two] = b, a
                    moved = True
        if not moved:
            break


@helper()
def _set_prices(frequency: NDArray[Any], scores: NDArray[Any], price: NDArray[Any], steps: int) -> None:
    """Adjust `price` [rank] by subgradient steps of the dual until about as many tokens choose each rank."""
    ranks = len(price)
    even = max(frequency.sum() / ranks, 1e-300)
    tokens = np.empty(ranks)
    scale, best = 0.0, np.inf
    for item in range(len(frequency)):
        scale += frequency[item] * scores[item].max()
    step = 0.5 * scale / max(frequency.sum(), 1e-300)  # half of a token's mean score on its best rank
    kept = price.copy()
    for turn in range(steps):
        tokens[:] = 0.0
        value = even * price.sum()
        for item in range(len(frequency)):
            top, most = 0, scores[item, 0] - price[0]
            for rank in range(1, ranks):
                if scores[item, rank] - price[rank] > most:
                    top, most = rank, scores[item, rank] - price[rank]
            tokens[top] += frequency[item]
            value += frequency[item] * most
        if value < best:
            best = value
            for rank in range(ranks):
                kept[rank] = price[rank]
        for rank in range(ranks):
            price[rank] += step / (1.0 + 0.3 * turn) * (tokens[rank] / even - 1.0)
    for rank in range(ranks):
        price[rank] = kept[rank]


@helper()
def _fixed_swaps(
    activations: NDArray[Any], load: NDArray[Any], most: NDArray[Any], penalty: float, placed: NDArray[Any]
) -> bool:
    """Swap experts of one layer while local activations rise, with fixed ranks of items; return whether any moved."""
    experts, ranks = activations.shape
    total = np.bincount(placed, load, ranks)
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
                more = load[y] - load[x]  # load that rank a gains
                over = _over(total[a] + more, most[a]) + _over(total[b] - more, most[b])
                over -= _over(total[a], most[a]) + _over(total[b], most[b])
                if over > 0.0 and penalty == PENALTY:
                    continue
                gain -= penalty * over
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
    ratio: float,
    asked: NDArray[Any],
    chosen: NDArray[Any],
    labels: NDArray[Any],
) -> None:
    """Swap experts if this gains with items on their best ranks at the present prices.

    A pass is kept only if the balanced assignment of items gains too. `asked` [item] marks the items considered.
    """
    ranks, count = most.shape[1], len(frequency)
    scores, label = np.empty((count, ranks)), np.empty(count, np.int64)
    for group in which:
        first, last = group * each, (group + 1) * each
        placed, price = chosen[first:last].copy(), np.zeros(ranks)
        best = -np.inf
        for turn in range(PASSES + 1):
            _local(first, trust, experts, weights, placed, scores)
            value = _assign(frequency, scores, price, label, ratio, PRICE_STEPS if turn == 0 else PRICE_STEPS // 5)
            value -= PENALTY * _overload(load[first:last], most[first:last], placed)
            if value <= best + 1e-6 * abs(best) and turn > 0:
                break
            best = value
            _keep(placed, label, chosen[first:last], labels[group])
            for item in range(count):
                for rank in range(ranks):
                    scores[item, rank] -= price[rank]
            for layer in range(first, last):
                _answering_layer(
                    layer,
                    asked,
                    frequency,
                    trust,
                    experts,
                    weights,
                    load[layer],
                    most[layer],
                    placed[layer - first],
                    scores,
                )


@helper()
def _answering_layer(
    layer: int,
    asked: NDArray[Any],
    frequency: NDArray[Any],
    trust: NDArray[Any],
    experts: NDArray[Any],
    weights: NDArray[Any],
    load: NDArray[Any],
    most: NDArray[Any],
    placed: NDArray[Any],
    scores: NDArray[Any],
) -> None:
    """Swap experts of one layer; `scores` [item, rank], local activations minus prices, are updated."""
    num_experts, ranks, count, kept = len(load), len(most), len(frequency), experts.shape[2]
    begin = np.zeros(num_experts + 1, np.int64)  # who[begin[e]:begin[e + 1]] are the items of expert e
    for item in range(count):
        for j in range(kept):
            if asked[item] and weights[item, layer, j] > 0.0:
                begin[experts[item, layer, j] + 1] += 1
    begin = np.cumsum(begin)
    fill = begin.copy()
    who, what = np.empty(begin[-1], np.int64), np.empty(begin[-1])
    for item in range(count):
        for j in range(kept):
            if asked[item] and weights[item, layer, j] > 0.0:
                at = fill[experts[item, layer, j]]
                who[at], what[at] = item, trust[item] * weights[item, layer, j]
                fill[experts[item, layer, j]] += 1
    top = np.empty((count, 3), np.int64)  # the three best ranks of an item
    for item in range(count):
        _rank_top(scores[item], top[item])
    total = np.bincount(placed, load, ranks)
    delta, touched = np.zeros(count), np.empty(count, np.int64)
    tolerance = 1e-9 * (frequency.sum() + 1.0)
    for x in range(num_experts):
        for y in range(num_experts):
            a, b = placed[x], placed[y]
            if a == b:
                continue
            more = load[y] - load[x]
            over = _over(total[a] + more, most[a]) + _over(total[b] - more, most[b])
            over -= _over(total[a], most[a]) + _over(total[b], most[b])
            if over > 0.0:
                continue
            gain = -PENALTY * over
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
