"""Prediction of a request's footprint, before a worker has computed it.

Sources, the best first: *prefix*, the mean of earlier requests with the same leading tokens, learned from the
footprints in prefill answers; *predictor*, a fitted predictor; *popularity*, the mean of all footprints seen or that of
a fit. Only footprints that passed the plausibility check are learned: a false one would steer every later request.

Footprints of partly cached prompts are complete if the worker stores expert ids with its KV cache, as Coterie's workers
do; the number of tokens without known experts is in `missing`.
"""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.errors import ConfigError, check, check_at_least
from coterie.predictors import Predictor, PredictRequest, TokenTable, predictors
from coterie.routing.fitted import RouterFit
from coterie.wire.footprints import MOST_TOKENS, WireFootprint

Source = Literal["prefix", "predictor", "popularity", "none"]
Counts = NDArray[np.integer] | NDArray[np.floating]
"""Activations, [layer, expert]."""
Profile = NDArray[np.float32]
"""Activations per token, [layer, expert]."""

BOUNDS = np.concatenate([np.arange(64, 1025, 64), np.arange(1280, 8193, 256), np.arange(9216, 65537, 1024)])
"""Lengths of the prefixes that are compared, in tokens; finer steps for short prompts."""
_BOUNDS: list[int] = BOUNDS.tolist()
RECENT = 4
"""Number of latest requests with a prefix whose mean predicts the next request with that prefix."""
DECAY = 0.99
"""Weight of the old mean in the moving average over all requests."""
MIN_SHARE = 0.5
"""Smallest share of a prompt that a prefix must be to predict it."""
SAMPLED = 64
"""Most tokens of a prompt, evenly spread, that the predictor gets: with 64 a token table takes 0.2 ms at 24 layers x
32 experts, 0.34 ms at 58 x 256."""
_KEY_BYTES, _ENTRY_BYTES = 160, 400


class Predicted(NamedTuple):
    counts: Profile | None
    """Expected activations, [layer, expert], read-only; None if nothing is known."""
    source: Source


class _Known(NamedTuple):
    profile: Profile
    keys: list[int]
    nbytes: int


class Footprints:
    """Learns and predicts footprints of one model, [layer, expert]. Not thread-safe.

    If `shape` is None, it is that of the predictor, of the popularity, or of the first footprint learned.
    """

    def __init__(
        self,
        shape: tuple[int, int] | None = None,
        top_k: int | None = None,
        *,
        predictor: Predictor | None = None,
        popularity: Counts | None = None,
        max_bytes: int = 64 << 20,
        seed: int | None = None,
    ) -> None:
        """`popularity` is the mean activations per token, [layer, expert].

        `max_bytes` limits the memory of earlier requests: the least recently used are dropped first. A lookup by
        prefix takes 17 to 33 µs, by popularity less than 1 µs.
        """
        check_at_least(1, max_bytes=max_bytes, top_k=top_k)
        self.top_k, self.predictor = top_k, predictor
        self.learned = 0
        """Number of footprints learned."""
        self.last_error = ""
        """Reason why the last prediction failed: it raised, or returned an invalid array; empty if none has."""
        self._max_bytes = max_bytes
        self._seed = np.random.default_rng(seed).integers(0, 1 << 64, dtype=np.uint64)
        self._known: dict[int, _Known] = {}  # most recently used last
        self._requests_at: dict[int, list[int]] = {}  # key of a prefix → numbers of requests, latest last
        self._added = 0
        self.nbytes = 0
        self._popularity = None if popularity is None else np.array(popularity, np.float32)
        self._mean_token = Predicted(self._popularity, "popularity")
        shapes = [
            shape,
            None if predictor is None else (predictor.num_layers, predictor.num_experts),
            None if self._popularity is None else self._popularity.shape,
        ]
        found = {one for one in shapes if one is not None}
        check(len(found) <= 1, f"footprints have shapes {sorted(found)}; model, predictor and popularity must agree")
        self.shape: tuple[int, ...] | None = next(iter(found), None)

    def __len__(self) -> int:
        return len(self._known)

    def footprint(self, ids: NDArray[np.int64] | None, tokens: int, domain: str | None = None) -> Predicted:
        """Predict the activations of a prompt of `tokens` tokens; `ids` are its token ids, None if unknown.

        A prediction by popularity is the activations of one mean token, not scaled to the prompt's length.
        """
        if ids is None and self.predictor is None and self._popularity is not None:
            return self._mean_token
        tokens = max(1, min(int(tokens), MOST_TOKENS))
        if ids is not None and len(ids):
            profile = self._by_prefix(ids)
            if profile is not None:
                return Predicted(profile * np.float32(tokens), "prefix")
        if self.predictor is not None and (load := self._by_predictor(ids, tokens, domain)) is not None:
            return Predicted(load, "predictor")
        return self._mean_token if self._popularity is not None else Predicted(None, "none")

    def learn(self, ids: NDArray[np.int64] | None, footprint: WireFootprint) -> bool:
        """Learn from a footprint that was checked; return False if it has more tokens than the prompt."""
        tokens = footprint.tokens
        if ids is not None and tokens > len(ids):
            return False
        profile = np.ascontiguousarray(footprint.counts, np.float32) / np.float32(tokens)
        self.shape = profile.shape
        self.learned += 1
        known = self._popularity
        # A new array each time: earlier predictions still hold the old one.
        self._popularity = profile.copy() if known is None else known + np.float32(1 - DECAY) * (profile - known)
        self._mean_token = Predicted(self._popularity, "popularity")
        if ids is not None and len(ids) and footprint.missing <= tokens:
            self._keep(ids, profile)
        return True

    def _by_prefix(self, ids: NDArray[np.int64]) -> Profile | None:
        if not self._known:
            return None
        keys = self._keys(ids)
        shortest = bisect_left(_BOUNDS, MIN_SHARE * len(ids))
        for key in reversed([*keys[shortest:-1], keys[-1]]):
            numbers = self._requests_at.get(key)
            if numbers:
                for number in numbers:
                    self._known[number] = self._known.pop(number)
                first, *more = (self._known[number].profile for number in numbers)
                if not more:
                    return first
                total = first + more[0]
                for profile in more[1:]:
                    total += profile
                total *= np.float32(1 / len(numbers))
                return total
        return None

    def _by_predictor(self, ids: NDArray[np.int64] | None, tokens: int, domain: str | None) -> Profile | None:
        assert self.predictor is not None
        if ids is not None and len(ids) > SAMPLED:
            ids = ids[np.linspace(0, len(ids) - 1, SAMPLED).astype(np.int64)]
        try:
            request = PredictRequest(token_ids=ids, domain=domain, num_tokens=tokens)
            load = np.asarray(self.predictor.predict(request), np.float32)
            if load.shape == self.shape and np.isfinite(load.sum()) and load.min() >= 0:
                return load
            self.last_error = f"{load.shape} from {load.min():g} to {load.max():g}, expected finite loads {self.shape}"
        except Exception as error:  # a plugin's bug must not fail a request
            self.last_error = f"{type(error).__name__}: {error}"
        return None

    def _keep(self, ids: NDArray[np.int64], profile: Profile) -> None:
        keys = self._keys(ids)
        for number in self._requests_at.get(keys[-1], ()):
            if self._known[number].keys == keys:  # the same prompt again: average the two
                self._known[number].profile[:] = (self._known[number].profile + profile) / 2
                return
        size = profile.nbytes + _KEY_BYTES * len(keys) + _ENTRY_BYTES
        if size > self._max_bytes:
            return
        number = self._added
        self._added += 1
        self._known[number] = _Known(profile, keys, size)
        self.nbytes += size
        for key in keys:
            numbers = self._requests_at.setdefault(key, [])
            numbers.append(number)
            del numbers[:-RECENT]
        while self.nbytes > self._max_bytes:
            self._forget(next(iter(self._known)))

    def _forget(self, number: int) -> None:
        gone = self._known.pop(number)
        self.nbytes -= gone.nbytes
        for key in gone.keys:
            numbers = self._requests_at.get(key, [])
            if number in numbers:
                numbers.remove(number)
                if not numbers:
                    del self._requests_at[key]

    def _keys(self, ids: NDArray[np.int64]) -> list[int]:
        """Return the keys of the prefixes, then the key of the whole prompt."""
        tokens = np.ascontiguousarray(ids, np.int64)
        if not tokens.flags.writeable:  # Numba would compile for a read-only array again, which takes a second
            tokens = tokens.copy()
        keys: list[int] = _prefix_keys(tokens, BOUNDS, self._seed).tolist()
        return keys


def warm_up() -> None:
    """Compile the loops, so that the first request does not wait for it."""
    known = Footprints((1, 2), 1)
    ids = np.arange(100)
    known.learn(ids, WireFootprint(np.array([[60, 40]], np.uint8), (0,), 100))
    known.footprint(ids, 100)


def popularity_of(fit: RouterFit) -> Profile:
    """Return a mean token's activations, [layer, expert]: a fit's profiles weighted by their shares of requests."""
    learned = fit.learned
    mean = np.average(learned.profiles, axis=0, weights=learned.shares)
    return np.asarray(mean.reshape(learned.shape), np.float32)


def open_predictor(path: str | Path) -> Predictor:
    """Load a fitted token table. Raises InputError, which says so if the path is the name of a predictor instead."""
    if not Path(path).is_file():
        predictors.make(str(path))  # raises if no predictor has this name
        raise ConfigError(f"predictor {str(path)!r} needs a trace to be fitted on, or the file of a fitted token table")
    return TokenTable.load(path)


@njit()
def _prefix_keys(ids: NDArray[np.int64], bounds: NDArray[np.int64], seed: np.uint64) -> NDArray[np.int64]:
    """Return the hash of the prompt up to each bound within it, then of the whole prompt, [prefix]."""
    count = 0
    while count < len(bounds) and bounds[count] <= len(ids):
        count += 1
    keys = np.empty(count + 1, np.int64)
    state, at = seed, 0
    for token in range(len(ids)):
        state = (state ^ np.uint64(ids[token])) * np.uint64(0x9E3779B97F4A7C15)
        state ^= state >> np.uint64(29)
        if at < count and token + 1 == bounds[at]:
            keys[at] = np.int64(state)
            at += 1
    state = (state ^ np.uint64(len(ids))) * np.uint64(0xBF58476D1CE4E5B9)
    keys[count] = np.int64(state ^ (state >> np.uint64(32)))
    return keys
