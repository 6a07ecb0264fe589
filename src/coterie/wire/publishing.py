"""Publish on a ZMQ PUB or XPUB socket without blocking: a full queue is detected, and other subscribers lose nothing.

libzmq lets a publisher write at most a set number of messages ahead of each subscriber. A subscriber that reads
messages frees room by a command to the publisher's socket, but `send` processes commands only once in 3,000,000 ticks
of the processor's clock, or nanoseconds where libzmq cannot read that clock: about 1 ms on x86_64 and 3 ms on aarch64.
Within that time a fast publisher may find every queue full, even those of subscribers that have read everything. So
pending commands are processed before a message is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import zmq


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
    try:
        socket.send_multipart(frames, zmq.DONTWAIT)
    except zmq.Again:
        return False
    return True
