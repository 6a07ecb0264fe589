"""The position store: the experts of every token whose KV is in the cache, kept by KV position.

An engine writes each token's KV to a position (block x block size + offset in the block) and finds it again through
the request's blocks. The store keeps the token's expert ids under the same number, so it follows the KV cache without
bookkeeping of its own:

- a prefix hit finds the ids that the first request wrote, whichever request reads them;
- a recomputed, preempted or rejected token writes the same position again: nothing is counted twice;
- a freed block needs no clearing: its next owner overwrites it before reading it.

Rows that no forward pass of this worker wrote (KV received from another worker, or computed while capture was off)
must not be read as known. So each position stores the *epoch* in which it was written, and only rows of the current
epoch are known.

    file     64 header words · layer ids [layer] · load [layer, expert], all uint64 ·
             last steps [step, column] float64 · epoch [position] uint16 · ids [position, layer, k]

The file is in memory (``/dev/shm``). One process writes, in the order of the steps; others map it and read a request's
positions after the step that wrote them. Ids are exact at any block size; counts per block would clip.

The creator holds a lock (``flock``) on the file as long as it lives: a store whose lock is free is that of a dead
engine, and the next engine of that name takes the name over. The creator's process id would not show this: a killed
process keeps its id until its parent waits for it, and ids are used again.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.errors import ConfigError, InputError, check
from coterie.types import narrowest_uint

MAGIC = 0x53_4C_4F_54_43_4F_54_33  # "SLOTCOT3"; stores of earlier versions held no lock, so must not count as dead
HEADER_WORDS = 64
MAX_EPOCH = (1 << 16) - 1
SUFFIX = ".slots"

# Header words.
_MAGIC, _POSITIONS, _LAYERS, _TOP_K, _EXPERTS, _OWNER = range(6)
_EPOCH, _ENABLED, _STEP, _STEPS, _TOKENS, _DISTINCT, _ERRORS = range(6, 13)


class PositionShape(NamedTuple):
    num_positions: int
    num_layers: int
    top_k: int
    num_experts: int

    @property
    def dtype(self) -> np.dtype[Any]:
        return narrowest_uint(self.num_experts - 1)

    @property
    def sections(self) -> tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]:
        """Dtype and shape of the file's arrays, in order; each but the last is padded to whole words of 8 bytes."""
        word, layers = np.dtype(np.uint64), self.num_layers
        return (
            (word, (HEADER_WORDS,)),
            (word, (layers,)),
            (word, (layers, self.num_experts)),
            (np.dtype(np.float64), (KEPT, len(COLUMNS))),
            (np.dtype(np.uint16), (self.num_positions,)),
            (self.dtype, (self.num_positions, layers, self.top_k)),
        )

    @property
    def nbytes(self) -> int:
        *padded, last = (dtype.itemsize * math.prod(shape) for dtype, shape in self.sections)
        return sum(-(-size // 8) * 8 for size in padded) + last


class PositionRows(NamedTuple):
    """Rows of the store for one request."""

    expert_ids: NDArray[np.unsignedinteger]
    """[token, layer, k]; a copy."""
    known: NDArray[np.bool_]
    """[token] whether a step of this worker wrote the position; if not, the row of ids is meaningless."""


class PositionStore:
    """Expert ids per KV position, in memory that several processes may map."""

    def __init__(self, shape: PositionShape, buffer: mmap.mmap, path: Path | None) -> None:
        self.shape = shape
        self.path = path
        self._buffer = buffer
        self._release: Callable[[], object] = lambda: None
        """Function that releases the creator's lock."""
        at, arrays = 0, []
        for dtype, size in shape.sections:
            arrays.append(np.frombuffer(buffer, dtype, math.prod(size), at).reshape(size))
            at += -(-arrays[-1].nbytes // 8) * 8
        self._header, self._layer_ids, self.load, ring, self._epochs, self._ids = arrays
        """`load` is [layer, expert] number of tokens that activated the expert since the start."""
        self.log = StepLog(ring, self._header[_STEPS : _STEPS + 1])

    @classmethod
    def create(
        cls, shape: PositionShape, path: Path | None = None, layer_ids: Sequence[int] | None = None, owner: int = 0
    ) -> PositionStore:
        """Create a store, in memory of this process or in a file that others attach to. Capture starts on.

        `layer_ids` are the recorded layers' indices in the model, dense layers counted; 0 … layers - 1 by default.
        `owner` identifies the engine: `attach` can require it, since a file of that name may be another engine's. The
        file of a dead process is replaced; the file of a living one raises ConfigError.
        """
        layers = range(shape.num_layers) if layer_ids is None else layer_ids
        check(len(layers) == shape.num_layers, f"layer_ids has {len(layers)} entries; num_layers={shape.num_layers}")
        check(
            min(shape) >= 1 and shape.top_k <= shape.num_experts and shape.num_experts <= 1 << 16,
            f"{shape} must be at least 1 everywhere, with top_k <= num_experts <= {1 << 16}",
        )
        if path is None:
            store = cls(shape, mmap.mmap(-1, shape.nbytes), None)
        else:
            descriptor = _locked_new(path)
            try:
                os.posix_fallocate(descriptor, 0, shape.nbytes)  # a full /dev/shm must fail here, not by SIGBUS later
                store = cls(shape, mmap.mmap(descriptor, shape.nbytes), path)
            except OSError:
                path.unlink()
                os.close(descriptor)
                raise
            store._release = weakref.finalize(store, os.close, descriptor)
        store._header[[_POSITIONS, _LAYERS, _TOP_K, _EXPERTS]] = shape
        store._layer_ids[:] = layers
        store._header[[_EPOCH, _ENABLED, _OWNER]] = 1, 1, owner
        store._header[_MAGIC] = MAGIC  # last: a reader that sees it sees the rest
        return store

    @classmethod
    def attach(cls, path: Path, owner: int | None = None) -> PositionStore:
        """Map a store that another process created; `owner` must match if given."""
        try:
            with path.open("r+b") as file:
                buffer = mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError) as error:
            raise InputError(f"{path} is not a position store: {error}") from None
        check(
            len(buffer) >= HEADER_WORDS * 8, f"{path} is not a position store: it has {len(buffer)} bytes", InputError
        )
        header = np.frombuffer(buffer, np.uint64, HEADER_WORDS)
        shape = PositionShape(*(int(word) for word in header[[_POSITIONS, _LAYERS, _TOP_K, _EXPERTS]]))
        check(
            header[_MAGIC] == MAGIC and min(shape) >= 1 and shape.nbytes == len(buffer),
            f"{path} is not a position store of this version, or not finished",
            InputError,
        )
        check(
            owner is None or int(header[_OWNER]) == owner, f"{path} is the position store of another engine", InputError
        )
        return cls(shape, buffer, path)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Index of each recorded layer in the model, dense layers counted."""
        return tuple(int(layer) for layer in self._layer_ids)

    @property
    def enabled(self) -> bool:
        """Whether steps are captured. Any process may set it; a change starts a new epoch: all positions are unknown.

        Turning capture off must do so too: otherwise positions reused while it is off would still count as known.
        """
        return bool(self._header[_ENABLED])

    @enabled.setter
    def enabled(self, value: bool) -> None:
        if value != self.enabled:
            self.forget_all()
        self._header[_ENABLED] = value

    @property
    def epoch(self) -> int:
        """Current epoch, increased whenever all rows are invalidated."""
        return int(self._header[_EPOCH])

    def forget_all(self) -> None:
        epoch = self.epoch + 1
        if epoch > MAX_EPOCH:
            self._epochs[:] = 0
            epoch = 1
        self._header[_EPOCH] = epoch

    @property
    def errors(self) -> int:
        """Failures counted by the writing process."""
        return int(self._header[_ERRORS])

    def note_error(self) -> None:
        self._header[_ERRORS] += np.uint64(1)

    @property
    def step(self) -> int:
        """Number of the last step written or skipped, as counted by the writer."""
        return int(self._header[_STEP])

    @property
    def totals(self) -> tuple[int, int, int]:
        """Steps and tokens written, and distinct experts summed over steps and layers, since the start."""
        steps, tokens, distinct = (int(word) for word in self._header[[_STEPS, _TOKENS, _DISTINCT]])
        return steps, tokens, distinct

    def write(
        self, positions: NDArray[np.integer], expert_ids: NDArray[np.integer], step: int = 0, epoch: int | None = None
    ) -> int:
        """Write one step: ids [token, layer, k] to `positions` [token]. Return the number of tokens kept.

        Negative positions are padding. A row with an id outside 0 … experts - 1 makes its position unknown. Give the
        step's `epoch` if it may be older than the current one: rows of a past epoch are unknown.
        """
        shape = self.shape
        expected = (len(positions), shape.num_layers, shape.top_k)
        if expert_ids.shape != expected:
            raise ConfigError(f"expert_ids has shape {expert_ids.shape}; {len(positions)} positions need {expected}")
        kept, distinct = _write(
            positions, expert_ids, self._ids, self._epochs, np.uint16(self.epoch if epoch is None else epoch), self.load
        )
        self.log.add(time.monotonic(), kept, distinct / shape.num_layers)
        self._header[_TOKENS] += np.uint64(kept)
        self._header[_DISTINCT] += np.uint64(distinct)
        self._header[_STEP] = step
        return int(kept)

    def compile(self) -> None:
        """Compile the loops of `write` and `footprint` now, so that the first calls do not wait."""
        none = np.empty(0, np.int64)
        rows = np.empty((0, self.shape.num_layers, self.shape.top_k), self.shape.dtype)
        _write(none, rows, self._ids, self._epochs, np.uint16(1), self.load)
        self.footprint(none)

    def skip(self, step: int) -> None:
        """Record a step that wrote nothing, so that readers waiting for it continue."""
        self._header[_STEP] = step

    def forget(self, positions: NDArray[np.integer]) -> None:
        """Mark positions unknown: their KV was not computed here."""
        self._epochs[positions[(positions >= 0) & (positions < self.shape.num_positions)]] = 0

    def copy(self, source: NDArray[np.integer], target: NDArray[np.integer]) -> None:
        """Copy rows from `source` to `target` positions, after their KV was copied (copy on write of a block)."""
        self._ids[target] = self._ids[source]
        self._epochs[target] = self._epochs[source]

    def read(self, positions: NDArray[np.integer]) -> PositionRows:
        """Return the rows of a request's positions, in the order of its tokens."""
        _check_positions(positions, self.shape.num_positions)
        return PositionRows(self._ids[positions], self._epochs[positions] == self._header[_EPOCH])

    def footprint(self, positions: NDArray[np.integer]) -> tuple[NDArray[np.uint32], int]:
        """Return [layer, expert] activation counts of the known tokens at `positions`, and their number."""
        _check_positions(positions, self.shape.num_positions)
        counts = np.zeros((self.shape.num_layers, self.shape.num_experts), np.uint32)
        return counts, int(_count(positions, self._ids, self._epochs, np.uint16(self._header[_EPOCH]), counts))

    def unlink(self) -> None:
        """Remove the file; processes that map it keep their view."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        self._release()


# A living process holds a lock on its file; once it is dead, another may take the file over. The kernel releases the
# lock however the process ends. Only files whose first word is MAGIC (complete) or 0 (not yet complete) are removed.


def _locked_new(path: Path) -> int:
    """Create a file and lock it; the store of a dead process is removed first. Returns the descriptor."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            if not _remove_dead(path):
                raise ConfigError(
                    f"{path} is the position store of a running engine, or not one of this version: name another, or "
                    "remove it"
                ) from None
            continue
        # Another engine starting now may have found the file before it was locked, and locked or removed it.
        if _lock(descriptor) and _same_file(descriptor, path):
            return descriptor
        os.close(descriptor)


def _remove_dead(path: Path) -> bool:
    """Remove a store that no process has locked; return False if its creator lives or the file is not a store.

    A file that is already gone counts as removed. A file whose creator died before completing it counts as a store.
    """
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    except PermissionError:
        return False  # a file of another user
    try:
        first_word = int.from_bytes(os.pread(descriptor, 8, 0), sys.byteorder)
        if first_word not in (0, MAGIC) or not _lock(descriptor):
            return False
        if _same_file(descriptor, path):  # otherwise another file has this name by now
            path.unlink()
        return True
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    import fcntl  # imported here: only Unix has it, and only Unix has stores in files

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def block_positions(block_ids: Sequence[int], block_size: int, start: int, stop: int) -> NDArray[np.int64]:
    """Return [token] the positions of tokens start … stop - 1 of a request, given its blocks."""
    if not 0 <= start <= stop <= len(block_ids) * block_size:
        raise ConfigError(f"tokens {start} … {stop} must lie in {len(block_ids)} blocks of {block_size}")
    tokens = np.arange(start, stop)
    return np.asarray(block_ids, np.int64)[tokens // block_size] * block_size + tokens % block_size


def store_folder() -> Path:
    """Return the folder for stores: /dev/shm, which is in memory, or else the temporary folder."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


def sweep(folder: Path, prefix: str) -> list[Path]:
    """Remove stores whose creator is dead, since a killed process cannot do it; return their paths."""
    removed = []
    for path in folder.glob(f"{prefix}*{SUFFIX}"):
        try:
            PositionStore.attach(path)
        except InputError:
            continue  # not a store, or still being created
        if _remove_dead(path):
            removed.append(path)
    return removed


def _check_positions(positions: NDArray[np.integer], num_positions: int) -> None:
    if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < num_positions:
        raise ConfigError(
            f"positions {int(positions.min())} … {int(positions.max())} must be in 0 … {num_positions - 1}"
        )


@njit()
def _write(
    positions: NDArray[Any], rows: NDArray[Any], ids: NDArray[Any], epochs: NDArray[Any], epoch: Any, load: NDArray[Any]
) -> tuple[int, int]:
    _, layers, k = rows.shape
    experts = load.shape[1]
    seen = np.zeros((layers, experts), np.bool_)
    kept, distinct = 0, 0
    for row in range(len(positions)):
        position = positions[row]
        if position < 0 or position >= len(epochs):
            continue
        epochs[position] = 0
        good = True
        for layer in range(layers):
            for j in range(k):
                expert = np.int64(rows[row, layer, j])
                if expert < 0 or expert >= experts:
                    good = False
        if not good:
            continue
        for layer in range(layers):
            for j in range(k):
                expert = np.int64(rows[row, layer, j])
                ids[position, layer, j] = expert
                load[layer, expert] += np.uint64(1)
                if not seen[layer, expert]:
                    seen[layer, expert] = True
                    distinct += 1
        epochs[position] = epoch
        kept += 1
    return kept, distinct


@njit()
def _count(positions: NDArray[Any], ids: NDArray[Any], epochs: NDArray[Any], epoch: Any, counts: NDArray[Any]) -> int:
    _, layers, k = ids.shape
    known = 0
    for position in positions:
        if epochs[position] != epoch:
            continue
        known += 1
        for layer in range(layers):
            for j in range(k):
                counts[layer, ids[position, layer, j]] += np.uint32(1)
    return known


# Log of a worker's last steps, one row per step: sums would hide how a step's distinct experts depend on its tokens.

KEPT = 1 << 14
COLUMNS = ENDED_S, ROWS, DISTINCT, SECONDS = range(4)
"""Columns of the log: end of the step on the machine's monotonic clock, in seconds; tokens computed; distinct experts
of a layer, mean over layers; seconds of the forward pass, 0 if the worker does not measure them."""


class LoggedSteps(NamedTuple):
    total: int
    """Number of steps since the worker's start."""
    rows: NDArray[np.float64]
    """[step, column] values of the last steps; a copy."""


class StepLog:
    """Ring buffer of the last steps, in memory of this process unless shared arrays are given."""

    def __init__(self, ring: NDArray[np.float64] | None = None, total: NDArray[np.uint64] | None = None) -> None:
        self._ring = np.zeros((KEPT, len(COLUMNS))) if ring is None else ring
        self._total = np.zeros(1, np.uint64) if total is None else total

    @property
    def total(self) -> int:
        """Number of steps since the start, including those no longer kept."""
        return int(self._total[0])

    def add(self, ended_s: float, rows: int, distinct: float, seconds: float = 0.0) -> None:
        self._ring[self.total % len(self._ring)] = ended_s, rows, distinct, seconds
        self._total[0] += np.uint64(1)

    def read(self, after: int | None = None) -> LoggedSteps:
        """Return the steps after the first `after` steps since the start; by default all that are kept."""
        total = self.total
        first = max(0, total - len(self._ring))
        after = first if after is None else after
        check(
            first <= after <= total,
            f"steps after {after} were asked for; of {total}, the last {len(self._ring)} are kept",
            InputError,
        )
        return LoggedSteps(total, self._ring[np.arange(after, total) % len(self._ring)])
