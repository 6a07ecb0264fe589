"""The position store against a KV cache played through by brute force: hits, preemption, aborts, reuse, foreign KV."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from coterie.errors import ConfigError, InputError
from coterie.footprints import PositionShape, PositionStore, block_positions, footprint
from coterie.footprints.positions import MAX_EPOCH, sweep

SHAPE = PositionShape(num_positions=64, num_layers=3, top_k=2, num_experts=8)


def experts_of(history: tuple[int, ...], shape: PositionShape = SHAPE) -> np.ndarray:
    """A model: the experts of a sequence's last token depend on all tokens before it, and on nothing else."""
    rng = np.random.default_rng(abs(hash(history)) % (1 << 32))
    return np.stack([rng.permutation(shape.num_experts)[: shape.top_k] for _ in range(shape.num_layers)])


def test_reads_what_was_written(rng: np.random.Generator) -> None:
    store = PositionStore.create(SHAPE)
    positions = rng.permutation(SHAPE.num_positions)[:20]
    ids = rng.integers(0, SHAPE.num_experts, (20, 3, 2))
    assert store.write(positions, ids) == 20
    rows = store.read(positions)
    assert rows.known.all()
    np.testing.assert_array_equal(rows.expert_ids, ids)
    counts, known = store.footprint(positions)
    assert known == 20
    np.testing.assert_array_equal(counts, footprint(ids, SHAPE.num_experts))
    np.testing.assert_array_equal(store.load, counts)


def test_what_was_never_written_is_not_known() -> None:
    store = PositionStore.create(SHAPE)
    assert not store.read(np.arange(SHAPE.num_positions)).known.any()
    assert store.footprint(np.arange(4))[1] == 0


def test_pads_are_skipped_and_bad_ids_leave_the_position_unknown() -> None:
    store = PositionStore.create(SHAPE)
    ids = np.zeros((3, 3, 2), np.int64)
    ids[2, 1, 0] = SHAPE.num_experts
    assert store.write(np.array([5, -1, 6]), ids) == 1
    assert store.read(np.array([5, 6])).known.tolist() == [True, False]
    assert store.load.sum() == 6
    good = np.ones((1, 3, 2), np.int64)
    store.write(np.array([6]), good)
    store.write(np.array([6]), ids[2:])
    assert not store.read(np.array([6])).known[0], "a bad row must not leave the row before it as known"


def test_turning_capture_off_and_on_forgets_everything() -> None:
    store = PositionStore.create(SHAPE)
    store.write(np.array([0, 1]), np.zeros((2, 3, 2), np.int64))
    store.enabled = False
    assert not store.read(np.array([0, 1])).known.any(), "KV may change unseen while capture is off"
    store.enabled = True
    assert not store.read(np.array([0, 1])).known.any()
    store.write(np.array([1]), np.zeros((1, 3, 2), np.int64))
    assert store.read(np.array([0, 1])).known.tolist() == [False, True]


def test_epochs_wrap_without_reviving_old_rows() -> None:
    store = PositionStore.create(SHAPE)
    store.write(np.array([3]), np.zeros((1, 3, 2), np.int64))
    for _ in range(MAX_EPOCH // 2 + 3):
        store.enabled = False
        store.enabled = True
        assert not store.read(np.array([3])).known[0]


def test_a_copy_on_write_is_followed() -> None:
    store = PositionStore.create(SHAPE)
    ids = np.arange(4 * 6).reshape(4, 3, 2) % SHAPE.num_experts
    store.write(np.arange(4), ids)
    store.copy(np.arange(8), np.arange(8, 16))
    rows = store.read(np.arange(8, 16))
    assert rows.known.tolist() == [True] * 4 + [False] * 4
    np.testing.assert_array_equal(rows.expert_ids[:4], ids)


def test_wide_models_use_two_bytes() -> None:
    shape = PositionShape(4, 2, 2, 384)
    store = PositionStore.create(shape)
    ids = np.array([[[300, 383], [0, 256]]])
    store.write(np.array([2]), ids)
    np.testing.assert_array_equal(store.read(np.array([2])).expert_ids, ids)
    assert store.shape.dtype.itemsize == 2


@pytest.mark.parametrize(
    ("shape", "word"),
    [
        (PositionShape(0, 1, 1, 1), "at least 1"),
        (PositionShape(8, 1, 4, 2), "top_k"),
        (PositionShape(8, 1, 1, 1 << 17), "65536"),
    ],
)
def test_shapes_that_make_no_sense_are_refused(shape: PositionShape, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        PositionStore.create(shape)


def test_wrong_rows_and_positions_are_refused() -> None:
    store = PositionStore.create(SHAPE)
    with pytest.raises(ConfigError, match="positions need"):
        store.write(np.array([1, 2]), np.zeros((2, 3, 3), np.int64))
    with pytest.raises(ConfigError, match=r"0 … 63"):
        store.read(np.array([64]))
    with pytest.raises(ConfigError, match="2 blocks of 4"):
        block_positions([0, 1], 4, 0, 9)


@given(st.lists(st.integers(0, 15), unique=True, max_size=6), st.integers(1, 9), st.data())
def test_block_positions_is_the_engine_formula(blocks: list[int], size: int, data: st.DataObject) -> None:
    stop = data.draw(st.integers(0, len(blocks) * size))
    start = data.draw(st.integers(0, stop))
    expected = [blocks[p // size] * size + p % size for p in range(start, stop)]
    assert block_positions(blocks, size, start, stop).tolist() == expected


def test_another_process_reads_it(tmp_path: Path) -> None:
    store = PositionStore.create(SHAPE, tmp_path / "a.slots", layer_ids=[3, 4, 7])
    store.write(np.array([9]), np.full((1, 3, 2), 5), step=17)
    code = (
        "import sys, pathlib, numpy as np\nfrom coterie.footprints import PositionStore\n"
        "s = PositionStore.attach(pathlib.Path(sys.argv[1]))\n"
        "rows = s.read(np.array([9, 8]))\n"
        "print(s.step, s.layer_ids, rows.known.tolist(), int(rows.expert_ids[0].sum()))\n"
        "s.enabled = False\n"
    )
    out = subprocess.run([sys.executable, "-c", code, str(store.path)], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "17 (3, 4, 7) [True, False] 30"
    assert not store.enabled, "any process may turn capture off"


def test_files_that_are_no_store_are_refused(tmp_path: Path) -> None:
    for name, content in (("empty", b""), ("short", b"x" * 100), ("noise", os.urandom(5000))):
        path = tmp_path / f"{name}.slots"
        path.write_bytes(content)
        with pytest.raises(InputError, match="is not a position store"):
            PositionStore.attach(path)
    with pytest.raises(InputError):
        PositionStore.attach(tmp_path / "absent.slots")
    store = PositionStore.create(SHAPE, tmp_path / "cut.slots")
    assert store.path is not None
    os.truncate(store.path, 1000)
    with pytest.raises(InputError, match="not a position store"):
        PositionStore.attach(store.path)


def test_a_store_of_another_engine_is_refused(tmp_path: Path) -> None:
    PositionStore.create(SHAPE, tmp_path / "a.slots", owner=7)
    assert PositionStore.attach(tmp_path / "a.slots", owner=7).shape == SHAPE
    with pytest.raises(InputError, match="another engine"):
        PositionStore.attach(tmp_path / "a.slots", owner=8)


def test_a_step_of_a_passed_epoch_is_not_known() -> None:
    """Captured before capture was turned off, written after: later steps may have overwritten that KV unseen."""
    store = PositionStore.create(SHAPE)
    before = store.epoch
    store.enabled = False
    store.write(np.array([4]), np.zeros((1, 3, 2), np.int64), epoch=before)
    assert not store.read(np.array([4])).known.any()


def test_compiling_changes_nothing() -> None:
    store = PositionStore.create(SHAPE)
    store.compile()
    assert store.totals == (0, 0, 0)
    assert not store.load.any()


def test_stores_of_dead_processes_are_swept(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\nfrom coterie.footprints import PositionShape, PositionStore\n"
        "PositionStore.create(PositionShape(8, 1, 1, 2), pathlib.Path(sys.argv[1]))\n"
    )
    dead = tmp_path / "coterie-dead.slots"
    subprocess.run([sys.executable, "-c", code, str(dead)], check=True)
    alive = PositionStore.create(SHAPE, tmp_path / "coterie-alive.slots")
    (tmp_path / "coterie-noise.slots").write_bytes(b"?" * 10)
    assert sweep(tmp_path, "coterie-") == [dead]
    assert alive.path is not None
    assert alive.path.exists()
    assert (tmp_path / "coterie-noise.slots").exists(), "what is not ours stays"


@pytest.mark.parametrize("waited", [True, False], ids=["reaped", "zombie"])
def test_the_store_of_a_killed_process_is_taken_over(tmp_path: Path, waited: bool) -> None:
    """A killed process that nobody waited for still has its process id; its lock is free all the same."""
    path = tmp_path / "coterie-plugin-0.slots"
    code = (
        "import pathlib, sys\nfrom coterie.footprints import PositionShape, PositionStore\n"
        "store = PositionStore.create(PositionShape(8, 1, 1, 2), pathlib.Path(sys.argv[1]))\n"
        "print('ready', flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"ready\n"
        with pytest.raises(ConfigError, match="position store of a running engine"):
            PositionStore.create(SHAPE, path)
        assert sweep(tmp_path, "coterie-") == []
        assert PositionStore.attach(path).shape.num_positions == 8
        engine.kill()
        if waited:
            engine.wait()
        else:
            os.waitid(os.P_PID, engine.pid, os.WEXITED | os.WNOWAIT)  # dead, and left in the process table
        store = PositionStore.create(SHAPE, path)
        assert PositionStore.attach(path).shape == SHAPE
    store.unlink()
    assert not path.exists()
    again = PositionStore.create(SHAPE, path)
    again.unlink()


def test_a_store_that_was_dropped_is_no_running_engines(tmp_path: Path) -> None:
    path = tmp_path / "coterie-a.slots"
    first = PositionStore.create(SHAPE, path)
    del first
    PositionStore.create(SHAPE, path).unlink()
    path.touch()  # by an engine that was killed as it began
    PositionStore.create(SHAPE, path).unlink()
    path.write_bytes(b"a file of somebody else")
    with pytest.raises(ConfigError, match="or not one of this version"):
        PositionStore.create(SHAPE, path)


BLOCK = 4
BLOCKS = SHAPE.num_positions // BLOCK


class _Request:
    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.blocks: list[int] = []
        self.computed = 0
        self.foreign: set[int] = set()


class KVCache(RuleBasedStateMachine):
    """A block allocator with prefix caching, as engines have it; the store must know what recomputation would say.

    A block is reused in the order it was freed. Cached blocks are found by their whole prefix. Some prefixes arrive
    from another worker: their KV is there, their experts are not.
    """

    @initialize()
    def start(self) -> None:
        self.store = PositionStore.create(SHAPE)
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(BLOCKS))
        self.refs = dict.fromkeys(range(BLOCKS), 0)
        self.cached: dict[tuple[int, ...], int] = {}
        self.prefix_of: dict[int, tuple[int, ...]] = {}
        self.foreign_blocks: set[int] = set()
        self.requests: list[_Request] = []
        self.waiting: list[_Request] = []

    def _take(self) -> int | None:
        if not self.free:
            return None
        block, _ = self.free.popitem(last=False)
        self.cached.pop(self.prefix_of.pop(block, ()), None)
        self.foreign_blocks.discard(block)
        self.refs[block] = 1
        return block

    def _release(self, request: _Request) -> None:
        for block in reversed(request.blocks):
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free[block] = None
        request.blocks, request.computed, request.foreign = [], 0, set()

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14), external=st.integers(0, 3))
    def arrive(self, tokens: list[int], external: int) -> None:
        """Start a request: cached prefix first, then whole blocks from another worker."""
        self._begin(_Request(tokens), external)

    def _begin(self, request: _Request, external: int) -> None:
        limit = (len(request.tokens) - 1) // BLOCK  # the last token is always computed
        while len(request.blocks) < limit:
            prefix = tuple(request.tokens[: (len(request.blocks) + 1) * BLOCK])
            block = self.cached.get(prefix)
            if block is None:
                break
            self.refs[block] += 1
            self.free.pop(block, None)
            request.blocks.append(block)
        request.computed = len(request.blocks) * BLOCK
        for _ in range(min(external, limit - len(request.blocks))):
            block = self._take()
            if block is None:
                break
            request.blocks.append(block)
            at = request.computed
            self.store.forget(block_positions(request.blocks, BLOCK, at, at + BLOCK))
            self.foreign_blocks.add(block)
            request.computed += BLOCK
        self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), chunk=st.integers(1, 6), speculative=st.integers(0, 2))
    def step(self, data: st.DataObject, chunk: int, speculative: int) -> None:
        """Compute a chunk of a request; drafted tokens past it are written and then rejected."""
        request = data.draw(st.sampled_from(self.requests))
        stop = min(len(request.tokens), request.computed + chunk)
        drafts = [7] * speculative if stop == len(request.tokens) else []
        sequence = request.tokens[:stop] + drafts
        while len(request.blocks) * BLOCK < len(sequence):
            block = self._take()
            if block is None:
                return self._preempt(request)
            request.blocks.append(block)
        tokens = range(request.computed, len(sequence))
        positions = block_positions(request.blocks, BLOCK, request.computed, len(sequence))
        ids = np.array([experts_of(tuple(sequence[: p + 1])) for p in tokens]).reshape(-1, 3, 2)
        self.store.write(np.append(positions, -1), np.append(ids, np.zeros((1, 3, 2), ids.dtype), axis=0))
        request.computed = stop
        for index in range(stop // BLOCK):
            prefix = tuple(request.tokens[: (index + 1) * BLOCK])
            if prefix not in self.cached and request.blocks[index] not in self.prefix_of:
                self.cached[prefix] = request.blocks[index]
                self.prefix_of[request.blocks[index]] = prefix
        if stop == len(request.tokens):
            request.tokens.append(int(np.random.default_rng(stop).integers(0, 2)))  # the sampled token
        return None

    def _preempt(self, request: _Request) -> None:
        self.requests.remove(request)
        self._release(request)
        self.waiting.append(request)

    @precondition(lambda self: self.waiting)
    @rule()
    def resume(self) -> None:
        self._begin(self.waiting.pop(0), 0)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """Stop or abort, at any point; the store is asked before the blocks are freed."""
        request = data.draw(st.sampled_from(self.requests))
        positions = block_positions(request.blocks, BLOCK, 0, request.computed)
        rows = self.store.read(positions)
        truth = [experts_of(tuple(request.tokens[: p + 1])) for p in range(request.computed)]
        here = [request.blocks[p // BLOCK] not in self.foreign_blocks for p in range(request.computed)]
        assert rows.known.tolist() == here
        known = np.flatnonzero(rows.known)
        if len(known):
            expected = np.array(truth)[known]
            np.testing.assert_array_equal(rows.expert_ids[known], expected)
            counts, count = self.store.footprint(positions)
            assert count == len(known)
            np.testing.assert_array_equal(counts, footprint(expected, SHAPE.num_experts))
        self.requests.remove(request)
        self._release(request)


TestKVCache = KVCache.TestCase
TestKVCache.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
