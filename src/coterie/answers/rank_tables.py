"""Fit rank tables to a trace under a placement: likely rank per token id, rank transitions and rank affinities."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.dispatch.tables import Contexts, RankTables
from coterie.errors import check
from coterie.footprints.ranks import token_ranks
from coterie.placement.holdings import held_by
from coterie.predictors import RankTransitions, TokenTable
from coterie.traces.activations import ActivationTrace
from coterie.types import Placement


def fit_rank_tables(
    trace: ActivationTrace,
    placement: Placement,
    requests: NDArray[np.integer] | None = None,
    *,
    table: TokenTable | None = None,
) -> RankTables:
    """Fit the tables of a placement on some requests of a trace (None: all requests).

    A token's rank is that with the largest expected share. `table` is a token table that is already fitted; None fits
    one.
    """
    check(
        trace.meta.num_layers == placement.num_layers and trace.meta.num_experts == placement.num_experts,
        f"the placement has [layer, expert] = ({placement.num_layers}, {placement.num_experts}); the trace has "
        f"({trace.meta.num_layers}, {trace.meta.num_experts})",
    )
    known = TokenTable().fit(trace, requests) if table is None else table
    held = held_by(placement)
    shares = known.local_shares(held)  # [token id seen, layer, rank]
    tokens, offsets = trace.arrays()
    spans = range(trace.num_requests) if requests is None else np.unique(requests)
    at = np.concatenate([np.arange(offsets[r], offsets[r + 1]) for r in spans])
    of = token_ranks(tokens.expert_ids[at], held)
    transitions = RankTransitions().fit(of.ranks, placement.num_ranks, of.local, trace.meta.top_k)
    rows = transitions.rows
    return RankTables.of(
        placement=placement,
        token_ids=known.rows.token_ids,
        ranks=shares.argmax(axis=2).T,
        confidence=shares.max(axis=2).T,
        contexts=Contexts(transitions.order, rows.offsets, rows.keys, rows.ranks, rows.confidence),
        affinity=shares.mean(axis=1),
        model=trace.meta.model,
        top_k=trace.meta.top_k,
        layer_ids=trace.meta.layer_ids,
    )
