"""What planners learn from the requests of an activation trace besides the load: items, and transitions of experts.

Items are requests (one rank each, as with data-parallel attention and the router `semantic`) or token ids (one rank per
layer, as with tensor-parallel attention). A plan that is scored on other requests learns from its own half alone.

Rank tables are fitted to a trace under a placement: likely rank per token id, rank transitions and rank affinities.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.dispatch.requests import schedule_requests
from coterie.dispatch.tables import Contexts, RankTables
from coterie.errors import check, check_given
from coterie.footprints.counting import footprint, transitions
from coterie.footprints.ranks import token_ranks
from coterie.placement import Items
from coterie.placement.holdings import held_by
from coterie.predictors import RankTransitions, TokenTable
from coterie.predictors.token_table import ONE
from coterie.traces.activations import ActivationTrace
from coterie.traces.requests import check_new_folder
from coterie.types import Placement

ItemKind = Literal["requests", "tokens"]
TOKENS, RANKS = "tokens.safetensors", "ranks.safetensors"
"""Files of a folder of tables."""


class LocalShares(NamedTuple):
    """Shares of activations whose expert is on the rank that their item is sent to."""

    items: ItemKind
    now: float
    after: float
    held_out: bool
    """Whether the items are of requests that the plan was not made on."""


@dataclass(frozen=True, slots=True, eq=False)
class SeenRequests:
    """Requests of a trace that a planner learns from."""

    trace: ActivationTrace
    requests: NDArray[np.int64]
    kind: ItemKind
    rows: slice = field(default_factory=lambda: slice(None))
    """Layers of the trace that are planned."""

    def of_layers(self, rows: slice) -> SeenRequests:
        return replace(self, rows=rows)

    def offers(self) -> dict[str, Callable[[], Any]]:
        """Return what planners may ask for; it is computed when the first one asks."""
        return {"items": cache(self.items), "transitions": cache(self._transitions)}

    def check_tokens(self, asked: str) -> None:
        check(self.has_tokens, f"{asked} needs token ids, which the trace has not; coterie record keeps them")

    @property
    def has_tokens(self) -> bool:
        return self.trace.arrays()[0].token_ids is not None

    def items(self) -> Items:
        if self.kind == "tokens":
            self.check_tokens("--items tokens")
            seen = TokenTable().fit(self.trace, self.requests).rows
            items = Items(seen.counts.astype(np.float64), seen.experts.astype(np.int32), seen.weights / ONE)
            return items.layers(self.rows)
        ids = self._ids()
        counts = np.stack([footprint(one, self.trace.meta.num_experts) for one in ids])
        return Items.of_counts(counts, np.array([len(one) for one in ids]), one_rank=True)

    def _transitions(self) -> NDArray[np.int64]:
        return transitions(np.concatenate(self._ids()), self.trace.meta.num_experts)

    def _ids(self) -> list[NDArray[np.unsignedinteger]]:
        """Return the expert ids [token, layer, k] of each request, of the layers that are planned."""
        return [self.trace.request(int(request)).expert_ids[:, self.rows] for request in self.requests]

    def local_share(self, placement: Placement) -> float:
        """Return the share of activations that are local if every item is on the rank of most of its experts.

        Requests are assigned in rounds of one for each rank, as by the router `semantic`, and know their own experts:
        an upper bound for predicted footprints.
        """
        items, held = self.items(), placement.held
        local = np.zeros((len(items), items.num_layers, placement.num_ranks))
        for layer in range(items.num_layers):
            beside = held[:, layer].T[items.experts[:, layer]]  # [item, kept, rank]
            local[:, layer] = np.einsum("ik,ikr->ir", items.weights[:, layer], beside)
        if items.one_rank:
            share = local.sum(axis=1)
            found = np.take_along_axis(share, schedule_requests(share)[:, None], axis=1)[:, 0]
        else:
            found = local.max(axis=2).sum(axis=1)
        return float(items.frequency @ found / (items.frequency @ items.weights.sum(axis=(1, 2))))


def check_tables(folder: Path | None, learned: SeenRequests | None) -> None:
    """Raise before the work if tables cannot be written to the folder; None (nothing is to be written) passes."""
    if folder is None:
        return
    check_new_folder(folder)
    given = check_given(learned, f"--tables={folder} needs an activation trace; a load table has no tokens")
    given.check_tokens(f"--tables={folder}")


def write_tables(folder: Path, learned: SeenRequests, placement: Placement) -> list[Path]:
    """Write the experts of token ids, and the ranks of tokens under the placement; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    table = TokenTable().fit(learned.trace)
    table.save(folder / TOKENS)
    fit_rank_tables(learned.trace, placement, table=table).save(folder / RANKS)
    return [folder / TOKENS, folder / RANKS]


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
