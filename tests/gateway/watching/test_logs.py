"""Log lines: one JSON object each, nothing of a request's text, and a reader that stalls stops nobody."""

from __future__ import annotations

import io
import json
import threading
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.gateway.watching.logs import Log


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_events_are_json_lines_in_order() -> None:
    stream = io.StringIO()
    log = Log(stream, clock=lambda: 1_700_000_000.5)
    log.started("http://127.0.0.1:8080", "1.2.3", {"decode": "joint"}, workers=3)
    log.worker("w1", "decode", "open", "5 failures in 10 s")
    log.reloaded(["decode"])
    log.reloaded(problem="fleet.yaml: no pools")
    log.stopped("SIGTERM", cut=2, seconds=1.23456)
    log.close(60)
    time = {"time": "2023-11-14T22:13:20.500+00:00"}
    assert lines(stream) == [
        {
            **time,
            "event": "start",
            "url": "http://127.0.0.1:8080",
            "version": "1.2.3",
            "pools": {"decode": "joint"},
            "workers": 3,
        },
        {**time, "event": "worker", "worker": "w1", "pool": "decode", "state": "open", "reason": "5 failures in 10 s"},
        {**time, "event": "reload", "ok": True, "changed": ["decode"]},
        {**time, "event": "reload", "ok": False, "changed": [], "problem": "fleet.yaml: no pools"},
        {**time, "event": "stop", "reason": "SIGTERM", "cut": 2, "seconds": 1.235},
    ]


@pytest.mark.parametrize("asked", [False, True])
def test_requests_are_logged_only_where_asked(asked: bool) -> None:
    stream = io.StringIO()
    log = Log(stream, requests=asked)
    log.request("req-1", "/v1/completions", "ok", 200, worker="w1", ttft_s=0.0123456, total_s=1.0, output_tokens=5)
    log.close(60)
    assert [line["event"] for line in lines(stream)] == ["request"] * asked
    if asked:
        assert lines(stream)[0]["ttft_ms"] == 12.346


def test_an_exception_is_logged_without_its_message() -> None:
    stream = io.StringIO()
    log = Log(stream)
    try:
        int("my secret prompt")
    except ValueError as error:
        log.failed(error)
    log.failed(KeyError("my secret prompt"))
    log.close(60)
    first, second = lines(stream)
    assert first["error"] == "ValueError"
    assert first["line"].startswith("test_logs.py:")
    assert (second["error"], second.get("line")) == ("KeyError", None)
    assert "secret" not in stream.getvalue()


def test_text_of_all_kinds_stays_on_one_line() -> None:
    stream = io.StringIO()
    log = Log(stream, requests=True)
    log.request('a"\n\r\u2028\ud800\x00' + "x" * 10_000, "/v1/models", "ok", 200, ttft_s=float("nan"))
    log.close(60)
    assert stream.getvalue().count("\n") == 1
    (line,) = (json.loads(text) for text in stream.getvalue().split("\n") if text)
    assert len(line["id"]) == 500
    assert line["ttft_ms"] is None


def test_values_of_other_types_do_not_stop_the_writer() -> None:
    stream = io.StringIO()
    log = Log(stream, requests=True)
    log.request("a", "/v1/models", "ok", 200, prompt_tokens=np.int64(7), output_tokens=object())  # type: ignore[arg-type]
    log.warning("later")
    log.close(60)
    first, second = lines(stream)
    assert (first["prompt_tokens"], first["output_tokens"]) == (7, "object")
    assert second["problem"] == "later"


class Stalled(io.StringIO):
    """A stream whose reader has stopped: a write waits until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.let_go = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.reached.set()
        assert self.let_go.wait(60)
        return super().write(text)


def test_a_reader_that_stalls_stops_nobody_and_what_is_lost_is_said() -> None:
    stream = Stalled()
    log = Log(stream, most_waiting=10)
    log.warning("first")
    assert stream.reached.wait(60), "the writer has the first line and waits"
    for number in range(25):
        log.warning(str(number))
    assert log.lost == 15
    stream.let_go.set()
    log.close(60)
    found = lines(stream)
    assert found[1] == {"time": found[1]["time"], "event": "lines_lost", "lines": 15}
    assert [line["problem"] for line in found if line["event"] == "warning"] == ["first", *map(str, range(10))]


def test_close_gives_up_and_a_closed_log_takes_nothing() -> None:
    stream = Stalled()
    log = Log(stream)
    log.warning("first")
    log.close(timeout_s=0.01)
    log.warning("late")
    log.close(timeout_s=0.01)
    assert log.lost == 1
    stream.let_go.set()


def test_a_closed_stream_is_survived() -> None:
    stream = io.StringIO()
    stream.close()
    log = Log(stream)
    log.warning("nobody reads")
    log.close(60)
    assert log.lost == 1
    with pytest.raises(ConfigError, match="most_waiting=0 must be at least 1"):
        Log(stream, most_waiting=0)
