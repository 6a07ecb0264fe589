"""What a gateway keeps over a restart: its workers and its routers, in one small file.

The file is replaced as a whole, so a crash leaves the old one or the new one. A file that cannot be read as what it
should be is never lost: it is renamed, and the gateway starts from its configuration and says so.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from coterie.errors import ConfigError, check_input_file
from coterie.gateway.fleet.spec import RouterSpec

FORMAT, VERSION = "coterie-gateway-state", 1
MOST_BYTES = 16 << 20
MOST_ASIDE = 1000
"""Damaged files kept beside each other; past that many the operator must look."""

Role = Literal["prefill", "decode", "both"]


class Worker(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An engine that serves requests."""

    id: str
    url: str
    role: Role = "both"
    places: int = 16
    """Requests that it runs at once."""
    speed: float = 1.0
    """Relative to the other workers of its pool."""
    rank: int | None = None
    """Data-parallel rank of the engine at that URL; None for an engine that is one worker."""

    def __post_init__(self) -> None:
        if not self.id or not self.url:
            raise ConfigError(f"id={self.id!r} and url={self.url!r} of a worker must not be empty")
        if self.places < 1 or not 0 < self.speed < float("inf"):
            raise ConfigError(
                f"worker {self.id!r}: places={self.places} must be at least 1, speed={self.speed} above 0"
            )
        if self.rank is not None and self.rank < 0:
            raise ConfigError(f"worker {self.id!r}: rank={self.rank} must be at least 0")


class SavedState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Workers, and the router of each pool by the pool's name."""

    workers: list[Worker] = []
    routers: dict[str, RouterSpec] = {}

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for worker in self.workers:
            if worker.id in seen:
                raise ConfigError(f"two workers have the id {worker.id!r}")
            seen.add(worker.id)


class Loaded(NamedTuple):
    """What a state file gave."""

    state: SavedState | None
    """None where there was no file, or none that can be read."""
    problem: str | None = None
    """What is wrong with the file, in one sentence that says where it is now; None if nothing is."""


class _File(SavedState, frozen=True, forbid_unknown_fields=True):
    format: str = FORMAT
    version: int = VERSION


class _Head(msgspec.Struct):
    """What every version of the file has."""

    format: str = ""
    version: int = 0


def save_state(path: str | Path, state: SavedState) -> None:
    """Replace the file atomically; it is on the disk when this returns. Raises ConfigError if it cannot be written."""
    file = Path(path)
    data = msgspec.json.format(msgspec.json.encode(_File(state.workers, state.routers)))
    part = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with part.open("wb") as stream:
            stream.write(data + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(file)
        _sync_folder(file.parent)
    except OSError as error:
        raise ConfigError(f"{file}: the gateway's state cannot be written: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)


def load_state(path: str | Path) -> Loaded:
    """Read the file. One that is damaged, or of another version, is renamed and reported.

    Raises ConfigError only if a file that cannot be read cannot be renamed either: going on would overwrite it.
    """
    file = Path(path)
    check_input_file(file)
    try:
        with file.open("rb") as stream:
            data = stream.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return Loaded(None)
    except OSError as error:
        raise ConfigError(f"{file}: the gateway's state cannot be read: {error.strerror}") from error
    try:
        if len(data) > MOST_BYTES:
            raise ConfigError(f"it has more than {MOST_BYTES} bytes")
        head = msgspec.json.decode(data, type=_Head)
        if head.format != FORMAT or head.version != VERSION:
            raise ConfigError(f"it is {head.format!r} version {head.version}; expected {FORMAT!r} version {VERSION}")
        found = msgspec.json.decode(data, type=_File)
    except (msgspec.MsgspecError, ConfigError, ValueError, RecursionError) as error:
        kept = _set_aside(file)
        return Loaded(None, f"{file}: the saved state cannot be used: {error}; it was kept as {kept}")
    return Loaded(SavedState(found.workers, found.routers))


def _set_aside(file: Path) -> Path:
    """Rename a file to a name that is free, never over another file."""
    for number in range(1, MOST_ASIDE + 1):
        kept = file.with_name(f"{file.name}.damaged-{number}")
        if kept.exists() or kept.is_symlink():
            continue
        try:
            return file.rename(kept)
        except OSError as error:
            raise ConfigError(f"{file}: is damaged and cannot be renamed: {error.strerror}; move it away") from error
    raise ConfigError(f"{file}: is damaged, and so are {MOST_ASIDE} files beside it: remove some")


def _sync_folder(folder: Path) -> None:
    """A new name is on the disk once its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
