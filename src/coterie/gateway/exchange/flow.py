"""Base of all request flows: send to a worker of a pool, retry before the first byte, pass the answer on."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from typing import Any

import msgspec

from coterie.errors import UnavailableError
from coterie.gateway.config import GatewayConfig
from coterie.gateway.exchange.call import Call, Outcome
from coterie.gateway.exchange.knowledge import Knowledge, KnownPrompt
from coterie.gateway.exchange.observing import Watcher
from coterie.gateway.exchange.pool import Member, Pool, Sent
from coterie.gateway.exchange.relay import WHY, Relayed, Usage, pass_stream, pass_whole
from coterie.gateway.fleet.health import HealthSettings, is_failure
from coterie.gateway.watching.spans import NO_SPAN
from coterie.net.http1 import Answer, Headers, HttpError, Responder, UpstreamError, is_event_stream
from coterie.wire.footprints import WireFootprint, read_footprint
from coterie.wire.handoff import REQUEST_ID_HEADER

BUSY = 429
PASSING = frozenset(("connect", "reset", "timeout", 502, 503, 504))
"""Failures after which another round of tries may succeed. The statuses are sent by a worker that starts or drains,
or by a proxy in front of a dead one."""
INNOCENT = PASSING - {"reset"} | {BUSY}
"""Failures that a bad request cannot have caused."""
MOST_SUSPECT = 3
"""Failures not in `INNOCENT` after which a request is given up: it may be what breaks the workers."""


def may_retry(status: int) -> bool:
    """Whether another worker may succeed: this one failed (5xx) or is full (429)."""
    return is_failure(status) or status == BUSY


class Tries:
    """Failed tries of one request in one pool, before the first byte of its answer. Created at the first failure.

    Each worker of the pool that is not known to be unhealthy is tried once per round. A further round follows, since a
    fleet often recovers within a second, unless the last failure is one that the next worker would repeat (HTTP 500, an
    unreadable answer) or a 429. A worker that broke during the request may have crashed because of it: such a request
    is given up after :data:`MOST_SUSPECT` failures. There are at most `retries` retries, and no new round starts more
    than `retry_s` after the first failure.
    """

    __slots__ = ("_health", "_pool", "_since", "_suspect", "failures", "tried")

    def __init__(self, pool: Pool, health: HealthSettings) -> None:
        self.tried: set[str] = set()
        """Ids of the workers that the next try excludes."""
        self._pool, self._health = pool, health
        self.failures = self._suspect = 0
        self._since = math.inf
        """Time of the first failure; infinite before it."""

    def broke(self, worker_id: str, error: UpstreamError) -> bool:
        """Count a worker that did not answer; return whether to try again."""
        if error.kind == "unhealthy":  # a health check failed while the request waited: not counted as a try
            self._leave_out(worker_id)
            return True
        return self._failed(worker_id, error.kind)

    def refused(self, worker_id: str, status: int) -> bool:
        """Count a worker that answered with an error; return whether to try again."""
        return may_retry(status) and self._failed(worker_id, status)

    def _failed(self, worker_id: str, kind: str | int) -> bool:
        now = self._pool.clock()
        self._since = min(self._since, now)
        self.failures += 1
        self._suspect += kind not in INNOCENT
        if self.failures > self._health.retries or self._suspect >= MOST_SUSPECT:
            return False
        if not self._leave_out(worker_id):
            return True
        only_one_timed_out = kind == "timeout" and worker_id not in self.tried
        return kind in PASSING and not only_one_timed_out and now < self._since + self._health.retry_s

    def _leave_out(self, worker_id: str) -> bool:
        """Exclude the worker and all unhealthy ones; return whether all have been tried, so that a new round begins."""
        members = self._pool.members
        well = {id for id, member in members.items() if not member.is_unhealthy} or set(members)
        out = self.tried | {worker_id}
        new_round = well <= out
        if new_round:
            out = {worker_id} if well - {worker_id} else set()
        self.tried = out | (members.keys() - well)
        return new_round


REQUEST_ID = REQUEST_ID_HEADER.lower().encode()
NO_USAGE = Usage()
RETRY_AFTER: Headers = [(b"retry-after", b"1")]
MOST_DOUBLINGS = 5
"""Most times that the wait before a retry doubles."""
NO_ONE: frozenset[str] = frozenset()
REFUSAL_BYTES = 1 << 16
"""Most bytes read from an answer that is not passed on."""


class Delivered(msgspec.Struct, frozen=True):
    """An answer that was passed on to the client, whole or in part."""

    sent: Sent
    status: int
    relayed: Relayed


class Flow(ABC):
    """Base of the request flows: one worker, or a prefill/decode pair. Subclasses define `serve`."""

    def __init__(self, config: GatewayConfig, knowledge: Knowledge, observer: Watcher) -> None:
        self.configure(config)
        self.knowledge, self.observer = knowledge, observer
        self._rng = random.Random()

    def configure(self, config: GatewayConfig) -> None:
        """Apply the limits of a config. Running requests keep those they have already read."""
        self.limits, self.health = config.limits, config.health

    @abstractmethod
    async def serve(self, call: Call, sink: Responder, known: KnownPrompt) -> Outcome:
        """Serve one request. Raises HttpError if nothing has been sent to the client."""

    async def close(self) -> None:
        """Wait for background work of the flow."""
        return

    def choose(
        self,
        pool: Pool,
        call: Call,
        known: KnownPrompt,
        tried: Collection[str],
        footprint: WireFootprint | None = None,
        prefilled: bool = False,
    ) -> Sent:
        """Choose a worker by the pool's router; raise HttpError 503 if the pool has no worker."""
        started = time.perf_counter()
        wanted, source = self.knowledge.wanted(pool, call, known, footprint, prefilled)
        try:
            sent = pool.route(call.key, wanted, tried)
        except UnavailableError as error:
            raise HttpError(503, str(error), code="no_worker", headers=RETRY_AFTER) from None
        self.observer.decided(pool, call, wanted, sent.choice, time.perf_counter() - started, source)
        return sent

    def received(self, params: Mapping[str, Any], cached_tokens: int | None = None) -> WireFootprint | None:
        """Return the footprint in a prefill's `kv_transfer_params`; None if it has none or a damaged one, and count it.

        `cached_tokens` of the prompt were in the prefill worker's cache; None if not reported.
        """
        known = self.knowledge.footprints
        footprint, problem = read_footprint(params, known.shape, known.top_k)
        self.observer.handed_over(footprint, problem, cached_tokens)
        return footprint

    async def deliver(
        self,
        pool: Pool,
        call: Call,
        known: KnownPrompt,
        sink: Responder,
        body: Callable[[Member, bool], bytes] | None = None,
        footprint: WireFootprint | None = None,
        written: Callable[[], None] | None = None,
    ) -> Delivered:
        """Send the request to a worker of the pool and pass its answer on; retry others until the first byte arrives.

        `body`, if given, makes the body for a worker after a prefill; its second argument says whether an earlier one
        may have received the request: the prefill's KV is then gone.
        `written` is called when a worker may have received the request.
        """
        tries: Tries | None = None
        seen = False

        def wrote() -> None:
            nonlocal seen
            seen = True
            if written is not None:
                written()

        while True:
            prefilled = body is not None and not seen
            sent = self.choose(pool, call, known, NO_ONE if tries is None else tries.tried, footprint, prefilled)
            if not call.stream:
                pool.came(sent)  # such an answer comes whole: nothing shows when its prompt was computed
            ok: bool | None = None
            try:
                data = call.raw if body is None else body(sent.member, seen)
                answer = await self.ask(sent, call, data, self.limits.first_token_s, wrote if body else written)
                if may_retry(answer.status):
                    tries = tries or Tries(pool, self.health)
                if tries is None or not tries.refused(sent.member.entry.id, answer.status):
                    relayed = await self.pass_on(answer, call, sink, partial(pool.came, sent))
                    ok = self.did_its_part(sent, relayed.problem or answer.status)
                    return Delivered(sent, answer.status, relayed)
                ok = self.did_its_part(sent, answer.status)
                failure = str(answer.status)
                with contextlib.suppress(UpstreamError):  # read the answer, so that its connection can be reused
                    await answer.read(REFUSAL_BYTES)
            except UpstreamError as error:
                ok = self.did_its_part(sent, error)
                tries = tries or Tries(pool, self.health)
                if not tries.broke(sent.member.entry.id, error):
                    raise failed(error) from None
                failure = error.kind
            finally:
                pool.ended(sent, ok)
            self.observer.retried(pool, call, f"{sent.member.entry.id} {failure}")
            await self.back_off(tries.failures)

    def did_its_part(self, sent: Sent, result: UpstreamError | int) -> bool | None:
        """Return whether the worker did its part, by its error or the status of its answer.

        It failed if it broke off or answered 5xx; a 4xx is no failure. None if the request was taken back because
        health checks failed: that failure is already counted.
        """
        kind = result.kind if isinstance(result, UpstreamError) else "status_5xx" if is_failure(result) else None
        if kind is None:
            return True
        self.observer.failed(sent.member, kind)
        sent.member.unreachable = kind == "connect"
        return None if kind == "unhealthy" else False

    def ask(
        self, sent: Sent, call: Call, body: bytes, head_s: float, written: Callable[[], None] | None = None
    ) -> Awaitable[Answer]:
        """Send the request to its worker and return the answer once its head arrived.

        `written` is called when the worker may have received the request.
        """
        if call.span is not NO_SPAN:
            return self._ask_traced(sent, call, body, head_s, written)
        member = sent.member
        headers = [*call.headers, (REQUEST_ID, call.name.encode()), *member.headers]
        return member.upstream.send("POST", call.path, headers, body, head_s=head_s, written=written)

    async def _ask_traced(
        self, sent: Sent, call: Call, body: bytes, head_s: float, written: Callable[[], None] | None
    ) -> Answer:
        member, span = sent.member, call.span
        if span.recording:
            span = span.child(f"worker {member.entry.id}")
            span.note(worker=member.entry.id, reason=sent.choice.decision.reason)
        headers = [*span.outgoing(call.headers), (REQUEST_ID, call.name.encode()), *member.headers]
        problem: str | None = "cancelled"
        try:
            answer = await member.upstream.send("POST", call.path, headers, body, head_s=head_s, written=written)
            problem = None
            return answer
        except UpstreamError as error:
            problem = error.kind
            raise
        finally:
            if span is not call.span:
                span.end(problem)

    def pass_on(self, answer: Answer, call: Call, sink: Responder, came: Callable[[int], None]) -> Awaitable[Relayed]:
        """Pass a worker's answer on; `came` is called with the number of tokens of each piece."""
        own = (REQUEST_ID, call.id.encode())
        stream = is_event_stream(answer.headers)
        return (
            pass_stream(answer, sink, own, came, call.path)
            if stream
            else pass_whole(answer, sink, own, self.limits.answer_bytes, came)
        )

    async def back_off(self, failures: int) -> None:
        """Wait before the next try of a request with this many failures: exponential backoff with jitter."""
        if failures and self.health.backoff_s:
            mean_s = self.health.backoff_s * 2.0 ** min(failures - 1, MOST_DOUBLINGS)
            await asyncio.sleep(self._rng.uniform(0.5, 1.5) * mean_s)


def failed(error: UpstreamError) -> HttpError:
    """Return the error for the client if all tries failed, without the worker's address."""
    if error.kind == "timeout":
        return HttpError(504, "the worker did not answer in time", code="worker_timeout")
    return HttpError(502, f"the worker failed: {WHY[error.kind]}", code="worker_failed", headers=RETRY_AFTER)


def outcome(delivered: Delivered, call: Call, known: KnownPrompt, started: float) -> Outcome:
    """Return the outcome of an answer that was passed on."""
    sent, relayed = delivered.sent, delivered.relayed
    usage = relayed.usage or NO_USAGE
    return Outcome(
        status=delivered.status,
        worker=sent.choice.worker_id,
        decision=sent.choice.decision,
        ttft_s=relayed.first_s - started,
        tpot_s=relayed.tpot_s if call.stream else None,
        problem=None if relayed.problem is None else str(relayed.problem),
        cut=relayed.problem is not None,
        tokens=usage.prompt_tokens or known.tokens,
        output_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


class PlainFlow(Flow):
    def __init__(self, pool: Pool, config: GatewayConfig, knowledge: Knowledge, observer: Watcher) -> None:
        super().__init__(config, knowledge, observer)
        self.pool = pool

    async def serve(self, call: Call, sink: Responder, known: KnownPrompt) -> Outcome:
        started = time.monotonic()
        delivered = await self.deliver(self.pool, call, known, sink)
        if delivered.status == 200:
            usage = delivered.relayed.usage or NO_USAGE
            self.knowledge.routed(self.pool, delivered.sent.choice.row, known, usage.cached_tokens)
        return outcome(delivered, call, known, started)
