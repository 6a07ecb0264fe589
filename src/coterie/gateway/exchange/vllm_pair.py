"""vLLM's prefill/decode pair, one after the other: the decode worker is chosen by the prefill's footprint.

The prefill worker keeps the prompt's KV until a decode worker has fetched it. So after its answer the KV must be
fetched by a decode worker or dropped by :meth:`~VllmPairFlow.let_go`, even if the client has left. KV is offered to a
second decode worker only if the first was never reached: the first may have fetched the blocks, and the prefill worker
may have reused them for another request.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
from msgspec.structs import replace

from coterie.gateway.config import GatewayConfig
from coterie.gateway.exchange.call import RESPONSES, Call, Outcome, encode_object
from coterie.gateway.exchange.flow import NO_USAGE, REQUEST_ID, Flow, may_retry, outcome
from coterie.gateway.exchange.knowledge import NOTHING, Knowledge, KnownPrompt
from coterie.gateway.exchange.observing import Watcher
from coterie.gateway.exchange.pool import Member, Pool
from coterie.gateway.exchange.relay import Usage, head_of
from coterie.net.http1 import Headers, HttpError, Responder, UpstreamError
from coterie.routing.base import Decision
from coterie.routing.fleet import shown
from coterie.wire.footprints import KEY, WireFootprint, without_footprint
from coterie.wire.handoff import GRANT, decode_body, prefill_body

DROP_S = 10.0
"""Seconds that a prefill worker gets to drop KV."""
MOST_DROPS = 1024
"""Most handoffs whose KV is being dropped at a time; engines free the KV of any others after a timeout."""


ACCEPTED: dict[str, tuple[float, float]] = {
    "max_tokens": (0, 1 << 31),
    "max_completion_tokens": (0, 1 << 31),
    "max_output_tokens": (0, 1 << 31),
    "min_tokens": (0, 1 << 31),
    "n": (1, 1 << 31),
    "temperature": (0, math.inf),
    "top_p": (0, 1),
    "top_k": (-1, 1 << 63),
    "min_p": (0, 1),
    "seed": (-(1 << 63), (1 << 63) - 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0, math.inf),
}
"""Field → smallest and largest number that any engine accepts."""


def check_generation(body: Mapping[str, Any], context_tokens: int, prompt_tokens: int) -> None:
    """Refuse before the prefill any request that every decode worker would refuse after it, when its KV is staged.

    The prefill worker is asked for one token, so it never sees the client's `max_tokens`, `min_tokens` and
    `stream_options`. Only numbers are compared: engines differ in which texts they read as numbers. `context_tokens` is
    the longest context of a decode worker, 0 if unknown; the prompt has at least `prompt_tokens`. A prompt that does
    not fit by itself is left to the prefill worker: its answer names the model's limit, and no KV is staged.
    """
    for field, (low, high) in ACCEPTED.items():
        value = body.get(field)
        if isinstance(value, int | float) and not low <= value <= high:
            relation = "at least 0" if high == math.inf else f"in {low} … {high}"
            raise HttpError(400, f"{field}={_shown(value)} must be {relation}", param=field)
    limits = ("max_completion_tokens", "max_tokens", "max_output_tokens", "min_tokens")
    most = {name: body.get(name) for name in limits}
    for field, value in most.items():
        if prompt_tokens < context_tokens and isinstance(value, int | float) and value + prompt_tokens > context_tokens:
            most_tokens = context_tokens - prompt_tokens
            room = f"the prompt has {prompt_tokens} or more tokens, and both must fit {context_tokens}"
            raise HttpError(400, f"{field}={_shown(value)} must be at most {most_tokens}: {room}", param=field)
    options = body.get("stream_options")
    if options and not (isinstance(options, dict) and body.get("stream")):
        raise HttpError(400, "stream_options must be an object, and needs stream=true", param="stream_options")
    fewest, allowed = most["min_tokens"], most["max_completion_tokens"] or most["max_tokens"]
    if isinstance(fewest, int) and isinstance(allowed, int) and fewest > allowed:
        raise HttpError(400, f"min_tokens={fewest} must be at most max_tokens={allowed}", param="min_tokens")


def limit_of(call: Call) -> str:
    """Return the field of a request's body with the most tokens of its answer."""
    return "max_output_tokens" if call.path == RESPONSES else "max_tokens"


def _shown(value: float) -> str:
    return shown(value) if isinstance(value, int) else str(value)


class _Choice(msgspec.Struct):
    prompt_token_ids: msgspec.Raw = msgspec.Raw()


class _Prefilled(msgspec.Struct):
    """Fields that are read from a prefill worker's answer."""

    usage: Usage | None = None
    kv_transfer_params: dict[str, Any] | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    """Token ids of a chat; those of a text are in its choice."""
    choices: list[_Choice] = []


class Handoff(NamedTuple):
    """Result of a prefill: KV transfer parameters and footprint for the decode worker."""

    member: Member
    params: dict[str, Any]
    footprint: WireFootprint | None
    carried: dict[str, Any]
    """The footprint as it came, for workers that want it; empty if there is none or it was refused."""
    tokens: int
    cached_tokens: int | None = None
    """Prompt tokens found in the prefill worker's cache; None if not reported."""
    ids: bytes = b""
    """Token ids of the prompt as JSON; empty if the answer has none."""

    def body(self, call: Call, decoder: Member, with_kv: bool) -> bytes:
        """Return the request's body for a decode worker, which fetches the prompt's KV if `with_kv`."""
        params = (self.params if with_kv else {}) | (self.carried if decoder.entry.footprints else {})
        return encode_object(decode_body(call.body, params)) if params else call.raw


class RefusedPrefill(NamedTuple):
    """A prefill worker's answer that the request itself is at fault."""

    status: int
    body: bytes
    headers: Headers
    worker_id: str
    decision: Decision

    def outcome(self, prefill_s: float) -> Outcome:
        return Outcome(self.status, prefill=self.worker_id, decision=self.decision, prefill_s=prefill_s)


class VllmPairFlow(Flow):
    def __init__(
        self, prefill: Pool, decode: Pool, config: GatewayConfig, knowledge: Knowledge, observer: Watcher
    ) -> None:
        super().__init__(config, knowledge, observer)
        self.prefill, self.decode = prefill, decode
        prefill.needed = False
        self._drops: set[asyncio.Task[None]] = set()

    async def serve(self, call: Call, sink: Responder, known: KnownPrompt) -> Outcome:
        started = time.monotonic()
        handoff = await self.prefilled(call, known)
        prefill_s = time.monotonic() - started
        if isinstance(handoff, RefusedPrefill):
            sink.send(handoff.status, handoff.body, b"", handoff.headers)
            return handoff.outcome(prefill_s)
        if handoff is None:  # no prefill worker answered: the decode worker computes the prompt
            delivered = await self.deliver(self.decode, call, known, sink)
            result = outcome(delivered, call, known, started)
            result.prefill_s = prefill_s
            return result
        known = self.learned(handoff, known)
        offered = taken = False

        def body(member: Member, seen: bool) -> bytes:
            nonlocal taken
            taken = bool(handoff.params) and not seen
            return handoff.body(call, member, taken)

        def written() -> None:
            nonlocal offered
            offered = True

        try:
            delivered = await self.deliver(self.decode, call, known, sink, body, handoff.footprint, written)
        except BaseException:  # the client left, or no decode worker answered
            self.let_go(handoff, call, offered)
            raise
        refused = 400 <= delivered.status < 500 and not may_retry(delivered.status)  # before the KV is fetched
        if not taken or delivered.status >= 400:
            self.let_go(handoff, call, offered and not refused)
        result = outcome(delivered, call, known, started)
        result.prefill, result.footprint, result.prefill_s = handoff.member.entry.id, handoff.footprint, prefill_s
        return result

    async def close(self) -> None:
        if self._drops:
            await asyncio.wait(self._drops, timeout=DROP_S)
        for task in self._drops:
            task.cancel()
        await asyncio.gather(*self._drops, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------------- prefill

    async def prefilled(self, call: Call, known: KnownPrompt) -> Handoff | RefusedPrefill | None:
        """Prefill the prompt. Return the handoff, a refusal to be passed on, or None if no worker answered.

        Raises HttpError for a request that every decode worker would refuse. After a handoff, its KV must be fetched or
        let go.
        """
        check_generation(call.body, self.decode.context_tokens, 1 if known.ids is None else known.tokens)
        asked = encode_object(prefill_body(call.body, known.question is not None, limit_of(call)))
        tried: set[str] = set()
        while not tried.issuperset(self.prefill.members) and len(tried) <= self.health.retries:
            if self.prefill.failing:
                break  # a decode worker computes the prompt sooner than a stalled prefill worker
            sent = self.choose(self.prefill, call, known, tried)
            ok: bool | None = None
            try:
                answer = await self.ask(sent, call, asked, self.limits.prefill_s)
                status = answer.status
                data = await answer.read(self.limits.answer_bytes)
                if 400 <= status < 500 and not may_retry(status):  # the request itself is at fault
                    ok = True
                    headers = head_of(answer, (REQUEST_ID, call.id.encode()))
                    return RefusedPrefill(status, data, headers, sent.member.entry.id, sent.choice.decision)
                if status == 200:
                    handoff = self._read(sent.member, data)
                    ok = True
                    self.knowledge.routed(self.prefill, sent.choice.row, known, handoff.cached_tokens)
                    return handoff
                ok, failure = self.did_its_part(sent, status), str(status)
            except UpstreamError as error:
                ok, failure = self.did_its_part(sent, error), error.kind
            finally:
                self.prefill.ended(sent, ok)
            tried.add(sent.member.entry.id)
            if not tried.issuperset(self.prefill.members) and len(tried) <= self.health.retries:
                self.observer.retried(self.prefill, call, f"{sent.member.entry.id} {failure}")
                await self.back_off(len(tried))
        self.observer.not_handed_over()
        return None

    def learned(self, handoff: Handoff, known: KnownPrompt) -> KnownPrompt:
        """Return the signals with what a prefill's answer says, and learn its footprint."""
        if handoff.tokens:
            known = replace(known, tokens=handoff.tokens)
        if handoff.ids:
            known = self.knowledge.told(known, handoff.ids, handoff.member.entry.id)
        if handoff.footprint is not None:
            self.knowledge.footprints.learn(known.ids, handoff.footprint)
        return known

    def _read(self, member: Member, data: bytes) -> Handoff:
        """Read a prefill's answer. Raises UpstreamError if it is no completion; a damaged footprint is only counted."""
        try:
            answer = msgspec.json.decode(data, type=_Prefilled)
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
            raise UpstreamError("protocol", f"the prefill worker's answer cannot be read: {error}", True) from None
        params, usage = answer.kv_transfer_params or {}, answer.usage or NO_USAGE
        footprint = self.received(params, usage.cached_tokens)
        carried = {} if footprint is None else {KEY: params[KEY]}
        cached, given = (
            usage.cached_tokens,
            [answer.prompt_token_ids, *(one.prompt_token_ids for one in answer.choices)],
        )
        ids = next((data for raw in given if (data := bytes(raw)) not in (b"", b"null")), b"")
        return Handoff(member, without_footprint(params), footprint, carried, usage.prompt_tokens, cached, ids)

    # ---------------------------------------------------------------------------------------------------- staged KV

    def let_go(self, handoff: Handoff, call: Call, offered: bool) -> None:
        """Have the prompt's KV dropped by the prefill worker, in the background.

        A reference worker drops KV on a DELETE request, fetched or not. Other engines keep it until a decode worker has
        fetched it: if none was reached (`offered` is False), one is asked for a single token. Engines free KV after a
        timeout anyway, so a failure here only costs memory until then.
        """
        if not handoff.params or len(self._drops) >= MOST_DROPS:
            return
        key = handoff.params.get("remote_request_id")
        if GRANT in handoff.params and isinstance(key, str):
            work = self._delete(handoff.member, key)
        elif not offered:
            work = self._take(handoff, call)
        else:
            return
        task = asyncio.create_task(work)
        self._drops.add(task)
        task.add_done_callback(self._drops.discard)

    async def _delete(self, member: Member, key: str) -> None:
        with contextlib.suppress(UpstreamError):
            await member.ask("DELETE", f"/kv/{quote(key, safe='')}", DROP_S)

    async def _take(self, handoff: Handoff, call: Call) -> None:
        try:
            body = encode_object(
                {**prefill_body(call.body, limit=limit_of(call)), "kv_transfer_params": handoff.params}
            )
            sent = self.choose(self.decode, call, NOTHING, set())
        except HttpError:
            return
        ok: bool | None = None
        try:
            async with asyncio.timeout(self.limits.prefill_s):
                answer = await self.ask(sent, call, body, self.limits.prefill_s)
                await answer.read()
            ok = True
        except UpstreamError as error:
            ok = self.did_its_part(sent, error)
        except TimeoutError:
            return
        finally:
            self.decode.ended(sent, ok)
