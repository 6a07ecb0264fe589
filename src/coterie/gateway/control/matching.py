"""Turn workers' expert events into inputs of the control loop: whole requests, and loads.

A decode worker may not know the experts of a prompt: its KV came from a prefill worker, whose own event has them. The
two halves of a request are matched by its id. No event makes this raise: events of another model's shape, with an
inconsistent payload or with impossible experts are counted and dropped. Only requests that the gateway sent to the
worker count, and each once: a worker that invents events cannot affect decisions.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.control.base import LoadSeen, LoopShape, RequestSeen
from coterie.errors import InputError
from coterie.footprints import footprint
from coterie.wire.expert_events import ExpertLoad, RequestExperts

MOST_WAITING = 2048
"""Most halves of requests that wait for their other half; beyond it the oldest are dropped."""
PATIENCE_S = 120.0
"""Seconds that half a request waits for its other half."""
MOST_REMEMBERED = 16_384
"""Number of events remembered, to recognise duplicates sent under another sequence number."""
MOST_LOAD_S = 3600.0
"""Longest time that one load event may cover, in seconds; longer ones are dropped as invalid."""
MOST_SENT = 65_536
"""Most requests remembered that were sent and not counted yet."""
REASONS = ("other_shape", "malformed", "nonsense", "not_sent", "doubled", "no_decode", "unmatched")
"""Reasons for dropping an event: another model's shape; inconsistent payload; impossible experts or values; a request
that the gateway did not send to this worker or that was already counted; a duplicate; an answer of one token, so no
decode step; no matching other half."""

Counts = NDArray[np.uint32]
_SUFFIX = re.compile(r"^((?:chat)?cmpl-.+)-[0-9a-f]{8}$")
_ENGINE_ID = re.compile(r"(?:[0-9]+_)?(?:chat)?cmpl-(.+)")
"""Pattern of vLLM's request ids, with a number in front if a request has several answers; group 1 holds our name."""


class _LeftOut(Exception):
    """Raised with one of REASONS for an event that is dropped."""


class _Half(NamedTuple):
    at_s: float
    worker: str
    prompt: Counts
    prompt_rows: int
    decode: Counts | None


class SentRequests:
    """Requests that the gateway sent, by name, with the workers that got them. A request is removed when counted."""

    def __init__(self) -> None:
        self._workers: dict[str, set[str]] = {}

    def add(self, name: str, worker: str) -> None:
        self._workers.setdefault(name, set()).add(worker)
        if len(self._workers) > MOST_SENT:
            del self._workers[next(iter(self._workers))]

    def name_of(self, request_id: str, worker: str) -> str | None:
        """Return the gateway's name of a request from a worker's id of it; None if it was not sent to the worker."""
        inner = _ENGINE_ID.fullmatch(request_id)
        names = [request_id] if inner is None else [request_id, inner[1], *_shortened(inner[1])]
        return next((name for name in names if worker in self._workers.get(name, ())), None)

    def count(self, name: str) -> None:
        """Remove a request that was counted, so that later events about it are ignored."""
        self._workers.pop(name, None)


def _shortened(name: str) -> list[str]:
    """Return the name without the suffixes that vLLM may append: random digits, the number of a prompt, or both."""
    without_digits = re.sub(r"-[0-9a-f]{8}$", "", name)
    return [without_digits, re.sub(r"-[0-9]+$", "", without_digits), re.sub(r"-[0-9]+$", "", name)]


class Matcher:
    """Makes inputs of the loop from events; holds no clock and no socket."""

    def __init__(self, shape: LoopShape, sent: SentRequests | None = None) -> None:
        """`sent` are the requests whose events count; None for all."""
        self._sent = sent
        self.counters: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self._shape = (shape.num_layers, shape.num_experts)
        self._top_k = shape.top_k
        self.halves: dict[str, _Half] = {}
        """Name of a request → the half of it that waits for the other half."""
        self._known: dict[tuple[str, str, int], None] = {}

    def take(self, worker: str, event: RequestExperts | ExpertLoad, at_s: float) -> RequestSeen | LoadSeen | None:
        """Return the input that an event makes or completes; None if it must wait or is dropped."""
        if (len(event.layer_ids), event.num_experts) != self._shape:
            self.counters["other_shape"] += 1
            return None
        try:
            return self._load(worker, event, at_s) if isinstance(event, ExpertLoad) else self._part(worker, event, at_s)
        except _LeftOut as left:
            self.counters[left.args[0]] += 1
        except InputError:
            self.counters["malformed"] += 1
        return None

    def expire(self, now_s: float) -> None:
        """Drop the halves that waited longer than `PATIENCE_S`."""
        for name in [name for name, half in self.halves.items() if now_s - half.at_s > PATIENCE_S]:
            self._drop(name)

    def _load(self, worker: str, event: ExpertLoad, at_s: float) -> LoadSeen:
        load = event.load().astype(np.float64)
        # An expert's load is at most the tokens. Twice that is allowed: engines may read the totals at different times.
        possible = event.tokens >= 1 and load.max(initial=0.0) <= 2.0 * event.tokens
        if event.steps < 1 or not 0 < event.seconds < MOST_LOAD_S or not possible:
            raise _LeftOut("nonsense")
        return LoadSeen(at_s, worker, load, event.steps, event.seconds)

    def _part(self, worker: str, event: RequestExperts, at_s: float) -> RequestSeen | None:
        name = "" if self._sent is None else self._sent.name_of(event.request_id, worker)
        if name is None:
            raise _LeftOut("not_sent")
        seen = self._half(worker, event, at_s)
        if seen is not None and self._sent is not None:
            self._sent.count(name)
        return seen

    def _half(self, worker: str, event: RequestExperts, at_s: float) -> RequestSeen | None:
        if event.top_k != self._top_k:
            raise _LeftOut("other_shape")
        ids, known = event.ids(), event.seen()
        if event.prompt_tokens < 0 or _repeats(ids[known]):
            raise _LeftOut("nonsense")
        name = request_name(event.request_id)
        if not self._is_new(name, worker, event):
            raise _LeftOut("doubled")
        prompt = known & (np.arange(len(known)) < event.prompt_tokens)
        decode = known & ~prompt
        after = footprint(ids[decode], event.num_experts) if decode.any() else None
        half = _Half(at_s, worker, footprint(ids[prompt], event.num_experts), int(prompt.sum()), after)
        if after is not None and half.prompt_rows >= max(1, event.prompt_tokens // 2):
            other = self.halves.pop(name, None)
            return _whole(name, half, half if other is None else max(half, other, key=lambda one: one.prompt_rows))
        return self._matched(name, half, event.output_tokens)

    def _matched(self, name: str, half: _Half, output_tokens: int) -> RequestSeen | None:
        """Join a half with its other half, or keep it until that arrives."""
        other = self.halves.get(name)
        if other is not None and (other.decode is None) != (half.decode is None):
            del self.halves[name]
            before, after = (half, other) if half.decode is None else (other, half)
            if not before.prompt_rows:
                raise _LeftOut("unmatched")
            return _whole(name, after, before)
        if half.decode is None and not half.prompt_rows:
            raise _LeftOut("no_decode" if output_tokens <= 1 else "unmatched")
        self.halves[name] = half
        while len(self.halves) > MOST_WAITING:
            self._drop(next(iter(self.halves)))
        return None

    def _drop(self, name: str) -> None:
        """Drop a half: count a prompt half as `no_decode` (harmless), a decode half as `unmatched` (lost data)."""
        self.counters["no_decode" if self.halves.pop(name).decode is None else "unmatched"] += 1

    def _is_new(self, name: str, worker: str, event: RequestExperts) -> bool:
        """Whether this event is new from this worker. Compares contents too, as clients may reuse request names."""
        key = (name, worker, hash((event.token_ids, event.known, event.output_tokens)))
        if key in self._known:
            return False
        self._known[key] = None
        if len(self._known) > MOST_REMEMBERED:
            del self._known[next(iter(self._known))]
        return True


def request_name(request_id: str) -> str:
    """Return the part of an id that all workers of a request share: vLLM appends eight random digits to its ids."""
    return _SUFFIX.sub(r"\1", request_id)


def _whole(name: str, after: _Half, before: _Half) -> RequestSeen:
    assert after.decode is not None
    return RequestSeen(after.at_s, name, after.worker, before.prompt.astype(np.int64), after.decode.astype(np.int64))


def _repeats(ids: NDArray[np.unsignedinteger]) -> bool:
    """Whether a token chose an expert of a layer twice."""
    ordered = np.sort(ids, axis=-1)
    return bool((ordered[..., 1:] == ordered[..., :-1]).any())
