"""``coterie plan``: what it prints, what it writes, what it refuses."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command_line import Run, refused
from coterie.cli.output import WIDTH
from coterie.models import get_model
from coterie.placement.maps import formats as maps
from coterie.placement.planning import eplb
from coterie.traces import ActivationWriter, LoadTable, RequestTrace, TraceMeta
from coterie.types import Placement
from planning_commands import DENSE, EXPERTS, LAYERS, MODEL, counts, save_load
from v3_prices import v3_prices


@pytest.fixture
def load(tmp_path: Path) -> Path:
    return save_load(tmp_path / "load")


ASK = ("--ranks", "4", "--slots", "40", "--planner", "eplb")


def test_a_plan_on_a_page(run: Run, load: Path, tmp_path: Path) -> None:
    ran = run("plan", load, *ASK, "-o", tmp_path / "map.json")
    assert (ran.code, ran.err) == (0, "")
    assert "gpt-oss-20b: 24 MoE layers of 32 experts, 40 slots on 4 ranks" in ran.out
    assert "load: 2 windows of load\nplanner: eplb, split equal\n" in ran.out
    for said in ("Time of every rank", "█", "moves, ", "inside a node", "paid for after", "planning took"):
        assert said in ran.out
    assert f"Written: {tmp_path / 'map.json'}, native" in ran.out
    tables = [line for line in ran.out.splitlines() if line[:1] in "┏┃│└"]  # the terminal wraps lines of text
    assert max(map(len, tables)) <= WIDTH
    found = maps.read_map(tmp_path / "map.json")
    assert found.model == MODEL.name
    assert np.array_equal(found.placement.slot_experts, expected(counts().sum(axis=0)).slot_experts)


def expected(tokens: np.ndarray) -> Placement:
    from coterie.placement import Load
    from coterie.types import Topology

    current = Placement.linear(LAYERS, EXPERTS, 4, 40)
    return eplb.Eplb(v3_prices()).plan(Load(tokens.astype(float)), Topology(4), current).placement


def test_json_holds_what_the_page_says(run: Run, load: Path) -> None:
    ran = run("plan", load, *ASK, "--nodes", 2, "--json")
    assert ran.out.count("\n") == 1
    found = json.loads(ran.out)
    assert (found["moves"] > 0, found["keep"], found["skip_reason"]) == (True, False, None)
    assert sum(part["moves"] for part in found["moves_by_link"].values()) == found["moves"]
    assert set(found["moves_by_link"]) <= {"inside a node", "between nodes"}
    assert found["after_s"] < found["before_s"]
    assert found["gain_pct"] == pytest.approx(100 * (1 - found["after_s"] / found["before_s"]))
    assert found["break_even_steps"] == pytest.approx(found["movement_s"] / (found["before_s"] - found["after_s"]))
    assert found["move_bytes"] == found["moves"] * MODEL.expert_bytes()
    assert len(found["rank_s_after"]) == 4
    assert found["duplicates_after"] == 0
    assert "written" not in found


@pytest.mark.parametrize("to", ["sglang:version=0.5.23,runner=triton", "vllm", "tensorrt-llm", "ascend", "native"])
def test_what_is_written_is_the_next_current_and_is_kept(run: Run, load: Path, tmp_path: Path, to: str) -> None:
    first = tmp_path / "first"
    assert run("plan", load, *ASK, "--to", to, "-o", first).code == 0
    ran = run(
        "plan", load, "--ranks", 4, "--planner", "eplb", "--current", first, "--to", to, "-o", tmp_path / "second"
    )
    assert ran.code == 0
    assert "keep the current placement: the load asks for no other" in ran.out
    assert "(the current placement)" in ran.out
    assert (tmp_path / "second").read_bytes() == first.read_bytes()
    found = json.loads(run("plan", load, "--ranks", 4, "--planner", "eplb", "--current", first, "--json").out)
    assert (found["moves"], found["keep"], found["break_even_steps"], found["slots"]) == (0, True, 0.0, 40)


def test_a_map_that_would_change_outputs_is_written_only_by_force(run: Run, load: Path, tmp_path: Path) -> None:
    asked = ("plan", load, *ASK, "--to", "sglang", "-o", tmp_path / "map.json")
    refused(run(*asked), "gpt-oss-20b on SGLang of unknown version")
    assert not (tmp_path / "map.json").exists()
    ran = run(*asked, "--force")
    assert ran.code == 0
    assert "--init-expert-location" in ran.out
    assert "--ep-num-redundant-experts 8 --ep-dispatch-algorithm dynamic" in ran.out
    assert (
        "moe_expert_parallel_size is above 1"
        in run("plan", load, *ASK, "--to", "tensorrt-llm", "-o", tmp_path / "m").out
    )


def test_windows(run: Run, load: Path, tmp_path: Path) -> None:
    def planned(*window: str) -> np.ndarray:
        path = tmp_path / f"m{len(list(tmp_path.iterdir()))}"
        assert run("plan", load, *ASK, *window, "-o", path).code == 0
        return maps.read_map(path).placement.slot_experts

    both, first, second = (expected(tokens).slot_experts for tokens in (counts().sum(axis=0), *counts()))
    for window in ((), ("--window", "0:2"), ("--window", ":")):
        assert np.array_equal(planned(*window), both)
    for name in ("code", "code/0", "0", ":1"):
        assert np.array_equal(planned("--window", name), first)
    for name in ("law", "1", "1:"):
        assert np.array_equal(planned("--window", name), second)


def test_windows_that_are_sums_of_others_are_taken_only_by_name(run: Run, tmp_path: Path) -> None:
    parts = counts(3)
    table = np.concatenate([parts.sum(axis=0)[None], parts[:2].sum(axis=0)[None], parts])
    labels = ["merged_all", "merged_code", "code/0", "code/1", "law"]
    LoadTable(table, model=MODEL.name, labels=labels).save(tmp_path / "load")
    found = json.loads(run("plan", tmp_path / "load", *ASK, "--json").out)
    assert found["load"] == "3 of 5 windows of load (2 named merged_… are left out: sums of others)"
    by_name = json.loads(run("plan", tmp_path / "load", *ASK, "--window", "merged_all", "--json").out)
    assert by_name["load"] == "merged_all of load"
    assert found["rank_s_after"] == pytest.approx(by_name["rank_s_after"])
    LoadTable(table[:2], model=MODEL.name, labels=labels[:2]).save(tmp_path / "sums")
    refused(run("plan", tmp_path / "sums", *ASK), "all 2 windows of")
    LoadTable(table[:1], model=MODEL.name, labels=labels[:1]).save(tmp_path / "one")
    assert json.loads(run("plan", tmp_path / "one", *ASK, "--json").out)["load"] == "one"


def test_real_loads_count_their_tokens_once(data_dir: Path) -> None:
    from coterie.answers.plan.loads import read_load

    path = data_dir / "activations/glm-5.2/expert_counts.npz"
    parts = [read_load(path, None, None, window).tokens for window in ("merged_all", "11:14")]
    found = read_load(path, None, None, None)
    assert np.array_equal(found.tokens, parts[0] + parts[1])
    assert "83 of 94 windows" in found.what


def test_shares_in_force_are_what_is_before(run: Run, load: Path, tmp_path: Path) -> None:
    """A map planned with an optimal split is read back with its shares: before is then what after was."""
    ask = ("plan", load, "--ranks", 4, "--split", "optimal", "--json")
    first = json.loads(run(*ask, "--slots", 40, "-o", tmp_path / "m").out)
    assert maps.read_map(tmp_path / "m").shares is not None
    again = json.loads(run(*ask, "--current", tmp_path / "m").out)
    assert again["before_s"] == pytest.approx(first["after_s"])
    assert again["rank_s_before"] == pytest.approx(first["rank_s_after"])
    assert again["balancedness_before"] == pytest.approx(first["balancedness_after"])
    assert first["before_s"] > first["after_s"]


def test_the_ilp_says_what_it_proves(run: Run, load: Path, tmp_path: Path) -> None:
    LoadTable(counts(1)[:, :3], model=MODEL.name, layer_ids=np.arange(3)).save(tmp_path / "small")
    ask = ("plan", tmp_path / "small", "--ranks", 2, "--planner", "latency_optimal_ilp", "--time-limit", 5)
    proof = json.loads(run(*ask, "--json").out)["proof"]
    assert proof["bound_s"] <= proof["objective_s"]
    assert proof["gap"] == pytest.approx(1 - proof["bound_s"] / proof["objective_s"])
    assert proof["worst_gap"] >= proof["gap"] - 1e-12
    assert proof["layers_closed"] == 3
    ran = run(*ask)
    assert "over the horizon, movement paid; no plan is below" in ran.out
    assert "3 of 3 layers closed" in ran.out
    assert json.loads(run("plan", load, *ASK, "--json").out)["proof"] is None


def test_an_ilp_that_is_interrupted_writes_nothing(tmp_path: Path) -> None:
    """The bar shows which layer it is at; Ctrl-C there ends it, whatever the solver is doing."""
    spec = get_model("deepseek-v3")
    LoadTable(counts(1, spec.num_moe_layers, spec.num_experts), model=spec.name).save(tmp_path / "load")
    ours, theirs = pty.openpty()
    ask = ["plan", "load", "--slots", "288", "--planner", "latency_optimal_ilp", "-o", "map"]
    command = [sys.executable, "-c", "from coterie.cli.main import main; main()", *ask]
    shown = b""
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=theirs) as ran:
        os.close(theirs)
        while b"Layer " not in shown and ran.poll() is None:
            shown += os.read(ours, 4096)
        ran.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # closed: it has ended
            while more := os.read(ours, 4096):
                shown += more
        assert ran.communicate()[0] == b""
    os.close(ours)
    assert ran.returncode == 130
    assert [path.name for path in tmp_path.iterdir()] == ["load"]


def test_one_move_and_one_step_are_singular(run: Run, tmp_path: Path) -> None:
    even = np.full((1, LAYERS, EXPERTS), 1000, np.uint64)
    even[0, 5, 20] = 9000  # one hot expert, which a spare slot helps
    LoadTable(even, model=MODEL.name).save(tmp_path / "load")
    maps.write_map(tmp_path / "now", maps.PlacementMap(Placement.linear(LAYERS, EXPERTS, 4, 36), MODEL.name))
    ask = ("plan", tmp_path / "load", "--ranks", 4, "--current", tmp_path / "now", "--max-moves", 1)
    assert json.loads(run(*ask, "--json").out)["moves"] == 1
    ran = run(*ask, "--horizon", 100000)
    assert "1 move, " in ran.out
    assert "paid for after 0" not in ran.out
    found = json.loads(run(*ask, "--horizon", 100000, "--json").out)
    steps = int(np.ceil(found["break_even_steps"]))
    assert f"paid for after {steps:,} step{'s' if steps > 1 else ''}, " in ran.out


def test_activations_are_counted(run: Run, tmp_path: Path) -> None:
    ids = np.random.default_rng(1).integers(0, EXPERTS, (50, LAYERS, 4)).astype(np.uint8)
    with ActivationWriter(tmp_path / "t", TraceMeta(MODEL.name, EXPERTS, LAYERS, 4)) as out:
        out.append(ids, [0] * 50)
    ran = run("plan", tmp_path / "t", *ASK, "-o", tmp_path / "m")
    assert "load: 1 requests of t" in ran.out
    load = np.array([np.bincount(ids[:, layer].ravel(), minlength=EXPERTS) for layer in range(LAYERS)])
    assert np.array_equal(maps.read_map(tmp_path / "m").placement.slot_experts, expected(load).slot_experts)


def test_dense_layers(run: Run, tmp_path: Path) -> None:
    whole = counts(1, DENSE.num_layers, DENSE.num_experts)
    whole[:, 0] = 0
    LoadTable(whole, model=DENSE.name).save(tmp_path / "whole")
    LoadTable(whole[:, 1:], model=DENSE.name).save(tmp_path / "moe")
    for name in ("whole", "moe"):
        ran = run(
            "plan",
            tmp_path / name,
            "--planner",
            "eplb",
            "--slots",
            72,
            "--to",
            "sglang:version=0.5.23",
            "-o",
            tmp_path / f"{name}.json",
        )
        assert ran.code == 0, ran.err
    rows = json.loads((tmp_path / "whole.json").read_text())["physical_to_logical_map"]
    assert len(rows) == DENSE.num_layers
    assert (tmp_path / "whole.json").read_bytes() == (tmp_path / "moe.json").read_bytes()
    whole[:, 0] = 1
    LoadTable(whole, model=DENSE.name).save(tmp_path / "odd")
    assert "layer 0, which is dense" in run("plan", tmp_path / "odd", "--planner", "eplb").err


def test_a_rank_that_is_gone_and_settings_that_are_heeded(run: Run, load: Path) -> None:
    found = json.loads(
        run(
            "plan",
            load,
            "--ranks",
            4,
            "--slots",
            44,
            "--planner",
            "eplb",
            "--speeds",
            "1,0,1,1",
            "--horizon",
            5,
            "--json",
        ).out
    )
    assert found["rank_s_after"][1] == 0.0
    assert "from the host" in found["moves_by_link"]
    assert found["horizon"] == 5.0


BAD: dict[str, tuple[tuple[object, ...], str]] = {
    "slots that ranks do not divide": (("--ranks", 4, "--slots", 42), "num_slots=42 must be a multiple of num_ranks=4"),
    "fewer slots than experts": (("--ranks", 4, "--slots", 28), "--slots=28 must hold the num_experts=32"),
    "more slots than experts for a rank": (("--ranks", 2, "--slots", 80), "40 slots a rank must be at most"),
    "no ranks": (("--ranks", 0), "--ranks=0 must be a multiple of --nodes=1, both at least 1"),
    "nodes that do not divide": (("--ranks", 4, "--nodes", 3), "--ranks=4 must be a multiple of --nodes=3"),
    "unknown planner": (("--planner", "eplp"), "Did you mean 'eplb'?"),
    "unknown format": (("--to", "vlm"), "Did you mean 'vllm'?"),
    "a format that is only read": (("--to", "rank-expert"), "is only read"),
    "unknown preset": (("--preset", "h20"), "Did you mean 'h200'?"),
    "another model": (("--model", "mixtral-8x7b"), "has 32 experts a layer; mixtral-8x7b has 8"),
    "a setting the planner lacks": (
        ("--split", "optimal"),
        "eplb has no --split; latency_optimal, latency_optimal_ilp have it",
    ),
    "a limit the planner lacks": (("--time-limit", 1), "eplb has no --time-limit; latency_optimal_ilp has it"),
    "no time": (("--planner", "latency_optimal_ilp", "--time-limit", 0), "time_limit_s=0.0 must be above 0"),
    "a window that is not there": (("--window", "2"), "must be within the 2 windows"),
    "a label that is not there": (("--window", "medicine"), "or one of code, law"),
    "speeds that are none": (("--speeds", "fast"), "--speeds=fast must be 8 numbers"),
    "speeds of other ranks": (("--speeds", "1,1"), "speeds has 2 values; num_ranks=8"),
    "no horizon": (("--horizon", "-1"), "horizon=-1.0 must be"),
    "NaN horizon": (("--horizon", "nan"), "horizon=nan must be"),
    "no batch": (("--batch", 0), "--batch=0 must be at least 1"),
    "a current placement that is not there": (("--current", "none.json"), "none.json: file: does not exist"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_line_and_writes_nothing(run: Run, load: Path, tmp_path: Path, what: str) -> None:
    arguments, said = BAD[what]
    before = sorted(tmp_path.rglob("*"))
    planner = () if "--planner" in arguments else ("--planner", "eplb")
    refused(run("plan", load, *planner, *arguments, "-o", tmp_path / "map"), said)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tokens: tokens - tokens.max(), "must hold tokens"),
        (lambda tokens: tokens * np.nan, "expected integers"),
        (lambda tokens: tokens[:-1], "layers"),
    ],
)
def test_a_load_that_cannot_be_is_refused(run: Run, tmp_path: Path, change: Any, said: str) -> None:
    tokens = counts(1)[0].astype(np.int64)
    np.savez(tmp_path / "wrong.npz", counts=change(tokens)[None])
    refused(run("plan", tmp_path / "wrong.npz", "--model", MODEL.name, *ASK, "-o", tmp_path / "map"), said)
    np.savez(tmp_path / "fine.npz", counts=tokens[None])
    refused(run("plan", tmp_path / "fine.npz", *ASK), f"model '{tmp_path.name}', which is not known")
    assert not (tmp_path / "map").exists()


def test_a_map_for_something_else_is_refused(run: Run, load: Path, tmp_path: Path) -> None:
    other = Placement.linear(26, 64, 4)
    maps.write_map(tmp_path / "other", maps.PlacementMap(other, DENSE.name, DENSE.moe_layer_ids))
    refused(run("plan", load, "--ranks", 4, "--planner", "eplb", "--current", tmp_path / "other"), "'deepseek-v2-lite'")
    maps.write_map(tmp_path / "m", maps.PlacementMap(Placement.linear(LAYERS, EXPERTS, 4), MODEL.name))
    ask = ("plan", load, "--planner", "eplb", "--current", tmp_path / "m")
    refused(run(*ask, "--ranks", 8), "num_ranks: is 4, expected 8")
    refused(run(*ask, "--ranks", 4, "--slots", 40), "--slots=40 must be the 32")
    refused(run(*ask, "--ranks", 4, "-o", tmp_path / "m"), "exists already")
    RequestTrace(np.array([1]), np.array([1]), np.array([0.0])).save(tmp_path / "r")
    refused(run("plan", tmp_path / "r", "--model", MODEL.name), "requests without their experts")
