"""The event publisher and the subscriber over real sockets: who listens, what is lost, what fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import zmq

from coterie.engines.vllm.publisher import EventPublisher
from coterie.engines.vllm.recording import Subscriber, events_endpoint
from coterie.errors import InputError, UnavailableError
from coterie.net.processes import free_port
from coterie.wire.expert_events import RequestExperts


def request(name: str, tokens: int = 4) -> RequestExperts:
    ids = np.arange(tokens * 6).reshape(tokens, 3, 2) % 8
    return RequestExperts.pack(
        ids,
        np.arange(tokens),
        np.ones(tokens, np.bool_),
        8,
        request_id=name,
        model="m",
        layer_ids=[0, 1, 2],
        prompt_tokens=tokens,
    )


@pytest.fixture
def endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def publisher(endpoint: str) -> Iterator[EventPublisher]:
    made = EventPublisher(endpoint, rank=2, capacity=16)
    yield made
    made.close()


def names(subscriber: Subscriber, seconds: float, count: int) -> list[str]:
    found = []
    for event in subscriber.events(seconds):
        assert isinstance(event, RequestExperts)
        found.append(event.request_id)
        if len(found) == count:
            break
    return found


def test_every_subscriber_is_greeted_and_hears_all(publisher: EventPublisher, endpoint: str) -> None:
    assert [publisher.wanted] == [False]
    with Subscriber(endpoint) as first, Subscriber(endpoint) as second:
        first.wait(60)
        second.wait(60)
        assert publisher.wanted
        for number in range(10):
            publisher.publish(request(str(number)))
        expected = [str(number) for number in range(10)]
        assert names(first, 60, 10) == expected
        assert names(second, 60, 10) == expected
        assert first.gaps.lost == second.gaps.lost == 0
    until = time.monotonic() + 60
    while publisher.wanted and time.monotonic() < until:
        time.sleep(0.02)
    assert not publisher.wanted, "nobody is left"


def test_a_full_queue_is_counted_and_never_waited_for(publisher: EventPublisher) -> None:
    begun, gate = threading.Event(), threading.Event()

    def slow() -> RequestExperts:
        begun.set()
        gate.wait(300)
        return request("slow")

    publisher.publish(slow)
    assert begun.wait(60)
    accepted = [publisher.publish(request("x")) for _ in range(50)]  # the thread takes none meanwhile
    assert accepted == [True] * 16 + [False] * 34
    assert publisher.counts.dropped == 34
    gate.set()


def test_a_subscriber_that_never_reads_is_noticed(endpoint: str) -> None:
    publisher = EventPublisher(endpoint, rank=0, capacity=4)
    deaf: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
    deaf.setsockopt(zmq.RCVHWM, 1)
    deaf.setsockopt(zmq.LINGER, 0)
    deaf.connect(endpoint)
    deaf.setsockopt(zmq.SUBSCRIBE, b"")
    until = time.monotonic() + 120
    while not publisher.counts.dropped and time.monotonic() < until:
        publisher.publish(request("big", 50_000))
        time.sleep(0.005)
    deaf.close()
    publisher.close()
    assert publisher.counts.dropped > 0


def test_an_event_that_cannot_be_built_is_counted_and_the_next_is_sent(
    publisher: EventPublisher, endpoint: str
) -> None:
    def broken() -> RequestExperts:
        raise ValueError("no")

    with Subscriber(endpoint) as subscriber:
        subscriber.wait(60)
        publisher.publish(broken)
        publisher.publish(lambda: request("after"))
        assert names(subscriber, 60, 1) == ["after"]
    assert (publisher.counts.failed, publisher.last_error) == (1, "ValueError('no')")


def test_with_a_secret_only_the_fleet_subscribes(endpoint: str) -> None:
    secret = "a secret that a fleet shares"
    publisher = EventPublisher(endpoint, rank=0, capacity=16, secret=secret)
    try:
        with Subscriber(endpoint) as stranger, Subscriber(endpoint, secret=secret) as subscriber:
            assert subscriber.wait(60), "it is greeted"
            publisher.publish(lambda: request("private"))
            assert names(subscriber, 60, 1) == ["private"]
            assert list(stranger.events(0.01)) == []
    finally:
        publisher.close()


def test_damaged_messages_are_counted(endpoint: str) -> None:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(endpoint)
    with Subscriber(endpoint) as subscriber:
        assert socket.poll(60_000), "it subscribes"
        socket.recv()
        for frames in ([b"experts", b"short", b""], [b"experts", b"12345678", b"\xc1"], [b"experts"]):
            socket.send_multipart(frames)
        until = time.monotonic() + 60
        while subscriber.damaged < 3 and time.monotonic() < until:
            assert list(subscriber.events(0.5)) == []
        assert subscriber.damaged == 3
    socket.close()


def test_clear_words_for_what_is_not_there(endpoint: str) -> None:
    with Subscriber(endpoint) as subscriber, pytest.raises(UnavailableError, match="CoterieConnector"):
        subscriber.wait(0.2)
    with pytest.raises(InputError, match="not a ZMQ endpoint"):
        Subscriber("nonsense")
    taken = EventPublisher(endpoint, 0, 4)
    with pytest.raises(UnavailableError, match="cannot be published"):
        EventPublisher(endpoint, 0, 4)
    taken.close()


def test_where_a_server_publishes() -> None:
    assert events_endpoint("http://box:8000", None) == "tcp://box:5602"
    assert events_endpoint("http://box:8000", "tcp://*:7000") == "tcp://box:7000"
    assert events_endpoint("http://box:8000", "ipc:///tmp/x") == "ipc:///tmp/x"
