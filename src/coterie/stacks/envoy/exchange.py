"""One request of Envoy: its body read, a worker chosen, its answer passed on, its load taken back.

Envoy sends each part of the request and of the answer, and waits until the picker sends it back. So the picker sees the
whole answer, and the worker's load ends with it: also if the client leaves, since Envoy then ends the stream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
from numpy.typing import NDArray

from coterie.gateway.config import PickerSection
from coterie.gateway.exchange.call import CHAT, COMPLETIONS, EMBEDDINGS, Call, Outcome, checked_id, make_call, new_name
from coterie.gateway.exchange.flow import NO_USAGE, REQUEST_ID, RETRY_AFTER, may_retry
from coterie.gateway.exchange.knowledge import NOTHING, KnownPrompt
from coterie.gateway.exchange.pool import DECODE, PREFILL, Member, Pool, Sent
from coterie.gateway.exchange.relay import USAGE, usage_in, usage_of
from coterie.gateway.exchange.vllm_pair import Handoff, RefusedPrefill, VllmPairFlow
from coterie.gateway.fleet.waiting import Refused
from coterie.gateway.gateway import DOMAIN_HEADER, DRAINING, REFUSALS, Gateway, draining
from coterie.gateway.watching.recent import CLIENT_GONE
from coterie.net.grpc_server import DEADLINE_EXCEEDED, GrpcCall, GrpcError
from coterie.net.http1 import Headers, HttpError, is_event_stream
from coterie.net.http1.messages import check_http, split_target
from coterie.stacks.envoy.messages import (
    SUBSET,
    body_replies,
    endpoints_in,
    message_part,
    pairs,
    plain_reply,
    refusal,
    route_to,
    served_by,
    subset_of,
)
from coterie.wire.footprints import WireFootprint

GENERATE = "/inference/v1/generate"
"""Path of the requests by token ids that llm-d's Coordinator can send to vLLM."""
COMPLETING = frozenset((COMPLETIONS, CHAT, EMBEDDINGS, GENERATE))
"""Paths whose requests are loads. Others go to the idlest worker, and their answers do not pass the picker."""
PROFILE = b"epp-profile"
POOLS = {b"prefill": PREFILL, b"decode": DECODE}
ANSWER_HEADERS = frozenset((":status", "content-type"))
MOST_ID = 1 << 31


class _Sampling(msgspec.Struct):
    extra_args: dict[str, Any] = {}


class _Tokens(msgspec.Struct):
    token_ids: list[int] = []


class _Coordinated(msgspec.Struct):
    """Fields that llm-d's Coordinator adds to a request: the prompt's token ids, and what the prefill answered."""

    kv_transfer_params: dict[str, Any] | None = None
    sampling_params: _Sampling | None = None
    token_ids: list[int] = []
    tokens: _Tokens | None = None

    @property
    def params(self) -> dict[str, Any]:
        """The prefill's `kv_transfer_params`; a request by token ids has them among its sampling parameters."""
        inner = None if self.sampling_params is None else self.sampling_params.extra_args.get("kv_transfer_params")
        return self.kv_transfer_params or (inner if isinstance(inner, dict) else {})

    @property
    def ids(self) -> NDArray[np.int64] | None:
        ids = self.token_ids or ([] if self.tokens is None else self.tokens.token_ids)
        return np.array(ids, np.int64) if ids and min(ids) >= 0 and max(ids) < MOST_ID else None


_COORDINATED = msgspec.json.Decoder(_Coordinated)


class PrefillRefused(HttpError):
    """A prefill worker's refusal, which is passed on as it is."""

    def __init__(self, refusal: RefusedPrefill) -> None:
        super().__init__(refusal.status, "the prefill worker refused the request")
        self._body = refusal.body

    def body(self) -> bytes:
        return self._body


class Exchange:
    """One stream of Envoy."""

    def __init__(self, gateway: Gateway, section: PickerSection, stream: GrpcCall) -> None:
        self.gateway, self.parts, self.section, self.stream = gateway, gateway.parts, section, stream
        self.started = time.monotonic()
        self.headers: dict[bytes, bytes] = {}
        self.path = ""
        self.subset: frozenset[str] | None = None
        """Endpoints to choose from; None for any."""
        self.trailers = False
        """Whether the request has trailers, which then are its last part."""
        self.waited_s: float | None = None
        """Seconds in the waiting line; None before the request has a place."""
        self.call: Call | None = None
        self.known: KnownPrompt = NOTHING
        self.pool: Pool = self.parts.pools[DECODE]
        self.handoff: Handoff | None = None
        self.footprint: WireFootprint | None = None
        self.prefilled = False
        """Whether another worker has computed the prompt."""
        self.sent: Sent | None = None
        self.answered = False
        """Whether the whole answer has come."""
        self.outcome = Outcome(CLIENT_GONE)

    async def run(self) -> None:
        try:
            if await self._read_head() and (body := await self._read_body()) is not None:
                self.sent = await self._choose(body)
                await self._pass_answer(self.sent)
        except HttpError as error:
            self.outcome = Outcome(error.status, problem=str(error))
            await self._refuse(error.status, error.body(), error.headers)
        except asyncio.CancelledError:
            if self.stream.task not in self.gateway.late:
                if not self.stream.client_gone:
                    self.outcome = Outcome(503, drained=True, problem=DRAINING)
                raise
            self.stream.task.uncancel()
            self.outcome = Outcome(504, problem="timeout")
            raise GrpcError(DEADLINE_EXCEEDED, "no whole answer in time") from None
        finally:
            self._end()

    async def _read(self) -> tuple[str, Any, Any]:
        """Return the next part: its kind, itself and the whole message; the kind is empty if Envoy ended the stream."""
        message = await self.stream.read()
        return ("", None, None) if message is None else message_part(message)

    async def _refuse(self, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
        named = {name.decode(): value for name, value in headers} | {"content-type": b"application/json"}
        await self.stream.write(refusal(status, body, named))

    async def _pass_on(self, kind: str, part: Any) -> None:
        """Send a part back unchanged."""
        replies = body_replies(kind, part.body, part.end_of_stream) if kind.endswith("_body") else [plain_reply(kind)]
        for reply in replies:
            await self.stream.write(reply)

    # -------------------------------------------------------------------------------------------------------- request

    async def _read_head(self) -> bool:
        """Read the request's headers; return whether it is a load, after passing others on."""
        kind, part, message = await self._read()
        if kind != "request_headers":
            return False
        self.headers, self.subset = dict(pairs(part)), subset_of(message)
        if self.subset is None and SUBSET.encode() in self.headers:
            self.subset = endpoints_in(self.headers[SUBSET.encode()].decode("latin-1"))
        if self.gateway.draining:
            raise draining(self.headers.get(REQUEST_ID))
        self.path, _ = split_target(self.headers.get(b":path", b""))
        if self.path in COMPLETING and not part.end_of_stream:
            return True
        running = self.pool.keeper.running
        idlest = min(self._eligible(self.pool), key=lambda member: running(member.entry.id))
        await self.stream.write(route_to(endpoint_of(idlest.entry.url), headers_for(idlest)))
        while kind:  # the answer too: Envoy loses its body if the picker ends the stream
            kind, part, _ = await self._read()
            if kind:
                await self._pass_on(kind, part)
        return False

    async def _read_body(self) -> bytes | None:
        """Return the request's body; None if Envoy gave it up."""
        body, ended, most = bytearray(), False, self.gateway.body_limit
        while not ended:
            kind, part, message = await self._read()
            if not kind:
                return None
            self.trailers = kind == "request_trailers"
            ended = self.trailers or part.end_of_stream
            if not self.trailers:
                body += part.body
            check_http(len(body) <= most, 413, f"the body has more than {most} bytes")
            self.subset = subset_of(message) if self.subset is None else self.subset
        return bytes(body)

    def _call(self, body: bytes) -> Call:
        gateway, given = self.gateway, self.headers.get(REQUEST_ID)
        request_id = None if given is None else checked_id(given)
        domain = self.headers.get(DOMAIN_HEADER)
        call = make_call(
            self.path,
            body,
            request_id=request_id,
            name=new_name() if request_id in gateway.in_flight else None,
            domain=None if domain is None else domain.decode("latin-1"),
            trusted=self.section.mode == "profiles",
        )
        gateway.in_flight.add(call.name)
        gateway.deadlines[self.stream.task] = self.started + gateway.config.limits.total_s
        return call

    # --------------------------------------------------------------------------------------------------------- choice

    async def _choose(self, body: bytes) -> Sent:
        """Choose a worker, and send the request's head and body back with its endpoint."""
        parts, mode = self.parts, self.section.mode
        call = self.call = self._call(body)
        await self._take_place()
        if mode == "profiles":
            await self._follow_profile(call)
        elif self.path != EMBEDDINGS:
            self.known = await parts.knowledge.describe(call)
            if mode == "prefill" and self.path != GENERATE:
                await self._prefill(call)
        able = self._eligible(self.pool)
        out = self.pool.members.keys() - {member.entry.id for member in able}
        sent = self.sent = parts.plain.choose(self.pool, call, self.known, out, self.footprint, self.prefilled)
        if not call.stream:
            self.pool.came(sent)  # such an answer comes whole: nothing shows when its prompt was computed
        data = call.raw if self.handoff is None else self.handoff.body(call, sent.member, True)
        own = {REQUEST_ID.decode(): call.name.encode(), "content-length": b"%d" % len(data)}
        await self.stream.write(route_to(",".join(self._endpoints(sent, able)), headers_for(sent.member) | own))
        for reply in body_replies("request_body", data, not self.trailers):
            await self.stream.write(reply)
        if self.trailers:
            await self.stream.write(plain_reply("request_trailers"))
        return sent

    async def _take_place(self) -> None:
        line = self.parts.line
        try:
            waited_s = 0.0 if line.take_at_once() else await line.take(self.gateway.config.limits.queue_s)
        except Refused as refused:
            self.parts.metrics.rejected.inc(REFUSALS.get(refused.reason, "draining"))
            after: Headers = [(b"retry-after", str(refused.retry_after_s).encode())]
            raise HttpError(refused.status, str(refused), "overloaded", headers=after) from None
        self.waited_s = waited_s

    async def _follow_profile(self, call: Call) -> None:
        """Take the pool that llm-d's Coordinator asks for, and what its request tells of the prompt and the prefill."""
        profile = self.headers.get(PROFILE, b"decode")
        check_http(profile in POOLS, 503, f"no worker has the profile {profile!r}; known: prefill, decode")
        self.pool = self.parts.pools[POOLS[profile]]
        try:
            fields = _COORDINATED.decode(call.raw)
        except msgspec.DecodeError:
            fields = _Coordinated()
        if self.path != EMBEDDINGS:
            self.known = await self.parts.knowledge.describe(call, fields.ids)
        if self.pool.name == DECODE and fields.params:
            self.footprint, self.prefilled = self.parts.flow.received(fields.params), True
            if self.footprint is not None:
                self.parts.knowledge.footprints.learn(self.known.ids, self.footprint)

    async def _prefill(self, call: Call) -> None:
        """Prefill the prompt, if a prefill worker answers."""
        flow = self.parts.flow
        assert isinstance(flow, VllmPairFlow)
        self._eligible(self.pool)  # no prefill without a decode worker
        handoff = await flow.prefilled(call, self.known)
        if isinstance(handoff, RefusedPrefill):
            raise PrefillRefused(handoff)
        if handoff is not None:
            self.handoff, self.footprint, self.prefilled = handoff, handoff.footprint, True
            self.known = flow.learned(handoff, self.known)

    def _eligible(self, pool: Pool) -> list[Member]:
        """Return the open workers of a pool that Envoy allows. Raises HttpError 503 if there is none."""
        members = pool.keeper.members
        able = [
            member
            for id, member in pool.members.items()
            if members[id].open and (self.subset is None or endpoint_of(member.entry.url) in self.subset)
        ]
        if not able:
            raise HttpError(503, f"no {pool.name} worker is ready", "no_worker", headers=RETRY_AFTER)
        return able

    def _endpoints(self, sent: Sent, able: Sequence[Member]) -> list[str]:
        """Return the chosen endpoint, and next those of the best others that the same request can go to."""
        scores, row_of, headers = sent.choice.decision.scores, self.pool.row_of, sent.member.headers
        others = [member for member in able if member.headers == headers and member is not sent.member]
        others.sort(key=lambda member: float(scores[row_of(member)]))
        endpoints = [endpoint_of(member.entry.url) for member in (sent.member, *others)]
        return list(dict.fromkeys(endpoints))[: self.section.endpoints]

    # --------------------------------------------------------------------------------------------------------- answer

    async def _pass_answer(self, sent: Sent) -> None:
        """Pass the answer on, count its tokens, and record how it ended."""
        status, streams, events, first, last = 0, False, 0, 0.0, 0.0
        kept: list[bytes] = []
        while not self.answered:
            kind, part, message = await self._read()
            if not kind:
                return
            if kind == "response_headers":
                headers = pairs(part, ANSWER_HEADERS)
                status, streams = int(dict(headers).get(b":status", b"0")), is_event_stream(headers)
                sent = self._moved(sent, served_by(message))
            elif kind == "response_body" and part.body:
                last = time.monotonic()
                first = first or last
                found = part.body.count(b"\n\n") if streams else 0
                events += found
                self.pool.came(sent, found)
                if not streams or USAGE in part.body:
                    kept = [part.body] if streams else [*kept, part.body]
            self.answered = kind == "response_trailers" or part.end_of_stream
            if self.answered:  # before the last part is sent back: Envoy may then cancel the stream at once
                usage = (usage_in if streams else usage_of)(b"".join(kept)) or NO_USAGE
                self.outcome = Outcome(
                    status,
                    footprint=self.footprint,
                    tokens=usage.prompt_tokens or self.known.tokens,
                    output_tokens=usage.completion_tokens,
                    cached_tokens=usage.cached_tokens,
                    ttft_s=first - self.started if first else None,
                    tpot_s=(last - first) / (events - 1) if events > 2 else None,
                )
                if status == 200 and not self.prefilled:
                    self.parts.knowledge.routed(self.pool, sent.choice.row, self.known, usage.cached_tokens)
            await self._pass_on(kind, part)

    def _moved(self, sent: Sent, endpoint: str) -> Sent:
        """Return the worker that serves the request: if Envoy could not reach the chosen one, it went to the next."""
        members = self.pool.members
        others = {id for id, member in members.items() if endpoint_of(member.entry.url) != endpoint}
        if sent.member.entry.id not in others or len(others) == len(members) or self.call is None:
            return sent
        sent.member.unreachable = True
        self.parts.watcher.failed(sent.member, "connect")
        self.parts.watcher.retried(self.pool, self.call, f"{sent.member.entry.id} connect")
        self.pool.ended(sent, False)
        wanted, _ = self.parts.knowledge.wanted(self.pool, self.call, self.known, self.footprint, self.prefilled)
        self.sent = self.pool.route(self.call.key, wanted, others)
        return self.sent

    # ------------------------------------------------------------------------------------------------------------ end

    def _end(self) -> None:
        """Take back what the request holds, and record its end."""
        parts, sent, handoff, outcome = self.parts, self.sent, self.handoff, self.outcome
        if sent is not None:
            self.pool.ended(sent, parts.plain.did_its_part(sent, outcome.status) if self.answered else None)
            outcome.worker, outcome.decision = sent.choice.worker_id, sent.choice.decision
        if handoff is not None:
            outcome.prefill = handoff.member.entry.id
            refused = self.answered and outcome.status < 500 and not may_retry(outcome.status)
            if outcome.status >= 400 and self.call is not None and isinstance(parts.flow, VllmPairFlow):
                parts.flow.let_go(handoff, self.call, sent is not None and not refused)
        if self.waited_s is not None:
            parts.line.give_back()
        self.gateway.deadlines.pop(self.stream.task, None)
        self.gateway.late.discard(self.stream.task)
        if self.call is not None:
            self.gateway.in_flight.discard(self.call.name)
            parts.watcher.ended(self.call, outcome, time.monotonic() - self.started, self.waited_s)


def headers_for(member: Member) -> dict[str, bytes]:
    """Return the headers that a worker needs: its key, its data-parallel rank."""
    return {name.decode(): value for name, value in member.headers}


@lru_cache(4096)
def endpoint_of(url: str) -> str:
    """Return HOST:PORT of a worker's URL."""
    parts = urlsplit(url)
    return parts.netloc if parts.port else f"{parts.netloc}:{443 if parts.scheme == 'https' else 80}"
