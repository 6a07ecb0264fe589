"""Expert-parallel MoE layers: choose slots, dispatch, compute, combine; and attention with a shuffled reduce-scatter.

A token stays on its rank; its experts may be on any rank, in one slot or several. The output equals that of the same
layers on one device, up to rounding: a matrix product may round differently with the number of its rows, and with
deduplicated rows sums are grouped by rank. If the arithmetic is exact, the output is bit-equal.

Dispatch sends tokens' hidden states to the ranks of their experts, combine the results back, in two modes:

    deduplicated      one row per token and distinct rank; that rank sums its experts' weighted results
    per activation    one row per token and expert; the token's own rank sums, in the order of its top-k

Deduplicated sends fewer rows if experts of a token share a rank. Per activation sums in the same order as a layer on
one device, so that the placement of experts does not change a sum's rounding.

Each row carries its slots and weights, top-k of both or one of each: tens of bytes, compared with thousands for the
row. They are counted separately, as "routing".

Weights of a rank's experts: one block of memory with a row per slot, and spare rows for arriving experts.

A slot maps to a row index, so that a switch of a migration changes indices and copies nothing. A row holds an expert's
three matrices one after the other, in the order they are sent: gate and up [2 x inner, hidden], down [hidden, inner].

Attention-TP with a shuffled reduce-scatter instead of the all-reduce; the gather is deferred past the experts.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from coterie.dispatch.shuffle import ShuffleSchedule
from coterie.dispatch.slots import SlotTable, choose_slots
from coterie.engines.optional import torch
from coterie.engines.torch_ep.group import Group
from coterie.errors import check, check_one_of
from coterie.types import Placement

Activation = Literal["silu", "relu"]
LoadExpert = Callable[[int, int], tuple[Any, Any]]
"""Loads (layer, expert) → gate and up as one [2 x inner, hidden], and down [hidden, inner]."""
Rows = tuple[tuple[int, ...], ...]
"""[layer][slot of this rank] row of the block."""


class SlotWeights:
    """Experts of one rank, for all layers."""

    def __init__(
        self, placement: Placement, rank: int, load: LoadExpert, staging: int = 0, activation: Activation = "silu"
    ) -> None:
        check_one_of(("silu", "relu"), activation=activation)
        self.activation = activation
        self.load = load
        up, down = load(0, int(placement.slot_experts[0, 0]))
        self.inner, self.hidden = int(down.shape[1]), int(down.shape[0])
        check(
            tuple(up.shape) == (2 * self.inner, self.hidden),
            f"gate and up have shape {tuple(up.shape)}; down asks for {(2 * self.inner, self.hidden)}",
        )
        per_rank, layers = placement.slots_per_rank, placement.num_layers
        count = layers * per_rank + staging
        self.block = torch.empty((count, 3 * self.inner * self.hidden), dtype=up.dtype)
        self.rows: Rows = tuple(tuple(range(layer * per_rank, (layer + 1) * per_rank)) for layer in range(layers))
        self.free = list(range(layers * per_rank, count))
        for layer in range(layers):
            own = placement.slot_experts[layer, rank * per_rank : (rank + 1) * per_rank].tolist()
            for row, expert in zip(self.rows[layer], own, strict=True):
                self.fill(row, layer, expert)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert of one layer."""
        return int(self.block.shape[1] * self.block.element_size())

    def fill(self, row: int, layer: int, expert: int) -> None:
        """Load an expert into a row with the `load` function, which can load any expert."""
        up, down = self.load(layer, expert)
        torch.cat([up.flatten(), down.flatten()], out=self.block[row])

    def replace(self, layer: int, arriving: dict[int, int]) -> list[int]:
        """Point slots of a layer to other rows, {slot: row}; return the rows they pointed to before."""
        old = self.rows[layer]
        self.rows = (
            *self.rows[:layer],
            tuple(arriving.get(slot, row) for slot, row in enumerate(old)),
            *self.rows[layer + 1 :],
        )
        return [old[slot] for slot in arriving]

    def run(self, row: int, hidden: Any) -> Any:
        """Run the expert in a row of the block on hidden states [token, hidden]."""
        cut = 2 * self.inner * self.hidden
        gate, up = (hidden @ self.block[row, :cut].view(2 * self.inner, self.hidden).T).chunk(2, dim=1)
        activate = torch.nn.functional.silu if self.activation == "silu" else torch.relu
        return (activate(gate) * up) @ self.block[row, cut:].view(self.hidden, self.inner).T


DISPATCH, ROUTING, COMBINE = "dispatch", "routing", "combine"
"""Names of the byte counters."""


class ReceivedRows(NamedTuple):
    """Rows received for this rank's experts."""

    rows: Any
    """[row, hidden]"""
    slots: Any
    """[row, j] slot index within this rank; -1 if unused."""
    weights: Any
    """[row, j] router weight of the expert output computed in `slots` [row, j]."""
    ticket: Any
    """State that `combine` needs to send the results back."""


class Ticket(NamedTuple):
    tokens: Any
    """[sent row] token of each row, grouped by receiving rank."""
    places: Any
    """[sent row] index among the token's k experts; None if rows are deduplicated per rank."""
    send_counts: list[int]
    receive_counts: list[int]
    num_tokens: int
    top_k: int


@dataclass(frozen=True, slots=True)
class TorchExchange:
    """Exchange by torch.distributed's all-to-all with uneven splits."""

    group: Group
    slots_per_rank: int
    deduplicate: bool = True

    def dispatch(self, hidden: Any, slots: Any, weights: Any) -> ReceivedRows:
        """Send `hidden` [token, hidden] to the ranks of `slots` [token, k], slot indices of the whole group."""
        to = slots // self.slots_per_rank  # [token, k] rank
        if self.deduplicate:
            needs = torch.zeros((len(slots), self.group.size), dtype=torch.bool)
            needs.scatter_(1, to, True)
            ranks, tokens = needs.T.nonzero(as_tuple=True)
            places = None
            there = to[tokens] == ranks[:, None]
            local_slots = torch.where(there, slots[tokens] % self.slots_per_rank, -1)
            local_weights = torch.where(there, weights[tokens], torch.zeros((), dtype=weights.dtype))
        else:
            order = to.flatten().argsort(stable=True)
            ranks = to.flatten()[order]
            tokens, places = order // slots.shape[1], order % slots.shape[1]
            local_slots = (slots.flatten()[order] % self.slots_per_rank)[:, None]
            local_weights = weights.flatten()[order][:, None]
        send_counts = torch.bincount(ranks, minlength=self.group.size).tolist()
        receive_counts = self.group.exchange_counts(send_counts)
        rows = self.group.all_to_all(hidden[tokens], send_counts, receive_counts, DISPATCH)
        got_slots = self.group.all_to_all(local_slots.to(torch.int32), send_counts, receive_counts, ROUTING)
        got_weights = self.group.all_to_all(local_weights, send_counts, receive_counts, ROUTING)
        return ReceivedRows(
            rows,
            got_slots.to(torch.int64),
            got_weights,
            Ticket(tokens, places, send_counts, receive_counts, len(hidden), slots.shape[1]),
        )

    def combine(self, results: Any, ticket: Ticket) -> Any:
        """Send `results` [row, hidden] of the received rows back; return each token's sum, [token, hidden]."""
        back = self.group.all_to_all(results, ticket.receive_counts, ticket.send_counts, COMBINE)
        summed = results.new_zeros((ticket.num_tokens, results.shape[1]))
        if ticket.places is None:
            # A rank returns each token once, so indices within its part are distinct; parts add in rank order.
            for tokens, part in zip(
                ticket.tokens.split(ticket.send_counts), back.split(ticket.send_counts), strict=True
            ):
                summed[tokens] += part
            return summed
        by_token = results.new_empty((ticket.num_tokens, ticket.top_k, results.shape[1]))
        by_token[ticket.tokens, ticket.places] = back
        for place in range(ticket.top_k):
            summed += by_token[:, place]
        return summed


class StepMap(NamedTuple):
    """Locations of the experts during one step; a switch during the step does not change them."""

    tables: tuple[SlotTable, ...]
    """[layer] table of each expert's slots."""
    rows: Rows
    """[layer][slot of this rank] row of the weights."""


class ExpertParallelLayers:
    """MoE layers of one rank. All ranks call `forward` together, layer by layer, each with its own tokens."""

    def __init__(self, group: Group, placement: Placement, weights: SlotWeights, exchange: TorchExchange) -> None:
        check(
            placement.num_ranks == group.size,
            f"placement.num_ranks={placement.num_ranks} must equal the group's {group.size} ranks",
        )
        self.group, self.weights, self.exchange = group, weights, exchange
        self.num_experts = placement.num_experts
        self._tables: dict[tuple[int, ...], SlotTable] = {}
        self.map = self.step_map(placement.slot_experts.tolist())

    def step_map(self, rows: Sequence[Sequence[int]]) -> StepMap:
        """Build a step's map from [layer][slot] experts and the current rows of the weights."""
        keys = [tuple(row) for row in rows]
        self._tables = {
            key: self._tables.get(key) or SlotTable.of(key, self.num_experts, self.group.size) for key in keys
        }
        return StepMap(tuple(self._tables[key] for key in keys), self.weights.rows)

    def forward(self, layer: int, hidden: Any, experts: Any, weights: Any) -> Any:
        """Return each token's weighted sum over its experts, [token, hidden]; experts and weights [token, k].

        A rank may have no tokens.
        """
        step = self.map
        with self.group.guard(f"layer {layer}"):
            check(
                experts.shape == weights.shape and len(experts) == len(hidden),
                f"experts has shape {tuple(experts.shape)}, weights {tuple(weights.shape)}; "
                f"both must be [{len(hidden)} tokens, k]",
            )
            chosen = choose_slots(experts.numpy(), self.group.rank, step.tables[layer])
            slots = torch.from_numpy(chosen)
            received = self.exchange.dispatch(hidden, slots, weights.to(hidden.dtype))
            return self.exchange.combine(self._compute(received, step.rows[layer]), received.ticket)

    def _compute(self, received: ReceivedRows, rows: Sequence[int]) -> Any:
        """Return the weighted sum over the slots of each received row, [row, hidden], computed slot by slot."""
        results = torch.zeros_like(received.rows)
        at, place = (received.slots >= 0).nonzero(as_tuple=True)
        order = received.slots[at, place].argsort(stable=True)
        at, place = at[order], place[order]
        counts = torch.bincount(received.slots[at, place], minlength=len(rows)).tolist()
        for slot, (ats, places) in enumerate(zip(at.split(counts), place.split(counts), strict=True)):
            if len(ats):
                given = self.weights.run(rows[slot], received.rows[ats])
                results[ats] += given * received.weights[ats, places].to(given.dtype)[:, None]
        return results


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
    order = torch.from_numpy(schedule.order)
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
    return gathered.index_select(0, torch.from_numpy(schedule.inverse))


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
        stream = own + residual[torch.from_numpy(schedule.tokens_of(group.rank))]
        normed = norm(stream)
        routed = route(normed)
        stream = stream + layers.forward(layer, normed, routed.experts, routed.weights)
        return deferred_gather(group, stream, schedule)
