"""The demo tells a gateway's page how it goes, and keeps its fleet busy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest

from canned_workers import Canned, canned_workers
from coterie.answers.demo import serving
from coterie.answers.demo.run import DemoRow
from coterie.answers.demo.serving import keep_busy
from coterie.answers.suites import Report
from coterie.errors import UnavailableError
from coterie.gateway.watching.comparison import Comparison
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


def compared(monkeypatch: pytest.MonkeyPatch, compare: Callable[..., object]) -> list[Comparison]:
    """Every state that the page gets while `compare` stands for the demo."""
    monkeypatch.setattr(serving, "run_demo", compare)
    told: list[Comparison] = []
    with contextlib.suppress(RuntimeError, UnavailableError):  # no gateway takes the fitted router
        serving.run_on(Mock(), f"http://127.0.0.1:{free_port()}", Path("out"), lambda *_: None, told.append)
    for state in told:
        assert msgspec.json.decode(msgspec.json.encode(state), type=Comparison) == state, "it is within its limits"
    return told


def test_a_page_is_told_of_rows_and_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(report: Report, rows_so_far: Callable[[list[DemoRow]], None], **_: object) -> object:
        report("Recording", 1, 9)
        rows_so_far([ROW])
        rows_so_far([ROW, ROW._replace(router="ours", saving_pct=9.0, interval_pct=(4.0, 12.0))])
        return Mock(verdict="ours: 9% fewer", fit="router.safetensors")

    first, *_, last = compared(monkeypatch, compare)
    assert (first.state, first.stage, first.done, first.total) == ("running", "Recording", 1, 9)
    assert (last.state, last.verdict, last.stage) == ("done", "ours: 9% fewer", "")
    assert [(row.router, row.low_pct, row.high_pct) for row in last.rows] == [
        ("round_robin", -1.0, 1.0),
        ("ours", 4.0, 12.0),
    ]
    assert last.rows[0].requests == [3, 4]


def test_a_comparison_that_fails_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(rows_so_far: Callable[[list[DemoRow]], None], **_: object) -> object:
        rows_so_far([ROW])
        raise RuntimeError("no more workers " + "x" * 1000)

    last = compared(monkeypatch, compare)[-1]
    assert last.state == "failed"
    assert last.verdict.startswith("The comparison failed: no more workers")
    assert len(last.rows) == 1


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
