"""Recent popularity: predict every request as the mean of recent requests.

It learns while serving. A record (the footprint of a request or step) loses weight by the factor `decay` with every
later record: at 0.99 the last hundred records make up 63% of the mean. A record's weight does not depend on its number
of tokens. Right where traffic drifts, and with a predictor for each worker where a router sends similar requests to the
same worker. Wrong where traffic is steady, because the mean of a hundred records is noisier than the mean of all.

Only the mean is stored, not a sum: a record moves it towards itself by 1 ÷ weight, where weight = decay x weight + 1
stays below 1 ÷ (1 - decay). Memory does not grow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, check, check_positive, check_positive_share
from coterie.footprints import footprint
from coterie.predictors.base import ActivationRates, Calibrated, check_request_rows, phase_ids, predictors
from coterie.traces.activations import ActivationTrace

Counts = NDArray[np.integer] | NDArray[np.floating]


@predictors.register("recent_popularity")
@dataclass(slots=True, eq=False)
class RecentPopularity(Calibrated):
    """The decayed mean distribution of observed records, scaled to the request's tokens."""

    name: ClassVar[str] = "recent_popularity"
    decay: float = 0.99
    """Weight of a record relative to the next record; 1 forgets nothing."""
    weight_: float = field(default=0.0, init=False, repr=False)
    """Weight of all records together."""

    def __post_init__(self) -> None:
        check_positive_share(decay=self.decay)

    def fit(
        self, trace: ActivationTrace, requests: NDArray[np.integer] | None = None, phase: int | None = None
    ) -> RecentPopularity:
        """Reset, then observe these requests in order of arrival."""
        fitted = RecentPopularity(self.decay)
        for _, counts, tokens in arrived(trace, requests, phase):
            fitted.observe(counts, tokens)
        self.popularity_, self.weight_ = fitted.popularity_, fitted.weight_
        return self

    def observe(self, footprint: Counts, tokens: float) -> None:
        """Add a record: activations [layer, expert] of `tokens` tokens of a request or step."""
        top_k = self._check(footprint, tokens)
        per_token = np.asarray(footprint, np.float64) / tokens
        before = self.popularity_.per_token if self.popularity_ else np.zeros_like(per_token)
        self.weight_ = self.weight_ * self.decay + 1.0
        self.popularity_ = ActivationRates(before + (per_token - before) / self.weight_, top_k)

    def _check(self, footprint: Counts, tokens: float) -> int:
        """Validate a footprint and return its top_k."""
        check_positive(tokens=tokens)
        known = self.popularity_
        if footprint.ndim != 2 or 0 in footprint.shape or (known and footprint.shape != known.per_token.shape):
            expected = "none 0" if known is None else f"{known.per_token.shape} as before"
            raise ConfigError(f"footprint has shape {footprint.shape}; expected [layer, expert], {expected}")
        check(np.isfinite(footprint).all() and footprint.min() >= 0, "footprint must be finite and not negative")
        sums = footprint.sum(axis=1, dtype=np.float64)
        top_k = known.top_k if known else max(1, round(float(sums[0]) / tokens))
        for layer in np.flatnonzero(np.abs(sums - tokens * top_k) > 1e-6 * tokens * top_k):
            raise ConfigError(
                f"footprint sums to {sums[layer]:g} in layer {layer}; expected tokens={tokens:g} x top_k={top_k}"
            )
        return top_k


def arrived(
    trace: ActivationTrace, requests: NDArray[np.integer] | None, phase: int | None
) -> Iterator[tuple[int, NDArray[np.uint32], int]]:
    """Yield (index, footprint [layer, expert], tokens) of requests that have tokens; raises if there are none.

    The order is that of arrival if known, else that of the trace.
    """
    chosen = check_request_rows(trace, requests)
    if trace.requests.arrival_s is not None:
        chosen = chosen[np.argsort(trace.requests.arrival_s[chosen], kind="stable")]
    empty = True
    for index in chosen.tolist():
        ids = phase_ids(trace, index, phase)
        if len(ids):
            empty = False
            yield index, footprint(ids, trace.meta.num_experts), len(ids)
    check(not empty, f"no token to fit on: the requests chosen of {trace.num_requests} have none (phase={phase})")
