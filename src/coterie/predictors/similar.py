"""Similar prefix: predict the recorded load of the earlier request with the longest shared prefix.

The match is the stored request that shares the most leading tokens with the prompt; the latest wins a tie. It must
share at least `similarity` of the prompt; otherwise the prediction is recent popularity. The answer of an earlier
request is compared too, because the next turn of a conversation begins with prompt and answer.

Right for conversations, retries and repeated questions on one long document. Wrong where prompts share a template and
little else: then 0.8 of a prompt may not determine its subject, and one request's load is noisier than a mean.
Unrelated prompts mostly find no match.
"""

from __future__ import annotations

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


@dataclass(slots=True, eq=False)
class _Node:
    """A run of tokens shared by all sequences below the node: bytes `start` to `stop` of the sequence `latest`."""

    start: int
    """Offset in bytes, like `stop`."""
    stop: int
    latest: int
    """Highest sequence number below the node; once this sequence is forgotten, so are all others below."""
    children: dict[bytes, _Node]
    """First token → child."""


class PrefixIndex:
    """Index of token sequences by their prefixes; the oldest sequences are forgotten first.

    It is a radix tree: a lookup compares each token of the prompt at most once, a run at a time, however many sequences
    there are. Runs refer to the stored sequences, so a sequence adds only one or two nodes. Sequences are stored as
    bytes, which compare ten times as fast as arrays; that matters if many prompts diverge after a long shared prefix.
    """

    __slots__ = ("_added", "_held", "_roots")

    def __init__(self) -> None:
        self._held: dict[int, bytes] = {}
        self._roots: dict[bytes, _Node] = {}
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
        children, at = self._roots, 0
        while at < len(tokens):
            first = tokens[at : at + _WIDTH]
            node = children.get(first)
            if node is None:
                children[first] = _Node(at, len(tokens), number, {})
                break
            at = self._shared(node, tokens)
            if at < node.stop:
                upper = _Node(node.start, at, number, {self._held[node.latest][at : at + _WIDTH]: node})
                node.start = at
                children[first] = node = upper
            node.latest = number
            children = node.children
        return number

    def longest(self, token_ids: NDArray[np.integer]) -> Match | None:
        """Return the sequence that shares the most leading tokens, the latest if tied; None if no token is shared."""
        tokens, best = _packed(token_ids), None
        children, at = self._roots, 0
        while at < len(tokens):
            node = children.get(tokens[at : at + _WIDTH])
            if node is None:
                break
            at, best = self._shared(node, tokens), node.latest
            if at < node.stop:
                break
            children = node.children
        return None if best is None else Match(best, at // _WIDTH)

    def forget_oldest(self) -> int:
        """Forget the oldest sequence; returns its number."""
        check(self._held, "there is no sequence to forget")
        number = next(iter(self._held))
        tokens = self._held.pop(number)
        children, at = self._roots, 0
        above: _Node | None = None
        while at < len(tokens):
            first = tokens[at : at + _WIDTH]
            node = children[first]
            if node.latest == number:
                del children[first]
                break
            children, at, above = node.children, node.stop, node
        if above is not None and len(children) == 1:
            (only,) = children.values()
            # Merge the two nodes. An older sequence may end between them, but the latest one, which wins ties,
            # continues into the child: the older one is never the result of a lookup.
            if only.latest == above.latest:
                above.stop, above.children = only.stop, only.children
        return number

    def _shared(self, node: _Node, tokens: bytes) -> int:
        """Return the bytes shared from the sequence's start, up to the end of a node whose first token matches."""
        stop = min(node.stop, len(tokens))
        own, asked = self._held[node.latest][node.start : stop], tokens[node.start : stop]
        if own == asked:
            return stop
        return node.start + int((np.frombuffer(own, np.int32) != np.frombuffer(asked, np.int32)).argmax()) * _WIDTH


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
    and 1,000 tokens per request, about 16,000 to 27,000 requests fit; the tree takes another 500 bytes per request."""
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
