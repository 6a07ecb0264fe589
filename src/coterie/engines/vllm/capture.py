"""Capture in the worker: copy expert ids out of every MoE layer and write them to the position store once per step.

The hook runs inside the model. Under CUDA graphs it runs only during graph capture, and its kernels are then replayed:
it may therefore only write tensors into buffers with fixed addresses. Where a layer's kernel routes internally, the
hook gets the router's logits and takes the top k itself. It copies the positions from the forward context
in the same way, because both model runners keep the slot mapping in a fixed buffer that a graph reads at each replay.
The scheduler provides the number of real rows of a step.

On a CPU the buffers are read in place. On a GPU they are copied to pinned memory in stream order, and a thread writes
them to the store when the copy is done.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.engines.kernels.top_k import top_k_into
from coterie.errors import UnavailableError
from coterie.footprints.positions import PositionStore

RING = 8
"""Maximum number of steps in transit from a GPU to the store; the next step waits."""


class StepEdits(NamedTuple):
    """A step's changes to the position store, sent from the scheduler's process to the worker's."""

    step: int
    num_tokens: int
    forget: list[int]
    """Positions newly allocated to a request: they hold another request's rows until they are written."""
    copies: list[tuple[int, int]]
    """(source, target) blocks copied on write before the step."""


class Layout(NamedTuple):
    """Range of this worker's tokens among the rows that a MoE layer routes."""

    start: int
    stop: int
    gather: bool = False
    """Whether the rows are a shard, so that the tensor-parallel group's rows must be gathered first."""


def local_rows(
    rows: int, tokens_by_rank: Sequence[int] | None, rank: int, shards: Sequence[int] | None, tp_size: int
) -> Layout:
    """Find this rank's tokens among the rows that a layer routes.

    Under data parallelism a layer may see this rank's tokens, all ranks' (padded by shard or not), or a shard.
    `tokens_by_rank` [data-parallel rank] and `shards` [data-parallel rank x shard] come from the forward context;
    without data parallelism all rows are local.
    """
    if tokens_by_rank is None:
        return Layout(0, rows)
    local, total = tokens_by_rank[rank], sum(tokens_by_rank)
    gather = False
    if rows == total:
        start = sum(tokens_by_rank[:rank])
    elif rows == local:
        start = 0
    elif shards is not None and rows == sum(shards):
        start = sum(shards[: rank * (len(shards) // len(tokens_by_rank))])
    elif tp_size > 1 and rows == -(-local // tp_size):
        start, gather = 0, True
    else:
        raise UnavailableError(
            f"a MoE layer routes {rows} rows; of {total} tokens {local} are this rank's, in shards {shards}"
        )
    return Layout(start, start + local, gather)


class _StepRows(NamedTuple):
    """Rows that a layer routes, and the part of the buffer that their experts go to."""

    rows: torch.Tensor
    column: torch.Tensor
    """[row, k]"""


class StepCapture:
    """The hook of every MoE layer, and the buffers it fills. One per worker."""

    def __init__(
        self,
        layer_ids: Sequence[int],
        top_k: int,
        num_experts: int,
        max_tokens: int,
        device: torch.device,
        positions_of: Callable[[Any], torch.Tensor | None],
        rank: int = 0,
        tp_size: int = 1,
        gather: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._first, self.top_k = layer_ids[0], top_k
        dtype = torch.uint8 if num_experts <= 256 else torch.int16  # int16 is read as uint16: the bits are the same
        self.ids = torch.zeros((max_tokens, len(layer_ids), top_k), dtype=dtype, device=device)
        self._columns = {layer_id: self.ids[:, column] for column, layer_id in enumerate(layer_ids)}
        self.positions = torch.full((max_tokens,), -1, dtype=torch.int64, device=device)
        self._positions_of = positions_of
        self._rank, self._tp_size, self._gather = rank, tp_size, gather
        self.on = True
        """Whether the hook copies. A graph captured while this was True keeps copying."""

    def capture(self, layer_id: int, topk_ids: torch.Tensor, context: Any) -> None:
        """Copy a layer's expert ids [row, k], before replicas are chosen; called by the layer."""
        step = self._step_rows(layer_id, topk_ids, context)
        if step is not None:
            step.column.copy_(step.rows[:, : self.top_k])  # shared experts are dropped

    def capture_logits(self, layer_id: int, logits: torch.Tensor, context: Any) -> None:
        """Keep the experts of a layer whose kernel routes internally, by the router's logits [row, expert]."""
        step = self._step_rows(layer_id, logits, context)
        if step is not None:
            top_k_into(step.rows, step.column)

    def _step_rows(self, layer_id: int, routed: torch.Tensor, context: Any) -> _StepRows | None:
        """Return this worker's rows of `routed` [row, …]; None if they are not kept. The first layer sets positions."""
        column = self._columns.get(layer_id)
        if column is None:  # the layer of a draft model
            return None
        rows, data = routed, context.dp_metadata
        if data is not None:
            by_rank = [int(n) for n in data.num_tokens_across_dp_cpu]
            layout = local_rows(len(routed), by_rank, self._rank, getattr(data, "local_sizes", None), self._tp_size)
            whole = self._gather(routed) if layout.gather and self._gather else routed
            rows = whole[layout.start : layout.stop]
        if not self.on:  # checked after the gather, in which every rank must take part
            return None
        if layer_id == self._first:
            positions = self._positions_of(context)
            if positions is None:  # warm-up step: keep nothing
                self.positions.fill_(-1)
            else:
                mapped = min(len(positions), len(self.positions))
                self.positions[:mapped].copy_(positions[:mapped])
        rows = rows[: len(column)]  # without padding rows beyond the buffer
        return _StepRows(rows, column[: len(rows)])


def as_numpy(ids: torch.Tensor) -> NDArray[np.unsignedinteger]:
    array: NDArray[np.unsignedinteger] = ids.numpy()
    return array.view(np.uint16) if array.dtype == np.int16 else array


class StoreWriter:
    """Writes each step's buffers to the store, in step order."""

    def __init__(
        self, store: PositionStore, capture: StepCapture, block_size: int, failed: Callable[[Exception], None]
    ) -> None:
        """Create the writer; `failed` is called with the error if a step could not be written."""
        self.store, self.capture, self._block_size, self._failed = store, capture, block_size, failed
        self._ring = _Ring(self) if capture.ids.device.type == "cuda" else None

    def submit(self, edits: StepEdits) -> None:
        """Queue a step's buffers after its forward pass; on a GPU this returns before the step has run."""
        wanted = self.store.enabled
        epoch = self.store.epoch if wanted and self.capture.on else None  # on: during this step's pass
        self.capture.on = wanted
        if self._ring is not None:
            self._ring.submit(edits, epoch)
        else:
            count = min(edits.num_tokens, len(self.capture.ids))
            self.write(edits, self.capture.positions[:count], self.capture.ids[:count], epoch)

    def write(self, edits: StepEdits, positions: torch.Tensor, ids: torch.Tensor, epoch: int | None) -> None:
        """Write a step to the store. `epoch` is the store's at the forward pass; None if nothing was captured."""
        if edits.forget:
            self.store.forget(np.asarray(edits.forget, np.int64))
        for source, target in edits.copies:
            within = np.arange(self._block_size)
            self.store.copy(source * self._block_size + within, target * self._block_size + within)
        if epoch is not None and len(positions):
            self.store.write(positions.numpy(), as_numpy(ids), edits.step, epoch)
        else:
            self.store.skip(edits.step)

    def lost(self, edits: StepEdits, error: Exception) -> None:
        """Forget all positions after a step that could not be written: its positions may hold older rows."""
        self._failed(error)
        self.store.forget_all()
        self.store.skip(edits.step)

    def close(self) -> None:
        if self._ring is not None:
            self._ring.close()


class _Ring:
    """Pinned copies of the buffers, and the thread that writes the copies to the store."""

    def __init__(self, writer: StoreWriter) -> None:
        self._writer, capture = writer, writer.capture
        self._ids = torch.empty((RING, *capture.ids.shape), dtype=capture.ids.dtype, pin_memory=True)
        self._positions = torch.empty((RING, len(capture.positions)), dtype=torch.int64, pin_memory=True)
        self._events = [torch.cuda.Event(blocking=True) for _ in range(RING)]
        self._free: queue.Queue[int] = queue.Queue()
        for place in range(RING):
            self._free.put(place)
        self._copies: queue.Queue[tuple[StepEdits, int, int, int | None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="coterie-positions", daemon=True)
        self._thread.start()

    def submit(self, edits: StepEdits, epoch: int | None) -> None:
        place, capture = self._free.get(), self._writer.capture
        count = min(edits.num_tokens, len(capture.ids)) if epoch is not None else 0
        if count:
            self._ids[place, :count].copy_(capture.ids[:count], non_blocking=True)
            self._positions[place, :count].copy_(capture.positions[:count], non_blocking=True)
        self._events[place].record()
        self._copies.put((edits, place, count, epoch))

    def _run(self) -> None:
        while (copy := self._copies.get()) is not None:
            edits, place, rows, epoch = copy
            try:
                self._events[place].synchronize()
                self._writer.write(edits, self._positions[place, :rows], self._ids[place, :rows], epoch)
            except Exception as error:  # the thread must go on: a ring that is never emptied would block the worker
                self._writer.lost(edits, error)
            finally:
                self._free.put(place)

    def close(self) -> None:
        self._copies.put(None)
        self._thread.join(timeout=5)
