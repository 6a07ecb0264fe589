"""Dispatch and combine: send tokens' hidden states to the ranks of their experts, and the results back.

Two modes:

    deduplicated      one row per token and distinct rank; that rank sums its experts' weighted results
    per activation    one row per token and expert; the token's own rank sums, in the order of its top-k

Deduplicated sends fewer rows if experts of a token share a rank. Per activation sums in the same order as a layer on
one device, so that the placement of experts does not change a sum's rounding.

Each row carries its slots and weights, top-k of both or one of each: tens of bytes, compared with thousands for the
row. They are counted separately, as "routing".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from coterie.engines.optional import torch
from coterie.engines.torch_ep.group import Group

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
