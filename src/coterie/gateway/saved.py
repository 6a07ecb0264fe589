"""What a gateway keeps over a restart: workers and routers that were set at run time, in one small file.

The file is replaced as a whole, so a crash leaves the old one or the new one. A file that cannot be read as what it
should be is never lost: it is renamed, and the gateway starts from its configuration and says so. One gateway at a time
uses it: two would overwrite each other's changes.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import NamedTuple

import msgspec

from coterie.errors import ConfigError, check_input_file
from coterie.gateway.config import GatewayConfig, WorkerEntry
from coterie.gateway.fleet.spec import RouterSpec

FORMAT, VERSION = "coterie-gateway-state", 1
MOST_BYTES = 16 << 20
MOST_ASIDE = 1000
"""Damaged files kept beside each other; past that many the operator must look."""


class SavedState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was set at run time, over what the config says."""

    workers: list[WorkerEntry] = []
    """Added, or changed."""
    routers: dict[str, RouterSpec] = {}
    """Pool → router."""
    removed: list[str] = []
    """Ids of workers that the config lists."""

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for worker in self.workers:
            if worker.id in seen:
                raise ConfigError(f"two workers have the id {worker.id!r}")
            seen.add(worker.id)

    def over(self, config: GatewayConfig) -> GatewayConfig:
        """The config as it is in effect. Raises ConfigError where the two do not fit."""
        workers = {worker.id: worker for worker in config.workers if worker.id not in self.removed}
        workers |= {worker.id: worker for worker in self.workers}
        return msgspec.structs.replace(
            config,
            workers=list(workers.values()),
            prefill=self.routers.get("prefill", config.prefill),
            decode=self.routers.get("decode", config.decode),
        )

    def with_worker(self, entry: WorkerEntry) -> SavedState:
        left = self.without_worker(entry.id, listed=False)
        return SavedState([*left.workers, entry], left.routers, left.removed)

    def without_worker(self, worker_id: str, listed: bool) -> SavedState:
        """`listed`: whether the config lists it."""
        removed = [removed_id for removed_id in self.removed if removed_id != worker_id] + [worker_id] * listed
        return SavedState([worker for worker in self.workers if worker.id != worker_id], self.routers, removed)

    def with_router(self, pool: str, spec: RouterSpec) -> SavedState:
        return SavedState(self.workers, {**self.routers, pool: spec}, self.removed)

    def after_reload(self, before: GatewayConfig, config: GatewayConfig) -> SavedState:
        """What still holds when the config file has changed: its changes are newer than those made before them."""
        old, new = ({worker.id: worker for worker in version.workers} for version in (before, config))
        touched = {id for id in old.keys() | new.keys() if old.get(id) != new.get(id)}
        specs = {"prefill": before.prefill != config.prefill, "decode": before.decode != config.decode}
        return SavedState(
            [worker for worker in self.workers if worker.id not in touched],
            {pool: spec for pool, spec in self.routers.items() if not specs.get(pool)},
            [id for id in self.removed if id not in touched],
        )


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
    data = msgspec.json.format(msgspec.json.encode(_File(state.workers, state.routers, state.removed)))
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


def lock_state(path: str | Path) -> int:
    """Keep other gateways from the file; the file descriptor holds the lock until it is closed.

    The lock is on a file beside it, as the file itself is replaced. Raises ConfigError with the process that holds it.
    """
    file = Path(path).resolve()
    try:
        lock = os.open(file.with_name(f".{file.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{path}: the gateway's state cannot be locked: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.truncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
    except OSError as error:
        holder = os.read(lock, 20).decode(errors="replace")
        os.close(lock)
        if isinstance(error, BlockingIOError):
            message = f"{path}: the gateway with process id {holder} uses this state file; end it, or set another state"
            raise ConfigError(message) from None
        raise ConfigError(f"{path}: the gateway's state cannot be locked: {error.strerror}") from error
    return lock


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
        saved = msgspec.json.decode(data, type=_File)
    except (msgspec.MsgspecError, ConfigError, ValueError, RecursionError) as error:
        kept = set_aside(file)
        return Loaded(None, f"{file}: the saved state cannot be used: {error}; it was kept as {kept}")
    return Loaded(SavedState(saved.workers, saved.routers, saved.removed))


def set_aside(file: Path) -> Path:
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
