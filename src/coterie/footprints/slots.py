"""The slot store: the experts of every token whose KV is in the cache, kept by KV slot.

An engine writes each token's KV into a slot (block x block size + position in the block) and finds it again through
the request's blocks. The store keeps the token's expert ids under the same number, so it follows the KV cache without
a bookkeeping of its own:

- a prefix hit finds the ids that the first request left there, whichever request asks;
- a recomputed, preempted or rejected token writes the same slot again: nothing is counted twice;
- a freed block needs no clearing: its next owner overwrites it before it reads it.

What no forward pass of this worker wrote (KV that came from another worker, or while capture was off) must not be
read as if it were known, so each slot carries the *epoch* of its writing, and only the current epoch counts.

    file     64 header words · layer ids [layer] · load [layer, expert], all uint64 ·
             last steps [step, column] float64 · epoch [slot] uint16 · ids [slot, layer, k]

The file lies in memory (``/dev/shm``). One process writes, in the order of the steps; others map it and read a
request's slots once the step that wrote them is over. Exact at any block size, where counts per block clip.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.errors import ConfigError, InputError
from coterie.footprints.step_log import COLUMNS, KEPT, StepLog
from coterie.types import narrowest_uint

MAGIC = 0x53_4C_4F_54_43_4F_54_32  # "SLOTCOT2"
HEADER_WORDS = 64
MAX_EPOCH = (1 << 16) - 1
SUFFIX = ".slots"

# Header words.
_MAGIC, _SLOTS, _LAYERS, _TOP_K, _EXPERTS, _PID, _OWNER = range(7)
_EPOCH, _ENABLED, _STEP, _STEPS, _TOKENS, _DISTINCT, _ERRORS = range(7, 14)


class SlotShape(NamedTuple):
    num_slots: int
    num_layers: int
    top_k: int
    num_experts: int

    @property
    def dtype(self) -> np.dtype[Any]:
        return narrowest_uint(self.num_experts - 1)

    @property
    def layers_at(self) -> int:
        return HEADER_WORDS * 8

    @property
    def load_at(self) -> int:
        return self.layers_at + self.num_layers * 8

    @property
    def log_at(self) -> int:
        return self.load_at + self.num_layers * self.num_experts * 8

    @property
    def epochs_at(self) -> int:
        return self.log_at + KEPT * len(COLUMNS) * 8

    @property
    def ids_at(self) -> int:
        return self.epochs_at + (self.num_slots * 2 + 7) // 8 * 8

    @property
    def nbytes(self) -> int:
        return self.ids_at + self.num_slots * self.num_layers * self.top_k * self.dtype.itemsize


class SlotRows(NamedTuple):
    """What the store holds of a request."""

    expert_ids: NDArray[np.unsignedinteger]
    """[token, layer, k]; a copy."""
    known: NDArray[np.bool_]
    """[token] False where no step of this worker wrote the slot: that row of ids means nothing."""


class SlotStore:
    """Expert ids per KV slot, in memory that several processes may map."""

    def __init__(self, shape: SlotShape, buffer: mmap.mmap, path: Path | None) -> None:
        self.shape = shape
        self.path = path
        self._buffer = buffer
        self._header = np.frombuffer(buffer, np.uint64, HEADER_WORDS)
        self._layer_ids = np.frombuffer(buffer, np.uint64, shape.num_layers, shape.layers_at)
        self.load = np.frombuffer(buffer, np.uint64, shape.num_layers * shape.num_experts, shape.load_at).reshape(
            shape.num_layers, shape.num_experts
        )
        """[layer, expert] tokens since the start; only grows."""
        ring = np.frombuffer(buffer, np.float64, KEPT * len(COLUMNS), shape.log_at).reshape(KEPT, len(COLUMNS))
        self.log = StepLog(ring, self._header[_STEPS : _STEPS + 1])
        self._epochs = np.frombuffer(buffer, np.uint16, shape.num_slots, shape.epochs_at)
        self._ids = np.frombuffer(
            buffer, shape.dtype, shape.num_slots * shape.num_layers * shape.top_k, shape.ids_at
        ).reshape(shape.num_slots, shape.num_layers, shape.top_k)

    @classmethod
    def create(
        cls, shape: SlotShape, path: Path | None = None, layer_ids: Sequence[int] | None = None, owner: int = 0
    ) -> SlotStore:
        """A new store: in memory of this process, or in a file that others attach to. Starts with capture on.

        `layer_ids` names the model's layers that are kept, dense layers counted; 0 … layers - 1 by default. `owner` is
        a number that those who attach may ask for: a file of that name may be another engine's.
        """
        layers = range(shape.num_layers) if layer_ids is None else layer_ids
        if len(layers) != shape.num_layers:
            raise ConfigError(f"layer_ids has {len(layers)} entries; num_layers={shape.num_layers}")
        if min(shape) < 1 or shape.top_k > shape.num_experts or shape.num_experts > 1 << 16:
            raise ConfigError(f"{shape} must be at least 1 everywhere, with top_k <= num_experts <= {1 << 16}")
        if path is None:
            buffer = mmap.mmap(-1, shape.nbytes)
        else:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, shape.nbytes)  # a full /dev/shm must say so now, not by SIGBUS later
                buffer = mmap.mmap(descriptor, shape.nbytes)
            except OSError:
                path.unlink()
                raise
            finally:
                os.close(descriptor)
        store = cls(shape, buffer, path)
        store._header[[_SLOTS, _LAYERS, _TOP_K, _EXPERTS]] = shape
        store._layer_ids[:] = layers
        store._header[[_PID, _EPOCH, _ENABLED, _OWNER]] = os.getpid(), 1, 1, owner
        store._header[_MAGIC] = MAGIC  # last: a reader that sees it sees the rest
        return store

    @classmethod
    def attach(cls, path: Path, owner: int | None = None) -> SlotStore:
        """Map a store that another process made; with `owner`, only that one's."""
        try:
            with path.open("r+b") as file:
                buffer = mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError) as error:
            raise InputError(f"{path} is not a slot store: {error}") from None
        if len(buffer) < HEADER_WORDS * 8:
            raise InputError(f"{path} is not a slot store: it has {len(buffer)} bytes")
        header = np.frombuffer(buffer, np.uint64, HEADER_WORDS)
        shape = SlotShape(*(int(word) for word in header[[_SLOTS, _LAYERS, _TOP_K, _EXPERTS]]))
        if header[_MAGIC] != MAGIC or min(shape) < 1 or shape.nbytes != len(buffer):
            raise InputError(f"{path} is not a slot store of this version, or not finished")
        if owner is not None and int(header[_OWNER]) != owner:
            raise InputError(f"{path} is the slot store of another engine")
        return cls(shape, buffer, path)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Index of each kept layer in the model, dense layers counted."""
        return tuple(int(layer) for layer in self._layer_ids)

    @property
    def enabled(self) -> bool:
        """Whether steps are captured. Any process may set it; a change begins a new epoch, and nothing is known.

        Turning it off must do that too: slots written from then on would be taken for what they held before.
        """
        return bool(self._header[_ENABLED])

    @enabled.setter
    def enabled(self, value: bool) -> None:
        if value != self.enabled:
            self.forget_all()
        self._header[_ENABLED] = value

    @property
    def epoch(self) -> int:
        """Changes when all that was written is forgotten."""
        return int(self._header[_EPOCH])

    def forget_all(self) -> None:
        epoch = self.epoch + 1
        if epoch > MAX_EPOCH:
            self._epochs[:] = 0
            epoch = 1
        self._header[_EPOCH] = epoch

    @property
    def errors(self) -> int:
        """Failures of the writing process, as it counted them here."""
        return int(self._header[_ERRORS])

    def note_error(self) -> None:
        self._header[_ERRORS] += np.uint64(1)

    @property
    def step(self) -> int:
        """Number of the last step written, as the writer counts."""
        return int(self._header[_STEP])

    @property
    def totals(self) -> tuple[int, int, int]:
        """Steps and tokens written, and distinct experts summed over steps and layers, since the start."""
        steps, tokens, distinct = (int(word) for word in self._header[[_STEPS, _TOKENS, _DISTINCT]])
        return steps, tokens, distinct

    def write(
        self, slots: NDArray[np.integer], expert_ids: NDArray[np.integer], step: int = 0, epoch: int | None = None
    ) -> int:
        """One step's rows: ids [token, layer, k] into their slots; a slot below 0 pads. Returns the tokens kept.

        Ids outside 0 … experts - 1 leave their slot unknown. `epoch` is that of the step, if it may be older than now:
        rows of an epoch that has passed are not known.
        """
        shape = self.shape
        if expert_ids.shape != (len(slots), shape.num_layers, shape.top_k):
            expected = (len(slots), shape.num_layers, shape.top_k)
            raise ConfigError(f"expert_ids has shape {expert_ids.shape}; {len(slots)} slots need {expected}")
        stamp = np.uint16(self.epoch if epoch is None else epoch)
        kept, distinct = _write(slots, expert_ids, self._ids, self._epochs, stamp, self.load)
        self.log.add(time.monotonic(), kept, distinct / shape.num_layers)
        self._header[_TOKENS] += np.uint64(kept)
        self._header[_DISTINCT] += np.uint64(distinct)
        self._header[_STEP] = step
        return int(kept)

    def compile(self) -> None:
        """Do now what the first write and the first footprint would have to wait for: their loops are compiled."""
        none = np.empty(0, np.int64)
        rows = np.empty((0, self.shape.num_layers, self.shape.top_k), self.shape.dtype)
        _write(none, rows, self._ids, self._epochs, np.uint16(1), self.load)
        self.footprint(none)

    def skip(self, step: int) -> None:
        """A step that wrote nothing; readers that wait for it go on."""
        self._header[_STEP] = step

    def forget(self, slots: NDArray[np.integer]) -> None:
        """Mark slots unknown: their KV was not computed here."""
        self._epochs[slots[(slots >= 0) & (slots < self.shape.num_slots)]] = 0

    def copy(self, source: NDArray[np.integer], target: NDArray[np.integer]) -> None:
        """Follow a copy of KV from slots to slots (copy on write of a block)."""
        self._ids[target] = self._ids[source]
        self._epochs[target] = self._epochs[source]

    def read(self, slots: NDArray[np.integer]) -> SlotRows:
        """The rows of a request's slots, in the order of its tokens."""
        _check_slots(slots, self.shape.num_slots)
        return SlotRows(self._ids[slots], self._epochs[slots] == self._header[_EPOCH])

    def footprint(self, slots: NDArray[np.integer]) -> tuple[NDArray[np.uint32], int]:
        """[layer, expert] activations of the known tokens among `slots`, and how many tokens those are."""
        _check_slots(slots, self.shape.num_slots)
        counts = np.zeros((self.shape.num_layers, self.shape.num_experts), np.uint32)
        known = _count(slots, self._ids, self._epochs, np.uint16(self._header[_EPOCH]), counts)
        return counts, int(known)

    def unlink(self) -> None:
        """Remove the file; those who map it keep what they see."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def block_slots(block_ids: Sequence[int], block_size: int, start: int, stop: int) -> NDArray[np.int64]:
    """Slots of the tokens start … stop - 1 of a request, given its blocks."""
    if not 0 <= start <= stop <= len(block_ids) * block_size:
        raise ConfigError(f"tokens {start} … {stop} must lie in {len(block_ids)} blocks of {block_size}")
    positions = np.arange(start, stop)
    return np.asarray(block_ids, np.int64)[positions // block_size] * block_size + positions % block_size


def store_folder() -> Path:
    """Where stores lie: in memory where the system has such a folder."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


def sweep(folder: Path, prefix: str) -> list[Path]:
    """Remove stores whose maker is dead: a killed process cannot do it itself."""
    removed = []
    for path in folder.glob(f"{prefix}*{SUFFIX}"):
        try:
            pid = int(SlotStore.attach(path)._header[_PID])
        except InputError:
            continue  # not ours, or being made right now
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            path.unlink(missing_ok=True)
            removed.append(path)
        except PermissionError:
            continue  # alive, and somebody else's
    return removed


def _check_slots(slots: NDArray[np.integer], num_slots: int) -> None:
    if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < num_slots:
        raise ConfigError(f"slots {int(slots.min())} … {int(slots.max())} must be in 0 … {num_slots - 1}")


@njit()
def _write(
    slots: NDArray[Any], rows: NDArray[Any], ids: NDArray[Any], epochs: NDArray[Any], epoch: Any, load: NDArray[Any]
) -> tuple[int, int]:
    _, layers, k = rows.shape
    experts = load.shape[1]
    seen = np.zeros((layers, experts), np.bool_)
    kept, distinct = 0, 0
    for row in range(len(slots)):
        slot = slots[row]
        if slot < 0 or slot >= len(epochs):
            continue
        epochs[slot] = 0
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
                ids[slot, layer, j] = expert
                load[layer, expert] += np.uint64(1)
                if not seen[layer, expert]:
                    seen[layer, expert] = True
                    distinct += 1
        epochs[slot] = epoch
        kept += 1
    return kept, distinct


@njit()
def _count(slots: NDArray[Any], ids: NDArray[Any], epochs: NDArray[Any], epoch: Any, counts: NDArray[Any]) -> int:
    _, layers, k = ids.shape
    known = 0
    for slot in slots:
        if epochs[slot] != epoch:
            continue
        known += 1
        for layer in range(layers):
            for j in range(k):
                counts[layer, ids[slot, layer, j]] += np.uint32(1)
    return known
