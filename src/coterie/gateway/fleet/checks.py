"""Checks of what a keeper passes to a router and gets back, and the reasons of fallbacks.

Token counts come from clients and workers, cached tokens from event streams: the sizes of neither can be trusted.
Compiled loops do not check their indices, so it is done here. Footprints are checked on arrival
(:func:`~coterie.wire.footprints.check_possible`), and routers refuse those of another model.
"""

from __future__ import annotations

from operator import index
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.errors import ConfigError, CoterieError
from coterie.routing import Decision, Fleet, Request
from coterie.routing.fleet import MOST_CONTEXT, shown

COUNTS, SHARES = np.dtype(np.int64), np.dtype(np.float32)
"""Dtypes of the footprints that routers get: loops are compiled for these two."""


class BadRequestError(ConfigError):
    """A value of a request that must not reach a router, or an invalid decision; `reason` is its label in counters."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Fallback(NamedTuple):
    """Reason why a request was placed without the router."""

    reason: str
    """Short label for counters, from a fixed set."""
    text: str


def fallback_of(error: Exception) -> Fallback:
    """Return the fallback for an error. The text of foreign exceptions is omitted: it may quote the request."""
    if isinstance(error, BadRequestError):
        return Fallback(error.reason, str(error))
    text = f": {error}" if isinstance(error, CoterieError) else ""
    return Fallback("router_error", f"the router failed with {type(error).__name__}{text}")


def tokens_of(wanted: Request) -> int:
    """Return the number of prompt tokens; 0 if the value is not valid."""
    try:
        return _checked_tokens(wanted.prompt_tokens)
    except BadRequestError:
        return 0


class Checks:
    """Checker of requests. It remembers the last array of cached tokens that passed, which is often passed again."""

    __slots__ = ("_held", "_within")

    def __init__(self) -> None:
        self._held: NDArray[Any] | None = None
        self._within = 0

    def checked(self, wanted: Request, fleet: Fleet) -> Request:
        """Return the request with the dtypes that loops are compiled for and one entry of cached tokens per row.

        Raises :class:`BadRequestError`. Cached tokens are clipped to the prompt's, because workers may report more. The
        same array is not checked twice in a row: callers must make a new array rather than change it.
        """
        _, tokens, footprint, domain, held = wanted
        whole = True
        if type(tokens) is not int or not 0 <= tokens <= MOST_CONTEXT:
            tokens, whole = _checked_tokens(tokens), False
        if footprint is not None:
            routed: NDArray[Any] = np.ascontiguousarray(footprint, SHARES if footprint.dtype.kind == "f" else COUNTS)
            whole = whole and routed is footprint
            footprint = routed
        rows = len(fleet.places)
        again = held is self._held and self._within <= tokens
        if held is not None and not (again and len(held) == rows):
            clipped = _checked_cached(held, rows, tokens)
            if clipped is held:
                self._held, self._within = clipped, tokens
            else:
                held, whole = clipped, False
        return wanted if whole else Request(wanted.id, tokens, footprint, domain, held)


def checked_row(decision: Decision, fleet: Fleet) -> int:
    """Return the row that a router chose; raise BadRequestError for a closed row or an invalid decision."""
    if not isinstance(decision, Decision):
        raise BadRequestError("bad_decision", f"the router gave a {type(decision).__name__}; expected a Decision")
    row, scores = decision.worker, decision.scores
    try:
        row = index(row)
    except TypeError:
        raise BadRequestError("bad_decision", f"the router chose a {type(row).__name__}; expected a row") from None
    if not 0 <= row < len(fleet.alive) or not fleet.alive.item(row):
        raise BadRequestError("bad_choice", f"the router chose row {shown(row)}, which may not be chosen")
    if type(scores) is not np.ndarray or scores.shape != fleet.alive.shape:
        raise BadRequestError("bad_decision", f"the router's scores must be an array of {len(fleet)}")
    return row


def _checked_tokens(tokens: Any) -> int:
    try:
        count = index(tokens)
    except TypeError:
        raise BadRequestError("bad_tokens", f"prompt_tokens is a {type(tokens).__name__}; expected an int") from None
    if not 0 <= count <= MOST_CONTEXT:
        raise BadRequestError("bad_tokens", f"prompt_tokens={shown(count)} must be in 0 … {MOST_CONTEXT}")
    return count


def _checked_cached(held: Any, rows: int, tokens: int) -> NDArray[np.int64]:
    if type(held) is np.ndarray and held.dtype is COUNTS and held.shape == (rows,) and held.flags.c_contiguous:
        if _within(held, tokens):
            return held
    elif type(held) is not np.ndarray or held.ndim != 1 or held.dtype.kind not in "iu":
        raise BadRequestError("bad_cached_tokens", "cached_tokens must be an array [row] of whole numbers")
    whole = np.zeros(rows, np.int64)
    some = min(rows, len(held))
    whole[:some] = np.minimum(np.maximum(held[:some], 0), tokens)
    return whole


@njit()
def _within(held: NDArray[np.int64], most: int) -> bool:
    wrong = 0
    for at in range(len(held)):
        wrong += not (0 <= held[at] <= most)
    return wrong == 0
