"""Take a port before the work that needs it."""

from __future__ import annotations

import errno
import socket

from coterie.errors import UnavailableError


def bind(host: str, port: int) -> socket.socket:
    """A socket that has the port but does not listen yet: until its server is ready, clients are refused."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise UnavailableError(f"host {host!r}: {error}") from None
    listener = socket.socket(family, kind, number)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        hint = "; choose another port, or stop what uses it" if error.errno == errno.EADDRINUSE else ""
        raise UnavailableError(f"{host}:{port}: {error.strerror}{hint}") from None
    return listener
