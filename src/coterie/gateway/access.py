"""API keys and rate limits of callers. The gateway stores the SHA-256 of each key, never the key.

A keys file, in YAML or JSON, is a list of entries::

    - {name: search-team, sha256: 9f86d081…, rate: 50, burst: 100}
    - {name: on-call, sha256: 60303ae2…, admin: true}
    - {name: prometheus, sha256: 486ea462…, only: metrics}

Keys are 256 random bits (:func:`new_key`), so an unsalted hash is enough: a dictionary attack cannot guess them. A
presented key is hashed once and its digest is compared with every entry by :func:`hmac.compare_digest`, so the time of
a check reveals neither how much of a key was right nor which entry matched.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

from coterie.errors import ConfigError, check
from coterie.gateway.config import read_small_text

MAX_NAME = 128
MAX_KEY_BYTES = 512
"""Longest Authorization header that is checked, in bytes; longer ones cannot hold a key of this gateway."""
KEY_PREFIX = "coterie-"
"""Prefix of every key, so that scanners for leaked secrets find them."""


SINGLE = ("metrics", "peers")
"""Endpoints for which there are keys that open nothing else."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One stored key."""

    name: str
    """Name of the caller, shown in logs and errors; its rate is limited by this name."""
    sha256: str
    """SHA-256 of the key, 64 hexadecimal digits."""
    admin: bool = False
    """Whether the key opens the admin endpoints."""
    only: str | None = None
    """The one endpoint that the key opens: `metrics` for Prometheus, `peers` for other gateways. None for all endpoints
    of callers, and of administrators with `admin`."""
    rate: float | None = None
    """Long-run limit in requests per second; None for no limit."""
    burst: float | None = None
    """Most requests at once; None for one second of `rate`, at least 1."""

    def as_yaml(self) -> str:
        """Return the line to add to a keys file."""
        return "- " + yaml.safe_dump(msgspec.to_builtins(self), default_flow_style=True, sort_keys=False, width=10_000)


class NewKey(NamedTuple):
    key: str
    """The key in clear text. Show it once: only its hash is stored."""
    entry: Entry


def new_key(
    name: str, *, admin: bool = False, only: str | None = None, rate: float | None = None, burst: float | None = None
) -> NewKey:
    """Return a random key and the entry to store for it."""
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    entry = Entry(name=name, sha256=_digest(key.encode()).hex(), admin=admin, only=only, rate=rate, burst=burst)
    Keys.load([entry])
    return NewKey(key, entry)


class Keys:
    """Stored keys, and the check of a presented key."""

    def __init__(self, entries: Sequence[Entry], warnings: Sequence[str] = ()) -> None:
        """`entries` must have passed the checks of :meth:`load`."""
        self.entries = tuple(entries)
        self.warnings = tuple(warnings)
        """Warnings about the file's permissions, one line each."""
        self._digests = [bytes.fromhex(entry.sha256) for entry in entries]

    @classmethod
    def load(cls, source: str | Path | Sequence[Any]) -> Keys:
        """Read a keys file, or a list of entries or mappings. Raises InputError that names the faulty entry."""
        if isinstance(source, str | Path):
            path = Path(source)
            raw, warnings, where = _read(path), _mode_warnings(path), str(path)
        else:
            raw, warnings, where = list(source), [], "keys"
        check(isinstance(raw, list), f"{where}: must be a list of entries with name and sha256")
        entries = [_entry(where, number, item) for number, item in enumerate(raw)]
        _check_distinct(where, entries)
        return cls(entries, warnings)

    def check(self, header: bytes | None) -> Entry | None:
        """Return the entry whose key an `Authorization` header presents; None if no stored key matches."""
        if header is None or len(header) > MAX_KEY_BYTES or header[:7].lower() != b"bearer ":
            return None
        digest, compare = _digest(header[7:].strip()), hmac.compare_digest
        # All entries are compared, so the time does not depend on which matches; find() is one fast memchr.
        position = bytes([compare(stored, digest) for stored in self._digests]).find(1)
        return self.entries[position] if position >= 0 else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _read(path: Path) -> Any:
    text = read_small_text(path)
    try:
        return msgspec.json.decode(text) if path.suffix == ".json" else yaml.safe_load(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: is not JSON: {error}") from None
    except (yaml.YAMLError, RecursionError, ValueError, LookupError, AttributeError, TypeError) as error:
        mark = getattr(error, "problem_mark", None)  # the text of the error may quote the file
        raise ConfigError(f"{path}: is not YAML" + (f": see line {mark.line + 1}" if mark else "")) from None


def _mode_warnings(path: Path) -> list[str]:
    mode = stat.S_IMODE(path.stat().st_mode)
    may = "write it" if mode & 0o022 else "read it" if mode & 0o044 else None
    harm = " and so let themselves in" if mode & 0o022 else ""
    return [] if may is None else [f"{path}: others may {may} (mode {mode:o}){harm}; chmod 600 {path}"]


def _entry(where: str, number: int, item: Any) -> Entry:
    """Check an entry and return it. No message quotes `sha256`: someone may have put the key itself there."""
    name = item.name if isinstance(item, Entry) else item.get("name") if isinstance(item, dict) else None
    label = f"{where}: entry {number + 1}" + (f" ({name[:MAX_NAME]!r})" if isinstance(name, str) else "")
    try:
        entry = item if isinstance(item, Entry) else msgspec.convert(item, Entry)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{label}: {error}") from None
    check(
        0 < len(entry.name) <= MAX_NAME and entry.name.isprintable(),
        f"{label}: name must have 1 to {MAX_NAME} printable characters",
    )
    check(
        len(entry.sha256) == 64 and all(digit in "0123456789abcdefABCDEF" for digit in entry.sha256),
        f"{label}: sha256 must be 64 hexadecimal digits, the SHA-256 of the key and not the key",
    )
    check(
        entry.only is None or entry.only in SINGLE, f"{label}: only={entry.only!r} must be one of {', '.join(SINGLE)}"
    )
    check(entry.only is None or not entry.admin, f"{label}: only={entry.only!r} opens nothing else: leave out admin")
    for setting, value in (("rate", entry.rate), ("burst", entry.burst)):
        check(value is None or 0 < value < 1e9, f"{label}: {setting}={value} must be above 0 and below 1e9")
    check(
        entry.burst is None or entry.burst >= 1,
        f"{label}: burst={entry.burst} must be at least 1, or no request would pass",
    )
    check(entry.burst is None or entry.rate is not None, f"{label}: burst={entry.burst} needs a rate")
    return entry


def _check_distinct(where: str, entries: Sequence[Entry]) -> None:
    seen: dict[tuple[str, str], str] = {}
    for number, entry in enumerate(entries):
        label = f"entry {number + 1} ({entry.name!r})"
        for field, value in (("name", entry.name), ("sha256", entry.sha256.lower())):
            earlier = seen.setdefault((field, value), label)
            check(earlier is label, f"{where}: {label}: {field} is that of {earlier}")


class Rates:
    """Rate limits: one token bucket per caller of the keys file. The time is an argument, in seconds of any clock.

    A bucket holds up to `burst` tokens and gains `rate` per second. A request takes one token, or is refused with the
    time to wait. So in any T seconds a caller gets at most burst + rate x T requests.
    """

    def __init__(self) -> None:
        self._buckets: dict[str, tuple[float, float]] = {}
        """Caller → tokens in its bucket, and the time of that count."""

    def take(self, caller: Entry, *, now: float) -> float:
        """Take a token and return 0; or take nothing and return the seconds until a token is available."""
        rate = caller.rate
        if rate is None:
            return 0.0
        burst = max(1.0, rate) if caller.burst is None else caller.burst
        tokens, seen = self._buckets.get(caller.name, (burst, now))
        tokens = min(burst, tokens + max(0.0, now - seen) * rate)  # a clock that steps back adds nothing
        passes = tokens >= 1.0
        self._buckets[caller.name] = (tokens - passes, max(seen, now))
        # At least a microsecond: rounding must not return 0, which means that a token was taken.
        return 0.0 if passes else max((1.0 - tokens) / rate, 1e-6)
