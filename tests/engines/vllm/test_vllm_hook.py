"""The worker's half of the vLLM plugin without vLLM: rows to positions, on the CPU and under CUDA graphs."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from coterie.engines.vllm.capture import Layout, StepCapture, StepEdits, StoreWriter, local_rows
from coterie.errors import UnavailableError
from coterie.footprints import PositionShape, PositionStore

pytestmark = pytest.mark.torch
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LAYERS, TOP_K, EXPERTS, BLOCK = 3, 2, 300, 8
SHAPE = PositionShape(128, LAYERS, TOP_K, EXPERTS)
LAYER_IDS = (1, 2, 5)


class Worker:
    """A model's MoE layers as the hook sees them: ids per layer, a slot mapping in a buffer that stays."""

    def __init__(self, device: str) -> None:
        self.mapping = torch.full((64,), -1, dtype=torch.int64, device=device)
        self.routed = torch.zeros((LAYERS, 64, TOP_K), dtype=torch.int32, device=device)
        self.context = SimpleNamespace(dp_metadata=None, slot_mapping=self.mapping)
        self.capture = StepCapture(
            LAYER_IDS, TOP_K, EXPERTS, 64, torch.device(device), lambda context: context.slot_mapping
        )
        self.store = PositionStore.create(SHAPE)
        self.failures: list[Exception] = []
        self.writer = StoreWriter(self.store, self.capture, BLOCK, self.failures.append)

    def load(self, positions: np.ndarray, ids: np.ndarray, padded: int) -> None:
        """Fill the buffers of a step, padded as engines pad."""
        self.mapping.fill_(-1)
        self.mapping[: len(positions)] = torch.as_tensor(positions).to(self.mapping.device)
        self.routed[:, : len(positions)] = torch.as_tensor(ids.swapaxes(0, 1), dtype=torch.int32).to(
            self.mapping.device
        )
        self.context.slot_mapping = self.mapping[:padded]

    def forward(self, padded: int) -> None:
        for column, layer in enumerate(LAYER_IDS):
            self.capture.capture(layer, self.routed[column, :padded], self.context)

    def settle(self, step: int) -> None:
        until = time.monotonic() + 120
        while self.store.step < step and time.monotonic() < until:
            time.sleep(0.001)
        assert self.store.step == step


def some_step(rng: np.random.Generator, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.stack([[rng.permutation(EXPERTS)[:TOP_K] for _ in range(LAYERS)] for _ in range(tokens)])
    return rng.permutation(SHAPE.num_positions)[:tokens], ids


def edits(step: int, tokens: int, forget: list[int] | None = None, copies: Any = ()) -> StepEdits:
    return StepEdits(step, tokens, forget or [], list(copies))


def test_a_step_that_cannot_be_written_is_told_and_nothing_older_is_vouched_for(rng: np.random.Generator) -> None:
    worker, error = Worker("cpu"), ValueError("the reason")
    positions, ids = some_step(rng, 10)
    worker.store.write(positions, ids, 1)
    assert worker.store.read(positions).known.all()
    worker.writer.lost(edits(2, 10), error)
    assert (worker.failures, worker.store.step) == ([error], 2)
    assert not worker.store.read(positions).known.any()


def test_a_step_reaches_its_positions(rng: np.random.Generator) -> None:
    worker = Worker("cpu")
    positions, ids = some_step(rng, 10)
    worker.load(positions, ids, padded=16)
    worker.forward(16)
    worker.writer.submit(edits(1, 10))
    rows = worker.store.read(positions)
    assert rows.known.all()
    np.testing.assert_array_equal(rows.expert_ids, ids)
    assert worker.store.step == 1
    assert int(worker.store.load.sum()) == ids.size, "padding is not load"


def test_padding_rows_are_not_recorded_whatever_they_hold(rng: np.random.Generator) -> None:
    """A graph of 16 rows replays a larger step's positions and ids in its padding rows; a mask writes ids of -1."""
    for stale in (True, False):
        worker = Worker("cpu")
        positions, ids = some_step(rng, 16)
        worker.load(positions, ids, padded=16)
        worker.forward(16)
        worker.writer.submit(edits(1, 16))
        _, again = some_step(rng, 16)
        worker.routed[:] = torch.as_tensor(again.swapaxes(0, 1), dtype=torch.int32)[:, :1] if stale else -1
        worker.routed[:, :9] = torch.as_tensor(again[:9].swapaxes(0, 1), dtype=torch.int32)
        worker.forward(16)  # rows 9 to 15 are padding; their positions are still those of the first step
        worker.writer.submit(edits(2, 9))
        np.testing.assert_array_equal(worker.store.read(positions[:9]).expert_ids, again[:9])
        np.testing.assert_array_equal(worker.store.read(positions[9:]).expert_ids, ids[9:])
        assert int(worker.store.load.sum()) == ids.size + again[:9].size, "padding is not load"


def test_a_draft_models_layer_is_left_out(rng: np.random.Generator) -> None:
    worker = Worker("cpu")
    positions, ids = some_step(rng, 4)
    worker.load(positions, ids, padded=4)
    worker.forward(4)
    worker.capture.capture(99, torch.full((4, TOP_K), 7), worker.context)
    worker.writer.submit(edits(1, 4))
    np.testing.assert_array_equal(worker.store.read(positions).expert_ids, ids)


def test_logits_of_a_kernel_that_routes_internally_reach_their_positions(rng: np.random.Generator) -> None:
    """The k largest, the first of equals; padding rows and rows of a draft model are left out."""
    worker = Worker("cpu")
    positions, ids = some_step(rng, 10)
    worker.load(positions, ids, padded=16)
    ids[:, :, 0], ids[:, :, 1] = ids.min(axis=2), ids.max(axis=2)
    for column, layer in enumerate(LAYER_IDS):
        logits = torch.zeros((80, EXPERTS), dtype=torch.bfloat16)  # more rows than the buffer has
        logits[:10].scatter_(1, torch.as_tensor(ids[:, column]), 1.0)
        worker.capture.capture_logits(layer, logits, worker.context)
    worker.capture.capture_logits(99, torch.zeros((16, EXPERTS)), worker.context)
    worker.writer.submit(edits(1, 10))
    rows = worker.store.read(positions)
    assert rows.known.all()
    np.testing.assert_array_equal(rows.expert_ids, ids)


def test_a_warm_up_step_writes_nothing(rng: np.random.Generator) -> None:
    worker = Worker("cpu")
    positions, ids = some_step(rng, 4)
    worker.load(positions, ids, padded=4)
    worker.forward(4)
    worker.context.slot_mapping = None
    worker.forward(4)
    worker.writer.submit(edits(1, 4))
    assert not worker.store.read(positions).known.any()


def test_the_step_in_which_capture_is_turned_on_is_not_believed(rng: np.random.Generator) -> None:
    """The hook was off during its forward pass: the buffers still hold an older step."""
    worker = Worker("cpu")
    positions, ids = some_step(rng, 4)
    worker.load(positions, ids, padded=4)
    worker.forward(4)
    worker.store.enabled = False
    worker.writer.submit(edits(1, 4))
    worker.forward(4)
    worker.store.enabled = True
    worker.writer.submit(edits(2, 4))
    assert not worker.store.read(positions).known.any()
    worker.forward(4)
    worker.writer.submit(edits(3, 4))
    assert worker.store.read(positions).known.all()


def test_foreign_positions_and_copies_come_before_the_step(rng: np.random.Generator) -> None:
    worker = Worker("cpu")
    _, ids = some_step(rng, 8)
    worker.load(np.arange(8), ids, padded=8)
    worker.forward(8)
    worker.writer.submit(edits(1, 8))
    worker.load(np.array([10]), ids[:1], padded=1)  # block 1 starts as a copy of block 0; its third token is computed
    worker.forward(1)
    worker.writer.submit(edits(2, 1, forget=[3, 10, -1, 5000], copies=[(0, 1)]))
    rows = worker.store.read(np.arange(16))
    assert rows.known.tolist() == [True] * 3 + [False] + [True] * 7 + [False] + [True] * 4
    np.testing.assert_array_equal(rows.expert_ids[8:10], ids[:2])
    np.testing.assert_array_equal(rows.expert_ids[10], ids[0])


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.integers(1, 4),
    st.sampled_from(["own", "all", "shards", "shard"]),
    st.data(),
)
def test_local_rows_finds_this_ranks_tokens(by_rank: list[int], tp: int, how: str, data: st.DataObject) -> None:
    """Rows are numbered by owner; whatever the layout, the rows found must be this rank's, in order."""
    rank = data.draw(st.integers(0, len(by_rank) - 1))
    own = [(rank, position) for position in range(by_rank[rank])]
    pad = (-1, -1)
    shards = [-(-count // tp) for count in by_rank for _ in range(tp)]
    if how == "own":
        rows = own
    elif how == "all":
        rows = [(r, p) for r, count in enumerate(by_rank) for p in range(count)]
    elif how == "shards":
        rows = [(r, p) if p < count else pad for r, count in enumerate(by_rank) for p in range(-(-count // tp) * tp)]
    else:
        rows = own[: -(-len(own) // tp)]
    layout = local_rows(len(rows), by_rank, rank, shards, tp)
    if layout.gather:
        assert len(rows) == -(-by_rank[rank] // tp)
        assert (layout.start, layout.stop) == (0, by_rank[rank])
    elif how != "shard":
        assert rows[layout.start : layout.stop] == own


def test_rows_that_fit_no_layout_are_refused() -> None:
    assert local_rows(7, None, 0, None, 1) == Layout(0, 7)
    with pytest.raises(UnavailableError, match="routes 13 rows"):
        local_rows(13, [4, 5], 0, [4, 5], 1)


@needs_gpu
def test_under_cuda_graphs(rng: np.random.Generator) -> None:
    """The hook runs only at capture; replays must write each step's own ids and positions, in order, from a thread."""
    worker = Worker("cuda")
    graphs = {}
    for padded in (8, 16, 32):
        worker.context.slot_mapping = worker.mapping[:padded]
        worker.forward(padded)
        graphs[padded] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[padded]):
            worker.forward(padded)
    truth: dict[int, np.ndarray] = {}
    for step in range(1, 200):
        tokens = int(rng.integers(1, 32))
        padded = next(size for size in graphs if size >= tokens)
        positions, ids = some_step(rng, tokens)
        worker.load(positions, ids, padded)
        graphs[padded].replay()
        worker.writer.submit(edits(step, tokens))
        truth.update(zip(positions.tolist(), ids, strict=True))
    worker.settle(199)
    rows = worker.store.read(np.array(list(truth)))
    assert rows.known.all()
    np.testing.assert_array_equal(rows.expert_ids, np.array(list(truth.values())))
    worker.writer.close()
