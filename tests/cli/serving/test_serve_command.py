"""``coterie serve``: what it refuses, what it checks, and that it serves until it is told to end."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import yaml

from canned_workers import canned_workers
from command_line import Run, refused
from control_cases import saved_fit
from coterie.cli.verbs.serving.serve import _ready
from coterie.gateway.access import Keys
from coterie.gateway.fleet.spec import RouterSpec
from coterie.net.http_client import healthy
from gateway_runs import config_of, gateway
from gateway_runs import run as run_test

CONFIG = """
listen: 127.0.0.1:0
handshake: vllm
workers:
  - {id: p0, url: "http://127.0.0.1:1", role: prefill}
  - {id: d0, url: "http://127.0.0.1:2", role: decode}
decode: {router: joint}
"""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--config FILE, or --embedded"),
        (("--embedded", "--config", "x"), "--config FILE, or --embedded"),
        (("--config", "missing.yaml"), "missing.yaml"),
        (("--config", "x", "--port", 1), "--embedded"),
        (("--embedded", "--router", "jont"), "joint"),
        (("--embedded", "--router", "domain"), "labels"),
        (("--embedded", "--check"), "config files"),
        (("--config", "x", "--live"), "--check"),
        (("--new-key", ""), "name"),
        (("--new-key", "a", "--only", "live"), "metrics, peers"),
    ],
)
def test_what_is_refused(run: Run, arguments: tuple[object, ...], words: str) -> None:
    refused(run("serve", *arguments), words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("listen: 127.0.0.1:0", "listen: 0.0.0.0:0"), "keys"),
        (("joint", "latency_aware"), "fitted"),
        (("joint", "jont"), "joint"),
        (("role: decode}", "role: decode, places: 0}"), "places=0"),
    ],
)
def test_a_config_that_cannot_be_served(run: Run, tmp_path: Path, change: tuple[str, str], words: str) -> None:
    (tmp_path / "fleet.yaml").write_text(CONFIG.replace(*change))
    refused(run("serve", "--config", tmp_path / "fleet.yaml", "--check"), words)


def test_checking_a_config(run: Run, tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(CONFIG)
    ran = run("serve", "--config", tmp_path / "fleet.yaml", "--check")
    assert ran.code == 0
    assert "1 prefill, 1 decode workers" in ran.out
    assert "Next: coterie serve --config" in ran.out


def test_trying_the_workers_of_a_config(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"

    async def test() -> None:
        async with canned_workers("a", "b") as (a, b):
            path.write_bytes(msgspec.yaml.encode(config_of([a, b])))
            ran = await asyncio.to_thread(run, "serve", "--config", path, "--check", "--live")
            assert (ran.code, ran.err) == (0, "")
            ready = [f"{name}: ready: canned, 1,024 tokens of context" for name in ("a", "b")]
            assert ran.out.splitlines()[:2] == ready
            assert f"2 of 2 workers can serve as {path} says." in ran.out
            assert ran.out.endswith(f"Next: coterie serve --config {path}\n")
            await b.stop()
            ran = await asyncio.to_thread(run, "serve", "--config", path, "--check", "--live")
            assert ran.code == 1
            first, second = ran.out.splitlines()[:2]
            assert first == ready[0]
            assert second.startswith(f"b: url={b.url}: GET /health: connect: ")
            assert second.endswith("; start its engine, or write the host and port that it listens on")
            assert ran.out.endswith(f"Next: coterie serve --config {path} --check --live\n")
            ran = await asyncio.to_thread(run, "serve", "--config", path, "--check", "--live", "--json")
            assert ran.code == 1
            found = json.loads(ran.out)["workers"]
            assert [len(worker["problems"]) for worker in found] == [0, 1]

    run_test(test)


@pytest.mark.parametrize("handshake", ["none", "vllm"])
@pytest.mark.parametrize("router", ["join_shortest_queue", "round_robin", "fitted"])
def test_the_next_command_compares_routers_of_this_gateway(
    router: str, handshake: str, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pool with the default router was not listed by its name, so that the command refused the gateway."""
    spec = RouterSpec(fit=saved_fit("low", tmp_path)) if router == "fitted" else RouterSpec(router)

    async def test() -> None:
        roles = ["prefill", "decode"] if handshake == "vllm" else None
        async with canned_workers("a", "b") as workers:
            config = config_of(workers, roles, handshake=handshake, decode=spec)
            async with gateway(config) as found:
                capsys.readouterr()
                _ready(config, False)(found.running, lambda: None)
                words = shlex.split(capsys.readouterr().out.rpartition("Next: coterie ")[2])
                assert words.count("--router") == 2
                few = ("--requests", 2, "--warmup", 0, "--blocks", 2, "--max-tokens", 1, "--no-stream", "--no-chat")
                ran = await asyncio.to_thread(run, *words, *few)
                assert ran.code == 0, ran.err
                assert "2 of 2 answered" in ran.out
                assert found.running.parts.pools["decode"].spec == spec, "the router in use is put back"

    run_test(test)


def test_a_new_key_is_shown_once_and_stored_as_a_hash(run: Run, tmp_path: Path) -> None:
    ran = run("serve", "--new-key", "search-team", "--admin", "--json")
    told = json.loads(ran.out)
    ran = run("serve", "--new-key", "other")
    shown, _, line = ran.out.partition("Line for the keys file:\n")
    (tmp_path / "keys.yaml").write_text(line)
    key = shown.split()[-1]
    assert key not in line
    caller = Keys.load(tmp_path / "keys.yaml").check(b"Bearer " + key.encode())
    assert caller is not None
    assert (caller.name, caller.admin) == ("other", False)
    entry = {"name": told["name"], "sha256": told["sha256"], "admin": True}
    caller = Keys.load([entry]).check(b"Bearer " + told["key"].encode())
    assert caller is not None
    assert caller.admin
    assert yaml.safe_load(line)[0]["name"] == "other"
    ran = run("serve", "--new-key", "prometheus", "--only", "metrics")
    (entry,) = yaml.safe_load(ran.out.partition("Line for the keys file:\n")[2])
    assert (entry["name"], entry["only"], "admin" in entry) == ("prometheus", "metrics", False)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_embedded_fleet_serves_until_it_is_told_to_end(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "coterie", "serve", "--embedded", "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ})
    try:
        assert process.stdout is not None
        told = msgspec.json.decode(process.stdout.readline())
        assert healthy(told["url"], 60.0)
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, err.decode()
