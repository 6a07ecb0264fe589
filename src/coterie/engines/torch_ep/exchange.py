"""Dispatch and combine: tokens' hidden states to the ranks of their experts, and the results back.

Two modes, by what is sent:

    deduplicated      one row per token and distinct rank; the rank sums what its experts give, by their weights
    per activation    one row per token and expert; the token's own rank sums, in the order of its top-k

Deduplicated sends less, the more so the more experts of a token share a rank. Per activation adds up in the same order
as a layer on one device, so the placement of experts does not change a sum's rounding.

With each row go its slots and weights, top-k of both or one of each: tens of bytes, where a row has thousands. They are
counted apart, as "routing".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from coterie.engines.torch_ep.group import Group

try:
    import torch
except ImportError:
    torch = None

DISPATCH, ROUTING, COMBINE = "dispatch", "routing", "combine"
"""Names of the byte counters."""


class ReceivedRows(NamedTuple):
    """Rows that came to this rank's experts."""

    rows: Any
    """[row, hidden]"""
    slots: Any
    """[row, j] slot of this rank, from 0, or -1."""
    weights: Any
    """[row, j] weight of that slot's result."""
    ticket: Any
    """What `combine` needs to send the results back."""


class Exchange(Protocol):
    """A way to send rows there and back."""

    def dispatch(self, hidden: Any, slots: Any, weights: Any) -> ReceivedRows:
        """Send `hidden` [token, hidden] to the ranks of `slots` [token, k], slots of the whole group."""
        ...

    def combine(self, results: Any, ticket: Any) -> Any:
        """Send `results` [row, hidden], of received rows, back; returns each token's sum, [token, hidden]."""
        ...


class Ticket(NamedTuple):
    tokens: Any
    """[sent row] token it is of, grouped by the rank it went to."""
    places: Any
    """[sent row] position among the token's k; None where rows are one per rank."""
    send_counts: list[int]
    receive_counts: list[int]
    num_tokens: int
    top_k: int


@dataclass(frozen=True, slots=True)
class TorchExchange:
    """All-to-all with uneven splits of torch.distributed."""

    group: Group
    slots_per_rank: int
    deduplicate: bool = True

    def dispatch(self, hidden: Any, slots: Any, weights: Any) -> ReceivedRows:
        to = slots // self.slots_per_rank  # [token, k] rank
        if self.deduplicate:
            needs = torch.zeros((len(slots), self.group.size), dtype=torch.bool, device=slots.device)
            needs.scatter_(1, to, True)
            ranks, tokens = needs.T.nonzero(as_tuple=True)
            places = None
            there = to[tokens] == ranks[:, None]
            local_slots = torch.where(there, slots[tokens] % self.slots_per_rank, -1)
            local_weights = torch.where(there, weights[tokens], torch.zeros((), dtype=weights.dtype))
        else:
            order = to.flatten().argsort(stable=True)
            ranks = to.flatten()[order]
            tokens = order // slots.shape[1]
            places = order % slots.shape[1]
            local_slots = (slots.flatten()[order] % self.slots_per_rank)[:, None]
            local_weights = weights.flatten()[order][:, None]
        send_counts = torch.bincount(ranks, minlength=self.group.size).tolist()
        receive_counts = self.group.exchange_counts(send_counts)
        rows = self.group.all_to_all(hidden[tokens], send_counts, receive_counts, DISPATCH)
        got_slots = self.group.all_to_all(local_slots.to(torch.int32), send_counts, receive_counts, ROUTING)
        got_weights = self.group.all_to_all(local_weights, send_counts, receive_counts, ROUTING)
        ticket = Ticket(tokens, places, send_counts, receive_counts, len(hidden), slots.shape[1])
        return ReceivedRows(rows, got_slots.to(torch.int64), got_weights, ticket)

    def combine(self, results: Any, ticket: Ticket) -> Any:
        back = self.group.all_to_all(results, ticket.receive_counts, ticket.send_counts, COMBINE)
        summed = results.new_zeros((ticket.num_tokens, results.shape[1]))
        if ticket.places is None:
            # A rank sends a token back once, so within its rows no two add to the same one: the order is that of ranks.
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
