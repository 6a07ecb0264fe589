"""Token table: predict each token's experts from its id, whatever its context.

Right where a token's identity determines its experts: in the first layers of most models and, on average over a prompt,
in many more layers. Wrong where the context determines them. The row of a token seen n times has weight
n / (n + smoothing) and popularity the rest; an unseen token is predicted by popularity alone.

A full table of 200,000 tokens, 48 layers and 128 experts would be 4.9 GB in 32 bits. So only tokens that were seen are
kept, and in each layer only their `experts_kept` most likely experts, at three bytes each. Popularity also replaces the
experts not kept: the load of a layer always sums to tokens x top_k.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, check, check_at_least, check_new_file, check_not_negative, require_fitted
from coterie.predictors.base import (
    ActivationRates,
    FallsBack,
    Load,
    PredictRequest,
    StartKind,
    check_request_rows,
    mean_rates,
    predictors,
)
from coterie.predictors.token_table.rows import ONE, TokenRows, add_rows, count_rows, empty_rows, read_rows, write_rows
from coterie.traces.activations import ActivationTrace
from coterie.traces.store import value_errors

Held = NDArray[np.bool_]
"""[rank, layer, expert] whether the rank holds the expert."""


@predictors.register("token_table")
@dataclass(slots=True, eq=False)
class TokenTable(FallsBack):
    """Mean activations of each token id, summed over a request's tokens."""

    needs_start: ClassVar[StartKind] = StartKind.TOKENS
    any_phase: ClassVar[bool] = True
    smoothing: float = 0.0
    """Number of occurrences at which a token's row has the same weight as popularity. 0 fully trusts a single
    occurrence and scored best: noise of rare tokens averages out over a request, a bias towards popularity does not."""
    experts_kept: int | None = None
    """Experts kept per token and layer; None is twice top_k."""
    max_bytes: int = 1 << 29
    """Largest size of the table in bytes; above it the rarest tokens are left out and predicted by popularity."""
    confidence_smoothing: float = 2.0
    """Like `smoothing`, but for confidences: a token seen once has a share of 1 on its own experts, which says little
    about its next occurrence."""
    rows_: TokenRows | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_not_negative(smoothing=self.smoothing, confidence_smoothing=self.confidence_smoothing)
        check_at_least(1, experts_kept=self.experts_kept, max_bytes=self.max_bytes)

    @property
    def rows(self) -> TokenRows:
        return require_fitted(self.rows_, "predictor 'token_table'")

    @property
    def popularity(self) -> ActivationRates:
        return self.rows.popularity

    def fit(
        self, trace: ActivationTrace, requests: NDArray[np.integer] | None = None, phase: int | None = None
    ) -> TokenTable:
        """Count the tokens of these requests; the trace must have token ids."""
        tokens, offsets = trace.arrays()
        if tokens.token_ids is None:
            raise ConfigError(f"the trace of {trace.meta.model!r} has no token_ids: a token table needs them")
        chosen = check_request_rows(trace, requests)
        popularity = mean_rates(trace, chosen, phase)
        at = np.concatenate([np.arange(offsets[r], offsets[r + 1]) for r in chosen])  # [token] position in the trace
        if phase is not None:
            at = at[tokens.phase[at] == phase]
        ids = tokens.token_ids[at]
        check(int(ids.min()) >= 0, f"token_ids holds {int(ids.min())}; it must not be negative")
        at = at[np.argsort(ids, kind="stable")]
        seen, counts = np.unique(ids, return_counts=True)
        ends = np.cumsum(counts)
        meta = trace.meta
        kept = min(meta.num_experts, self.experts_kept or 2 * meta.top_k)
        keep, experts, weights = empty_rows(counts, meta.num_layers, kept, meta.num_experts, self.max_bytes)
        bad = count_rows(tokens.expert_ids, at, (ends - counts)[keep], ends[keep], meta.num_experts, experts, weights)
        check(bad < 0, f"token {bad} activates an expert outside 0 … {meta.num_experts - 1}")
        self.rows_ = TokenRows(
            token_ids=seen[keep].astype(np.int32),
            counts=counts[keep].astype(np.int64),
            experts=experts,
            weights=weights,
            popularity=popularity,
            model=meta.model,
            layer_ids=meta.layer_ids,
        )
        return self

    def predict(self, request: PredictRequest) -> Load:
        rows = self.rows
        rows.popularity.check(request)
        if request.token_ids is None or not len(request.token_ids):
            return rows.popularity.scaled(request)
        wanted, times = np.unique(np.asarray(request.token_ids, np.int64), return_counts=True)
        at = rows.find(wanted)
        known = at >= 0
        seen = rows.counts[at[known]]
        out = np.zeros((self.num_layers, self.num_experts))
        trust = times[known] * (seen / (seen + self.smoothing))
        placed = add_rows(rows.experts, rows.weights, at[known], trust, out)  # [layer] activations
        rest = len(request.token_ids) * rows.popularity.top_k - placed
        out += rest[:, None] / rows.popularity.top_k * rows.popularity.per_token
        return out * (1.0 if request.num_tokens is None else request.num_tokens / len(request.token_ids))

    def local_shares(self, held: Held) -> NDArray[np.float32]:
        """Compute the expected share of each seen token's activations that are local on a rank, [seen, layer, rank].

        `held` [rank, layer, expert] describes a placement. Shares are smoothed by `confidence_smoothing`.
        """
        rows, popularity = self.rows, self.rows.popularity
        check(
            held.shape[1:] == popularity.per_token.shape,
            f"held has shape {held.shape}; expected [rank, layer, expert] = (…, {popularity.per_token.shape})",
        )
        everyone = np.einsum("le,rle->lr", popularity.per_token, held) / popularity.top_k  # [layer, rank]
        out = np.zeros((len(rows.token_ids), self.num_layers, len(held)), np.float32)
        trust = rows.counts / (rows.counts + self.confidence_smoothing)
        for layer in range(self.num_layers):
            holds = held[:, layer].T.astype(np.float64)  # [expert, rank]
            weights = rows.weights[:, layer] / (ONE * popularity.top_k)  # [seen, kept]
            own = sum(
                weights[:, j, None] * holds[rows.experts[:, layer, j]] for j in range(weights.shape[1])
            )  # [seen, rank]
            own = own + (1 - weights.sum(axis=1))[:, None] * everyone[layer]
            out[:, layer] = trust[:, None] * own + (1 - trust[:, None]) * everyone[layer]
        return out

    def save(self, path: str | Path) -> None:
        """Write one safetensors file; the same table gives the same bytes. Refuses to overwrite a file."""
        file = Path(path)
        check_new_file(file)
        write_rows(
            file,
            self.rows,
            {
                "smoothing": float(self.smoothing),
                "experts_kept": self.experts_kept,
                "max_bytes": self.max_bytes,
                "confidence_smoothing": float(self.confidence_smoothing),
            },
        )

    @classmethod
    def load(cls, path: str | Path) -> TokenTable:
        """Map a saved table into memory, which processes on one machine share. All values are checked."""
        file = Path(path)
        about, rows = read_rows(file)
        with value_errors(file, "metadata", "metadata"):
            kept = about["experts_kept"]
            table = cls(
                float(about["smoothing"]),
                None if kept is None else int(kept),
                int(about["max_bytes"]),
                float(about["confidence_smoothing"]),
            )
        table.rows_ = rows
        return table
