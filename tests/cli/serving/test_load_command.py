"""``coterie load`` against a real worker: what is printed and written, comparisons, keys, Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import Run, refused
from coterie.answers.load.run import read_steps
from coterie.engines.worker.embedded import embedded_worker
from coterie.net.access import FleetAccess
from coterie.net.http_client import Client

FEW = ("--requests", 6, "--warmup", 1, "--max-tokens", 3)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = embedded_worker("both", tmp_path_factory.mktemp("worker"), "worker", FleetAccess()).process
    try:
        yield server.start().url
    finally:
        server.kill()


def test_a_closed_loop_prints_times_a_verdict_and_the_next_step(run: Run, url: str, tmp_path: Path) -> None:
    ran = run("load", url, *FEW, "--out", tmp_path / "out")
    assert ran.code == 0, ran.err
    for words in ("TTFT", "TPOT", "E2E", "6 of 6 answered", "Next: coterie load"):
        assert words in ran.out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["load.json", "load.pdf", "load.png"]
    (tmp_path / "out" / "load.png").write_text("mine")
    refused(run("load", url, *FEW, "--out", tmp_path / "out"), "load.png", "not a result of coterie load")


def test_an_open_loop_of_conversations_finds_their_prefixes_cached(run: Run, url: str) -> None:
    settings = ("--workload", "shared-prefix", "--rate", 200, "--systems", 2, "--hit-rate", 0.6, "--turns", 2)
    rates = []
    for _ in range(2):
        ran = run("load", url, "--requests", 8, "--warmup", 4, "--max-tokens", 2, *settings, "--json")
        assert ran.code == 0, ran.err
        (found,) = json.loads(ran.out)["rows"]
        assert found["answered"] == 8
        assert found["offered_per_s"] > 0
        rates.append(found["hit_rate"]["value"])
    assert min(rates) > 0.1
    assert max(rates) < 0.95, "what the first run left in the cache does not help the second"


def test_answers_that_are_not_streamed_have_only_a_whole_time(run: Run, url: str) -> None:
    ran = run("load", url, *FEW, "--no-stream", "--no-chat", "--ignore-eos", "--json")
    (found,) = json.loads(ran.out)["rows"]
    assert (found["answered"], found["output_tokens"]) == (6, 18)
    assert "ttft_ms" not in found
    assert found["e2e_ms"]["p50"]["value"] > 0


def test_lengths_and_times_of_a_trace(run: Run, url: str, tmp_path: Path) -> None:
    rows = [{"timestamp": 20 * n, "input_length": 600, "output_length": 30, "hash_ids": [0, n]} for n in range(1, 8)]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "texts.txt").write_text("Which of the two trains arrives first, and how long does it wait?\n" * 9)
    settings = (
        "--workload",
        "trace",
        "--prompts",
        tmp_path / "texts.txt",
        "--arrivals",
        tmp_path / "trace.jsonl",
        "--length-scale",
        0.1,
        "--speed-up",
        2,
    )
    ran = run("load", url, *settings, "--warmup", 2, "--json")
    found = json.loads(ran.out)
    (row,) = found["rows"]
    assert row["answered"] == 5
    assert row["output_tokens"] == 15
    assert row["prompt_tokens"] / 5 == pytest.approx(60 + 12, abs=20), "with the template's tokens and the marker's"
    assert found["reachable_hit_rate"] == pytest.approx(512 / 600, abs=0.03)


def test_two_servers_are_compared_on_the_same_requests(run: Run, url: str) -> None:
    other = url.replace("127.0.0.1", "localhost")  # another name of the same worker
    ran = run("load", url, "--compare", other, *FEW, "--blocks", 3)
    assert ran.code == 0, ran.err
    for words in (f"Change against {url}", "TTFT, mean", "TPOT, p90", f"{other}: 6 of 6 answered"):
        assert words in ran.out
    assert f"{other} against {url}: " in ran.out


def test_what_is_asked_wrong_is_one_line(run: Run, url: str, tmp_path: Path) -> None:
    refused(run("load", "http://127.0.0.1:9"), "127.0.0.1:9", "does not answer")
    refused(run("load", url, "--rate", 3, "--concurrency", 2), "closed loop")
    refused(run("load", url, "--workload", "trace"), "needs a trace")
    refused(run("load", url, "--rate", 3, "--speed-up", 2), "speed_up=2.0 needs a trace")
    refused(run("load", url, "--no-stream", "--ttft-target-ms", 3), "need streamed answers")
    refused(run("load", url, "--ttft-target-ms", 0), "ttft_target_s=0.0")
    refused(run("load", url, "--compare", "http://127.0.0.1:9", *FEW), "blocks=8 must be at most the 7 requests")
    refused(run("load", url, "--workload", "prompt"), "prompts, shared-prefix, trace")
    refused(run("load", url, "--compare", f"{url}/v1"), "given twice")
    refused(run("load", url, "--router", "a", "--router", "b"), "/routers", "not the routers of a Coterie gateway")
    refused(run("load", url, "--workload", "shared-prefix", "--hit-rate", 0.1), "hit_rate=0.1", "fewer turns")
    (tmp_path / "key").write_text("two words\n")
    refused(run("load", url, "--key-file", tmp_path / "key"), "one key")


def test_a_server_that_refuses_every_request_is_a_no(run: Run, url: str) -> None:
    ran = run("load", url, *FEW, "--model", "another")
    assert ran.code == 1
    assert "None of 6 requests was answered: 6 answered 4xx." in ran.out
    assert "is not served here" in ran.out


def test_an_interrupted_run_prints_what_it_measured(url: str) -> None:
    def steps(after: int | None = None) -> int:
        async def ask() -> int:
            async with Client(url) as client:
                return (await read_steps(client, after)).total

        return asyncio.run(ask())

    before = steps()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "coterie",
            "load",
            url,
            "--requests",
            "2000",
            "--warmup",
            "0",
            "--max-tokens",
            "4",
            "--json",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        started = time.monotonic()
        while steps(before) < before + 20:  # several answers of 4 tokens
            assert process.poll() is None
            assert time.monotonic() - started < 100
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, err) == (130, "interrupted\n")
    found = json.loads(out)
    assert found["interrupted"]
    assert found["rows"][0]["answered"] >= 1
    assert found["rows"][0]["unfinished"] >= 1
    assert found["verdict"].startswith("Interrupted")
