"""The frames of an event stream on ZMQ PUB: ``[topic, sequence number, payload]``, as vLLM publishes KV events.

A gap in the sequence tells a subscriber how many messages it lost (PUB drops messages for a slow reader).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import zmq

from coterie.errors import InputError

REPLAY_END = (1 << 64) - 1
"""Sequence number that closes a replay: vLLM sends -1 in eight bytes."""


class Frame(NamedTuple):
    topic: bytes
    seq: int
    payload: bytes


def to_frames(topic: bytes, seq: int, payload: bytes) -> list[bytes]:
    return [topic, seq.to_bytes(8, "big"), payload]


def from_frames(frames: Sequence[bytes]) -> Frame:
    """Parse a message as received; malformed input raises InputError.

    A replay may leave the topic out: SGLang does, and vLLM did.
    """
    topic, rest = (b"", frames) if len(frames) == 2 else (frames[0] if frames else b"", frames[1:])
    if len(rest) != 2 or len(rest[0]) != 8:
        sizes = [len(frame) for frame in frames]
        raise InputError(f"is a message of frames with {sizes} bytes, expected [topic, 8-byte sequence, payload]")
    return Frame(topic, int.from_bytes(rest[0], "big"), rest[1])


@dataclass(slots=True)
class Gaps:
    """Lower bound of the messages a subscriber missed: those lost at a publisher's end cannot be seen.

    A sequence that falls means that the publisher restarted at 0.
    """

    lost: int = 0
    restarts: int = 0
    _next: int | None = None

    def see(self, seq: int) -> int:
        """Number of messages lost just before this one."""
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
"""Silence after which the system asks whether the other end is there, and the time between two such questions."""
QUEUE_BYTES = 64 << 20
"""Most bytes of a queue. Beyond that the other end waits, and keeps messages or drops them."""
MOST_QUEUED = 1000


def queue_of(message_bytes: int) -> int:
    """Messages of a queue that is bounded in bytes: ZMQ itself counts messages only."""
    return max(2, min(QUEUE_BYTES // message_bytes, MOST_QUEUED))


def bound_reader(socket: zmq.Socket[Any], queue: int, message_bytes: int) -> None:
    """Bound a socket's queue, in messages, and its messages. Call before `connect`.

    The system's keep-alive finds a connection whose other end is gone. Not ZMQ's heartbeats: with them, a reader whose
    queue is full aborts its process (libzmq 4.3, assertion `_input_stopped`).
    """
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, queue)
    socket.setsockopt(zmq.MAXMSGSIZE, message_bytes)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
