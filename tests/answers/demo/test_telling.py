"""The demo tells a gateway's page how it goes, and keeps its fleet busy."""

from __future__ import annotations

import asyncio
import threading

import pytest

from canned_workers import Canned, canned_workers
from coterie.answers.demo.run import DemoRow
from coterie.answers.demo.serving import keep_busy, telling
from coterie.net.http1.messages import HttpRequest
from coterie.net.http1.responder import Responder
from coterie.net.processes import free_port
from gateway_runs import config_of, gateway, run

WHOLE = b'data: {"choices": [{"delta": {"content": "yes"}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
ROW = DemoRow("round_robin", 14.5, 0.0, (-1.0, 1.0), 4.4, 13.0, 2.0, [3, 4])


async def says_all(_: Canned, __: HttpRequest, responder: Responder) -> None:
    """A streamed answer with its end."""
    responder.start(200, [(b"content-type", b"text/event-stream")])
    responder.write(WHOLE)
    responder.end()


def test_a_page_is_told_of_rows_and_of_the_end() -> None:
    async def test() -> None:
        async with canned_workers("a") as (a,), gateway(config_of([a])) as found:

            def compare() -> None:
                with telling(found.running.url, ("round_robin", "ours"), "an H200") as told:
                    told.progress("Recording", 1, 9)
                    told.rows([ROW])
                    told.rows([ROW, ROW._replace(router="ours", saving_pct=9.0, interval_pct=(4.0, 12.0))])
                    told.done("ours: 9% fewer")

            await asyncio.to_thread(compare)
            kept = found.running.parts.comparison
            assert kept is not None
            assert (kept.state, kept.verdict, kept.stage) == ("done", "ours: 9% fewer", "")
            assert [(row.router, row.low_pct, row.high_pct) for row in kept.rows] == [
                ("round_robin", -1.0, 1.0),
                ("ours", 4.0, 12.0),
            ]
            assert kept.rows[0].requests == [3, 4]

    run(test)


def test_a_comparison_that_fails_is_told_as_such() -> None:
    async def test() -> None:
        async with canned_workers("a") as (a,), gateway(config_of([a])) as found:

            def compare() -> None:
                with telling(found.running.url, ("round_robin",), "an H200") as told:
                    told.rows([ROW])
                    raise RuntimeError("no more workers " + "x" * 1000)

            with pytest.raises(RuntimeError, match="no more workers"):
                await asyncio.to_thread(compare)
            kept = found.running.parts.comparison
            assert kept is not None
            assert kept.state == "failed"
            assert kept.verdict.startswith("The comparison failed: no more workers")
            assert len(kept.rows) == 1

    run(test)


def test_without_a_gateway_the_comparison_goes_on() -> None:
    with telling(f"http://127.0.0.1:{free_port()}", ("round_robin",), "an H200") as told:
        told.rows([ROW])
        told.done("all the same")
    assert (told._state["state"], told._state["verdict"]) == ("done", "all the same")
    assert "coterie-telling" not in {thread.name for thread in threading.enumerate()}, "its thread has ended"


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
