"""What the gateway tells of itself while it serves: metrics, decisions, spans, log lines."""

from __future__ import annotations

import time

from coterie.gateway.exchange.call import Call, Outcome
from coterie.gateway.exchange.pool import DECODE, PREFILL, Member, Pool
from coterie.gateway.fleet.keeper import Choice
from coterie.gateway.watching.decisions import Decisions
from coterie.gateway.watching.logs import Log
from coterie.gateway.watching.metrics import Metrics
from coterie.routing.base import Request
from coterie.wire.footprints import WireFootprint

CLIENT_GONE = 499
"""Status in logs and metrics of a request whose client went away."""


class Watcher:
    """Told of every decision and every end; see :class:`~coterie.gateway.exchange.flow.Observer`."""

    def __init__(self, metrics: Metrics, decisions: Decisions, log: Log) -> None:
        self.metrics, self.decisions, self.log = metrics, decisions, log
        self._failures: dict[str, list[str]] = {}
        """Key of a request that was retried → what failed before; until it ends."""

    def decided(self, pool: Pool, call: Call, wanted: Request, choice: Choice, seconds: float, source: str) -> None:
        metrics = self.metrics
        metrics.decision_seconds.observe(seconds, pool.name)
        metrics.routed.inc(pool.name, choice.worker_id)
        metrics.footprints.inc(source)
        if choice.fallback is not None:
            metrics.fallbacks.inc(choice.fallback)
        cached = wanted.cached_tokens
        if cached is not None and choice.row < len(cached):
            metrics.cached_tokens.inc(pool.name, "expected", by=cached.item(choice.row))
        self.decisions.add(
            call.id,
            pool.name,
            choice.worker_id,
            pool.ids,
            choice.decision,
            time_s=time.time(),
            fallback=choice.fallback,
            cached=cached,
            source=source,
            prompt_tokens=wanted.prompt_tokens,
            decision_s=seconds,
        )
        if call.span.recording:
            call.span.note(
                pool=pool.name,
                worker=choice.worker_id,
                reason=choice.decision.reason,
                fallback=choice.fallback,
                prompt_tokens=wanted.prompt_tokens,
                footprint=source,
            )

    def failed(self, member: Member, kind: str) -> None:
        self.metrics.worker_failures.inc(member.entry.id, kind)

    def retried(self, pool: Pool, call: Call, failure: str) -> None:
        self.metrics.retries.inc(pool.name)
        self._failures.setdefault(call.key, []).append(failure)

    def not_handed_over(self) -> None:
        self.metrics.handoffs.inc("prefill_failed")

    def handed_over(self, footprint: WireFootprint | None, problem: str | None, cached_tokens: int | None) -> None:
        self.metrics.handoffs.inc("ok")
        if cached_tokens:
            self.metrics.cached_tokens.inc(PREFILL, "reported", by=cached_tokens)
        if problem is not None:
            self.metrics.footprints.inc("damaged")
        elif footprint is not None:
            touched = (footprint.counts > 0).sum() / len(footprint.counts)
            self.metrics.predicted_experts.observe(float(touched))

    def ended(self, call: Call, found: Outcome, seconds: float) -> None:
        metrics, status = self.metrics, found.status
        failures = self._failures.pop(call.key, []) if self._failures else []
        outcome = outcome_of(status, found.cut)
        metrics.requests.inc(call.path, outcome)
        metrics.request_seconds.observe(seconds)
        if found.ttft_s is not None:
            metrics.ttft_seconds.observe(found.ttft_s)
        if found.tpot_s is not None:
            metrics.tpot_seconds.observe(found.tpot_s)
        if found.tokens:
            metrics.prompt_tokens.inc(by=found.tokens)
            metrics.output_tokens.inc(by=found.output_tokens)
        if found.cached_tokens:
            metrics.cached_tokens.inc(DECODE, "reported", by=found.cached_tokens)
        self.log.request(
            call.id,
            call.path,
            outcome,
            status,
            caller=call.caller or None,
            worker=found.worker,
            prefill_worker=found.prefill,
            failures=failures,
            ttft_s=found.ttft_s,
            total_s=seconds,
            prompt_tokens=found.tokens or None,
            output_tokens=found.output_tokens or None,
            cached_tokens=found.cached_tokens,
        )
        if call.span.recording:
            call.span.note(status=status, outcome=outcome, worker=found.worker, retries=len(failures))
            call.span.end(None if outcome == "ok" else outcome)


def outcome_of(status: int, cut: bool = False) -> str:
    if cut:
        return "broken"
    if status < 400:
        return "ok"
    if status == CLIENT_GONE:
        return "cancelled"
    if status in (401, 403, 429, 503):
        return "refused"
    return "invalid" if status < 500 else "failed"
