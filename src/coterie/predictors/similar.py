"""Similar prefix: predict the recorded load of the earlier request with the longest shared prefix.

The match is the stored request that shares the most leading tokens with the prompt; the latest wins a tie. It must
share at least `similarity` of the prompt; otherwise the prediction is recent popularity. The answer of an earlier
request is compared too, because the next turn of a conversation begins with prompt and answer.

Right for conversations, retries and repeated questions on one long document. Wrong where prompts share a template and
little else: then 0.8 of a prompt may not determine its subject, and one request's load is noisier than a mean.
Unrelated prompts mostly find no match.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, check, check_at_least, check_positive_share, require_fitted
from coterie.predictors.base import ActivationRates, FallsBack, Load, PredictRequest, predictors
from coterie.predictors.recent import Counts, RecentPopularity, arrived
from coterie.traces.activations import ActivationTrace
from coterie.types import PREFILL, narrowest_uint

_WIDTH = np.dtype(np.int32).itemsize
"""Bytes of a token id."""


class Match(NamedTuple):
    """The sequence with the longest shared prefix."""

    number: int
    """Number of the sequence, as returned by `add`."""
    tokens: int
    """Number of shared leading tokens, at least 1."""


class PrefixIndex:
    """Index of token sequences by their prefixes; the oldest sequences are forgotten first.

    Sequences are stored as bytes in sorted order, where those with a common prefix are adjacent: the longest shared
    prefix is shared with a neighbour of the place that the prompt would take.
    """

    __slots__ = ("_added", "_held", "_numbers", "_sorted")

    def __init__(self) -> None:
        self._held: dict[int, bytes] = {}
        self._sorted: list[bytes] = []
        self._numbers: list[int] = []
        """Number of each sequence in `_sorted`."""
        self._added = 0

    def __len__(self) -> int:
        return len(self._held)

    def add(self, token_ids: NDArray[np.integer]) -> int:
        """Add a sequence; returns its number, one more than the previous sequence's."""
        return self._insert(_packed(token_ids))

    def _insert(self, tokens: bytes) -> int:
        number = self._added
        self._added += 1
        self._held[number] = tokens
        at = bisect_right(self._sorted, tokens)
        self._sorted.insert(at, tokens)
        self._numbers.insert(at, number)
        return number

    def longest(self, token_ids: NDArray[np.integer]) -> Match | None:
        """Return the sequence that shares the most leading tokens, the latest if tied; None if no token is shared."""
        tokens = _packed(token_ids)
        at = bisect_left(self._sorted, tokens)
        shared = max((_shared(tokens, held) for held in self._sorted[max(0, at - 1) : at + 1]), default=0)
        if not shared:
            return None
        prefix = tokens[:shared]
        first, stop = (
            side(self._sorted, prefix, key=lambda held: held[:shared]) for side in (bisect_left, bisect_right)
        )
        return Match(max(self._numbers[first:stop]), shared // _WIDTH)

    def forget_oldest(self) -> int:
        """Forget the oldest sequence; returns its number."""
        check(self._held, "there is no sequence to forget")
        number = next(iter(self._held))
        # Equal sequences are in order of their numbers, so the oldest is the first of them.
        at = bisect_left(self._sorted, self._held.pop(number))
        del self._sorted[at], self._numbers[at]
        return number


def _shared(first: bytes, second: bytes) -> int:
    """Return the bytes of the leading tokens that two sequences share."""
    size = min(len(first), len(second))
    if first[:size] == second[:size]:
        return size
    tokens = (np.frombuffer(sequence, np.int32, size // _WIDTH) for sequence in (first, second))
    return int(np.not_equal(*tokens).argmax()) * _WIDTH


def _packed(token_ids: NDArray[np.integer]) -> bytes:
    ids = np.asarray(token_ids)
    check(ids.ndim == 1, f"token_ids has shape {ids.shape}; expected [token]")
    packed = ids.astype(np.int32)
    if ids.dtype != np.int32 and (packed != ids).any():
        raise ConfigError(f"token_ids holds {int(ids[packed != ids][0])}; it must be in {-(1 << 31)} … {(1 << 31) - 1}")
    return packed.tobytes()


class Profile(NamedTuple):
    """Recorded activations of a request."""

    footprint: Counts
    """[layer, expert] tokens."""
    tokens: float
    nbytes: int
    """Bytes of the footprint and the token ids."""


class Similar(NamedTuple):
    """An earlier request with a shared prefix."""

    profile: Profile
    share: float
    """Share of the prompt's tokens in the shared prefix."""


@predictors.register("similar_prefix")
@dataclass(slots=True, eq=False)
class SimilarPrefix(FallsBack):
    """The load of an earlier request that shares at least `similarity` of the prompt; else recent popularity."""

    similarity: float = 0.8
    """Smallest share of the prompt, from its start, that an earlier request must have in common with it."""
    decay: float = 0.99
    """Decay of recent popularity per record (see RecentPopularity)."""
    max_bytes: int = 1 << 28
    """Bytes of stored profiles and token ids; above this the oldest requests are forgotten. At 48 layers of 128 experts
    and 1,000 tokens per request, about 16,000 to 27,000 requests fit."""
    recent_: RecentPopularity | None = field(default=None, init=False, repr=False)
    index_: PrefixIndex = field(default_factory=PrefixIndex, init=False, repr=False)
    profiles_: dict[int, Profile] = field(default_factory=dict, init=False, repr=False)
    """Number in the index → profile."""
    nbytes_: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        check_positive_share(similarity=self.similarity)
        check_at_least(1, max_bytes=self.max_bytes)
        RecentPopularity(self.decay)  # validates the decay

    @property
    def popularity(self) -> ActivationRates:
        return require_fitted(self.recent_, "predictor 'similar_prefix'").popularity

    def fit(
        self, trace: ActivationTrace, requests: NDArray[np.integer] | None = None, phase: int | None = None
    ) -> SimilarPrefix:
        """Reset, then observe these requests in order of arrival.

        The trace must have token ids. A request without a recorded prompt counts for popularity only.
        """
        known = map(trace.request, range(trace.num_requests))
        prompts = [request.token_ids if (request.phase == PREFILL).any() else None for request in known]
        return self.fit_prompts(trace, requests, phase, prompts)

    def fit_prompts(
        self,
        trace: ActivationTrace,
        requests: NDArray[np.integer] | None,
        phase: int | None,
        prompts: Sequence[NDArray[np.integer] | None],
    ) -> SimilarPrefix:
        """Like :meth:`fit`; `prompts` holds, per request of the trace, the token ids known before it ran, or None."""
        check(
            trace.arrays()[0].token_ids is not None,
            f"the trace of {trace.meta.model!r} has no token_ids: prefixes are compared by them",
        )
        fitted = SimilarPrefix(self.similarity, self.decay, self.max_bytes)
        for index, counts, tokens in arrived(trace, requests, phase):
            fitted.observe(prompts[index], counts, tokens)
        self.recent_, self.index_, self.profiles_ = fitted.recent_, fitted.index_, fitted.profiles_
        self.nbytes_ = fitted.nbytes_
        return self

    def observe(self, token_ids: NDArray[np.integer] | None, footprint: Counts, tokens: float) -> None:
        """Add a finished request: token ids of its prompt and, if known, its answer; activations of `tokens` tokens.

        The footprint covers the part to predict, for example the answer only. A request too large for `max_bytes`, or
        without token ids, counts for popularity only.
        """
        packed = b"" if token_ids is None else _packed(token_ids)
        recent = self.recent_ or RecentPopularity(self.decay)
        recent.observe(footprint, tokens)
        self.recent_ = recent
        whole = np.issubdtype(footprint.dtype, np.integer)
        counts: Counts = np.array(footprint, narrowest_uint(int(footprint.max())) if whole else np.float64)
        size = len(packed) + counts.nbytes
        if not packed or size > self.max_bytes:
            return
        while self.nbytes_ + size > self.max_bytes:
            self.nbytes_ -= self.profiles_.pop(self.index_.forget_oldest()).nbytes
        self.profiles_[self.index_._insert(packed)] = Profile(counts, tokens, size)
        self.nbytes_ += size

    def similar(self, token_ids: NDArray[np.integer] | None) -> Similar | None:
        """Return the earlier request that predicts a prompt; None if the prediction is recent popularity."""
        match = None if token_ids is None else self.index_.longest(token_ids)
        if token_ids is None or match is None or match.tokens / len(token_ids) < self.similarity:
            return None
        return Similar(self.profiles_[match.number], match.tokens / len(token_ids))

    def predict(self, request: PredictRequest) -> Load:
        self.popularity.check(request)
        earlier = self.similar(request.token_ids)
        if earlier is None:
            return self.popularity.scaled(request)
        counts, tokens, _ = earlier.profile
        return np.asarray(counts, np.float64) * (self.popularity.tokens_of(request) / tokens)
