"""Attention-TP with a shuffled reduce-scatter instead of the all-reduce; the gather is deferred past the experts.

    all-reduce               partial sums [token, hidden] ──▶ every rank: all tokens summed; each then routes its share
    shuffled reduce-scatter  partial sums, rows in the schedule's order ──▶ rank r: its own tokens summed, and no others
    ... residual added, norm, router, experts, on tokens that mostly need no dispatch ...
    gather                   every rank's tokens ──▶ every rank: all tokens, back in their original order

An all-reduce is a reduce-scatter and a gather, so this sends no more bytes: the gather only runs later. The residual
stream is replicated before attention, so a rank takes its tokens' rows from its own copy. The gather collects the
residual stream after the experts.

The shuffle copies rows. On the partial sums it copies [token, hidden]; before the row-parallel projection that computes
them (`already_shuffled`), it copies [token, hidden ÷ ranks], since the rows of a product follow those of its left
factor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from coterie.dispatch.shuffle import ShuffleSchedule
from coterie.engines.optional import torch
from coterie.engines.torch_ep.group import Group
from coterie.engines.torch_ep.layer import ExpertParallelLayers
from coterie.errors import check

REDUCE_SCATTER, GATHER = "reduce-scatter", "gather"
"""Byte counters of the two collectives."""


class RouterAnswer(NamedTuple):
    """Experts chosen by a router."""

    experts: Any
    """[token, k]"""
    weights: Any
    """[token, k]"""


def shuffle_rows(rows: Any, schedule: ShuffleSchedule) -> Any:
    """Return the rows in the schedule's order, [rank x per_rank, ...]; padding repeats row 0 and is never read."""
    order = torch.from_numpy(schedule.order).to(rows.device)
    return rows.index_select(0, order.clamp(min=0)) if len(order) else rows[:0]


def shuffled_reduce_scatter(
    group: Group, partial: Any, schedule: ShuffleSchedule, *, already_shuffled: bool = False
) -> Any:
    """Sum `partial` [token, hidden] over ranks; return this rank's rows, [token of this rank, hidden]."""
    places = len(schedule.order) if already_shuffled else len(schedule.inverse)
    check(len(partial) == places, f"partial has {len(partial)} rows; the schedule asks for {places}")
    rows = partial if already_shuffled else shuffle_rows(partial, schedule)
    summed = group.reduce_scatter(rows.view(group.size, schedule.per_rank, *rows.shape[1:]), REDUCE_SCATTER)
    return summed[: len(schedule.tokens_of(group.rank))]  # padding is at a block's end


def deferred_gather(group: Group, own: Any, schedule: ShuffleSchedule) -> Any:
    """Gather every rank's `own` [token of this rank, hidden]; return all tokens in original order, [token, hidden]."""
    block = own.new_zeros((schedule.per_rank, *own.shape[1:]))
    block[: len(own)] = own
    gathered = group.all_gather(block, GATHER).flatten(0, 1)
    return gathered.index_select(0, torch.from_numpy(schedule.inverse).to(own.device))


def shuffled_experts(
    layers: ExpertParallelLayers,
    layer: int,
    partial: Any,
    residual: Any,
    schedule: ShuffleSchedule,
    *,
    norm: Callable[[Any], Any],
    route: Callable[[Any], RouterAnswer],
    already_shuffled: bool = False,
) -> Any:
    """Return the residual stream after attention and experts, [token, hidden], the same on every rank.

    `partial` [token, hidden] is this rank's share of the attention output, `residual` [token, hidden] the stream before
    attention; `route` returns the experts of normalised rows.
    """
    group = layers.group
    with group.guard(f"layer {layer}"):
        check(
            schedule.num_ranks in (0, group.size),
            f"the schedule has {schedule.num_ranks} ranks; the group has {group.size}",
        )
        own = shuffled_reduce_scatter(group, partial, schedule, already_shuffled=already_shuffled)
        stream = own + residual[torch.from_numpy(schedule.tokens_of(group.rank)).to(own.device)]
        normed = norm(stream)
        routed = route(normed)
        stream = stream + layers.forward(layer, normed, routed.experts, routed.weights)
        return deferred_gather(group, stream, schedule)
