"""The frames of an event stream on ZMQ PUB: ``[topic, sequence number, payload]``, as vLLM publishes KV events.

A gap in the sequence numbers tells a subscriber how many messages it lost (PUB drops messages for a slow reader).

Publishing on a PUB or XPUB socket does not block: a full queue is detected, and other subscribers lose nothing.
libzmq lets a publisher write at most a set number of messages ahead of each subscriber. A subscriber that reads
messages frees room by a command to the publisher's socket, but `send` processes commands only once in 3,000,000 ticks
of the processor's clock, or nanoseconds where libzmq cannot read that clock: about 1 ms on x86_64 and 3 ms on aarch64.
Within that time a fast publisher may find every queue full, even those of subscribers that have read everything. So
pending commands are processed before a message is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import zmq

from coterie.errors import InputError

REPLAY_END = (1 << 64) - 1
"""Sequence number of the message that ends a replay: vLLM sends -1 as eight bytes."""


class Frame(NamedTuple):
    topic: bytes
    seq: int
    payload: bytes


def to_frames(topic: bytes, seq: int, payload: bytes) -> list[bytes]:
    return [topic, seq.to_bytes(8, "big"), payload]


def from_frames(frames: Sequence[bytes]) -> Frame:
    """Parse a message as received; malformed input raises InputError.

    Messages of a replay may lack the topic: SGLang omits it, and so did older versions of vLLM.
    """
    topic, rest = (b"", frames) if len(frames) == 2 else (frames[0] if frames else b"", frames[1:])
    if len(rest) != 2 or len(rest[0]) != 8:
        sizes = [len(frame) for frame in frames]
        raise InputError(f"is a message of frames with {sizes} bytes, expected [topic, 8-byte sequence, payload]")
    return Frame(topic, int.from_bytes(rest[0], "big"), rest[1])


@dataclass(slots=True)
class Gaps:
    """Lower bound on the messages a subscriber missed: the last messages before a publisher stops leave no gap.

    A sequence number below the expected one means that the publisher restarted at 0.
    """

    lost: int = 0
    _next: int | None = None

    def see(self, seq: int) -> int:
        """Record a received sequence number; returns the number of messages lost just before it."""
        expected = seq if self._next is None else self._next
        if seq < expected:
            expected = 0
        self._next = seq + 1
        self.lost += seq - expected
        return seq - expected


KEEPALIVE_S = 10
"""Seconds of silence before the first TCP keep-alive probe, and seconds between probes."""
QUEUE_BYTES = 64 << 20
"""Upper bound on the bytes of a receive queue. When the queue is full, the sender queues messages or drops them."""
MOST_QUEUED = 1000


def queue_of(message_bytes: int) -> int:
    """Return the length, in messages, of a queue of at most QUEUE_BYTES: ZMQ limits messages, not bytes."""
    return max(2, min(QUEUE_BYTES // message_bytes, MOST_QUEUED))


def bound_reader(socket: zmq.Socket[Any], queue: int, message_bytes: int) -> None:
    """Limit a socket's receive queue, in messages, and the bytes of a message. Call before `connect`.

    TCP keep-alive detects a connection whose other end is gone. ZMQ's heartbeats are not used: with them, a reader
    whose queue is full aborts its process (libzmq 4.3, assertion `_input_stopped`).
    """
    options = {zmq.LINGER: 0, zmq.RCVHWM: queue, zmq.MAXMSGSIZE: message_bytes}
    alive = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: KEEPALIVE_S, zmq.TCP_KEEPALIVE_INTVL: KEEPALIVE_S}
    for option, value in (options | alive).items():
        socket.setsockopt(option, value)


def limit_queues(socket: zmq.Socket[bytes], messages: int) -> None:
    """Queue at most `messages` for each subscriber of a socket that will be bound."""
    socket.setsockopt(zmq.SNDHWM, messages)
    socket.setsockopt(zmq.XPUB_NODROP, 1)  # refuse a message instead of dropping it silently


def send_to_all(socket: zmq.Socket[bytes], frames: Sequence[bytes]) -> bool:
    """Send to every subscriber whose queue has room; returns False if a queue was full.

    After that, libzmq silently skips the subscriber with the full queue until half of its queue is free again.
    """
    if _accepts(socket, frames):
        return True
    socket.getsockopt(zmq.EVENTS)  # reading EVENTS processes the socket's pending commands
    if _accepts(socket, frames):
        return True
    socket.setsockopt(zmq.XPUB_NODROP, 0)
    socket.send_multipart(frames, zmq.DONTWAIT)
    socket.setsockopt(zmq.XPUB_NODROP, 1)
    return False


def _accepts(socket: zmq.Socket[bytes], frames: Sequence[bytes]) -> bool:
    with suppress(zmq.Again):
        socket.send_multipart(frames, zmq.DONTWAIT)
        return True
    return False
