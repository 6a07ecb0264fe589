"""What every socket that reads event streams has: bounds, and a way to notice that the other end is gone."""

from __future__ import annotations

from typing import Any

import zmq

KEEPALIVE_S = 10
"""Silence after which the system asks whether the other end is there, and the time between two such questions."""


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
