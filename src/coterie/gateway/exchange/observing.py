"""Observation of a gateway's requests: metrics, records of decisions, trace spans, log lines."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from coterie.gateway.exchange.call import Call, Outcome
from coterie.gateway.exchange.pool import DECODE, PREFILL, Member, Pool
from coterie.gateway.fleet.keeper import Choice
from coterie.gateway.watching.decisions import Decisions
from coterie.gateway.watching.logs import Log
from coterie.gateway.watching.metrics import Metrics
from coterie.gateway.watching.recent import CLIENT_GONE, Recent
from coterie.routing.base import Request
from coterie.wire.footprints import WireFootprint

ENDS = {CLIENT_GONE: "cancelled", **dict.fromkeys((401, 403, 429, 503), "refused")}
"""Error status → label of the request's end; others are invalid (4xx) or failed (5xx)."""
Cached = NDArray[np.int64] | None
Beliefs = NDArray[np.float64] | None
MOST_WAITING = 512
"""Most decisions, and most ends of requests, that are buffered before they are counted."""


class Watcher:
    """Observer of the events in a request's life: decisions, failures, retries, handoffs, its end.

    Events are buffered, and counted in batches by :meth:`catch_up`: that keeps counting off the requests' path, and
    takes a third of the time of counting each event at once.
    """

    def __init__(self, metrics: Metrics, decisions: Decisions, log: Log) -> None:
        self.metrics, self.decisions, self.log = metrics, decisions, log
        self.recent = Recent()
        metrics.before_reading = decisions.before_reading = self.catch_up
        self.beliefs: Callable[[str], Beliefs] = lambda _: None
        """Function from a pool's name to the share of each worker's claimed cached tokens that is believed, [row]."""
        self.sent: Callable[[str, str], None] | None = None
        """Callback with each request's name and worker id, called before the request is sent; None for none."""
        # The requests themselves are not kept: their bodies may be large.
        self._made: list[tuple[str, str, Choice, list[str | None], Cached, Beliefs, int, float, str, float]] = []
        self._ends: list[tuple[str, Outcome, float, float | None]] = []
        self._failures: dict[str, list[str]] = {}
        """Key of a retried request → its failures so far; removed when the request ends."""

    def decided(self, pool: Pool, call: Call, wanted: Request, choice: Choice, seconds: float, source: str) -> None:
        known = wanted.cached_tokens, self.beliefs(pool.name), wanted.prompt_tokens
        self._made.append((call.id, pool.name, choice, pool.ids, *known, seconds, source, time.time()))
        if self.sent is not None:
            self.sent(call.name, choice.worker_id)
        if len(self._made) >= MOST_WAITING:
            self.catch_up()
        if call.span.recording:
            call.span.note(
                pool=pool.name,
                worker=choice.worker_id,
                reason=choice.decision.reason,
                fallback=choice.fallback,
                prompt_tokens=wanted.prompt_tokens,
                footprint=source,
            )

    def catch_up(self) -> None:
        """Count the events buffered since the last call."""
        made, self._made = self._made, []
        ends, self._ends = self._ends, []
        for decision in made:
            self._count_decision(*decision)
        now_s = time.time() if ends else 0.0
        for end in ends:
            self._count_end(*end, now_s)

    def _count_decision(
        self,
        id: str,
        pool: str,
        choice: Choice,
        ids: list[str | None],
        cached: Cached,
        beliefs: Beliefs,
        prompt_tokens: int,
        seconds: float,
        source: str,
        time_s: float,
    ) -> None:
        metrics = self.metrics
        metrics.decision_seconds.observe(seconds, pool)
        metrics.routed.inc(pool, choice.worker_id)
        metrics.footprints.inc(source)
        if choice.fallback is not None:
            metrics.fallbacks.inc(choice.fallback)
        if cached is not None and choice.row < len(cached):
            metrics.cached_tokens.inc(pool, "expected", by=cached.item(choice.row))
        self.decisions.add(
            id,
            pool,
            choice.worker_id,
            ids,
            choice.decision,
            time_s=time_s,
            fallback=choice.fallback,
            cached=cached,
            beliefs=beliefs,
            source=source,
            prompt_tokens=prompt_tokens,
            decision_s=seconds,
            router=choice.router,
        )

    def failed(self, member: Member, kind: str) -> None:
        """Count a worker's failure. `kind`: a kind of UpstreamError, or status_5xx."""
        self.metrics.worker_failures.inc(member.entry.id, kind)

    def retried(self, pool: Pool, call: Call, failure: str) -> None:
        """Count a request that goes to another worker; `failure` is the failed worker's id and the kind of failure."""
        self.metrics.retries.inc(pool.name)
        self._failures.setdefault(call.key, []).append(failure)

    def not_handed_over(self) -> None:
        """Count a request whose prompt a decode worker computes, because no prefill worker answered."""
        self.metrics.handoffs.inc("prefill_failed")

    def handed_over(self, footprint: WireFootprint | None, problem: str | None, cached_tokens: int | None) -> None:
        """Count a prefill worker's answer; `cached_tokens` of the prompt were in its cache, None if unknown."""
        self.metrics.handoffs.inc("ok")
        if cached_tokens:
            self.metrics.cached_tokens.inc(PREFILL, "reported", by=cached_tokens)
        if problem is not None:
            self.metrics.footprints.inc("damaged")
        elif footprint is not None:
            self.metrics.predicted_experts.observe(float((footprint.counts > 0).sum() / len(footprint.counts)))

    def ended(self, call: Call, result: Outcome, seconds: float, waited_s: float | None = None) -> None:
        """Record that a request ended after `seconds`; it waited `waited_s` in line, None if it was never admitted."""
        self._ends.append((call.path, result, seconds, waited_s))
        failures = self._failures.pop(call.key, []) if self._failures else []
        if self.log.requests:
            self.log.request(
                call.id,
                call.path,
                outcome_of(result),
                result.status,
                caller=call.caller or None,
                worker=result.worker,
                prefill_worker=result.prefill,
                failures=failures,
                ttft_s=result.ttft_s,
                total_s=seconds,
                prompt_tokens=result.tokens or None,
                output_tokens=result.output_tokens or None,
                cached_tokens=result.cached_tokens,
            )
        if call.span.recording:
            outcome = outcome_of(result)
            call.span.note(status=result.status, outcome=outcome, worker=result.worker, retries=len(failures))
            call.span.end(None if outcome == "ok" else outcome)
        if len(self._ends) >= MOST_WAITING:
            self.catch_up()

    def _count_end(self, path: str, result: Outcome, seconds: float, waited_s: float | None, now_s: float) -> None:
        metrics, outcome = self.metrics, outcome_of(result)
        metrics.requests.inc(path, outcome)
        ttft_s = None if result.status >= 400 else result.ttft_s  # a refusal has no token
        self.recent.add(now_s, result.status, result.cut, ttft_s, result.tpot_s, result.output_tokens)
        if waited_s is not None:
            metrics.queue_seconds.observe(waited_s)
        metrics.request_seconds.observe(seconds)
        if ttft_s is not None:
            metrics.ttft_seconds.observe(ttft_s)
        if result.tpot_s is not None:
            metrics.tpot_seconds.observe(result.tpot_s)
        if result.tokens:
            metrics.prompt_tokens.inc(by=result.tokens)
            metrics.output_tokens.inc(by=result.output_tokens)
        if result.cached_tokens:
            metrics.cached_tokens.inc(DECODE, "reported", by=result.cached_tokens)


def outcome_of(result: Outcome) -> str:
    """Return the label of a request's end in metrics and logs."""
    if result.drained:
        return "drained"
    if result.cut or result.status < 400:
        return "broken" if result.cut else "ok"
    return ENDS.get(result.status, "invalid" if result.status < 500 else "failed")
