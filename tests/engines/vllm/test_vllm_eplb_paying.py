"""The EPLB policy that keeps the map until a change pays: alone, and in vLLM's EplbState on four ranks."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import eplb_paying
from coterie.engines.vllm.eplb import Agreement, EplbRound, Rounds, count_moves
from coterie.engines.vllm.eplb.policy import differences
from coterie.engines.vllm.eplb.rounds import KINDS, series
from coterie.engines.vllm.settings import EplbSettings
from coterie.errors import ConfigError
from coterie.placement.maps.formats import read_map
from coterie.types import Placement
from eplb_cases import LINEAR, LOADS, PLANNER, Alone, ask, asked, balance, duplicates, map_file, vllms_map
from eplb_ranks import EXPERTS, RANKS, SLOTS, run_ranks
from vllm_servers import needs_vllm

STEPS = 4.0
BEFORE, AFTER = LOADS[0], np.roll(LOADS[0], 5, axis=1)
"""A load, and one that is quite another."""


def paying(**settings: Any) -> Rounds:
    given: dict[str, Any] = {"planner": PLANNER, "when": "pays", "horizon": STEPS, "window": STEPS, "planning_s": 4e-3}
    return Rounds(EplbSettings(**(given | settings)))


def serve(rounds: Rounds, loads: list[np.ndarray], old: np.ndarray = LINEAR, group: Any = None) -> list[np.ndarray]:
    """The maps of rounds, each from the last, beginning with `old`."""
    maps = [old]
    for load in loads:
        maps.append(ask(rounds, asked(load, maps[-1]), group))
    return maps


def kind(rounds: Rounds) -> str:
    assert rounds.last is not None
    return rounds.last.kind


def test_keeps_until_a_change_pays() -> None:
    rounds, kinds, old = paying(), [], LINEAR
    for load in [BEFORE] * 6 + [AFTER] * 4:
        new = ask(rounds, asked(load, old))
        kinds.append(kind(rounds))
        assert (kinds[-1] == "moved") == (count_moves(old, new, RANKS) > 0)
        if kinds[-1] != "moved":
            np.testing.assert_array_equal(new, old)
        old = new
    assert kinds[:2] == ["first_window", "moved"]
    assert set(kinds[2:6]) <= {"planning_costs_more", "not_due", "nothing_found"}, "the same load, all even"
    assert "moved" in kinds[6:8], "the load is another"
    assert balance(old, AFTER) > 0.95 > balance(LINEAR, AFTER)
    assert rounds.counters["kept"] == len(kinds) - kinds.count("moved")


def test_only_a_window_that_may_be_part_empty_is_left_out() -> None:
    """vLLM first asks after a quarter of the interval."""
    whole = paying(window=1.0)
    assert count_moves(LINEAR, ask(whole, asked(BEFORE / 4)), RANKS) > 0
    np.testing.assert_array_equal(ask(paying(window=2.0), asked(BEFORE / 2)), LINEAR)
    grown = np.pad(LINEAR, ((0, 0), (0, SLOTS)), constant_values=-1)
    slots = ask(whole, asked(BEFORE / 4, grown, 8))
    ask(whole, asked(AFTER / 4, slots, 8))
    assert kind(whole) == "first_window", "counted before the ranks came"
    ask(whole, asked(AFTER / 4, slots, 8))
    assert kind(whole) != "first_window"


def test_planning_that_costs_more_than_it_saves_is_left() -> None:
    rounds = paying(planning_s=1e3)
    assert all(np.array_equal(new, LINEAR) for new in serve(rounds, [*LOADS, *LOADS]))
    assert rounds.counters["plans"] == 0
    assert rounds.last is not None
    assert "planning alone costs 1e+03 s" in rounds.last.reason


def test_moves_that_cost_more_than_they_save_are_left() -> None:
    rounds = paying(planning_s=0.0, expert_bytes=44e12)
    assert all(np.array_equal(new, LINEAR) for new in serve(rounds, [*LOADS]))
    assert rounds.counters["plans"] > 0
    assert rounds.counters["moves"] == 0


class Slow(Alone):
    """One of several ranks, the slowest of which takes `slowest_s` for every plan."""

    def __init__(self, rank: int, slowest_s: float) -> None:
        super().__init__(rank)
        self.slowest_s = slowest_s
        self.digests: list[int] = []

    def agree(self, digest: int, planning_s: float = 0.0) -> Agreement:
        self.digests.append(digest)
        return Agreement(True, max(self.slowest_s, planning_s) if planning_s else 0.0)


def test_ranks_of_different_speed_decide_alike() -> None:
    """By the slowest rank's time, which none of them measures itself."""
    groups = [Slow(rank, slowest_s=50.0) for rank in range(2)]
    maps = [serve(paying(planning_s=None), [np.zeros_like(BEFORE), *LOADS], group=group) for group in groups]
    assert groups[0].digests == groups[1].digests
    for one, other in zip(*maps, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, LINEAR, "50 s a plan: nothing pays")


def test_planning_time_is_learned_from_the_start() -> None:
    """While vLLM reserves memory it asks without load: the planner is tried, and its time agreed on."""
    rounds, group = paying(planning_s=None), Slow(0, slowest_s=7.0)
    assert rounds._payoff is not None
    assert rounds._payoff.planning_s == 0.0
    ask(rounds, asked(np.zeros_like(BEFORE)), group)
    assert rounds._payoff.planning_s == 7.0


@pytest.mark.parametrize("bad", [np.nan, -1.0, np.inf])
def test_nonsense_is_kept_out(bad: float) -> None:
    broken = BEFORE.copy()
    broken[1, 3] = bad
    rounds, other = paying(), paying()
    maps = serve(rounds, [BEFORE, BEFORE])
    np.testing.assert_array_equal(ask(rounds, asked(broken, maps[-1])), maps[-1])
    assert kind(rounds) == "bad_load"
    assert rounds.counters["failures"] == 0
    after = serve(rounds, [AFTER] * 4, maps[-1])
    expected = serve(other, [BEFORE, BEFORE, *[AFTER] * 4])[2:]
    for one, two in zip(after, expected, strict=True):
        np.testing.assert_array_equal(one, two, "as if it had never come")


def test_no_load_keeps_the_map_and_is_no_round() -> None:
    rounds = paying()
    np.testing.assert_array_equal(ask(rounds, asked(np.zeros_like(BEFORE))), LINEAR)
    assert rounds.counters["rounds"] == 0


@pytest.mark.parametrize(
    ("ranks", "old"),
    [
        pytest.param(4, None, id="no old map"),
        pytest.param(8, np.pad(LINEAR, ((0, 0), (0, SLOTS)), constant_values=-1), id="four ranks came, slots empty"),
        pytest.param(3, LINEAR, id="a rank leaves"),
        pytest.param(4, np.full_like(LINEAR, -1), id="nothing anywhere"),
        pytest.param(4, LINEAR[:, :20], id="another number of slots"),
    ],
)
def test_a_map_that_cannot_stay_is_planned_at_once(ranks: int, old: np.ndarray | None) -> None:
    rounds = paying()
    serve(rounds, [BEFORE, BEFORE, AFTER])
    slots = ask(rounds, asked(BEFORE, old, ranks))
    placement = Placement(slots.astype(np.int32), ranks, EXPERTS)
    assert placement.num_slots == ranks * SLOTS // RANKS
    for load in (BEFORE, AFTER, AFTER, AFTER):
        slots = ask(rounds, asked(load, slots, ranks))
    assert rounds.counters["failures"] == 0
    found = Placement(slots.astype(np.int32), ranks, EXPERTS)
    assert found.duplicates == 0


def test_goes_on_from_the_map_that_vllm_has() -> None:
    """An asynchronous round that vLLM gave up left the map as it was, or half of it."""
    rounds = paying()
    ask(rounds, asked(BEFORE))
    planned = ask(rounds, asked(BEFORE))
    assert count_moves(LINEAR, planned, RANKS)
    half = np.concatenate([planned[:1], LINEAR[1:]])
    again = ask(rounds, asked(BEFORE, half))
    np.testing.assert_array_equal(again[:1], half[:1], "the layer that landed")
    assert count_moves(half, again, RANKS) > 0, "and the others once more"
    assert rounds.counters["failures"] == 0


def test_a_planner_that_fails_keeps_the_map(caplog: pytest.LogCaptureFixture) -> None:
    rounds = paying()
    ask(rounds, asked(BEFORE))
    wrong = BEFORE[:, :-1]  # of another number of experts than the map's
    with caplog.at_level(logging.ERROR, "vllm.coterie"):
        np.testing.assert_array_equal(ask(rounds, asked(wrong)), LINEAR)
    assert (rounds.counters["failures"], kind(rounds)) == (1, "failed")
    assert "the map is kept" in caplog.text


def test_disagreement_begins_anew() -> None:
    rounds = paying()
    maps = serve(rounds, [BEFORE, BEFORE])
    np.testing.assert_array_equal(ask(rounds, asked(AFTER, maps[-1]), Alone(agrees=False)), maps[-1])
    assert kind(rounds) == "disagreed"
    assert rounds._payoff is not None
    assert rounds._payoff.fingerprint() == ()
    assert count_moves(maps[-1], ask(rounds, asked(AFTER, maps[-1])), RANKS) > 0, "its window is whole"


def test_a_lost_state_shows_even_where_maps_agree() -> None:
    groups = Slow(0, 0.0), Slow(1, 0.0)
    kept, lost = paying(planning_s=1e3), paying(planning_s=1e3)
    serve(kept, [BEFORE] * 3, group=groups[0])
    serve(lost, [BEFORE] * 2, group=groups[1])
    assert groups[0].digests[:2] == groups[1].digests
    assert groups[0].digests[2] not in groups[1].digests


def test_a_draft_model_has_a_state_of_its_own() -> None:
    rounds, alone, old = paying(), paying(), LINEAR
    draft = EplbRound(BEFORE[:1] * 0.5, SLOTS, 1, RANKS, LINEAR[:1])
    for load in [BEFORE, BEFORE, AFTER, AFTER]:
        new = ask(rounds, asked(load, old))
        draft = draft._replace(old=ask(rounds, draft))
        np.testing.assert_array_equal(new, ask(alone, asked(load, old)))
        old = new
    assert rounds.counters["failures"] == 0


def test_the_reason_is_said_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vllm.coterie"):
        rounds = paying(planning_s=1e3)
        serve(rounds, [BEFORE] * 12)
    kept = [line for line in caplog.messages if "keep, because" in line]
    assert len(kept) < 12, "not in every round"
    assert any("planning alone costs" in line for line in kept)


def test_series_of_the_registry() -> None:
    from prometheus_client import REGISTRY

    def value(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(f"coterie_eplb_{name}_total", labels) or 0.0

    series()
    names = ("rounds", "plans", "moves", "predicted_gain_seconds", "planning_seconds", "asking_seconds")
    before = {name: value(name) for name in names}
    kept = {reason: value("kept", reason=reason) for reason in KINDS}
    rounds = paying()
    serve(rounds, [BEFORE, BEFORE, BEFORE])
    serve(paying(), [BEFORE, BEFORE], group=Alone(rank=1))  # only the first rank counts
    found = {name: value(name) - before[name] for name in names}
    counters = rounds.counters
    assert (found["rounds"], found["plans"], found["moves"]) == (3, counters["plans"], counters["moves"])
    assert counters["moves"] > 0
    assert all(found[name] > 0 for name in names)
    assert sum(value("kept", reason=reason) - kept[reason] for reason in KINDS) == counters["kept"]


# ---------------------------------------------------------------------------------------------------- maps of files


def following(path: Path, when: str = "never") -> Rounds:
    return Rounds(EplbSettings(planner=PLANNER, when=when, load_map=str(path)))  # type: ignore[arg-type]


def replace_map(path: Path, slots: np.ndarray, ranks: int = RANKS) -> None:
    fresh = path.with_suffix(".new")
    map_file(fresh, slots, ranks)
    fresh.replace(path)


def test_every_newer_map_is_taken_over_once(tmp_path: Path) -> None:
    path, rounds, flipped = tmp_path / "advice.json", following(tmp_path / "advice.json"), vllms_map()
    np.testing.assert_array_equal(serve(rounds, [BEFORE])[-1], LINEAR, "no file yet")
    replace_map(path, np.roll(LINEAR, 7, axis=1))
    np.testing.assert_array_equal(serve(rounds, [BEFORE, AFTER])[-1], np.roll(LINEAR, 7, axis=1))
    assert kind(rounds) == "never", "taken over in the round before"
    replace_map(path, flipped)
    np.testing.assert_array_equal(serve(rounds, [BEFORE], np.roll(LINEAR, 7, axis=1))[-1], flipped)
    path.unlink()
    np.testing.assert_array_equal(serve(rounds, [BEFORE], flipped)[-1], flipped)
    assert (rounds.counters["maps"], rounds.counters["failures"]) == (2, 0)


def test_planning_goes_on_from_a_map_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "advice.json"
    rounds = paying(load_map=str(path))
    maps = serve(rounds, [BEFORE, BEFORE])
    replace_map(path, LINEAR)
    maps = serve(rounds, [BEFORE, BEFORE], maps[-1])
    np.testing.assert_array_equal(maps[1], LINEAR)
    assert kind(rounds) == "moved", "the advice was worse: it may be left at once where that pays"
    assert balance(maps[2], BEFORE) > balance(LINEAR, BEFORE)


@pytest.mark.parametrize("content", ["{", "", '{"format": "coterie-vllm"}'])
def test_a_broken_file_changes_nothing(tmp_path: Path, content: str) -> None:
    path = tmp_path / "advice.json"
    path.write_text(content)
    rounds = following(path)
    for new in serve(rounds, [BEFORE, AFTER, BEFORE]):
        np.testing.assert_array_equal(new, LINEAR)
    assert rounds.counters["failures"] == 1, "said once, not in every round"


def test_a_map_of_another_shape_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "advice.json"
    replace_map(path, LINEAR, ranks=3)
    rounds = following(path)
    with caplog.at_level(logging.WARNING, "vllm.coterie"):
        np.testing.assert_array_equal(serve(rounds, [BEFORE, AFTER])[-1], LINEAR)
    assert caplog.text.count("vLLM asks for (3, 16, 4, 24)") == 1


def test_a_file_that_not_all_have_waits(tmp_path: Path) -> None:
    path = tmp_path / "advice.json"
    replace_map(path, vllms_map())
    rounds = following(path)
    elsewhere = OthersHaveNoFile()
    np.testing.assert_array_equal(serve(rounds, [BEFORE, BEFORE], group=elsewhere)[-1], LINEAR)
    assert (rounds.counters["maps"], rounds.counters["disagreements"]) == (0, 0)
    np.testing.assert_array_equal(serve(rounds, [BEFORE])[-1], vllms_map())


class OthersHaveNoFile(Alone):
    """Ranks that agree on maps, and of which only this one has the file: each round compares files, then maps."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def agree(self, digest: int, planning_s: float = 0.0) -> Agreement:
        self.calls += 1
        return super().agree(digest, planning_s)._replace(same=self.calls % 2 == 0)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ('{"when": "sometimes"}', "Invalid enum value 'sometimes'"),
        ('{"when": "pays", "window": 5000}', "window=5000.0 must be at most horizon=3000.0"),
        ('{"planning_s": 1}', "rebalancing and planning_s need when='pays'; it is 'always'"),
        ('{"when": "pays", "planning_s": -1}', "planning_s=-1.0"),
        ('{"when": "pays", "rebalancing": {"intervall": 3}}', "intervall.*settings: first_interval, min_interval"),
        ('{"when": "pays", "rebalancing": {"min_interval": 1e9}}', "min_interval=1000000000.0, first_interval=3000.0"),
        ('{"load_map": "a", "save_map": "a"}', "load_map='a' must be a file of its own"),
    ],
)
def test_wrong_settings_stop_the_start(settings: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        EplbSettings.parse(settings)


class Config(NamedTuple):
    """The fields of vLLM's EPLBConfig that are compared with the settings."""

    window_size: int = 1000
    step_interval: int = 3000
    use_async: bool = True


@pytest.mark.parametrize(
    ("config", "problems"),
    [
        (Config(), []),
        (Config(step_interval=500), ["horizon=3000 must equal step_interval=500", "with use_async window_size=1000"]),
        (Config(window_size=3000), ["window=1000 must equal window_size=3000", "with use_async window_size=3000"]),
        (Config(window_size=3000, use_async=False), ["window=1000 must equal window_size=3000 of --eplb-config"]),
    ],
)
def test_settings_that_are_not_vllms_are_named(config: Config, problems: list[str]) -> None:
    found = differences(EplbSettings(when="pays"), config, layers=58)
    assert len(found) == len(problems)
    assert all(text.startswith(problem) for text, problem in zip(found, problems, strict=True))


# ---------------------------------------------------------------------------------------------------- in vLLM


needs_recording = pytest.mark.skipif(
    not (Path(os.environ.get("COTERIE_DATA", "")) / "activations" / "glm-5.2").is_dir(),
    reason="COTERIE_DATA names no folder with activations/glm-5.2",
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """What four gloo processes saw, and the folder of their files."""
    folder = tmp_path_factory.mktemp("paying")
    (folder / "prometheus").mkdir()
    env = {"PROMETHEUS_MULTIPROC_DIR": str(folder / "prometheus")}
    return folder, run_ranks(folder, {"planner": "latency_optimal"}, eplb_paying.__file__, env)


def sound(record: dict[str, Any]) -> None:
    assert record["weights_right"], "each slot holds the weights its map says, bit for bit"
    assert record["same_on_all"]
    assert record["error"] < 1e-5, "outputs as those of a dense layer, as before"
    assert (record["received"] > 0) == (record["kind"] == "moved"), "a map that is kept moves nothing"


@pytest.mark.long
@pytest.mark.vllm
@needs_vllm
@needs_recording
def test_recorded_drift_in_vllms_state(served: tuple[Path, list[dict[str, Any]]]) -> None:
    loads = eplb_paying.recorded_loads()
    for rank in served[1]:
        first, *records = rank["paying"]
        assert first["kind"] == "first_window"
        for record in (first, *records):
            sound(record)
        calm, drifted = records[:6], records[6:]
        assert calm[0]["kind"] == "moved", "vLLM's first map knows no load"
        assert sum(record["received"] == 0 for record in calm[1:]) >= 3, "books after books: mostly nothing pays"
        assert drifted[0]["kind"] == "moved", "news after books"
        assert any("planning alone costs" in record["reason"] for record in records)
        kept = [record for record in records if record["kind"] != "moved"]
        assert len(kept) >= len(records) / 2
        stale, fresh = calm[-1]["map"], drifted[-1]["map"]
        news = loads[6:].sum(axis=0)
        assert balance(fresh, news) > balance(stale, news) + 0.03
        assert duplicates(fresh) == 0


@pytest.mark.long
@pytest.mark.vllm
@needs_vllm
@needs_recording
def test_counters_of_all_ranks_in_vllms_registry(served: tuple[Path, list[dict[str, Any]]]) -> None:
    """Through the registry that vLLM's /metrics is made of; it reads the variable once, so in a process of its own."""
    folder, ranks = served
    code = (
        "from prometheus_client import generate_latest;"
        "from vllm.v1.metrics.prometheus import get_prometheus_registry as found;"
        "print(generate_latest(found()).decode())"
    )
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder / "prometheus")}
    text = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("coterie_eplb"))
    states = [record for part in ("paying", "files", "one_rank_s_file", "lost") for record in ranks[0][part]]
    rounds = len(states) + len(ranks[0]["measured"]) - 1
    assert float(values["coterie_eplb_rounds_total"]) == rounds, "once for all ranks"
    kept = sum(float(value) for name, value in values.items() if name.startswith("coterie_eplb_kept_total"))
    moved = sum(record["received"] > 0 for record in states)
    assert rounds - kept >= moved
    assert float(values["coterie_eplb_moves_total"]) >= sum(record["received"] for record in states)
    assert float(values["coterie_eplb_predicted_gain_seconds_total"]) > 0
    assert float(values["coterie_eplb_planning_seconds_total"]) > 0
    assert float(values["coterie_eplb_maps_loaded_total"]) == 3
    assert float(values["coterie_eplb_disagreements_total"]) == 1
    assert float(values["coterie_eplb_failures_total"]) == RANKS, "a broken file, on every rank"


@pytest.mark.long
@pytest.mark.vllm
@needs_vllm
@needs_recording
def test_a_written_map_is_what_vllm_then_has(served: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    loads = eplb_paying.recorded_loads()
    wanted = []
    for name, load in (("first", loads[0]), ("second", loads[-1])):
        eplb_paying.advise(tmp_path / f"{name}.json", load)
        wanted.append(read_map(tmp_path / f"{name}.json").placement.slot_experts.tolist())
    assert wanted[0] != wanted[1]
    for rank in served[1]:
        records = rank["files"]
        for record in records:
            sound(record)
        maps = [record["map"] for record in records]
        assert maps == [LINEAR.tolist(), *[wanted[0]] * 2, *[wanted[1]] * 4]
        assert [record["maps"] for record in records[1:]] == [1, 1, 2, 2, 2, 2]
        assert records[-1]["failures"] == 1
        alone = rank["one_rank_s_file"]
        for record in alone:
            sound(record)
        assert alone[0]["map"] == LINEAR.tolist()
        assert alone[1]["kind"] == "moved", "a file that one machine has costs no round"
        assert alone[1]["map"] != wanted[1] == alone[2]["map"]
        assert alone[2]["disagreements"] == 0


@pytest.mark.long
@pytest.mark.vllm
@needs_vllm
@needs_recording
def test_a_lost_state_costs_rounds_and_nothing_else(served: tuple[Path, list[dict[str, Any]]]) -> None:
    for rank in served[1]:
        records = rank["lost"]
        for record in records:
            sound(record)
        assert [record["disagreements"] for record in records] == [0, 0, 1, 1, 1, 1]
        assert [record["kind"] for record in records[2:4]] == ["disagreed", "moved"]


@pytest.mark.long
@pytest.mark.vllm
@needs_vllm
@needs_recording
def test_planning_time_is_the_slowest_rank_s(served: tuple[Path, list[dict[str, Any]]]) -> None:
    times = [rank["measured"] for rank in served[1]]
    assert all(one == times[0] for one in times)
    assert times[0][0] > 0, "known before the first round that serves"
