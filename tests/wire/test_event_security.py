"""Streams that only a fleet can read, on real sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from coterie.wire import event_security
from coterie.wire.event_security import secure_publisher, secure_subscriber

SECRET = "a secret that a fleet shares"
WAIT_MS = 60_000
FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class Sockets:
    """Keeps them open until the end of a test."""

    def __init__(self, context: Any) -> None:
        self._context, self._made = context, list[Any]()

    def __call__(self, kind: int) -> Any:
        self._made.append(self._context.socket(kind))
        return self._made[-1]

    def close(self) -> None:
        for socket in self._made:
            socket.close(linger=0)


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    context = zmq.Context()
    sockets = Sockets(context)
    yield sockets
    sockets.close()
    context.term()


def publisher(sockets: Sockets, secret: str) -> Any:
    socket = sockets(zmq.XPUB)
    secure_publisher(socket, secret)
    socket.bind("tcp://127.0.0.1:*")
    return socket


def subscriber(sockets: Sockets, server: Any, prepare: Callable[[Any], None]) -> tuple[Any, bool]:
    """A subscriber, and whether it was let in."""
    socket = sockets(zmq.SUB)
    prepare(socket)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    monitor = socket.get_monitor_socket(FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
    socket.connect(server.getsockopt_string(zmq.LAST_ENDPOINT))
    assert monitor.poll(WAIT_MS), "the handshake has an end"
    success = recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
    socket.disable_monitor()
    monitor.close()
    return socket, success


def test_who_has_the_secret_can_read(sockets: Sockets) -> None:
    """Two fleets in one process do not disturb each other."""
    other = "another secret of another fleet"
    servers = [publisher(sockets, secret) for secret in (SECRET, other)]
    for server, secret in zip(servers, (SECRET, other), strict=True):
        socket, success = subscriber(sockets, server, partial(secure_subscriber, secret=secret))
        assert success
        assert server.poll(WAIT_MS)
        assert server.recv() == b"\x01", "it has subscribed"
        server.send(b"a prompt")
        assert socket.poll(WAIT_MS)
        assert socket.recv() == b"a prompt"


def _with_a_key_of_its_own(socket: Any) -> None:
    """Knows even the publisher's public key, which only the secret gives."""
    public, private = zmq.curve_keypair()
    socket.setsockopt(zmq.CURVE_SERVERKEY, event_security._pair(SECRET, "publisher").public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, private)


@pytest.mark.parametrize(
    "prepare",
    [lambda _: None, partial(secure_subscriber, secret=SECRET + "x"), _with_a_key_of_its_own],
    ids=["plain", "another secret", "another key"],
)
def test_others_cannot(sockets: Sockets, prepare: Callable[[Any], None]) -> None:
    server = publisher(sockets, SECRET)
    socket, success = subscriber(sockets, server, prepare)
    assert not success
    friend, _ = subscriber(sockets, server, partial(secure_subscriber, secret=SECRET))
    assert server.poll(WAIT_MS)
    server.recv()
    server.send(b"a prompt")
    assert friend.poll(WAIT_MS)
    assert socket.poll(0) == 0
    assert server.poll(0) == 0, "no other subscription arrived"


def test_keys_follow_from_the_secret_alone() -> None:
    one, again = (event_security._pair(SECRET, "publisher") for _ in range(2))
    assert one == again
    others = [event_security._pair(SECRET + "x", "publisher"), event_security._pair(SECRET, "subscriber")]
    assert len({one, *others}) == 3
    assert SECRET.encode() not in one.private
