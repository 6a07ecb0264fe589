"""Publish on a ZMQ PUB or XPUB socket without waiting: a full subscriber is noticed, and costs no other one a message.

libzmq lets a publisher write at most a set number of messages ahead of each subscriber. A subscriber that keeps up
returns that room by a command to the publisher's socket, and `send` looks at its commands only once in a while: once in
3,000,000 ticks of the processor's clock, or of nanoseconds where libzmq cannot read that clock. This is about 1 ms on
x86_64 and 3 ms on aarch64. Within that time a publisher that is fast enough finds everyone full, also subscribers who
have read everything. So before a message is dropped, the commands are read.
"""

from __future__ import annotations

from collections.abc import Sequence

import zmq


def limit_queues(socket: zmq.Socket[bytes], messages: int) -> None:
    """Queue at most `messages` for each subscriber of a socket that will be bound."""
    socket.setsockopt(zmq.SNDHWM, messages)
    socket.setsockopt(zmq.XPUB_NODROP, 1)  # refuse a message instead of dropping it silently


def send_to_all(socket: zmq.Socket[bytes], frames: Sequence[bytes]) -> bool:
    """Send to every subscriber that has room. False if a queue was found full.

    From then on libzmq leaves that subscriber out without telling, until half of its queue is free again.
    """
    if _accepts(socket, frames):
        return True
    socket.getsockopt(zmq.EVENTS)  # reads the socket's commands now
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
