"""curl as a client of a gateway: what it does with HTTP/1.1 that no library shows."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from canned_workers import canned_workers
from gateway_runs import config_of, gateway, run

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")

REPORT = "\n%{http_code} %{http_version} %{num_connects}\n"
LARGE = 3 << 20
"""Bytes of a large body: from 1 MB on, curl asks whether it may send it (Expect: 100-continue)."""


class Reply(NamedTuple):
    body: str
    status: int
    version: str
    connects: int
    trace: str
    """Heads that were sent and received."""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Curl:
    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder

    def body(self, padding: int = 0, **more: Any) -> str:
        """Write a completion's body to a file and return the option that sends it."""
        text = json.dumps({"model": "canned", "prompt": "The ducks on the pond", "max_tokens": 12, **more})
        file = self.folder / "body.json"
        file.write_text(text[:-1] + " " * padding + "}")
        return f"@{file}"

    def ask(self, path: str, *options: str) -> Reply:
        return self.ask_all((path, *options))[0]

    def ask_all(self, *requests: tuple[str, ...]) -> list[Reply]:
        """Send several requests with one curl, which keeps its connection if the server does."""
        argv = ["curl"]
        for number, (path, *options) in enumerate(requests):
            argv += ["--next"] if number else []
            argv += ["-sS", "-v", "-w", REPORT, "-H", "content-type: application/json", *options, self.url + path]
        ended = subprocess.run(argv, capture_output=True, text=True, check=True)
        replies: list[Reply] = []
        body: list[str] = []
        for line in ended.stdout.splitlines():
            words = line.split()
            if len(words) == 3 and words[0].isdigit() and words[1] in ("1", "1.0", "1.1"):
                replies.append(Reply("\n".join(body), int(words[0]), words[1], int(words[2]), ended.stderr))
                body = []
            else:
                body.append(line)
        assert len(replies) == len(requests), ended.stdout
        return replies


def keeps_alive(curl: Curl) -> None:
    post = ("/v1/completions", "-d", curl.body())
    replies = curl.ask_all(post, ("/v1/models", "-I"), post, ("/v1/models",), ("/nothing",), post)
    assert [reply.status for reply in replies] == [200, 200, 200, 200, 404, 200]
    assert {reply.version for reply in replies} == {"1.1"}
    assert [reply.connects for reply in replies] == [1, 0, 0, 0, 0, 0]


def streams(curl: Curl) -> None:
    reply = curl.ask("/v1/completions", "-N", "-d", curl.body(stream=True))
    assert reply.body.rstrip().endswith("data: [DONE]")


def head(curl: Curl) -> None:
    health, models = curl.ask("/health", "-I"), curl.ask("/v1/models", "-I")
    assert (health.status, models.status) == (200, 200)
    assert f"content-length: {len(curl.ask('/v1/models').body.encode())}" in models.body.lower()


def http_1_0(curl: Curl) -> None:
    whole = curl.ask("/v1/completions", "-0", "-d", curl.body())
    assert whole.status == 200
    assert whole.json["choices"]
    stream = curl.ask("/v1/completions", "-0", "-N", "-d", curl.body(stream=True))
    assert stream.status == 200
    assert stream.body.rstrip().endswith("data: [DONE]")
    assert "transfer-encoding" not in stream.trace.lower()


def expects(curl: Curl) -> None:
    reply = curl.ask("/v1/completions", "-H", "Expect: 100-continue", "-d", curl.body())
    assert reply.status == 200
    assert "< HTTP/1.1 100 Continue" in reply.trace


def large_body(curl: Curl) -> None:
    """A body of some MB is refused before it is sent, or served, depending on the limit."""
    reply = curl.ask("/v1/completions", "-d", curl.body(LARGE), "--expect100-timeout", "60")
    assert "> Expect: 100-continue" in reply.trace
    assert reply.status in (200, 413)
    if reply.status == 413:
        assert "100 Continue" not in reply.trace, "the body was asked for, then refused"
        assert reply.json["error"]["message"]


def chunked(curl: Curl) -> None:
    assert curl.ask("/v1/completions", "-H", "Transfer-Encoding: chunked", "-d", curl.body()).status == 200


def compressed(curl: Curl) -> None:
    assert curl.ask("/v1/completions", "--compressed", "-d", curl.body()).json["choices"]
    assert curl.ask("/v1/completions", "-H", "content-encoding: gzip", "-d", curl.body()).status == 415


def upgrade(curl: Curl) -> None:
    assert curl.ask("/v1/models", "--http2").status in (200, 400)


def refusals(curl: Curl) -> None:
    assert curl.ask("/v1/completions").status == 405
    broken = curl.ask("/v1/completions", "-d", "{")
    assert broken.status == 400
    assert broken.json["error"]["message"]


def at_once(curl: Curl) -> None:
    count = 8
    outputs = ["-o", "/dev/null"] * count
    argv = ["curl", "-Z", "--parallel-max", str(count), "-sS", "-w", "%{http_code}\n", *outputs]
    argv += ["-H", "content-type: application/json", "-d", curl.body(), *[curl.url + "/v1/completions"] * count]
    ended = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["200"] * count


WAYS = (keeps_alive, streams, head, http_1_0, expects, large_body, chunked, compressed, upgrade, refusals, at_once)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_curl_is_served(way: Callable[[Curl], None], tmp_path: Path) -> None:
    async def test() -> None:
        async with canned_workers("a") as (worker,), gateway(config_of([worker])) as found:
            await asyncio.to_thread(way, Curl(found.running.url, tmp_path))

    run(test)
