"""State that a gateway keeps across restarts: workers and routers set at run time, in one small file.

The file is replaced as a whole, so a crash leaves the old one or the new one. A damaged file is never deleted: it is
renamed, and the gateway starts from its config and logs a warning. A lock lets one gateway at a time use the file: two
would overwrite each other's changes.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import NamedTuple

import msgspec

from coterie.errors import ConfigError, check, check_input_file
from coterie.gateway.config import GatewayConfig, WorkerEntry, check_distinct_ids
from coterie.gateway.fleet.spec import RouterSpec
from coterie.traces.store import replaced

FORMAT, VERSION = "coterie-gateway-state", 1
MOST_BYTES = 16 << 20
MOST_ASIDE = 1000
"""Most damaged files that are kept; after that the gateway does not start until some are removed."""


class SavedState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Changes made at run time, which override the config."""

    workers: list[WorkerEntry] = []
    """Workers that were added or changed."""
    routers: dict[str, RouterSpec] = {}
    """Pool → router set at run time."""
    removed: list[str] = []
    """Ids of workers that the config lists but that were removed at run time."""

    format: str = FORMAT
    version: int = VERSION

    def __post_init__(self) -> None:
        check_distinct_ids(self.workers)

    def over(self, config: GatewayConfig) -> GatewayConfig:
        """Return the config with these changes applied. Raises ConfigError if the two do not fit together."""
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
        """Return the state after a worker's removal. `listed`: whether the config lists the worker."""
        removed = [removed_id for removed_id in self.removed if removed_id != worker_id] + [worker_id] * listed
        return SavedState([worker for worker in self.workers if worker.id != worker_id], self.routers, removed)

    def after_reload(self, before: GatewayConfig, config: GatewayConfig) -> SavedState:
        """Return the changes that still apply after a reload: edits of the config file override earlier changes."""
        old, new = ({worker.id: worker for worker in version.workers} for version in (before, config))
        touched = {id for id in old.keys() | new.keys() if old.get(id) != new.get(id)}
        specs = {"prefill": before.prefill != config.prefill, "decode": before.decode != config.decode}
        return SavedState(
            [worker for worker in self.workers if worker.id not in touched],
            {pool: spec for pool, spec in self.routers.items() if not specs.get(pool)},
            [id for id in self.removed if id not in touched],
        )


class Loaded(NamedTuple):
    """Result of reading a state file."""

    state: SavedState | None
    """Saved state; None if the file is missing or damaged."""
    problem: str | None = None
    """What is wrong with the file and where it was moved, in one sentence; None if nothing is wrong."""


class _Head(msgspec.Struct):
    """Fields that every version of the file has."""

    format: str = ""
    version: int = 0


def save_state(path: str | Path, state: SavedState) -> None:
    """Replace the file atomically; it is on the disk when this returns. Raises ConfigError if it cannot be written."""
    file = Path(path)
    try:
        with replaced(file, f".{file.name}.{os.getpid()}.tmp") as stream:
            stream.write(msgspec.json.format(msgspec.json.encode(state)) + b"\n")
        _sync_folder(file.parent)
    except OSError as error:
        raise ConfigError(f"{file}: the gateway's state cannot be written: {error.strerror}") from error


def lock_state(path: str | Path) -> int:
    """Lock the state file against other gateways; the returned file descriptor holds the lock until it is closed.

    The lock is on a separate file, as the state file itself is replaced. Raises ConfigError that names the process
    holding the lock.
    """
    try:
        file = Path(path).resolve()
    except (OSError, RuntimeError):  # RuntimeError until Python 3.12
        raise ConfigError(f"{path}: state must be a file, not a loop of symbolic links") from None
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
    """Read the state file. A file that is damaged or of another version is renamed and reported.

    Raises ConfigError if the file cannot be opened, or if a damaged file cannot be renamed: the next save would
    overwrite it.
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
        check(len(data) <= MOST_BYTES, f"it has more than {MOST_BYTES} bytes")
        head = msgspec.json.decode(data, type=_Head)
        check(
            head.format == FORMAT and head.version == VERSION,
            f"it is {head.format!r} version {head.version}; expected {FORMAT!r} version {VERSION}",
        )
        return Loaded(msgspec.json.decode(data, type=SavedState))
    except (msgspec.MsgspecError, ConfigError, ValueError, RecursionError) as error:
        return Loaded(None, f"{file}: the saved state cannot be used: {error}; it was kept as {set_aside(file)}")


def set_aside(file: Path) -> Path:
    """Rename a damaged file to a free name and return it; no other file is overwritten."""
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
    """Flush a folder to disk: only then does a rename in it survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
