"""The demo on a running gateway keeps its fleet busy."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from canned_workers import Canned, canned_workers
from coterie.answers.demo import serving
from coterie.answers.demo.run import DemoResult
from coterie.answers.demo.serving import keep_busy
from coterie.answers.suites import Report
from coterie.control.switchback import Comparison
from coterie.gateway.embedded import NO_TURNS, EmbeddedFleet, tiny_fit_path
from coterie.net.http1.messages import HttpRequest
from coterie.net.http1.responder import Responder
from demo_results import RESULT, ROWS
from gateway_runs import config_of, gateway, run

WHOLE = b'data: {"choices": [{"delta": {"content": "yes"}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'


async def says_all(_: Canned, __: HttpRequest, responder: Responder) -> None:
    """A streamed answer with its end."""
    responder.start(200, [(b"content-type", b"text/event-stream")])
    responder.write(WHOLE)
    responder.end()


def test_a_gateway_tells_how_far_the_comparison_is_and_its_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with canned_workers("a", "b") as workers, gateway(config_of(workers, switchback=NO_TURNS)) as found:
            parts = found.running.parts
            told: list[Comparison | None] = []

            def compare(report: Report, **_: Any) -> DemoResult:
                told.append(parts.comparison)
                report("Serving under round_robin", 34, 74)
                told.append(parts.comparison)
                return RESULT._replace(fit=str(tiny_fit_path()))

            monkeypatch.setattr(serving, "run_demo", compare)
            fleet = EmbeddedFleet([], tmp_path)
            result = await asyncio.to_thread(serving.run_on, fleet, found.running, tmp_path, lambda *_: None)
            assert [one and one.sentence for one in told] == [
                "Routers are being compared. Connecting to the workers.",
                "Routers are being compared. Serving under round_robin: 34 of 74 requests.",
            ]
            assert parts.comparison is not None
            assert parts.comparison.sentence == result.verdict
            assert parts.comparison.changes == {"token_experts": serving.change_of(ROWS)}
            assert parts.pools["decode"].spec.router == "latency_aware"
            parts.turn()
            assert parts.described_comparison() is not None, "no turns give a second number"

    run(test)


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
