"""Coterie's planners as vLLM's EPLB policy: alone, and on four ranks that move real weights with vLLM's own code."""

from __future__ import annotations

import asyncio
import io
import logging
import subprocess
import sys
import warnings
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.engines.vllm.eplb import EplbRound, Rounds, carry_over, count_moves
from coterie.engines.vllm.settings import EplbSettings
from coterie.errors import ConfigError, InputError
from coterie.gateway.config import GatewayConfig, WorkerEntry
from coterie.gateway.exchange.knowledge import mask_of
from coterie.gateway.fleet.spec import RouterSpec
from coterie.gateway.page.snapshot import PageQuery, snapshot
from coterie.gateway.parts import GatewayParts
from coterie.gateway.watching.logs import Log
from coterie.placement.maps.formats import read_map
from coterie.types import Placement, balancedness
from coterie.wire.expert_events import ExpertMap, decode_expert_events
from eplb_cases import LINEAR, LOADS, PLANNER, Alone, ask, asked, balance, duplicates, map_file, vllms_map
from eplb_ranks import EXPERTS, LAYERS, RANKS, SLOTS, run_ranks
from vllm_servers import needs_vllm

INITIAL = np.roll(LINEAR, 7, axis=1)


@pytest.fixture(scope="module")
def planned() -> list[np.ndarray]:
    """The maps of six rounds, each from the last."""
    rounds, maps = Rounds(EplbSettings(planner=PLANNER)), [LINEAR]
    for load in LOADS:
        maps.append(ask(rounds, asked(load, maps[-1])))
    assert rounds.counters["rounds"] == len(LOADS)
    assert rounds.counters["failures"] == 0
    return maps


def test_every_round_is_sound_and_counted(planned: list[np.ndarray]) -> None:
    for load, old, new in zip(LOADS, planned[:-1], planned[1:], strict=True):
        assert new.dtype == np.int64
        assert duplicates(new) == 0
        assert balance(new, load) >= balance(old, load)
        changed = int((old != new).sum())
        assert count_moves(old, new, RANKS) == changed, "what stays on a rank stays in its slot"


def test_the_same_map_whoever_asks(planned: list[np.ndarray]) -> None:
    """A rank that joined late, with no history, plans what the others do."""
    for load, old, new in zip(LOADS, planned[:-1], planned[1:], strict=True):
        np.testing.assert_array_equal(ask(Rounds(EplbSettings(planner=PLANNER)), asked(load, old), Alone(3)), new)


def test_no_load_keeps_the_map(planned: list[np.ndarray]) -> None:
    rounds = Rounds(EplbSettings(planner=PLANNER))
    for old in planned:
        np.testing.assert_array_equal(ask(rounds, asked(np.zeros((LAYERS, EXPERTS)), old)), old)
    assert rounds.counters["rounds"] == rounds.counters["failures"] == 0


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_carrying_over_when_ranks_come_and_go(before: int, now: int, data: st.DataObject) -> None:
    per_rank = data.draw(st.integers(max(1, -(-EXPERTS // min(before, now))), EXPERTS))
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    old = rng.permuted(np.tile(np.arange(before * per_rank) % EXPERTS, (LAYERS, 1)), axis=1)
    if now > before and data.draw(st.booleans()):  # as vLLM pads it
        old = np.pad(old, ((0, 0), (0, (now - before) * per_rank)), constant_values=-1)
    tokens = rng.random((LAYERS, EXPERTS))
    found = carry_over(EplbRound(tokens, now * per_rank, 1, now, old))
    assert found is not None  # and a Placement, so every expert is somewhere
    stayed = old[:, : now * per_rank]
    for row, was in zip(found.slot_experts, stayed, strict=True):
        gone = set(range(EXPERTS)) - set(was[was >= 0].tolist())
        changed = was != row[: len(was)]
        assert set(row[: len(was)][changed & (was >= 0)]) <= gone, "only to make room for an expert that lost its place"
        assert len(gone) >= int((changed & (was >= 0)).sum())
    if now <= before and not (set(range(EXPERTS)) - set(stayed.flat)):
        assert np.array_equal(found.slot_experts, stayed) or any(set(row) != set(range(EXPERTS)) for row in stayed)


@pytest.mark.parametrize(
    ("ranks", "old"),
    [
        pytest.param(4, None, id="no old map"),
        pytest.param(8, LINEAR, id="four ranks came"),
        pytest.param(8, np.pad(LINEAR, ((0, 0), (0, SLOTS)), constant_values=-1), id="four ranks came, slots empty"),
        pytest.param(3, LINEAR, id="a rank leaves"),
        pytest.param(4, np.full_like(LINEAR, -1), id="nothing anywhere"),
        pytest.param(4, LINEAR[:, :20], id="another number of slots"),
    ],
)
def test_elastic_cases_are_planned(ranks: int, old: np.ndarray | None) -> None:
    rounds = Rounds(EplbSettings(planner=PLANNER))
    for load in (np.zeros((LAYERS, EXPERTS)), LOADS[0]):
        slots = ask(rounds, asked(load, old, ranks))
        placement = Placement(slots.astype(np.int32), ranks, EXPERTS)
        assert slots.shape == (LAYERS, ranks * SLOTS // RANKS)
    assert rounds.counters["failures"] == 0
    assert placement.duplicates == 0
    assert balancedness(placement.rank_load(LOADS[0])) > 0.8


def test_first_rearrangement_returns_the_initial_map(tmp_path: Path, planned: list[np.ndarray]) -> None:
    path = map_file(tmp_path / "map.json", planned[3])
    rounds = Rounds(EplbSettings(planner=PLANNER, initial_map=path))
    np.testing.assert_array_equal(ask(rounds, asked(np.zeros((LAYERS, EXPERTS)))), LINEAR, "vLLM only measures memory")
    np.testing.assert_array_equal(ask(rounds, asked(LOADS[0])), planned[3])
    again = ask(rounds, asked(LOADS[0], planned[3]))
    np.testing.assert_array_equal(again, ask(Rounds(EplbSettings(planner=PLANNER)), asked(LOADS[0], planned[3])))


def test_initial_map_is_for_starting_and_for_this_model(tmp_path: Path, planned: list[np.ndarray]) -> None:
    path = map_file(tmp_path / "map.json", planned[3])
    joined = Rounds(EplbSettings(planner=PLANNER, initial_map=path))
    np.testing.assert_array_equal(ask(joined, asked(LOADS[1], planned[1])), planned[2], "serving for long")
    other = Rounds(EplbSettings(planner=PLANNER, initial_map=path))
    draft = EplbRound(LOADS[0][:1], SLOTS, 1, RANKS, LINEAR[:1])
    assert ask(other, draft).shape == (1, SLOTS)
    np.testing.assert_array_equal(ask(other, asked(LOADS[0])), planned[3], "a draft model came first")


def test_each_map_is_kept_and_a_restart_begins_from_it(tmp_path: Path, planned: list[np.ndarray]) -> None:
    path = tmp_path / "map.json"
    settings = EplbSettings(planner=PLANNER, initial_map=str(path), save_map=str(path))
    rounds = Rounds(settings)
    draft = EplbRound(LOADS[0][:1], SLOTS, 1, RANKS, LINEAR[:1])
    for load, old, new in zip(LOADS, planned[:-1], planned[1:], strict=True):
        ask(rounds, asked(load, old))
        ask(rounds, draft)
        np.testing.assert_array_equal(read_map(path).placement.slot_experts, new)
    assert [entry.name for entry in tmp_path.iterdir()] == ["map.json"], "nothing half-written is left"
    np.testing.assert_array_equal(ask(Rounds(settings), asked(LOADS[0])), planned[-1])


def test_only_the_first_rank_writes(tmp_path: Path) -> None:
    rounds = Rounds(EplbSettings(planner=PLANNER, save_map=str(tmp_path / "map.json")))
    ask(rounds, asked(), Alone(rank=1))
    assert not list(tmp_path.iterdir())


def test_a_map_that_cannot_be_kept_costs_nothing_else(tmp_path: Path, planned: list[np.ndarray]) -> None:
    (tmp_path / "file").touch()
    rounds = Rounds(EplbSettings(planner=PLANNER, save_map=str(tmp_path / "file" / "map.json")))
    np.testing.assert_array_equal(ask(rounds, asked()), planned[1])
    assert rounds.counters["failures"] == 1


@pytest.mark.parametrize("broken", [LOADS[0] * np.nan, -LOADS[0], LOADS[0][:, :-1]], ids=["NaN", "negative", "other"])
def test_a_failure_asks_for_vllms_own_map(broken: np.ndarray, caplog: pytest.LogCaptureFixture) -> None:
    rounds = Rounds(EplbSettings(planner=PLANNER))
    with caplog.at_level(logging.ERROR, "vllm.coterie"):
        np.testing.assert_array_equal(ask(rounds, asked(broken)), vllms_map())
    assert rounds.counters["failures"] == 1
    assert "asking for vLLM's own map" in caplog.text


def test_disagreement_moves_nothing(tmp_path: Path, planned: list[np.ndarray]) -> None:
    """Here the others had no file; from then on none begins from it."""
    path = map_file(tmp_path / "map.json", planned[3])
    rounds = Rounds(EplbSettings(planner=PLANNER, initial_map=path))
    np.testing.assert_array_equal(ask(rounds, asked(LOADS[0]), Alone(agrees=False)), LINEAR)
    np.testing.assert_array_equal(ask(rounds, asked(LOADS[0])), planned[1])
    grown = np.pad(LINEAR, ((0, 0), (0, SLOTS)), constant_values=-1)
    disagreed = ask(rounds, asked(LOADS[0], grown, 8), Alone(agrees=False))
    np.testing.assert_array_equal(disagreed, vllms_map(), "a map with empty slots cannot stay")
    assert (rounds.counters["disagreements"], rounds.counters["failures"]) == (2, 0)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ("[]", "COTERIE_EPLB: Expected `object`"),
        ("{", "COTERIE_EPLB: Input data was truncated"),
        ('{"planer": "eplb"}', "unknown field `planer`.*settings: planner, options"),
        ('{"window": 0}', "window=0.0 must be a finite number above 0"),
        ('{"device": "h200"}', "device='h200' needs a model"),
        ('{"planner": "eplp"}', "Unknown planner 'eplp'. Did you mean 'eplb'"),
        ('{"planner": "eplb", "options": {"groups": 2}}', "options={'groups': 2} of planner 'eplb'"),
        ('{"options": {"split": "optimal"}}', "split='optimal' of planner 'latency_optimal' must be 'equal'"),
        ('{"options": {"max_moves": -1}}', "max_moves=-1 must be at least 0"),
        ('{"planner": "eplb", "target_balance": 2}', "target_balance=2.0 must be above 0 and at most 1"),
        ('{"planner": "eplb", "model": "gpt-2"}', "Unknown model 'gpt-2'"),
        ('{"planner": "eplb", "model": "gpt-oss-20b", "device": "abacus"}', "abacus"),
        ('{"planner": "eplb", "initial_map": "nowhere.json"}', "nowhere.json"),
    ],
)
def test_wrong_settings_stop_the_start(settings: str, problem: str) -> None:
    with pytest.raises((ConfigError, InputError), match=problem):
        Rounds(EplbSettings.parse(settings))


def test_the_plugin_loads_no_compiler() -> None:
    """vLLM's CPU workers look into every loaded module as they start, and fail on llvmlite's."""
    code = "import sys, coterie.engines.vllm.plugin; sys.exit('llvmlite' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_prices_follow_the_model() -> None:
    """And the link."""
    base: dict[str, Any] = {"planner": PLANNER, "model": "gpt-oss-20b", "device": "h200"}
    plans = []
    for rate in (450.0, 4.5):
        rounds = Rounds(EplbSettings(**base, intra_gb_s=rate))
        ask(rounds, asked())
        assert rounds.last is not None
        assert rounds.last.plan is not None
        plans.append(rounds.last.plan)
    fast, slow = plans
    assert slow.movement_s > 20 * fast.movement_s
    assert fast.before_s < slow.before_s, "tokens take the same link"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What four gloo processes saw."""
    folder = tmp_path_factory.mktemp("eplb")
    map_file(folder / "initial.json", INITIAL)
    return run_ranks(folder, {"planner": "latency_optimal"})


def sound(record: dict[str, Any]) -> None:
    assert record["weights_right"], "each slot holds the weights its map says, bit for bit"
    assert record["same_on_all"]
    assert record["error"] < 1e-5, "outputs as those of a dense layer, as before"


@pytest.mark.vllm
@needs_vllm
def test_weights_follow_the_map_and_outputs_stay(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["rounds"][0]["map"] == LINEAR.tolist()
        for record in rank["rounds"]:
            sound(record)
            assert record["planned"] == record["changed"] == record["received"], "moves are what was planned"
    assert all(record["planned"] for record in ranks[0]["rounds"][1:])


@pytest.mark.vllm
@needs_vllm
def test_against_vllms_own_policy(ranks: list[dict[str, Any]]) -> None:
    ours, theirs = ranks[0]["rounds"][1:], ranks[0]["default"]
    for record, other, load in zip(ours, theirs, LOADS, strict=True):
        sound(other)
        assert balance(record["map"], load) > max(0.98, balance(other["map"], load) - 0.01)
        assert duplicates(record["map"]) == 0
    moved, theirs_moved = (sum(record["changed"] for record in records) for records in (ours, theirs))
    assert moved < 0.6 * theirs_moved, (moved, theirs_moved)
    assert sum(duplicates(record["map"]) for record in theirs) > 0, "slots that buy nothing"


@pytest.mark.vllm
@needs_vllm
def test_a_rank_leaves_and_comes_back(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        left, back = rank["elastic"]
        for record in (left, back):
            sound(record)
            assert record["received"] > 0
        gone, here = np.array(left["map"]), np.array(back["map"])
        per_rank = SLOTS // RANKS
        assert (gone[:, -per_rank:] == -1).all()
        assert Placement(gone[:, :-per_rank].astype(np.int32), RANKS - 1, EXPERTS).duplicates == 0
        assert duplicates(here) == 0


@pytest.mark.vllm
@needs_vllm
def test_inside_vllms_state(ranks: list[dict[str, Any]]) -> None:
    """EplbState counts loads, asks the policy, moves and commits; the map begins and ends on file."""
    for rank in ranks:
        state = rank["state"]
        for record in state.values():
            sound(record)
        assert state["profiled"]["map"] == LINEAR.tolist()
        assert state["first"]["map"] == state["first"]["kept"] == INITIAL.tolist()
        assert state["second"]["map"] == state["second"]["kept"] != state["first"]["map"]
        assert balance(state["second"]["map"], LOADS[1]) > 0.98 > balance(state["first"]["map"], LOADS[1])


@pytest.mark.vllm
@needs_vllm
def test_masks_and_page_follow_the_map_that_the_state_has_after_each_rearrangement(ranks: list[dict[str, Any]]) -> None:
    """From the tensors of EplbState through the plugin and a subscriber to masks and page of the gateway."""

    async def test() -> None:
        entries = [
            WorkerEntry(id=f"rank-{rank}", url=f"http://127.0.0.1:{rank + 1}", placement_rank=rank)
            for rank in range(RANKS)
        ]
        parts = GatewayParts(GatewayConfig(workers=entries, decode=RouterSpec("joint")), Log(io.StringIO()))
        await parts.start()
        try:
            for version, name in enumerate(("first", "second"), 1):
                record = ranks[0]["state"][name]
                (event,) = decode_expert_events(bytes.fromhex(record["published"])).events
                assert isinstance(event, ExpertMap)
                assert event.version == version
                in_force = Placement(np.array(record["map"], np.int32), RANKS, EXPERTS)
                for entry in entries:
                    parts.follow_map(entry.id, event)
                local = parts.pools["decode"].keeper.fleet.local
                assert local is not None
                for rank in range(RANKS):
                    np.testing.assert_array_equal(local[rank], mask_of(in_force, rank))
                shown = snapshot(parts, 0.0, PageQuery())["workers"]
                assert {worker["map_version"] for worker in shown} == {version}
        finally:
            await parts.close()

    asyncio.run(test())


CONFIG = {
    **{"model_type": "qwen3_moe", "num_experts": EXPERTS, "num_experts_per_tok": 2, "num_hidden_layers": LAYERS},
    **{"hidden_size": 2048, "moe_intermediate_size": 768, "intermediate_size": 6144, "vocab_size": 4096},
    **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "torch_dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def imported() -> None:
    """vLLM in this process: what it imports warns, and warnings are errors here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import coterie.engines.vllm.connector
        import coterie.engines.vllm.scheduler
        import coterie.engines.vllm.waiting  # noqa: F401


def scheduler_of(connector: Any) -> Any:
    """Coterie's scheduler over as much of vLLM's as it reads, with real queues, strategy and prices."""
    from vllm.v1.core.sched.request_queue import SchedulingPolicy

    from coterie.engines.vllm.scheduler import ExpertAwareMixin

    class Base:
        def __init__(self) -> None:
            self.connector, self.policy = connector, SchedulingPolicy("fcfs")
            self.waiting, self.kv_holding_waiting = deque[Any](), deque[Any]()
            self.running: list[Any] = []
            self.max_num_active_reqs, self.num_waiting_for_streaming_input = 8, 0
            self.parallel_config = SimpleNamespace(
                tensor_parallel_size=1, data_parallel_size=RANKS, enable_expert_parallel=True
            )
            model = SimpleNamespace(
                get_total_num_hidden_layers=lambda: LAYERS,
                get_num_experts=lambda: EXPERTS,
                hf_config=SimpleNamespace(to_dict=lambda: CONFIG),
            )
            how = {"strategy": "latency_aware", "device": "h200"}
            self.vllm_config = SimpleNamespace(
                model_config=model,
                parallel_config=self.parallel_config,
                additional_config={"coterie": {"scheduler": how}},
            )

        def schedule(self) -> str:
            return "scheduled"

    class Mixed(ExpertAwareMixin, Base):
        pass

    return Mixed()


def connector_of(layers: int = LAYERS) -> Any:
    """The scheduler's side of the connector, without what a running engine gives it."""
    from coterie.engines.vllm.connector import CoterieConnector

    connector: Any = object.__new__(CoterieConnector)
    connector.map_in_force, connector._publisher, connector._store = None, None, SimpleNamespace()
    connector._layer_ids, connector._counters, connector._logged = tuple(range(layers)), {}, set()
    return connector


@pytest.mark.vllm
@needs_vllm
@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize("nested", [False, True])
def test_scheduler_costs_follow_the_map_that_the_state_has_after_each_rearrangement(
    ranks: list[dict[str, Any]], nested: bool
) -> None:
    """From the tensors of EplbState through the worker's metadata to the prices of the strategy that chooses."""
    from coterie.engines.vllm.connector import CoterieWorkerMetadata

    connector = connector_of()
    scheduler = scheduler_of(SimpleNamespace(_connectors=[SimpleNamespace(), connector]) if nested else connector)
    connector._vllm_config = scheduler.vllm_config
    assert scheduler.schedule() == "scheduled"
    load = np.random.default_rng(0).random((LAYERS, EXPERTS))

    def by_rank() -> np.ndarray:
        rows = scheduler._chooser.strategy.cost.slot_loads(load)
        return np.asarray(rows.reshape(LAYERS, RANKS, -1).sum(axis=2))

    np.testing.assert_allclose(by_rank(), Placement.linear(LAYERS, EXPERTS, RANKS).rank_load(load))
    for step, name in enumerate(("first", "second"), 1):
        record = ranks[0]["state"][name]
        (event,) = decode_expert_events(bytes.fromhex(record["published"])).events
        assert isinstance(event, ExpertMap)
        answer = SimpleNamespace(kv_connector_worker_meta=CoterieWorkerMetadata(step, event.slots))
        connector.update_connector_output(answer)
        connector.update_connector_output(SimpleNamespace(kv_connector_worker_meta=CoterieWorkerMetadata(step)))
        assert scheduler.schedule() == "scheduled"
        in_force = Placement(np.array(record["map"], np.int32), RANKS, EXPERTS)
        np.testing.assert_allclose(by_rank(), in_force.rank_load(load))
        assert connector.map_in_force[0].version == step


@pytest.mark.vllm
@needs_vllm
@pytest.mark.usefixtures("imported")
def test_a_map_that_does_not_fit_leaves_the_prices_and_the_scheduler_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = connector_of(layers=LAYERS + 1)
    scheduler = scheduler_of(connector)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    slots = [row.astype("<u2").tobytes() for row in Placement.linear(LAYERS, EXPERTS, RANKS).slot_experts]
    for version, rows in enumerate((slots, [], [slots[0][:3]]), 1):
        wrong = ExpertMap(num_experts=EXPERTS, num_ranks=RANKS, version=version, slots=rows)
        connector.map_in_force = wrong, tuple(range(LAYERS + 1))
        before = scheduler._chooser.strategy
        assert scheduler.schedule() == scheduler.schedule() == "scheduled"
        assert scheduler._chooser.strategy is before
        assert caplog.text.count(f"steps are not priced under expert map {version}") == 1


@pytest.mark.vllm
@needs_vllm
def test_a_planner_that_fails_on_one_rank_costs_a_round(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks):
        record = rank["one_fails"]
        sound(record)
        assert record["changed"] == record["received"] == 0
        assert record["disagreements"] == 1
        assert record["failures"] == (number == 2)
