"""Event streams that only a fleet can read: ZMQ's CURVE, with keys derived from the fleet's secret.

KV and expert events hold users' prompts as token ids. With a secret, both ends derive the same two key pairs from it,
one for publishers and one for subscribers: messages are encrypted, a subscriber knows that the publisher has the
secret, and the publisher's ZAP check refuses every client whose key is not the fleet's. A change of the secret changes
all keys. vLLM's own streams cannot be protected this way: isolate their network.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import threading
from typing import Any, NamedTuple

import zmq
import zmq.utils.z85

from coterie.errors import UnavailableError, check

_ZAP = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"


class _KeyPair(NamedTuple):
    public: bytes
    private: bytes


def _pair(secret: str, role: str) -> _KeyPair:
    """Derive the key pair of a role, as Z85 text; everyone who knows the secret derives the same pair."""
    derived = hmac.digest(secret.encode(), f"coterie event streams 1: {role}".encode(), "sha256")
    private = zmq.utils.z85.encode(derived)
    return _KeyPair(zmq.curve_public(private), private)


def secure_publisher(socket: zmq.Socket[Any], secret: str) -> None:
    """Let only subscribers with the fleet's secret connect to a socket that will be bound. Call before `bind`."""
    _check_curve()
    mine = _pair(secret, "publisher")
    domain = hashlib.sha256(mine.public).hexdigest()[:16]  # does not reveal the secret
    _zap_of(socket.context).allowed[domain] = zmq.utils.z85.decode(_pair(secret, "subscriber").public)
    socket.setsockopt_string(zmq.ZAP_DOMAIN, domain)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # refuse every client if no ZAP handler runs
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, mine.private)


def secure_subscriber(socket: zmq.Socket[Any], secret: str) -> None:
    """Encrypt a socket that will be connected to a publisher, or to its replay endpoint. Call before `connect`."""
    _check_curve()
    socket.setsockopt(zmq.CURVE_SERVERKEY, _pair(secret, "publisher").public)
    for option, key in zip((zmq.CURVE_PUBLICKEY, zmq.CURVE_SECRETKEY), _pair(secret, "subscriber"), strict=True):
        socket.setsockopt(option, key)


def _check_curve() -> None:
    check(
        zmq.has("curve"),
        "this build of ZMQ has no CURVE: install pyzmq from PyPI, or use no fleet secret",
        UnavailableError,
    )


class _Zap:
    """ZAP handler (RFC 27): admits or refuses clients by their public key, in a thread that ends with the context."""

    def __init__(self, context: int) -> None:
        """`context` is the address of a ZMQ context, which has one handler even if several Python objects wrap it."""
        self._context = context
        self.allowed: dict[str, bytes] = {}
        """ZAP domain → public key of the clients to admit."""
        # A shadow context: `Context.destroy` closes the sockets made by that object, even while a thread uses them.
        socket: zmq.Socket[bytes] = zmq.Context.shadow(context).socket(zmq.REP)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(_ZAP)
        threading.Thread(target=self._answer, args=(socket,), name="coterie-zap", daemon=True).start()

    def _answer(self, socket: zmq.Socket[bytes]) -> None:
        with contextlib.suppress(zmq.ZMQError):  # raised when the context is terminated
            while True:
                asked = socket.recv_multipart()
                good = len(asked) >= 7 and self._right(asked)
                answer = [b"200", b"OK", b"fleet"] if good else [b"400", b"not of this fleet", b""]
                socket.send_multipart([_ZAP_VERSION, asked[1] if len(asked) > 1 else b"", *answer, b""])
        with _making:  # before the context is freed: a new context may get the same address
            _handlers.pop(self._context, None)
        socket.close()

    def _right(self, asked: list[bytes]) -> bool:
        version, _, domain, _, _, mechanism, credential = asked[:7]
        allowed = self.allowed.get(domain.decode("latin-1"))
        curve = version == _ZAP_VERSION and mechanism == b"CURVE"
        return allowed is not None and curve and hmac.compare_digest(credential, allowed)


_handlers: dict[int, _Zap] = {}
_making = threading.Lock()


def _zap_of(context: zmq.Context[Any]) -> _Zap:
    address = context.underlying
    with _making:
        if address not in _handlers:
            _handlers[address] = _Zap(address)
        return _handlers[address]
