"""SGLang recorder dumps, written with torch.save as SGLang writes them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.engines.torch_files import SGLANG_RECORDER, read_sglang_recorder
from coterie.errors import TraceError, UnavailableError
from coterie.testing import check_reader
from coterie.traces import LoadTable
from coterie.traces.readers import ReadOptions

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

LAYERS, SLOTS, EXPERTS = 3, 6, 5
# Layer 0 is dense; expert 4 has its second slot at a different place in every layer.
SLOT_MAP = np.array([[0, 1, 2, 3, 4, 4], [4, 0, 1, 2, 3, 4], [4, 3, 2, 4, 1, 0]])


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Any]:
    def save(dump: Any, name: str = "expert_distribution_recorder_1.5_0.pt") -> Path:
        torch.save(dump, tmp_path / name)
        return tmp_path / name

    return save


def read(path: Path, **options: Any) -> Any:
    assert SGLANG_RECORDER.sniff(path)
    return SGLANG_RECORDER.read(path, ReadOptions(**options))


def detail(*records: dict[str, Any]) -> dict[str, Any]:
    return {"records": list(records), "last_physical_to_logical_map": torch.from_numpy(SLOT_MAP)}


# ------------------------------------------------------------------------------------------------------- stat, per_pass


def test_stat(write: Callable[..., Any]) -> None:
    counts = torch.zeros((6, LAYERS, EXPERTS), dtype=torch.int32)  # a ring of six, two steps recorded
    counts[0, 1] = torch.tensor([1, 2, 0, 0, 3])
    counts[1, 2] = torch.tensor([0, 0, 0, 6, 0])
    dump = {"rank": 0, "logical_count": counts, "average_utilization_rate_over_window": None}
    table = read(write(dump, "expert_distribution_recorder_1.5.pt"), model="m", num_experts=EXPERTS)
    assert isinstance(table, LoadTable)
    assert table.counts.tolist() == [[[1, 2, 0, 0, 3], [0] * 5], [[0] * 5, [0, 0, 0, 6, 0]]]
    assert (table.model, np.asarray(table.layer_ids).tolist()) == ("m", [1, 2])


def test_stat_summed_over_steps(write: Callable[..., Any]) -> None:
    table = read(write({"rank": 0, "logical_count": torch.ones((2, 4), dtype=torch.int64)}))
    assert table.counts.tolist() == [[[1] * 4] * 2]


def one_pass(number: int, counts: np.ndarray, rank: int = 0) -> dict[str, Any]:
    tensor = torch.from_numpy(counts.astype(np.int32))
    return {"forward_pass_id": number, "rank": rank, "gatherer_key": "primary", "global_physical_count": tensor}


def logical(counts: np.ndarray) -> np.ndarray:
    """Brute force: add every slot's count to its expert."""
    load = np.zeros((LAYERS, EXPERTS), int)
    for layer in range(LAYERS):
        for slot in range(SLOTS):
            load[layer, SLOT_MAP[layer, slot]] += counts[layer, slot]
    return load


def test_per_pass_turns_slots_into_experts_and_adds_ranks(
    write: Callable[..., Any], rng: np.random.Generator, tmp_path: Path
) -> None:
    counts = rng.integers(1, 9, (2, 3, LAYERS, SLOTS))  # [rank, pass, layer, slot]
    counts[:, :, 0] = 0
    for rank in range(2):
        passes = [one_pass(number, counts[rank, at], rank) for at, number in enumerate((12, 10, 11))]
        path = write(detail(*passes), f"expert_distribution_recorder_1.{rank}_{rank}.pt")
    expected = np.stack([logical(counts[:, at].sum(axis=0))[1:] for at in (1, 2, 0)])
    table = read(tmp_path)
    np.testing.assert_array_equal(table.counts, expected)
    assert (table.labels, np.asarray(table.layer_ids).tolist()) == (["10", "11", "12"], [1, 2])
    alone = read(path)
    np.testing.assert_array_equal(alone.counts, np.stack([logical(counts[1, at])[1:] for at in (1, 2, 0)]))


# ------------------------------------------------------------------------------------------------------------ per_token


def slots_of(rng: np.random.Generator, tokens: int, k: int = 2) -> np.ndarray:
    slots = np.full((LAYERS, tokens, 8), -1)
    slots[1:, :, :k] = np.argsort(rng.random((LAYERS - 1, tokens, SLOTS)), axis=2)[:, :, :k]
    return slots


def token_pass(number: int, slots: np.ndarray) -> dict[str, Any]:
    ids = torch.from_numpy(slots.astype(np.int32))
    return {"forward_pass_id": number, "rank": 0, "gatherer_key": "primary", "topk_ids_of_layer": ids}


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(0, 2**31))
def test_tokens_are_counted_by_pass(tmp_path_factory: pytest.TempPathFactory, tokens: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots = [slots_of(rng, count) for count in tokens]
    path = tmp_path_factory.mktemp("tokens") / "expert_distribution_recorder_1.5_0.pt"
    torch.save(detail(*(token_pass(number, each) for number, each in enumerate(slots))), path)
    expected = [
        logical(np.array([[(layer == slot).sum() for slot in range(SLOTS)] for layer in each]))[1:]
        for each in slots
        if each.shape[1]
    ]
    if not expected:
        with pytest.raises(TraceError, match="hold no load"):
            read(path)
        return
    table = read(path)
    np.testing.assert_array_equal(table.counts, np.stack(expected))
    assert table.labels == [str(number) for number, count in enumerate(tokens) if count]


# --------------------------------------------------------------------------------------------------------------- damage


def broken(**changes: Any) -> dict[str, Any]:
    record = token_pass(0, slots_of(np.random.default_rng(0), 3))
    return detail({**record, **changes})


def with_slot(value: int) -> Any:
    slots = slots_of(np.random.default_rng(0), 3)
    slots[2, 1, 0] = value
    return torch.from_numpy(slots)


@pytest.mark.parametrize(
    ("dump", "problem"),
    [
        ({"logical_count": torch.zeros(2, 3, 4, dtype=torch.int32)}, "counts: hold no load"),
        ({"logical_count": -torch.ones(2, 3, 4, dtype=torch.int32)}, "counts: hold -1"),
        ({"logical_count": torch.zeros(2, 3, 4)}, "logical_count: is float32 (2, 3, 4)"),
        ({"logical_count": "text"}, "logical_count: is"),
        ({"records": []}, "records: must be a list of at least one pass"),
        ({"records": [1]}, "records: must be a list"),
        ({"other": 1}, "has neither logical_count nor records"),
        ([1, 2], "has neither logical_count nor records"),
        ({"records": [one_pass(0, np.ones((LAYERS, SLOTS)))]}, "last_physical_to_logical_map: is"),
        (detail(one_pass(0, np.ones((LAYERS, 4)))), "global_physical_count: has shape (3, 4), the slot map (3, 6)"),
        (detail({"forward_pass_id": 0}), "records[0].global_physical_count: is"),
        (detail({**one_pass(0, np.ones((LAYERS, SLOTS))), "forward_pass_id": "x"}), "records[0].forward_pass_id: is"),
        (
            {"records": [one_pass(0, np.ones((1, 3)))], "last_physical_to_logical_map": torch.tensor([[0, 2, 2]])},
            "last_physical_to_logical_map[0]: has no slot for expert 1",
        ),
        (broken(topk_ids_of_layer=torch.zeros((2, 3, 8), dtype=torch.int32)), "topk_ids_of_layer: has 2 layers"),
        (broken(topk_ids_of_layer=with_slot(6)), "slots from -1 to 6; expected 3 layers and slots in -1 … 5"),
        (broken(topk_ids_of_layer=with_slot(-2)), "slots from -2 to 5"),
        (broken(topk_ids_of_layer="text"), "topk_ids_of_layer: is"),
        (broken(topk_ids_of_layer=torch.full((3, 3, 8), -1)), "counts: hold no load"),
    ],
)
def test_dumps_that_are_wrong(write: Callable[..., Any], dump: dict[str, Any] | list[int], problem: str) -> None:
    path = write(dump)
    with pytest.raises(TraceError) as caught:
        read_sglang_recorder(path, ReadOptions())
    assert problem in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_experts_given_must_agree(write: Callable[..., Any], rng: np.random.Generator) -> None:
    path = write(detail(token_pass(0, slots_of(rng, 2))))
    with pytest.raises(TraceError, match="has 5 experts, --num-experts says 6"):
        read(path, num_experts=6)


def test_folders(write: Callable[..., Any], rng: np.random.Generator, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="holds no expert_distribution_recorder"):
        read_sglang_recorder(tmp_path, ReadOptions())
    write(detail(token_pass(0, slots_of(rng, 2))), "expert_distribution_recorder_1_0.pt")
    write({"logical_count": torch.ones((2, 3, 4), dtype=torch.int64)}, "expert_distribution_recorder_1.pt")
    with pytest.raises(TraceError, match=r"holds 2 dumps of which expert_distribution_recorder_1\.pt stands alone"):
        read(tmp_path)
    (tmp_path / "expert_distribution_recorder_1.pt").unlink()
    assert read(tmp_path).counts.sum() == 2 * 2 * 2  # tokens x layers x experts a token


class _Evil:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("evil"),)


def test_a_pickle_that_runs_code_is_refused(
    write: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TraceError, match="torch cannot load it"):
        read_sglang_recorder(write({"records": _Evil()}), ReadOptions())
    assert not (tmp_path / "evil").exists()


@given(st.integers(0, 10**6))
def test_cut_files(tmp_path_factory: pytest.TempPathFactory, at: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "expert_distribution_recorder_1.5_0.pt"
    torch.save(broken(), path)
    data = path.read_bytes()
    path.write_bytes(data[: at % len(data)])
    SGLANG_RECORDER.sniff(path)
    with pytest.raises(TraceError, match="torch cannot load it"):
        read_sglang_recorder(path, ReadOptions())


@given(st.integers(0, 10**6), st.integers(0, 255))
def test_damaged_files(tmp_path_factory: pytest.TempPathFactory, at: int, byte: int) -> None:
    """torch does not check the numbers it maps, so damage there may pass; anything else is a TraceError."""
    path = tmp_path_factory.mktemp("damaged") / "expert_distribution_recorder_1.5_0.pt"
    torch.save(broken(), path)
    data = bytearray(path.read_bytes())
    data[at % len(data)] = byte
    path.write_bytes(data)
    SGLANG_RECORDER.sniff(path)
    try:
        trace = read_sglang_recorder(path, ReadOptions())
    except TraceError as error:
        problem = str(error)
    else:
        problem = ""
    if problem:
        assert problem.startswith(f"{path}: ")
        return
    assert isinstance(trace, LoadTable)


def test_without_torch(write: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(broken())
    monkeypatch.setitem(sys.modules, "torch", None)
    assert SGLANG_RECORDER.sniff(path), "recognising a dump needs no torch"
    with pytest.raises(UnavailableError, match=r"pip install coterie\[torch\]"):
        read_sglang_recorder(path, ReadOptions())


def test_other_files_are_not_claimed(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(3)}, tmp_path / "model.pt")
    (tmp_path / "noise.pt").write_bytes(b"PK\x03\x04" + bytes(100))
    (tmp_path / "empty.pt").write_bytes(b"")
    for path in (tmp_path, *tmp_path.iterdir(), tmp_path / "missing.pt"):
        assert not SGLANG_RECORDER.sniff(path)
    with pytest.raises(TraceError, match="does not exist"):
        read_sglang_recorder(tmp_path / "missing.pt", ReadOptions())


def test_contract(write: Callable[..., Any]) -> None:
    counts = torch.arange(1, 2 * LAYERS * EXPERTS + 1, dtype=torch.int32).reshape(2, LAYERS, EXPERTS)
    check_reader(SGLANG_RECORDER, write({"rank": 0, "logical_count": counts}, "expert_distribution_recorder_1.5.pt"))
