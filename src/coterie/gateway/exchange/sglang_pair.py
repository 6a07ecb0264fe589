"""SGLang's prefill/decode pair, both at once: the decode worker is chosen by a predicted footprint.

Both get the same body with the address of the prefill worker's bootstrap server and a random room; the decode worker
waits there for the KV. If the prefill fails before the first byte of the answer, another pair is tried.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from urllib.parse import urlsplit

from coterie.gateway.config import GatewayConfig
from coterie.gateway.exchange.call import Call, Outcome, Sink
from coterie.gateway.exchange.flow import REFUSAL_BYTES, Delivered, Flow, Observer, failed, outcome
from coterie.gateway.exchange.pool import Member, Pool
from coterie.gateway.signals.knowledge import Knowledge, Known
from coterie.net.http1.upstream import UpstreamError


class _PrefillFailedError(Exception):
    """The prefill worker failed before the decode worker answered."""

    def __init__(self, cause: UpstreamError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class SglangPairFlow(Flow):
    def __init__(
        self, prefill: Pool, decode: Pool, config: GatewayConfig, knowledge: Knowledge, observer: Observer
    ) -> None:
        super().__init__(config, knowledge, observer)
        self.prefill, self.decode = prefill, decode

    async def serve(self, call: Call, sink: Sink, known: Known) -> Outcome:
        started = time.monotonic()
        tried_prefill: set[str] = set()
        tried_decode: set[str] = set()
        for attempt in range(self.health.retries + 1):
            prefill, first = self.choose(self.prefill, call, known, tried_prefill)
            try:
                decode, choice = self.choose(self.decode, call, known, tried_decode)
                try:
                    status, relayed = await self._both(call, sink, prefill, decode)
                    self.report(self.decode, decode, status, relayed.problem)
                    self.report(self.prefill, prefill, 200)
                    self.knowledge.routed(self.prefill.name, first.row, known)
                    delivered = Delivered(decode, choice, status, relayed)
                    return outcome(delivered, call, known, started, prefill=prefill.entry.id)
                except _PrefillFailedError as error:
                    pool, cause = self.prefill, error.cause
                    self.report(pool, prefill, 0, cause)
                    tried_prefill.add(prefill.entry.id)
                except UpstreamError as error:
                    pool, cause = self.decode, error
                    self.report(pool, decode, 0, cause)
                    tried_decode.add(decode.entry.id)
                finally:
                    self.decode.finish(call.key)
            finally:
                self.prefill.finish(call.key)
            none_left = len(tried_prefill) >= len(self.prefill) or len(tried_decode) >= len(self.decode)
            if attempt == self.health.retries or none_left:
                raise failed(cause)
            self.observer.retried(pool)
            await self.back_off(attempt)
        raise AssertionError("the last attempt returns or raises")

    async def _both(self, call: Call, sink: Sink, prefill: Member, decode: Member):  # type: ignore[no-untyped-def]
        body = call.with_fields(
            bootstrap_host=urlsplit(prefill.entry.url).hostname,
            bootstrap_port=prefill.entry.bootstrap_port,
            bootstrap_room=secrets.randbits(63),
        )

        async def prefilled() -> None:
            answer = await self.ask(prefill, call, body, self.limits.prefill_s)
            if answer.status >= 500:
                await answer.read(REFUSAL_BYTES)
                raise UpstreamError("protocol", f"HTTP {answer.status}", answered=True)
            await answer.read(self.limits.answer_bytes)

        async def decoded():  # type: ignore[no-untyped-def]
            answer = await self.ask(decode, call, body, self.limits.first_token_s)
            if answer.status >= 500:
                await answer.read(REFUSAL_BYTES)
                raise UpstreamError("protocol", f"HTTP {answer.status}", answered=True)
            return answer.status, await self.pass_on(answer, call, sink)

        first, second = asyncio.create_task(prefilled()), asyncio.create_task(decoded())
        try:
            await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
            if not second.done() and not sink.started and first.done() and first.exception() is not None:
                raise _PrefillFailedError(first.exception())  # type: ignore[arg-type]
            return await second
        finally:
            for task in (first, second):
                task.cancel()
            await asyncio.gather(first, second, return_exceptions=True)
