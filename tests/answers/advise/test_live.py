"""Advice on what a live gateway has seen: real workers behind a gateway, real requests, the command's own process."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from command_line import runner
from coterie.answers.advise.live import MOST_PROMPT, GatewayTraffic, drawn_tokens, read_gateway
from coterie.errors import ConfigError, InputError, UnavailableError
from coterie.footprints import footprint
from coterie.gateway.access import new_key
from coterie.gateway.config import ControlSection, GatewayConfig
from coterie.gateway.control.messages import KeptRequests
from coterie.gateway.embedded import EmbeddedFleet, decode_router, run_embedded
from coterie.gateway.fleet.spec import RouterSpec
from coterie.prompts import load_prompts
from coterie.routing import calibration
from gateway_runs import Run, gateway, run
from http1_peers import until

PATIENCE_S = 300.0
REQUESTS = 24
PLAIN = RouterSpec("join_shortest_queue", model="coterie-tiny")


@pytest.fixture(scope="module")
def fleet() -> Iterator[EmbeddedFleet]:
    with run_embedded(decoders=2) as running:
        yield running


async def served(running: Run) -> GatewayTraffic:
    """Send requests until the loop keeps enough: those that finish before it listens are not kept."""
    parts = running.running.parts
    await until(lambda: running.open("prefill") and running.open("decode"))
    await until(lambda: parts.control is not None and parts.control.child is not None)
    prompts = [prompt.prompt[:300] for prompt in load_prompts()]
    for first in range(0, 20 * REQUESTS, 10):
        bodies = [{"prompt": f"{first} {prompts[(first + at) % len(prompts)]}", "max_tokens": 8} for at in range(10)]
        asked = [running.client.ask("POST", "/v1/completions", {"model": "coterie-tiny", **body}) for body in bodies]
        assert {answer.status for answer in await asyncio.gather(*asked)} == {200}
        live = await read_gateway(running.running.url, None)
        if live.kept is not None and len(live.kept.finished_s) >= REQUESTS:
            return live
    raise AssertionError("the loop keeps no requests")


@contextmanager
def in_front(fleet: EmbeddedFleet) -> Iterator[GatewayTraffic]:
    """A gateway in a thread of its own that has served requests; yields what it keeps, its address in `listen`."""
    told: queue.Queue[GatewayTraffic | BaseException] = queue.Queue()
    ended = threading.Event()

    async def serve() -> None:
        async with gateway(fleet.config(control=ControlSection()), access=fleet.access) as running:
            live = await served(running)
            told.put(
                msgspec.structs.replace(
                    live, config=msgspec.structs.replace(live.config, listen=f"127.0.0.1:{running.port}")
                )
            )
            await asyncio.to_thread(ended.wait)

    def work() -> None:
        try:
            run(serve, PATIENCE_S)
        except BaseException as error:
            told.put(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        live = told.get()
        assert isinstance(live, GatewayTraffic), live
        yield live
    finally:
        ended.set()
        thread.join()


def test_the_command_advises_on_what_a_gateway_has_seen(
    fleet: EmbeddedFleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with in_front(fleet) as live:
        source = live.source()
        counted = calibration(source.trace)
        assert np.array_equal(counted.decode, source.counts.decode), "no activation is lost or added"
        assert np.array_equal(counted.prefill, source.counts.prefill)
        assert (source.trace.requests.output_tokens >= 1).all()
        assert source.trace.meta.model == "coterie-tiny"

        few = ("--in-flight", 4, "--splits", 2, "--requests", 96, "--ranks", 4, "--json")
        ran = runner(monkeypatch, capsys)("advise", f"http://{live.config.listen}", *few)
    assert ran.code == 0, ran.err
    answer = json.loads(ran.out)
    assert (answer["model"], answer["recorded"] >= REQUESTS) == ("coterie-tiny", True)
    [deployment] = answer["deployments"]
    asked = deployment["settings"]
    assert (asked["gpus"], asked["ranks"]) == (4, 4)
    assert (asked["decoders"], asked["places"], asked["prefill"], asked["prompts"]) == (2, 16, 1, False)
    answers = {one["key"]: one["advice"] for one in deployment["decisions"]}
    assert set(answers) >= {"routing", "placement", "live_loop"}
    assert answers["live_loop"] != "not now", "seconds of traffic cannot tell"
    assert any("drawn" in note for note in deployment["notes"])
    assert str(live.worker) in answer["next"] or "advice" in answer["next"]


def test_requests_are_kept_where_the_router_uses_no_fit(fleet: EmbeddedFleet) -> None:
    """Somebody without a fitted router is the first who wants to know what to turn on."""

    async def test() -> None:
        config = fleet.config(decode=PLAIN, control=ControlSection(enabled=True))
        async with gateway(config, access=fleet.access) as running:
            source = (await served(running)).source()
            assert source.counts.decode.shape[1:] == (8, 32)
            assert source.trace.meta.model == "coterie-tiny"

    run(test, PATIENCE_S)


def test_a_gateway_that_keeps_nothing_says_what_to_set(fleet: EmbeddedFleet) -> None:
    async def refusal(config: GatewayConfig) -> str:
        async with gateway(config, access=fleet.access) as running:
            with pytest.raises(ConfigError) as refused:
                (await read_gateway(running.running.url, None)).source()
        return str(refused.value)

    async def test() -> None:
        off = await refusal(fleet.config(decode=PLAIN))
        assert "loop is off" in off
        assert "enabled: true" in off
        assert "coterie record" in off
        assert "enabled: true" not in await refusal(fleet.config(decode=decode_router(None), control=ControlSection()))
        silent = GatewayConfig(workers=[], listen="127.0.0.1:0")
        assert "coterie record" in await refusal(silent)

    run(test, PATIENCE_S)


def test_only_administrators_may_ask(fleet: EmbeddedFleet, tmp_path: Path) -> None:
    made = {name: new_key(name, admin=name == "boss") for name in ("boss", "user")}
    keys = tmp_path / "keys.yaml"
    keys.write_text("\n".join(entry.as_yaml() for _, entry in made.values()))

    async def test() -> None:
        config = msgspec.structs.replace(fleet.config(control=ControlSection(enabled=False)), keys=str(keys))
        async with gateway(config, access=fleet.access) as running:
            for key in (None, made["user"][0]):
                with pytest.raises(UnavailableError, match="COTERIE_ADMIN_KEY"):
                    await read_gateway(running.running.url, key)
            assert (await read_gateway(running.running.url, made["boss"][0])).config.handshake == "vllm"

    run(test, PATIENCE_S)


@given(st.integers(0, 1 << 32), st.integers(1, 40), st.integers(1, 6), st.integers(1, 4))
def test_drawn_tokens_have_exactly_the_counts(seed: int, tokens: int, top_k: int, layers: int) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.full(9, 0.3), size=layers)
    ids = np.array([[rng.choice(9, top_k, replace=False, p=0.9 * w + 0.1 / 9) for w in weights] for _ in range(tokens)])
    counts = footprint(ids, 9)
    drawn = drawn_tokens(counts, top_k, rng)
    assert np.array_equal(footprint(drawn, 9), counts)
    assert (np.diff(np.sort(drawn, axis=-1), axis=-1) > 0).all(), "no expert twice in a token"
    assert drawn_tokens(counts, top_k, rng, 3).shape == (min(tokens, 3), layers, top_k)


def test_steps_read_as_many_distinct_experts_as_with_the_true_tokens() -> None:
    """Requests at random positions: the mean of a step's distinct experts hangs on the counts alone."""
    rng = np.random.default_rng(5)
    weights = rng.dirichlet(np.full(16, 0.3), size=8)
    true = [np.array([[rng.choice(16, 2, replace=False, p=0.9 * w + 0.1 / 16)] for _ in range(60)]) for w in weights]
    drawn = [drawn_tokens(footprint(ids, 16), 2, rng) for ids in true]

    def distinct(requests: list[np.ndarray]) -> float:
        at = rng.integers(60, size=(4000, len(requests)))
        steps = np.stack([ids[at[:, row], 0] for row, ids in enumerate(requests)], axis=1).reshape(4000, -1)
        return float(np.mean([len(np.unique(step)) for step in steps]))

    assert distinct(drawn) == pytest.approx(distinct(true), rel=0.02)


@pytest.mark.parametrize("wrong", [b"", bytes(4 * 20 * 2 * 2 * 4), b"\xff" * (4 * 20 * 2 * 2 * 4)])
def test_counts_that_cannot_be_are_refused(wrong: bytes) -> None:
    kept = KeptRequests("coterie-tiny", 2, (20, 2, 2, 4), [float(number) for number in range(20)], wrong)
    with pytest.raises(InputError):
        GatewayTraffic(GatewayConfig(), [], kept).source()


def test_of_a_long_prompt_a_part_is_drawn_and_its_counts_and_length_are_whole() -> None:
    counts = np.zeros((20, 2, 1, 4), "<u4")
    counts[:, 0, :, :2], counts[:, 1, :, 2:] = 3 * MOST_PROMPT, 5
    kept = KeptRequests("coterie-tiny", 2, counts.shape, [float(number) for number in range(20)], counts.tobytes())
    source = GatewayTraffic(GatewayConfig(), [], kept).source()
    assert source.trace.num_tokens == 20 * (MOST_PROMPT + 5)
    assert source.trace.requests.prompt_tokens.tolist() == [3 * MOST_PROMPT] * 20
    assert np.array_equal(source.counts.prefill, counts[:, 0])
    assert source.trace.requests.arrival_s is not None
    assert source.trace.requests.arrival_s.tolist() == list(range(20))
