"""The frames of an event stream on ZMQ PUB: ``[topic, sequence number, payload]``, as vLLM publishes KV events.

A gap in the sequence numbers tells a subscriber how many messages it lost (PUB drops messages for a slow reader).
"""

from __future__ import annotations

from collections.abc import Sequence
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
    restarts: int = 0
    _next: int | None = None

    def see(self, seq: int) -> int:
        """Record a received sequence number; returns the number of messages lost just before it."""
        missed = 0
        if self._next is not None:
            if seq < self._next:
                self.restarts += 1
                missed = seq
            else:
                missed = seq - self._next
        self._next = seq + 1
        self.lost += missed
        return missed


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
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, queue)
    socket.setsockopt(zmq.MAXMSGSIZE, message_bytes)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
