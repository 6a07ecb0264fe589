"""curl against a gateway: what it does with HTTP/1.1 that no library shows."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from clients.checks import FAILED, PASSED, Asked, Check

TOLD = "\n%{http_code} %{http_version} %{num_connects} %{time_starttransfer} %{time_total}\n"
LIMIT_S = 120
LARGE = 3 << 20
"""Bytes of a large body: from 1 MB on, curl asks whether it may send it (Expect: 100-continue)."""


class Told(NamedTuple):
    """What curl reports for one request."""

    body: str
    status: int
    version: str
    connects: int
    first_s: float
    total_s: float
    trace: str = ""
    """Heads that were sent and received, with ``-v``."""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def streamed(self) -> bool:
        return self.body.rstrip().endswith("data: [DONE]")


class Curl:
    def __init__(self, asked: Asked, folder: Path) -> None:
        self.asked, self.folder = asked, folder
        self.headers = ["-H", "content-type: application/json"]
        if asked.key is not None:
            self.headers += ["-H", f"authorization: Bearer {asked.key}"]

    def body(self, **more: Any) -> str:
        """A completion's body in a file, as curl takes it."""
        body = {"model": self.asked.model, "prompt": "The ducks on the pond", "max_tokens": 12, "temperature": 0}
        file = self.folder / "body.json"
        file.write_text(json.dumps({**body, **more}))
        return f"@{file}"

    def ask(self, path: str, *options: str) -> Told:
        return self.ask_all([(path, options)])[0]

    def ask_all(self, requests: list[tuple[str, tuple[str, ...]]]) -> list[Told]:
        """Several requests of one curl, which keeps its connection if the server does."""
        argv = ["curl"]
        for number, (path, options) in enumerate(requests):
            argv += ["--next"] if number else []
            argv += ["-sS", "-v", "-w", TOLD, *self.headers, *options, self.asked.url + path]
        ran = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert ran.returncode == 0, f"curl ended with {ran.returncode}: {ran.stderr[-300:]}"
        found: list[Told] = []
        body: list[str] = []
        for line in ran.stdout.splitlines():
            words = line.split()
            if len(words) == 5 and words[0].isdigit() and words[1] in ("1", "1.0", "1.1"):
                said = (int(words[0]), words[1], int(words[2]), float(words[3]), float(words[4]))
                found.append(Told("\n".join(body), *said, ran.stderr))
                body = []
            else:
                body.append(line)
        assert len(found) == len(requests), ran.stdout
        return found

    def keeps_alive(self) -> str:
        post = ("/v1/completions", ("-d", self.body()))
        found = self.ask_all([post, ("/v1/models", ("-I",)), post, ("/v1/models", ()), ("/nothing", ()), post])
        assert [one.status for one in found] == [200, 200, 200, 200, 404, 200], found
        assert {one.version for one in found} == {"1.1"}, found
        assert [one.connects for one in found] == [1, 0, 0, 0, 0, 0], [one.connects for one in found]
        return "6 requests, 1 connection, one refused between"

    def streams(self) -> str:
        found = self.ask("/v1/completions", "-N", "-d", self.body(stream=True))
        assert found.streamed, found.body
        assert found.first_s < found.total_s, found
        return f"{found.body.count('data: ')} events"

    def head(self) -> str:
        health, models = self.ask("/health", "-I"), self.ask("/v1/models", "-I")
        assert (health.status, models.status) == (200, 200), (health, models)
        length = len(self.ask("/v1/models").body.encode())
        assert f"content-length: {length}" in models.body.lower(), models.body
        return f"content-length {length}, no body"

    def old_version(self) -> str:
        whole = self.ask("/v1/completions", "-0", "-d", self.body())
        assert (whole.status, bool(whole.json["choices"])) == (200, True), whole
        stream = self.ask("/v1/completions", "-0", "-N", "-d", self.body(stream=True))
        assert (stream.status, stream.streamed) == (200, True), stream
        assert "transfer-encoding" not in stream.trace.lower(), stream.trace
        return "whole and streamed"

    def expects(self) -> str:
        found = self.ask("/v1/completions", "-H", "Expect: 100-continue", "-d", self.body())
        assert found.status == 200, found
        assert "< HTTP/1.1 100 Continue" in found.trace, found.trace
        return "100, then 200"

    def large(self) -> str:
        """A body of some MB: refused before it is sent, or served, as the limit has it."""
        file = self.folder / "large.json"
        text = Path(self.body()[1:]).read_text()
        file.write_text(text[:-1] + " " * LARGE + "}")
        found = self.ask("/v1/completions", "-d", f"@{file}", "--expect100-timeout", "60")
        assert "> Expect: 100-continue" in found.trace, found.trace
        assert found.status in (200, 413), found
        if found.status == 413:
            assert "100 Continue" not in found.trace, "the body was asked for, then refused"
            assert found.json["error"]["message"], found.body
        return f"{LARGE >> 20} MB: {found.status}"

    def chunked(self) -> str:
        found = self.ask("/v1/completions", "-H", "Transfer-Encoding: chunked", "-d", self.body())
        assert found.status == 200, found
        return "200"

    def compressed(self) -> str:
        found = self.ask("/v1/completions", "--compressed", "-d", self.body())
        assert (found.status, bool(found.json["choices"])) == (200, True), found
        zipped = self.ask("/v1/completions", "-H", "content-encoding: gzip", "-d", self.body())
        assert zipped.status == 415, zipped
        return "Accept-Encoding served, a compressed body 415"

    def upgrade(self) -> str:
        found = self.ask("/v1/models", "--http2")
        assert found.status in (200, 400), found
        return f"{found.status} over HTTP/{found.version}"

    def refusals(self) -> str:
        wrong = self.ask("/v1/completions")
        assert wrong.status == 405, wrong
        broken = self.ask("/v1/completions", "-d", "{")
        assert (broken.status, bool(broken.json["error"]["message"])) == (400, True), broken
        return "405, 400 with OpenAI's error body"

    def parallel(self) -> str:
        count = 8
        options = ["-Z", "--parallel-max", str(count), "-sS", "-w", "%{http_code}\n", "-o", "/dev/null"]
        urls = [self.asked.url + "/v1/completions"] * count
        outputs = ["-o", "/dev/null"] * (count - 1)
        argv = ["curl", *options, *outputs, *self.headers, "-d", self.body(), *urls]
        ran = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert ran.stdout.split() == ["200"] * count, ran.stdout + ran.stderr
        return f"{count} at once"


def try_curl(asked: Asked) -> tuple[str, list[Check]]:
    """Version, and what came of each check."""
    said = subprocess.run(["curl", "--version"], capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        curl = Curl(asked, Path(folder))
        ways: dict[str, Callable[[], str]] = {
            "one connection for several requests": curl.keeps_alive,
            "-N, streamed": curl.streams,
            "HEAD": curl.head,
            "HTTP/1.0, whole and streamed": curl.old_version,
            "Expect: 100-continue": curl.expects,
            "Expect with a body over 1 MB": curl.large,
            "chunked body": curl.chunked,
            "compression": curl.compressed,
            "--http2 without TLS": curl.upgrade,
            "refusals": curl.refusals,
            "requests at once": curl.parallel,
        }
        found = [_try(what, way) for what, way in ways.items()]
    return said.split()[1], found


def _try(what: str, way: Callable[[], str]) -> Check:
    try:
        return Check("curl", what, PASSED, way())
    except (AssertionError, KeyError, ValueError, subprocess.SubprocessError) as error:
        return Check("curl", what, FAILED, f"{type(error).__name__}: {error}")
