"""The EPLB policy that plans for single steps from a file: alone, and in vLLM's EplbState on four ranks."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import eplb_steps
from coterie.engines.vllm.eplb import Agreement, Rounds
from coterie.engines.vllm.settings import EplbSettings
from coterie.errors import ConfigError
from coterie.placement import Load
from coterie.placement.scenarios import save_scenarios
from coterie.types import Placement
from eplb_cases import LINEAR, Alone, ask, asked, duplicates
from eplb_ranks import EXPERTS, LAYERS, RANKS, run_ranks
from vllm_servers import needs_vllm

WINDOW = 4.0


def steps(count: int = 12, seed: int = 0) -> np.ndarray:
    """[step, layer, expert] tokens of two subjects in turn, each with experts of its own."""
    rng = np.random.default_rng(seed)
    tastes = np.random.default_rng(7).dirichlet(np.full(EXPERTS, 0.4), (2, LAYERS))
    return np.array([rng.poisson(200_000 * tastes[step % 2]) for step in range(count)], np.float64)


def planning(path: Path | None, **settings: Any) -> Rounds:
    given: dict[str, Any] = {"when": "always", "horizon": WINDOW, "window": WINDOW} | settings
    return Rounds(EplbSettings(scenarios=None if path is None else str(path), **given))


def slowest(slots: np.ndarray, tokens: np.ndarray) -> float:
    """Mean over steps and layers of the slowest rank's tokens."""
    placement = Placement(np.asarray(slots, np.int32), RANKS, EXPERTS)
    return float(np.mean([placement.rank_load(step).max(axis=1).mean() for step in tokens]))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_scenarios(tmp_path / "steps.safetensors", Load.of_scenarios(steps()))
    return tmp_path / "steps.safetensors"


@pytest.mark.parametrize("when", ["always", "pays"])
def test_steps_of_a_file_are_planned_for(file: Path, when: str, caplog: pytest.LogCaptureFixture) -> None:
    mean = steps().mean(axis=0) * WINDOW
    settings = {"when": when} | ({"planning_s": 1e-6} if when == "pays" else {})
    found = []
    with caplog.at_level(logging.INFO, "vllm.coterie"):
        for path in (None, file):
            rounds, slots = planning(path, **settings), LINEAR
            for _ in range(2):  # a first window that may be part empty is left out
                slots = ask(rounds, asked(mean, slots))
            assert rounds.counters["failures"] == 0
            assert duplicates(slots) == 0
            found.append(slots)
    unseen = steps(40, seed=1)
    assert slowest(found[1], unseen) < 0.97 * slowest(found[0], unseen), "on steps that no plan has seen"
    said = [line for line in caplog.messages if "steps held out" in line]
    assert said, "with both figures"
    assert all("a plan for the mean step" in line for line in said)


def test_steps_follow_the_mean_that_vllm_reports(file: Path) -> None:
    """The file's steps are about another mean; what is planned for is about the reported one."""
    mean = np.roll(steps().mean(axis=0), 3, axis=1)
    rounds = planning(file)
    rounds._steps.agreed(rounds._steps.offered() > 0)
    load = rounds._steps.around(Load(mean * WINDOW, WINDOW))
    assert load.scenarios is not None
    np.testing.assert_allclose(np.average(load.scenarios, axis=0, weights=load.weights), mean)


@pytest.mark.parametrize(
    ("content", "told"),
    [(b"", "cannot be used"), (b"no file of steps at all", "cannot be used"), (None, "does not exist")],
)
def test_without_a_sound_file_the_mean_is_planned_for(
    tmp_path: Path, content: bytes | None, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "steps.safetensors"
    if content is not None:
        path.write_bytes(content)
    mean = steps().mean(axis=0) * WINDOW
    rounds = planning(path)
    with caplog.at_level(logging.WARNING, "vllm.coterie"):
        slots = [ask(rounds, asked(mean)) for _ in range(3)]
    expected = ask(planning(None), asked(mean))
    for one in slots:
        np.testing.assert_array_equal(one, expected)
    assert sum(told in line for line in caplog.messages) == 1, "said once"
    assert rounds.counters["failures"] == (content is not None)


def test_steps_of_another_model_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "steps.safetensors"
    save_scenarios(path, Load.of_scenarios(steps()[:, :2]))
    mean = steps().mean(axis=0) * WINDOW
    with caplog.at_level(logging.WARNING, "vllm.coterie"):
        slots = ask(planning(path), asked(mean))
    np.testing.assert_array_equal(slots, ask(planning(None), asked(mean)))
    assert "vLLM asks for (3, 16)" in caplog.text


class OthersHaveReadAnother(Alone):
    """Ranks that agree on maps and have read other steps: each round compares steps, then maps."""

    calls = 0

    def agree(self, digest: int, planning_s: float = 0.0) -> Agreement:
        self.calls += 1
        return super().agree(digest, planning_s)._replace(same=self.calls % 2 == 0)


def test_steps_that_not_all_ranks_have_are_left_out(file: Path) -> None:
    mean = steps().mean(axis=0) * WINDOW
    rounds = planning(file)
    np.testing.assert_array_equal(ask(rounds, asked(mean), OthersHaveReadAnother()), ask(planning(None), asked(mean)))
    assert rounds.counters["disagreements"] == 0
    np.testing.assert_array_equal(ask(rounds, asked(mean)), ask(planning(file), asked(mean)), "once all have it")


def test_a_newer_file_is_read(file: Path) -> None:
    mean, rounds = steps().mean(axis=0) * WINDOW, planning(file)
    first = ask(rounds, asked(mean))
    save_scenarios(file, Load.of_scenarios(np.repeat(steps().mean(axis=0)[None], 2, axis=0)))
    later = ask(rounds, asked(mean))
    assert not np.array_equal(first, later)


def test_a_map_that_is_never_planned_needs_no_steps() -> None:
    with pytest.raises(ConfigError, match="when='never' plans nothing"):
        EplbSettings.parse('{"scenarios": "steps.safetensors", "when": "never"}')


# ---------------------------------------------------------------------------------------------------- in vLLM


@pytest.mark.vllm
@needs_vllm
@pytest.mark.skipif(
    not (Path(os.environ.get("COTERIE_DATA", "")) / "activations" / "gpt-oss-20b").is_dir(),
    reason="COTERIE_DATA names no folder with activations/gpt-oss-20b",
)
def test_recorded_steps_in_vllms_state(tmp_path: Path) -> None:
    filed, others = eplb_steps.recorded_steps(0), eplb_steps.recorded_steps(1, 3 * eplb_steps.STEPS)
    served, unseen = others[: eplb_steps.STEPS], others[eplb_steps.STEPS :]
    np.save(tmp_path / "served.npy", served)
    save_scenarios(tmp_path / "steps.safetensors", Load.of_scenarios(filed))
    (tmp_path / "broken.safetensors").write_bytes(b"half of a file")
    # Searching over steps uncompiled takes minutes. A plan here leaves the compiled loops where the ranks find them.
    ask(planning(tmp_path / "steps.safetensors"), asked(served.sum(axis=0)))
    ranks = run_ranks(tmp_path, {"when": "always"}, eplb_steps.__file__, {"NUMBA_DISABLE_JIT": "0"})
    for rank in ranks:
        for record in rank.values():
            assert record["weights_right"], "each slot holds the weights its map says, bit for bit"
            assert record["same_on_all"]
            assert record["error"] < 1e-5, "outputs as those of a dense layer, as before"
            assert record["received"] > 0
        assert rank["steps"]["map"] != rank["mean"]["map"], "another plan than the mean's"
        assert rank["broken"]["map"] == rank["mean"]["map"], "a file that cannot be read: the mean is planned for"
        assert (rank["steps"]["failures"], rank["broken"]["failures"]) == (0, 1)
    said = " ".join(ranks[0]["steps"]["said"])
    assert "steps held out" in said
    assert "a plan for the mean step" in said, "logged with both figures"
    assert "plans are for the mean step" in " ".join(ranks[0]["broken"]["said"])
    times = {name: slowest(ranks[0][name]["map"], unseen) for name in ("mean", "steps")}
    assert times["steps"] < times["mean"], "on steps that neither plan has seen"
