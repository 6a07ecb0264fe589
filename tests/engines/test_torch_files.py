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
from coterie.traces import ActivationTrace, LoadTable
from coterie.traces.readers import ReadOptions
from coterie.types import DECODE, PREFILL

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


def token_pass(
    number: int, mode: int, slots: np.ndarray, positions: list[int], lengths: list[int] | None = None
) -> dict[str, Any]:
    ids = [1000 * number + at for at in range(len(positions))]
    return {
        "forward_pass_id": number,
        "rank": 0,
        "gatherer_key": "primary",
        "input_ids": ids,
        "positions": positions,
        "extend_seq_lens": lengths,
        "forward_mode": mode,
        "misc_objects": [],
        "topk_ids_of_layer": torch.from_numpy(slots.astype(np.int32)),
    }


def tokens_of(trace: ActivationTrace) -> list[list[int]]:
    return [np.asarray(trace.request(index).token_ids).tolist() for index in range(trace.num_requests)]


def test_per_token(write: Callable[..., Any], rng: np.random.Generator) -> None:
    """Two prompts together, then both decode; one leaves; a prompt in two chunks and a cached prefix come in."""
    shapes: list[tuple[int, list[int], list[int] | None]] = [
        (1, [0, 1, 2, 0, 1], [3, 2]),
        (2, [3, 2], None),
        (2, [4, 3], None),
        (1, [0, 1], [2]),  # the first chunk of a prompt of three
        (2, [4], None),  # only the second request goes on
        (1, [2, 7, 8], [1, 2]),  # its last chunk, and a prompt behind seven cached tokens
        (2, [5, 3, 9], None),
        (4, [], None),
    ]
    records = [
        token_pass(number, mode, slots_of(rng, len(positions)), positions, lengths)
        for number, (mode, positions, lengths) in enumerate(shapes)
    ]
    trace = read(write(detail(*reversed(records))), model="m")
    assert isinstance(trace, ActivationTrace)
    assert tokens_of(trace) == [
        [0, 1, 2, 1000, 2000],
        [3, 4, 1001, 2001, 4000, 6000],
        [3000, 3001, 5000, 6001],
        [5001, 5002, 6002],
    ]
    assert trace.request(2).phase.tolist() == [PREFILL] * 3 + [DECODE]
    assert trace.requests.prompt_tokens.tolist() == [3, 2, 3, 9]
    assert trace.requests.output_tokens.tolist() == [3, 5, 2, 2]
    assert trace.requests.extra["missing_tokens"] == [0, 0, 0, 7]
    assert (trace.meta.num_experts, trace.meta.top_k, trace.meta.layer_ids) == (EXPERTS, 2, (1, 2))
    slots = records[0]["topk_ids_of_layer"].numpy()
    for layer in (1, 2):
        np.testing.assert_array_equal(trace.request(0).expert_ids[:3, layer - 1], SLOT_MAP[layer][slots[layer, :3, :2]])


def test_mixed_pass(write: Callable[..., Any], rng: np.random.Generator) -> None:
    records = [
        token_pass(0, 1, slots_of(rng, 3), [0, 1, 2], [3]),
        token_pass(1, 3, slots_of(rng, 3), [0, 1, 3], [2, 1]),
        token_pass(2, 2, slots_of(rng, 2), [4, 2]),
    ]
    trace = read(write(detail(*records)))
    assert tokens_of(trace) == [[0, 1, 2, 1002, 2000], [1000, 1001, 2001]]
    assert trace.request(0).phase.tolist() == [PREFILL] * 3 + [DECODE] * 2


def test_recording_that_began_midway(write: Callable[..., Any], rng: np.random.Generator) -> None:
    trace = read(
        write(detail(token_pass(0, 2, slots_of(rng, 2), [40, 7]), token_pass(1, 2, slots_of(rng, 2), [41, 8])))
    )
    assert tokens_of(trace) == [[0, 1000], [1, 1001]]
    assert trace.requests.extra["missing_tokens"] == [40, 7]


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), min_size=1, max_size=8), st.integers(0, 2**31))
def test_a_simulated_engine_is_joined_back(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, int]], seed: int
) -> None:
    """Prompts of distinct lengths cannot be confused: the join must then be exact."""
    rng = np.random.default_rng(seed)
    prompts, last = [], 0
    for length, outputs in shapes:  # each begins past where the one before it ends: no two ever stand at one position
        prompts.append(last + length)
        last = prompts[-1] + outputs + 1
    records: list[dict[str, Any]] = []
    expected: list[list[int]] = [[] for _ in shapes]
    running: list[list[int]] = []  # [request, position, left]
    waiting = list(range(len(shapes)))
    while waiting or running:
        number = len(records)
        if waiting and (not running or rng.random() < 0.4):
            request = waiting.pop(0)
            length = int(prompts[request])
            records.append(token_pass(number, 1, slots_of(rng, length), list(range(length)), [length]))
            expected[request] += records[-1]["input_ids"]
            running.append([request, length, shapes[request][1]])
        else:
            positions = [position for _, position, _ in running]
            records.append(token_pass(number, 2, slots_of(rng, len(running)), positions))
            for (request, _, _), token in zip(running, records[-1]["input_ids"], strict=True):
                expected[request].append(token)
            running = [[request, position + 1, left - 1] for request, position, left in running if left > 0]
    path = tmp_path_factory.mktemp("sim") / "expert_distribution_recorder_1.5_0.pt"
    torch.save(detail(*records), path)
    assert tokens_of(read(path)) == expected


# --------------------------------------------------------------------------------------------------------------- damage


def broken(**changes: Any) -> dict[str, Any]:
    record = token_pass(0, 1, slots_of(np.random.default_rng(0), 3), [0, 1, 2], [3])
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
        (broken(forward_mode=5), "forward_mode: is 5, expected 1 (extend)"),
        (broken(forward_mode=None), "forward_mode: is None"),
        (broken(extend_seq_lens=[2]), "extend_seq_lens: sum to 2"),
        (broken(extend_seq_lens=[3, 0]), "with a least of 0"),
        (broken(extend_seq_lens=None), "extend_seq_lens: is"),
        (broken(positions=[0, 1]), "topk_ids_of_layer: has shape (3, 3, 8)"),
        (broken(input_ids=[1, 2]), "for 3 layers and 2 tokens"),
        (broken(input_ids=["a", "b", "c"]), "input_ids: is"),
        (broken(topk_ids_of_layer=with_slot(6)), "token 1, choice 0: is 6, expected a slot in 0 … 5"),
        (broken(topk_ids_of_layer=with_slot(-1)), "token 1, choice 0: is -1"),
        (broken(topk_ids_of_layer=torch.full((3, 3, 8), -1)), "is -1 throughout"),
        (
            broken(forward_mode=4, positions=[], input_ids=[], topk_ids_of_layer=torch.full((3, 0, 8), -1)),
            "records: hold no token",
        ),
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
    path = write(detail(token_pass(0, 1, slots_of(rng, 2), [0, 1], [2])))
    with pytest.raises(TraceError, match="has 5 experts, --num-experts says 6"):
        read(path, num_experts=6)


def test_folders(write: Callable[..., Any], rng: np.random.Generator, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="holds no expert_distribution_recorder"):
        read_sglang_recorder(tmp_path, ReadOptions())
    for rank in range(2):
        write(detail(token_pass(0, 1, slots_of(rng, 2), [0, 1], [2])), f"expert_distribution_recorder_1_{rank}.pt")
    with pytest.raises(TraceError, match=r"holds 2 dumps of which expert_distribution_recorder_1_0\.pt stands alone"):
        read(tmp_path)
    (tmp_path / "expert_distribution_recorder_1_1.pt").unlink()
    assert read(tmp_path).num_tokens == 2


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
    assert isinstance(trace, ActivationTrace | LoadTable)


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
