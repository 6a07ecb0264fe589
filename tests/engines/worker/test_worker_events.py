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
from coterie.wire.event_security import secure_subscriber
from coterie.wire.framing import REPLAY_END, Frame, Gaps, from_frames

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
    for _ in range(3000):  # until the subscription has arrived, and nothing older is on its way
        stream.publish(b"")
        while socket.poll(20):
            if from_frames(socket.recv_multipart()).seq == stream.published - 1:
                return socket
    raise AssertionError("nothing was received")


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
    assert stream.dropped >= 1, "the stuck reader was found full"
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


def test_a_reader_that_has_read_everything_is_never_found_full(
    context: Any, publish: Callable[[int], EventStream]
) -> None:
    """libzmq learns of the room that a reader makes up to 3 ms late: a faster publisher must ask for it."""
    stream = publish(1)
    reading = subscriber(context, stream, 10_000)
    dropped = stream.dropped
    for number in range(stream.published, stream.published + 1000):
        stream.publish(b"")
        assert stream.dropped == dropped, "the reader had received the message before"
        assert from_frames(reading.recv_multipart()).seq == number
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


# -------------------------------------------------------------------------------------------------------------- replay

SECRET = "a secret that a fleet shares"


def asker(context: Any, stream: EventStream, kind: int, secret: str | None) -> Any:
    socket = context.socket(kind)
    socket.setsockopt(zmq.RCVTIMEO, 120_000)
    socket.setsockopt(zmq.LINGER, 0)
    if secret is not None:
        secure_subscriber(socket, secret)
    assert stream._replay is not None
    socket.connect(stream._replay.endpoint)
    return socket


def replayed(dealer: Any, first: int) -> list[Frame]:
    """What a worker sends again, from a number on; the mark of its end is cut off."""
    dealer.send_multipart([b"", first.to_bytes(8, "big")])
    frames: list[Frame] = []
    while True:
        frame = from_frames(dealer.recv_multipart()[1:])
        if frame.seq == REPLAY_END:
            return frames
        frames.append(frame)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_past_messages_are_sent_again(context: Any, secret: str | None) -> None:
    stream = EventStream("tcp://127.0.0.1:*", b"t", 10, secret, "tcp://127.0.0.1:*", keep=4)
    try:
        for number in range(7):
            stream.publish(b"%d" % number)
        with asker(context, stream, zmq.DEALER, secret) as dealer:
            for first, numbers in ((0, [3, 4, 5, 6]), (5, [5, 6]), (7, []), (REPLAY_END, [])):
                assert replayed(dealer, first) == [Frame(b"t", number, b"%d" % number) for number in numbers]
            for nonsense in ([b"x"], [b""], [b"", b"x"], [b"", b"", b""], [b"x", bytes(8)], [b"", bytes(9)]):
                dealer.send_multipart(nonsense)
            assert [frame.seq for frame in replayed(dealer, 6)] == [6], "what cannot be read is not answered"
        with asker(context, stream, zmq.REQ, secret) as simple:  # takes the first message of the answer
            simple.send(bytes(8))
            assert from_frames(simple.recv_multipart()) == Frame(b"t", 3, b"3")
    finally:
        stream.close()


def test_every_replay_is_whole_for_one_who_reads_it(context: Any) -> None:
    """libzmq hears of what was read in halves of a queue: a queue of one answer has no room for the next."""
    stream = EventStream("tcp://127.0.0.1:*", b"t", 10, None, "tcp://127.0.0.1:*", keep=2)
    try:
        stream.publish(b"0")
        stream.publish(b"1")
        with asker(context, stream, zmq.DEALER, None) as dealer:
            for _ in range(200):
                assert [frame.seq for frame in replayed(dealer, 0)] == [0, 1]
    finally:
        stream.close()


def test_a_replay_that_cannot_be_bound_leaves_nothing_behind() -> None:
    with pytest.raises(UnavailableError, match="cannot publish there"):
        EventStream("tcp://127.0.0.1:*", b"t", 2, SECRET, "tcp://nowhere")
