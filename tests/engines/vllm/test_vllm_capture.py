"""Capture in real vLLM servers, against transformers on the same weights and against a server without the plugin."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from coterie.engines.recording import Sending
from coterie.engines.vllm import recording
from coterie.engines.vllm.recording import record_vllm
from coterie.engines.vllm.settings import ConnectorSettings
from coterie.footprints import PositionStore, footprint
from coterie.prompts import load_prompts, take_in_turn
from coterie.traces import ActivationTrace
from coterie.types import DECODE, PREFILL
from vllm_checks import NUM_EXPERTS, Listener, Truth, event_of, sent_footprint, sequence
from vllm_servers import PLUGIN, Fleet, Server, needs_vllm

pytestmark = [pytest.mark.vllm, needs_vllm]

NUM_PROMPTS = 200
MAX_TOKENS = 16
TIGHT = {
    "settings": {"footprint": "always", "load_interval_s": 0.2},
    "extra": ("--num-gpu-blocks-override", "24", "--max-num-batched-tokens", "64", "--max-num-seqs", "16"),
}


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth()


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return [prompt.prompt for prompt in take_in_turn(load_prompts(), NUM_PROMPTS)]


@pytest.fixture(scope="module")
def servers(fleet: Fleet) -> tuple[Server, Server]:
    """One without the plugin, one with it; the third that tests here ask for starts beside them."""
    plain, plugin, _ = fleet.start({"plain": {}, "plugin": PLUGIN, "tight": TIGHT})
    return plain, plugin


def test_tokens_and_experts_of_200_prompts(servers: tuple[Server, Server], truth: Truth, prompts: list[str]) -> None:
    """The plugin changes no token; what it captures is what transformers computes; footprints are their counts."""
    plain, plugin = servers
    listener = Listener(plugin.events)
    answers = plugin.complete_all(prompts, 8, max_tokens=MAX_TOKENS)
    found = listener.wait(len(prompts))
    reference = plain.complete_all(prompts, 8, max_tokens=MAX_TOKENS)
    assert [sequence(a) for a in answers] == [sequence(a) for a in reference]
    assert len(found) == len(prompts)
    wrong = total = 0
    for number, answer in enumerate(answers):
        event, tokens = event_of(found, f"r{number}r"), sequence(answer)[:-1]
        assert event.tokens().tolist() == tokens
        assert event.seen().all()
        assert event.prompt_tokens == len(answer["choices"][0]["prompt_token_ids"])
        ids = event.ids()
        wrong += truth.differing(tokens, ids)
        total += ids.shape[0] * ids.shape[1]
        sent = sent_footprint(answer)
        assert (sent.tokens, sent.missing) == (len(tokens), 0)
        np.testing.assert_array_equal(sent.counts, footprint(ids, NUM_EXPERTS))
    assert wrong == 0, f"{wrong} of {total} token-layers differ"


def test_a_prefix_hit_keeps_its_experts(servers: tuple[Server, Server], truth: Truth) -> None:
    """The second request computes only the end of its prompt; its footprint counts the whole."""
    plugin = servers[1]
    hits = plugin.metrics()["vllm:prefix_cache_hits_total"]
    shared = list(range(300, 420))
    first = plugin.complete([*shared, 7, 8, 9], max_tokens=4)
    second = plugin.complete([*shared, 17, 18], max_tokens=6)
    assert plugin.metrics()["vllm:prefix_cache_hits_total"] - hits >= 96, "three blocks of 32 were to be found"
    for answer in (first, second):
        tokens = sequence(answer)[:-1]
        sent = sent_footprint(answer)
        assert (sent.tokens, sent.missing) == (len(tokens), 0)
        np.testing.assert_array_equal(sent.counts, truth.footprint(tokens))


@pytest.mark.long
def test_chunks_and_preemption(fleet: Fleet, truth: Truth, prompts: list[str]) -> None:
    """Prompts in chunks of 64 tokens, and a KV cache for two requests while sixteen run."""
    (tight,) = fleet.start({"tight": TIGHT})
    listener = Listener(tight.events)
    chosen = prompts[:48]
    answers = tight.complete_all(chosen, 16, max_tokens=48, ignore_eos=True)
    found = listener.wait(len(chosen))
    assert tight.metrics()["vllm:num_preemptions_total"] > 0
    for number, answer in enumerate(answers):
        tokens, event = sequence(answer)[:-1], event_of(found, f"r{number}r")
        assert event.seen().all()
        assert truth.differing(tokens, event.ids()) == 0
        np.testing.assert_array_equal(sent_footprint(answer).counts, footprint(event.ids(), NUM_EXPERTS))
    fleet.stop("tight")


def test_an_abort_says_what_was_computed(servers: tuple[Server, Server], truth: Truth) -> None:
    """The client goes away in the middle; its event holds the tokens that ran, and later requests are right."""
    plugin = servers[1]
    listener = Listener(plugin.events)
    body: dict[str, Any] = {"prompt": list(range(500, 560)), "max_tokens": 440, "ignore_eos": True, "temperature": 0}
    asked = json.dumps({"model": "tiny", "request_id": "goneaway", "stream": True, **body}).encode()
    request = urllib.request.Request(plugin.url + "/v1/completions", asked, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        assert response.readline().startswith(b"data: "), "the first token is there: it runs"
    found = listener.wait(1)
    event = event_of(found, "goneaway")
    assert event.finish == "abort"
    assert 60 <= len(event.tokens()) < 500
    assert event.seen().all()
    assert truth.differing(event.tokens().tolist(), event.ids()) == 0
    again = plugin.complete(body["prompt"], max_tokens=8)
    np.testing.assert_array_equal(sent_footprint(again).counts, truth.footprint(sequence(again)[:-1]))


def test_recording_a_server_under_load(
    servers: tuple[Server, Server], truth: Truth, prompts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two recordings at once: of one's own prompts, and of all that the server has meanwhile."""
    for patience in ("CONNECTED_S", "LAST_EVENT_S", "GREETING_S"):
        monkeypatch.setattr(recording, patience, 120.0)
    plugin = servers[1]
    wanted = take_in_turn(load_prompts(), 24)
    listening = threading.Event()

    def until_all(what: str, *_: int) -> None:
        if what.startswith("Listening"):
            listening.set()
        if f"Listening, {24 + 20} requests" in what:
            raise KeyboardInterrupt

    def listen() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            record_vllm(plugin.url, tmp_path / "all", Sending(duration_s=600, report=until_all), events=plugin.events)

    everything = threading.Thread(target=listen)
    load = threading.Thread(target=lambda: plugin.complete_all(prompts[100:120], 4, max_tokens=8))
    everything.start()
    assert listening.wait(120)
    load.start()
    own = record_vllm(
        plugin.url,
        tmp_path / "own",
        Sending(prompts=wanted, max_tokens=12, chat=False, concurrency=4),
        events=plugin.events,
    )
    load.join()
    everything.join()
    assert (own.tally.done, own.tally.failed, own.lost, own.unknown) == (24, 0, 0, 0)
    trace = ActivationTrace.open(tmp_path / "own")
    trace.validate()
    assert trace.num_requests == 24
    domains, ids = trace.requests.domains, trace.requests.ids
    assert domains is not None
    assert ids is not None
    assert sum(trace.requests.extra["missing_tokens"]) == 0
    by_id = {prompt.id: prompt for prompt in wanted}
    assert sorted(ids) == sorted(by_id)
    assert all(by_id[i].domain == domain for i, domain in zip(ids, domains, strict=True))
    for index in range(0, 24, 6):
        request = trace.request(index)
        assert request.token_ids is not None
        assert truth.differing(request.token_ids.tolist(), np.asarray(request.expert_ids)) == 0
        assert (request.phase == PREFILL).sum() == trace.requests.prompt_tokens[index]
        assert (request.phase == DECODE).sum() == trace.requests.output_tokens[index] - 1
    assert ActivationTrace.open(tmp_path / "all").num_requests == 24 + 20


def test_a_full_queue_drops_events_and_serving_goes_on(servers: tuple[Server, Server]) -> None:
    """A subscriber that never reads: its queue fills, messages are dropped and counted, another still hears."""
    import zmq

    plugin = servers[1]
    deaf: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
    deaf.setsockopt(zmq.RCVHWM, 1)
    deaf.setsockopt(zmq.RCVBUF, 4096)
    deaf.setsockopt(zmq.LINGER, 0)
    before, errors = plugin.counter("events_dropped"), plugin.counter("errors")
    deaf.connect(plugin.events)
    deaf.setsockopt(zmq.SUBSCRIBE, b"")
    prompt = list(range(100, 500))
    for _ in range(300):
        plugin.complete(prompt, max_tokens=1)
        if plugin.counter("events_dropped") > before:
            break
    dropped = plugin.counter("events_dropped") - before
    listener = Listener(plugin.events)
    answer = plugin.complete([1, 2, 3], max_tokens=2, request_id="stillheard")
    assert "stillheard" in next(iter(listener.wait(1)))
    deaf.close()
    assert len(answer["choices"][0]["token_ids"]) == 2
    assert plugin.counter("errors") == errors
    assert dropped > 0, "the queue of the deaf subscriber never filled"


def test_metrics_are_bounded(servers: tuple[Server, Server]) -> None:
    plugin = servers[1]
    plugin.complete([3, 4, 5], max_tokens=2)
    deadline = time.monotonic() + 120
    while "coterie_distinct_experts" not in plugin.metrics() and time.monotonic() < deadline:
        plugin.complete([3, 4, 6], max_tokens=2)  # the gauges of an interval come with the first step after it
    text = urllib.request.urlopen(plugin.url + "/metrics", timeout=120).read().decode()
    series = [line for line in text.splitlines() if line.startswith("coterie_") and "_created" not in line]
    assert sum("layer=" in line for line in series) == 8, "one for each layer of coterie-tiny"
    assert len(series) < 30
    assert not any("expert=" in line for line in series)
    metrics = plugin.metrics()
    assert metrics["coterie_capture_on"] == 1
    assert 4 <= metrics["coterie_distinct_experts"] <= NUM_EXPERTS
    assert 0 < metrics["coterie_balancedness"] <= 1
    assert metrics["coterie_store_bytes"] > 0


def test_capture_is_turned_off_and_on_in_a_running_server(servers: tuple[Server, Server], truth: Truth) -> None:
    """Last in this file: it makes the server forget the experts of all that it has cached."""
    plugin = servers[1]
    store = PositionStore.attach(ConnectorSettings(store=plugin.store).store_path("", 0))
    prompt = list(range(700, 764))
    before = plugin.complete(prompt, max_tokens=4)
    store.enabled = False
    plugin.complete([5], max_tokens=2)
    off = plugin.complete(prompt, max_tokens=4)
    assert sent_footprint(off).tokens == 0
    assert sent_footprint(off).missing == len(sequence(off)) - 1
    store.enabled = True
    plugin.complete([6], max_tokens=2)
    hit = sent_footprint(plugin.complete(prompt, max_tokens=4))
    assert hit.missing >= 32, "a block cached before is no longer vouched for"
    fresh = plugin.complete(list(range(800, 864)), max_tokens=4)
    np.testing.assert_array_equal(sent_footprint(fresh).counts, truth.footprint(sequence(fresh)[:-1]))
    assert sequence(before) == sequence(off), "capture changes no token"
