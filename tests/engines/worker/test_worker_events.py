"""Event streams on real sockets: a stuck reader loses messages, is counted, and costs nobody else one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from coterie.engines.worker.events import EventStream
from coterie.errors import UnavailableError
from coterie.wire.framing import Gaps, from_frames

PAYLOAD = b"x" * 50_000


@pytest.fixture
def context() -> Iterator[Any]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def publish() -> Iterator[Callable[[int], EventStream]]:
    with contextlib.ExitStack() as stack:

        def start(queue: int) -> EventStream:
            stream = EventStream("tcp://127.0.0.1:*", b"t", queue)
            stack.callback(stream.close)
            return stream

        yield start


def subscriber(context: Any, stream: EventStream, queue: int, buffer: int | None = None) -> Any:
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVHWM, queue)
    socket.setsockopt(zmq.RCVTIMEO, 120_000)
    if buffer is not None:
        socket.setsockopt(zmq.RCVBUF, buffer)
    socket.setsockopt(zmq.SUBSCRIBE, b"t")
    socket.connect(stream.endpoint)
    for _ in range(12_000):  # until the subscription has arrived
        stream.publish(b"")
        if socket.poll(10):
            break
    while socket.poll(20):
        socket.recv_multipart()
    return socket


def test_a_full_queue_drops_and_counts_and_never_waits(context: Any, publish: Callable[[int], EventStream]) -> None:
    stream = publish(50)  # a reader that keeps up is given room in halves of this
    stuck, reading = subscriber(context, stream, 1, 4096), subscriber(context, stream, 10_000)
    gaps, got = Gaps(), 0
    first = stream.published
    for _ in range(400):
        stream.publish(PAYLOAD)  # if it waited for the stuck reader, it would wait for ever
        frame = from_frames(reading.recv_multipart())
        gaps.see(frame.seq)
        got += 1
    assert stream.dropped == 1, "it was found full once, and left out from then on"
    assert (got, gaps.lost) == (400, 0), "the other reader lost nothing"
    missed, seen, last = Gaps(), 0, first - 1
    missed.see(last)
    for _ in range(500):  # it wakes up: what was kept for it, then new messages
        while stuck.poll(20):
            seq = from_frames(stuck.recv_multipart()).seq
            if seq >= first:  # older ones were sent while the other reader subscribed
                last = seq
                missed.see(last)
                seen += 1
        if last >= first + 400:
            break
        stream.publish(PAYLOAD)
    assert seen + missed.lost == last - first + 1
    assert missed.lost > 100, "and it can tell how many it missed"
    stuck.close(linger=0)
    reading.close(linger=0)


def test_nobody_listening_is_no_loss(publish: Callable[[int], EventStream]) -> None:
    stream = publish(2)
    for _ in range(100):
        stream.publish(PAYLOAD)
    assert (stream.published, stream.dropped) == (100, 0)


def test_a_reader_that_leaves_is_no_loss(context: Any, publish: Callable[[int], EventStream]) -> None:
    stream = publish(2)
    subscriber(context, stream, 1).close(linger=0)
    deadline, before = time.monotonic() + 120, -1
    while stream.dropped != before and time.monotonic() < deadline:  # until it is known to be gone
        time.sleep(0.1)
        before = stream.dropped
        for _ in range(50):
            stream.publish(PAYLOAD)
    assert stream.dropped == before


def test_an_endpoint_that_cannot_be_had(publish: Callable[[int], EventStream]) -> None:
    stream = publish(2)
    for endpoint in (stream.endpoint, "tcp://nowhere", "ipc:///no/such/folder/x"):
        with pytest.raises(UnavailableError, match="cannot publish there"):
            EventStream(endpoint, b"t", 2)
