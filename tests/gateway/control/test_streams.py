"""Streams of expert events on real sockets: what is lost, doubled, late or broken is counted, and never acted on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from numpy.random import Generator

from control_cases import EXPERTS, LAYERS, SHAPE, Publisher, load_event, request_event, saved_fit
from coterie.gateway.config import ControlSection
from coterie.gateway.control.driver import Driver
from coterie.gateway.control.matching import SentRequests
from coterie.gateway.control.messages import FromLoop, SetUp, StreamEntry, Told
from coterie.gateway.control.streams import MOST_LOST, ExpertStreams, message_bytes
from coterie.gateway.fleet.spec import RouterSpec
from coterie.wire.expert_events import TOPIC, ExpertEvents, ExpertLoad, ExpertMap, RequestExperts, encode_expert_events
from coterie.wire.framing import to_frames

PATIENCE_S = 60.0
EAGER = ControlSection(window=4, min_requests=8, fit_requests=32, score_requests=16, cooldown_s=0.0)
"""Acts on as little as it may."""


class Raw:
    """A publisher that sends whatever frames it is given."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.PUB)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.bind("tcp://127.0.0.1:*")
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, *events: RequestExperts | ExpertLoad, seq: int, at_s: float | None = None) -> None:
        batch = ExpertEvents(time.time() if at_s is None else at_s, list(events))
        self.socket.send_multipart(to_frames(TOPIC, seq, encode_expert_events(batch)))

    def close(self) -> None:
        self.context.destroy(linger=0)


@contextmanager
def streams_of(endpoint: str, secret: str | None = None, secure: bool = False) -> Iterator[ExpertStreams]:
    streams = ExpertStreams(secret)
    try:
        streams.follow([StreamEntry("decode-0", endpoint, secure)])
        yield streams
    finally:
        streams.close()


def read_until(
    streams: ExpertStreams, holds: Callable[[], object], send: Callable[[], object] | None = None
) -> list[Any]:
    """Read events until it holds; `send` is called again and again, as nothing tells when a subscription stands."""
    found, until = [], time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until, streams.counters
        if send is not None:
            send()
        streams.wait_for(0.01)
        found += list(streams.read())
    return found


@pytest.fixture
def raw() -> Iterator[Raw]:
    publisher = Raw()
    try:
        yield publisher
    finally:
        publisher.close()


def connected(streams: ExpertStreams, raw: Raw) -> int:
    """Wait until messages come, and return the next free number."""
    seq = 0

    def send() -> None:
        nonlocal seq
        raw.send(seq=seq)
        seq += 1

    read_until(streams, lambda: streams.counters["messages"], send)
    read_until(streams, lambda: streams.last_seq("decode-0") == seq - 1)
    streams.counters.clear()
    return seq


def test_events_come_with_their_worker(rng: Generator) -> None:
    publisher = Publisher("decode-0")
    try:
        with streams_of(publisher.endpoint) as streams:
            found = read_until(streams, lambda: streams.counters["messages"], lambda: publisher.serve("low", 1, rng))
            assert {one.worker for one in found} == {"decode-0"}
    finally:
        publisher.close()


@pytest.mark.parametrize("mine", ["s" * 32, "t" * 32])
def test_a_protected_stream_needs_the_secret(rng: Generator, mine: str) -> None:
    publisher = Publisher("decode-0", "s" * 32)
    ours = Publisher("decode-1", mine)
    try:
        streams = ExpertStreams(mine)
        streams.follow(
            [StreamEntry("decode-0", publisher.endpoint, True), StreamEntry("decode-1", ours.endpoint, True)]
        )

        def send() -> None:
            publisher.serve("low", 1, rng)
            ours.serve("low", 1, rng)

        workers: set[str] = set()
        while "decode-1" not in workers or (mine[0] == "s" and "decode-0" not in workers):
            send()
            streams.wait_for(0.01)
            workers |= {one.worker for one in streams.read()}
        assert workers == ({"decode-0", "decode-1"} if mine[0] == "s" else {"decode-1"})
        streams.close()
    finally:
        publisher.close()
        ours.close()


def test_what_is_lost_doubled_or_begun_anew_is_counted(raw: Raw, rng: Generator) -> None:
    with streams_of(raw.endpoint) as streams:
        first = connected(streams, raw)
        event = load_event("low", rng)
        for seq in (first, first, first + 5, 0, 1):  # the second again, four lost, begun anew
            raw.send(event, seq=seq)
        raw.socket.send_multipart([TOPIC, b"?", b"?"])
        raw.socket.send_multipart([TOPIC])
        found = read_until(streams, lambda: streams.counters["messages"] == 7)
        assert len(found) == 4, "those that are new"
        assert +streams.counters == Counter(messages=7, lost=4, doubled=1, restarts=1, malformed=2)
        assert streams.last_error.startswith("decode-0: ")


@pytest.mark.parametrize("ahead_s", [0.0, 1800.0, 1e12, float("nan")])
def test_no_forged_number_and_no_wrong_clock_silences_a_worker(raw: Raw, rng: Generator, ahead_s: float) -> None:
    with streams_of(raw.endpoint) as streams:
        first, event = connected(streams, raw), load_event("low", rng)
        raw.send(event, seq=2**64 - 2, at_s=time.time() + ahead_s)
        for seq in range(first, first + 50):
            raw.send(event, seq=seq)
        assert len(read_until(streams, lambda: streams.counters["messages"] == 51)) == 51
        assert streams.counters["lost"] <= MOST_LOST


def test_messages_longer_than_the_model_needs_are_not_read(raw: Raw) -> None:
    """SHAPE has 2 layers of 2 experts a token: a prompt of 128k tokens takes little over a megabyte."""
    streams, most = ExpertStreams(None), message_bytes(SHAPE)
    assert most < 3 << 20
    assert 58 << 20 < message_bytes(SHAPE._replace(num_layers=58, num_experts=256, top_k=8)) < 64 << 20
    try:
        streams.follow([StreamEntry("decode-0", raw.endpoint)], most)
        connected(streams, raw)
        raw.socket.send_multipart(to_frames(TOPIC, 1, bytes(most + 1)))
        seq = iter(range(2, 10**6))
        found = read_until(streams, lambda: streams.counters["messages"], lambda: raw.send(seq=next(seq)))
        assert not found
        assert streams.counters["malformed"] == 0, "the long one was never read, and later ones are"
    finally:
        streams.close()


def test_a_secure_stream_is_not_read_without_a_secret(raw: Raw) -> None:
    with streams_of(raw.endpoint, None, secure=True) as streams:
        assert streams.counters["unreachable"] == 1
        assert "decode-0" in streams.last_error


def test_workers_come_and_go(raw: Raw, rng: Generator) -> None:
    with streams_of(raw.endpoint) as streams:
        connected(streams, raw)
        streams.follow([StreamEntry("decode-0", "no endpoint at all")])
        assert streams.counters["unreachable"] == 1
        raw.send(load_event("low", rng), seq=0)
        streams.wait_for(0.05)
        assert not list(streams.read())


def test_forged_requests_at_five_times_the_traffic_start_no_re_fit(rng: Generator, tmp_path: Path) -> None:
    """The fleet serves what it was fitted to; one of its workers tells of other traffic, five times as much."""
    told: list[FromLoop] = []
    spec = RouterSpec("latency_aware", fit=saved_fit("low", tmp_path))
    setup = SetUp(generation=1, spec=spec, rows=2, section=EAGER, folder=str(tmp_path), streams=[])
    sent, streams = SentRequests(), ExpertStreams(None)
    driver = Driver(setup, told.append, 0.0, sent)
    for number in range(64):
        worker = f"w{number % 2}"
        sent.add(f"real-{number}", worker)
        driver.take(worker, request_event(f"real-{number}", "low", number % 2, rng), number / 10)
        for forged in range(5):
            name = f"forged-{number}-{forged}" if forged else f"real-{number}"
            driver.take("w1", request_event(name, "odd", forged % 2, rng), number / 10)
        driver.tick(number / 10, streams)
    streams.close()
    kinds = {event["kind"] for one in told if isinstance(one, Told) for event in one.events}
    assert "no_drift" in kinds
    assert not kinds & {"drift", "refit_started", "refit_taken"}
    assert driver.matcher.counters["not_sent"] == 5 * 64


def hostile(number: int, rng: Generator) -> list[bytes]:
    """One message that no worker of this model sends, or that one sends again, late or broken."""
    good = request_event(f"r{number}", "odd", number % 2, rng)
    load = load_event("odd", rng)
    stamp, seq = time.time(), number
    structs: list[Any] = [
        msgspec.structs.replace(good, num_experts=EXPERTS * 2),
        msgspec.structs.replace(good, layer_ids=list(range(LAYERS + 1))),
        msgspec.structs.replace(good, expert_ids=rng.bytes(80)),
        msgspec.structs.replace(good, expert_ids=bytes(80)),
        msgspec.structs.replace(good, expert_ids=b""),
        msgspec.structs.replace(good, prompt_tokens=int(rng.integers(-(2**62), 2**62))),
        msgspec.structs.replace(good, token_ids=rng.bytes(7)),
        msgspec.structs.replace(good, known=rng.bytes(1)),
        msgspec.structs.replace(good, request_id="again", token_ids=bytes(80)),
        msgspec.structs.replace(load, seconds=float(rng.choice([np.nan, np.inf, -1.0, 1e300]))),
        msgspec.structs.replace(load, tokens=-1),
        msgspec.structs.replace(load, counts=rng.bytes(128)),
        msgspec.structs.replace(load, counts=b"\xff" * 128, tokens=2**62),
        msgspec.structs.replace(load, steps=-(2**40)),
        msgspec.structs.replace(load, num_experts=2**30, counts=b""),
    ]
    kind = int(rng.integers(len(structs) + 4))
    if kind < len(structs):
        return to_frames(TOPIC, seq, encode_expert_events(ExpertEvents(stamp, [structs[kind]])))
    payload = encode_expert_events(ExpertEvents(stamp, [good]))
    cut = bytearray(payload)
    cut[int(rng.integers(min(20, len(cut))))] ^= int(rng.integers(1, 256))
    others = [
        [TOPIC, rng.bytes(3), payload],
        to_frames(TOPIC, seq, rng.bytes(int(rng.integers(0, 200)))),
        to_frames(TOPIC, seq, bytes(cut[: int(rng.integers(1, len(cut)))])),
        to_frames(TOPIC, seq, encode_expert_events(ExpertEvents(float(rng.choice([np.nan, -1.0, 1e12])), [good]))),
    ]
    return others[kind - len(structs)]


@pytest.mark.parametrize("count", [600, pytest.param(10_000, marks=pytest.mark.long)])
def test_no_hostile_message_crashes_the_loop_or_makes_it_act(
    raw: Raw, rng: Generator, tmp_path: Path, count: int
) -> None:
    sent: list[FromLoop] = []
    setup = SetUp(
        generation=1,
        spec=RouterSpec("latency_aware", fit=saved_fit("low", tmp_path)),
        rows=2,
        section=EAGER,
        folder=str(tmp_path),
        streams=[],
    )
    now_s = 0.0
    driver = Driver(setup, sent.append, now_s)  # with all requests: what is not sent would not get far
    with streams_of(raw.endpoint) as streams:
        first = connected(streams, raw)
        for number in range(first, first + count):
            raw.socket.send_multipart(hostile(number, rng))
            if number % 50 == 49:
                raw.socket.send_multipart(to_frames(TOPIC, number, encode_expert_events(ExpertEvents(0.0, []))))
        total = count + sum(number % 50 == 49 for number in range(first, first + count))
        until = time.monotonic() + PATIENCE_S
        while streams.counters["messages"] < total:
            assert time.monotonic() < until, streams.counters
            streams.wait_for(0.05)
            for received in streams.read():
                assert not isinstance(received.event, ExpertMap)
                driver.take(received.worker, received.event, now_s)
            now_s += 0.1
            driver.tick(now_s, streams)
    told = [one for one in sent if isinstance(one, Told)]
    assert len(told) == len(sent), "nothing was to be swapped in"
    kinds = {event["kind"] for one in told for event in one.events}
    assert not kinds & {"refit_started", "refit_taken", "plan_made", "fall_back"}, kinds
    assert not list(tmp_path.glob("fit-*")), "no fit was made"
    counted: Counter[str] = Counter()
    for one in told:
        counted.update(one.counters)
    ignored = sum(counted[f"ignored.{reason}"] for reason in driver.matcher.counters) + counted["ignored.loop"]
    broken = sum(counted[f"streams.{kind}"] for kind in ("malformed", "doubled"))
    assert counted["streams.messages"] == total
    assert ignored > count / 4
    assert broken > count / 10
