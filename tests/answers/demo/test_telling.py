"""The demo on a running gateway keeps its fleet busy."""

from __future__ import annotations

import asyncio

from canned_workers import Canned, canned_workers
from coterie.answers.demo.serving import keep_busy
from coterie.net.http1.messages import HttpRequest
from coterie.net.http1.responder import Responder
from gateway_runs import config_of, gateway, run

WHOLE = b'data: {"choices": [{"delta": {"content": "yes"}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'


async def says_all(_: Canned, __: HttpRequest, responder: Responder) -> None:
    """A streamed answer with its end."""
    responder.start(200, [(b"content-type", b"text/event-stream")])
    responder.write(WHOLE)
    responder.end()


def test_requests_go_on_until_there_were_enough_or_the_gateway_is_gone() -> None:
    async def test() -> None:
        async with canned_workers("a", a=says_all) as (a,):
            async with gateway(config_of([a])) as found:
                assert await keep_busy(found.running.url, 5, in_flight=2) == 5
                assert len(a.completions) == 5
                endless = asyncio.create_task(keep_busy(found.running.url, in_flight=2))
                while len(a.completions) < 20:
                    await asyncio.sleep(0.001)
            assert await endless >= 10

    run(test)
