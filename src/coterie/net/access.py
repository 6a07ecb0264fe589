"""Who may talk to whom: secrets from the environment or a file, addresses of this machine, bearer keys.

A fleet has two secrets. The *fleet secret* is known to its workers and to those who read their event streams: it signs
handoffs of KV and encrypts the streams. The *worker key* is what a gateway, or another worker, shows at a worker's
private endpoints. Neither is ever an argument of a command: arguments are visible to every user of a machine.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

from coterie.errors import ConfigError

SECRET_VARIABLE = "COTERIE_FLEET_SECRET"
KEY_VARIABLE = "COTERIE_WORKER_KEY"
MIN_SECRET = 16
"""Least characters of a secret: one that people choose is guessed, `openssl rand -hex 32` makes one that is not."""


@dataclass(frozen=True, slots=True)
class FleetAccess:
    """The secrets of a fleet; None where it has none, on one machine."""

    secret: str | None = field(default=None, repr=False)
    key: str | None = field(default=None, repr=False)

    @classmethod
    def fresh(cls) -> Self:
        """New random ones."""
        return cls(secrets.token_hex(32), secrets.token_hex(32))

    @classmethod
    def read(cls, secret_file: Path | None = None, key_file: Path | None = None) -> Self:
        """From files where they are named, else from the environment."""
        return cls(read_secret(SECRET_VARIABLE, secret_file), read_secret(KEY_VARIABLE, key_file))

    @property
    def environment(self) -> dict[str, str]:
        """Variables that give a child process these secrets, and not those of this process."""
        return {SECRET_VARIABLE: self.secret or "", KEY_VARIABLE: self.key or ""}


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_secret(variable: str, file: Path | None = None) -> str | None:
    """The secret in a file, or in an environment variable; None if neither is given. White space around it is cut."""
    if file is None:
        secret = os.environ.get(variable, "").strip()
        return check_secret(secret, variable) if secret else None
    try:
        secret = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{file}: cannot read the secret: {error}") from None
    return check_secret(secret, str(file))


def check_secret(secret: str, where: str) -> str:
    """Raise ConfigError, without the secret itself, unless it is long enough and fits an HTTP header."""
    if len(secret) < MIN_SECRET or not (secret.isascii() and secret.isprintable()):
        raise ConfigError(
            f"{where} must hold at least {MIN_SECRET} printable ASCII characters, such as `openssl rand -hex 32` gives"
        )
    return secret


def bearer(key: str | None) -> dict[str, str]:
    """Headers that show a key."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def shows_key(header: bytes | None, key: str) -> bool:
    """Whether an Authorization header shows this key, in the same time for every wrong one."""
    scheme, _, shown = (header or b"").partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(shown.strip(), key.encode())


def is_loopback(host: str) -> bool:
    """Whether a host is certainly this machine: localhost, or a literal loopback address. Names are not looked up."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def parse_address(text: str, what: str = "address") -> Address:
    """Read HOST:PORT, or [HOST]:PORT for IPv6."""
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if not host or (":" in host) != bracketed or not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536):
        raise ConfigError(f"{what} {text!r} must be HOST:PORT, such as 10.0.0.7:8100 or [::1]:8100")
    return Address(host.lower(), int(port))
