"""SGLang's prefill/decode pair: both get the request at once; the decode worker is chosen by a predicted footprint.

Both get the same body, with the address of the prefill worker's bootstrap server and a random room number; through
them the decode worker receives the KV. If the prefill fails before the first byte of the answer, another pair is tried.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from functools import partial
from urllib.parse import urlsplit

from coterie.gateway.config import GatewayConfig
from coterie.gateway.exchange.call import CHAT, RESPONSES, Call, Outcome, encode_object
from coterie.gateway.exchange.flow import REFUSAL_BYTES, REQUEST_ID, Delivered, Flow, Tries, failed, may_retry, outcome
from coterie.gateway.exchange.knowledge import Knowledge, KnownPrompt
from coterie.gateway.exchange.observing import Watcher
from coterie.gateway.exchange.pool import Pool, Sent
from coterie.gateway.exchange.relay import Relayed
from coterie.net.http1 import Answer, Headers, Responder, UpstreamError, passed_on
from coterie.net.http1.messages import check_http


class _RefusedError(Exception):
    """A worker answered with an error."""

    def __init__(self, status: int, headers: Headers, body: bytes) -> None:
        super().__init__(f"HTTP {status}")
        self.status, self.headers, self.body = status, headers, body


class _PrefillFailedError(Exception):
    """The prefill worker failed, or refused, before the decode worker answered; raised with the cause."""


class SglangPairFlow(Flow):
    def __init__(
        self, prefill: Pool, decode: Pool, config: GatewayConfig, knowledge: Knowledge, observer: Watcher
    ) -> None:
        super().__init__(config, knowledge, observer)
        self.prefill, self.decode = prefill, decode

    async def serve(self, call: Call, sink: Responder, known: KnownPrompt) -> Outcome:
        check_http(call.path != RESPONSES, 501, f"SGLang's pairs do not take {RESPONSES}: ask {CHAT}")
        started = time.monotonic()
        prefills, decodes = Tries(self.prefill, self.health), Tries(self.decode, self.health)
        while True:
            prefill = self.choose(self.prefill, call, known, prefills.tried)
            prefilled = decoded = None
            decode: Sent | None = None
            cause: UpstreamError | _RefusedError
            try:
                decode = self.choose(self.decode, call, known, decodes.tried, prefilled=True)
                status, relayed = await self._both(call, sink, prefill, decode)
                prefilled, decoded = True, self.did_its_part(decode, relayed.problem or status)
                self.knowledge.routed(self.prefill, prefill.choice.row, known)
                result = outcome(Delivered(decode, status, relayed), call, known, started)
                result.prefill = prefill.member.entry.id
                return result
            except _PrefillFailedError as error:
                pool, tries, sent, cause = self.prefill, prefills, prefill, error.args[0]
                prefilled = self.did_its_part(prefill, cause if isinstance(cause, UpstreamError) else cause.status)
            except (UpstreamError, _RefusedError) as error:
                assert decode is not None
                pool, tries, sent, cause = self.decode, decodes, decode, error
                decoded = self.did_its_part(decode, cause if isinstance(cause, UpstreamError) else cause.status)
            finally:
                self.prefill.ended(prefill, prefilled)
                if decode is not None:
                    self.decode.ended(decode, decoded)
            assert decode is not None  # otherwise choose() has raised
            if isinstance(cause, UpstreamError):
                if not tries.broke(sent.member.entry.id, cause):
                    raise failed(cause)
            elif not tries.refused(sent.member.entry.id, cause.status):
                sink.send(cause.status, cause.body, b"", [*cause.headers, (REQUEST_ID, call.id.encode())])
                return Outcome(cause.status, decode.member.entry.id, prefill.member.entry.id, problem=str(cause))
            failure = cause.kind if isinstance(cause, UpstreamError) else cause.status
            self.observer.retried(pool, call, f"{sent.member.entry.id} {failure}")
            await self.back_off(tries.failures)

    async def _both(self, call: Call, sink: Responder, prefill: Sent, decode: Sent) -> tuple[int, Relayed]:
        entry = prefill.member.entry
        body = encode_object(
            {
                **call.body,
                "bootstrap_host": urlsplit(entry.url).hostname,
                "bootstrap_port": entry.bootstrap_port,
                "bootstrap_room": secrets.randbits(63),
            }
        )

        async def prefilled() -> None:
            answer = await self.ask(prefill, call, body, self.limits.prefill_s)
            if answer.status >= 400:
                await _refuse(answer)
            await answer.read(self.limits.answer_bytes)
            self.prefill.came(prefill)

        async def decoded() -> tuple[int, Relayed]:
            answer = await self.ask(decode, call, body, self.limits.first_token_s)
            if may_retry(answer.status):
                await _refuse(answer)
            return answer.status, await self.pass_on(answer, call, sink, partial(self.decode.came, decode))

        first, second = asyncio.create_task(prefilled()), asyncio.create_task(decoded())
        try:
            await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
            if first.done() and not second.done() and not sink.started:
                problem = first.exception()
                if isinstance(problem, UpstreamError | _RefusedError):
                    raise _PrefillFailedError(problem)
            return await second
        finally:
            for task in (first, second):
                task.cancel()
            await asyncio.gather(first, second, return_exceptions=True)


async def _refuse(answer: Answer) -> None:
    headers = [pair for pair in passed_on(answer.headers) if pair[0] != REQUEST_ID]
    raise _RefusedError(answer.status, headers, await answer.read(REFUSAL_BYTES))
