"""Access control between fleet members: secrets from the environment or a file, loopback checks, bearer keys.

A fleet has two secrets. The *fleet secret* is shared by the workers and the readers of their event streams: it signs
KV handoffs and encrypts the streams. The *worker key* is the bearer token that a gateway or another worker sends to a
worker's private endpoints. Neither is a command-line argument: every user of a machine can see those.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

from coterie.errors import ConfigError, check

SECRET_VARIABLE = "COTERIE_FLEET_SECRET"
KEY_VARIABLE = "COTERIE_WORKER_KEY"
MIN_SECRET = 16
"""Minimum length of a secret, in characters: short ones can be guessed. `openssl rand -hex 32` gives 64."""


@dataclass(frozen=True, slots=True)
class FleetAccess:
    """The two secrets of a fleet; None for a secret that is not set, as in a fleet on one machine."""

    secret: str | None = field(default=None, repr=False)
    key: str | None = field(default=None, repr=False)

    @classmethod
    def fresh(cls) -> Self:
        """Return new random secrets."""
        return cls(secrets.token_hex(32), secrets.token_hex(32))

    @classmethod
    def read(cls, secret_file: Path | None = None, key_file: Path | None = None) -> Self:
        """Read each secret from its file if one is given, else from its environment variable."""
        return cls(read_secret(SECRET_VARIABLE, secret_file), read_secret(KEY_VARIABLE, key_file))

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that pass these secrets to a child, overriding those it would inherit."""
        return {SECRET_VARIABLE: self.secret or "", KEY_VARIABLE: self.key or ""}


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_secret(variable: str, file: Path | None = None) -> str | None:
    """Return the secret from a file or an environment variable, stripped of white space; None if neither is given."""
    secret = read_key(variable, file)
    return None if secret is None else check_secret(secret, variable if file is None else str(file))


def read_key(variable: str, file: Path | None = None) -> str | None:
    """Return the text of a file or an environment variable, as :func:`read_secret`, unchecked."""
    if file is None:
        return os.environ.get(variable, "").strip() or None
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{file}: cannot read the secret: {error}") from None


def check_secret(secret: str, where: str) -> str:
    """Return the secret; raise ConfigError, without quoting it, if it is too short or does not fit an HTTP header."""
    check(
        len(secret) >= MIN_SECRET and (secret.isascii() and secret.isprintable()),
        f"{where} must hold at least {MIN_SECRET} printable ASCII characters, such as `openssl rand -hex 32` gives",
    )
    return secret


def bearer(key: str | None) -> dict[str, str]:
    """Return the Authorization header for a key; no header if the key is None."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def shows_key(header: bytes | None, key: str) -> bool:
    """Whether an Authorization header holds this key. Compares in constant time, so timing reveals nothing."""
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
    """Parse HOST:PORT, or [HOST]:PORT for IPv6; raise ConfigError that calls the value `what`."""
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    check(
        host and (":" in host) == bracketed and port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536,
        f"{what} {text!r} must be HOST:PORT, such as 10.0.0.7:8100 or [::1]:8100",
    )
    return Address(host.lower(), int(port))
