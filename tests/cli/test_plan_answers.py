"""``coterie plan``: answers that a user can act on: batch, memory, spare slots, held-out load, verdict."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command_line import Run, refused
from coterie.answers.plan.loads import read_load
from coterie.answers.plan.memory import RankMemory
from coterie.answers.verdicts import change
from coterie.costs.presets import load_preset
from coterie.models import get_model
from coterie.placement.maps import formats as maps
from coterie.traces import ActivationWriter, LoadTable, TraceMeta
from planning_commands import EXPERTS, LAYERS, MODEL, counts, save_load

GLM = "activations/glm-5.2/expert_counts.npz"


@pytest.fixture
def load(tmp_path: Path) -> Path:
    return save_load(tmp_path / "load")


def asked(run: Run, *arguments: object) -> dict[str, Any]:
    ran = run("plan", *arguments, "--json")
    assert (ran.code, ran.err) == (0, "")
    found: dict[str, Any] = json.loads(ran.out)
    return found


def test_the_batch_decides_what_glm_gains(run: Run, data_dir: Path) -> None:
    """In bf16, if devices had 200 GB: 7.4% of the MoE layers' time at 8,192 tokens a step, 0.7% at 256."""
    found = asked(run, data_dir / GLM, "--memory", 200)
    rows = {row["tokens"]: row for row in found["batches"]}
    assert (found["batch"], found["preset"], found["dtype"], found["ranks"]) == (8192, "h200", "bf16", 8)
    assert found["gain_pct"] == rows[8192]["gain_pct"] == pytest.approx(7.36, abs=0.05)
    assert rows[256]["replanned_gain_pct"] == pytest.approx(0.69, abs=0.05)
    assert 0 <= rows[256]["gain_pct"] < rows[256]["replanned_gain_pct"], "a plan for another batch is no better"
    assert 4 < found["held_out"]["gain_pct"] < found["gain_pct"]
    at_256 = asked(run, data_dir / GLM, "--memory", 200, "--batch", 256)
    assert at_256["gain_pct"] == pytest.approx(rows[256]["replanned_gain_pct"]), "the table says what --batch would"
    assert at_256["verdict"].startswith("It hardly pays for glm-5.2 in bf16 on 8 ranks of h200, 256 tokens a step: ")


def test_glm_in_bf16_does_not_fit(run: Run, data_dir: Path) -> None:
    refused(
        run("plan", data_dir / GLM, "--slots", 288), "needs 204 GB a rank", "150 GB (140 GiB)", "--dtype fp8 (102 GB)"
    )
    refused(run("plan", data_dir / GLM), "needs 181 GB a rank", "--ranks 16 (90.6 GB)")
    refused(run("plan", data_dir / GLM, "--slots", 288, "--memory", 190), "--slots 264 (187 GB)")


def test_spare_slots_that_slow_glm_down_do_not_look_better(run: Run, data_dir: Path) -> None:
    """Experts in order fill spare slots with replicas that nobody needs: gains from there would be 15.7%."""
    found = asked(run, data_dir / GLM, "--dtype", "fp8", "--slots", 288)
    plain = asked(run, data_dir / GLM, "--dtype", "fp8")
    assert found["before_s"] == pytest.approx(plain["before_s"]), "what runs now has no spare slots"
    assert found["start_s"] > found["before_s"]
    assert 100 * (1 - found["after_s"] / found["start_s"]) == pytest.approx(15.7, abs=0.1)
    assert found["gain_pct"] == pytest.approx(6.9, abs=0.1)
    assert found["no_spare"]["gain_pct"] == pytest.approx(plain["gain_pct"]) == pytest.approx(8.2, abs=0.1)
    assert found["held_out"]["no_spare_gain_pct"] > found["held_out"]["gain_pct"] > 0
    rows = {row["tokens"]: row for row in found["batches"]}
    assert rows[256]["gain_pct"] < -5 < 0 < rows[256]["no_spare_gain_pct"]
    assert found["verdict"].startswith("It does not pay to add spare slots for glm-5.2 in fp8")
    assert "--slots" not in found["next"]
    assert found["memory"]["experts_bytes"] + found["memory"]["replicas_bytes"] == pytest.approx(102e9, rel=0.01)


def test_the_page_shows_both_and_says_what_is_counted(run: Run, load: Path) -> None:
    ran = run("plan", load, "--ranks", 4, "--slots", 40)
    for said in (
        "planned for 8,192 tokens a step over all ranks, device h200, experts in mxfp4",
        "memory of a rank: experts 2.54 GB, replicas 635 MB, staging at least 26.4 MB; a device has 150 GB",
        "for KV cache, workspace and other weights (16-bit: 899 MB shared by ranks, 3.59 GB on each)",
        "no spare slots",
        " spare slots ┃",
        "8,192 (--batch)",
        "Held out: planned on 1 of its windows, scored on the other 1.",
        "\nNext: coterie plan ",
    ):
        assert said in ran.out
    assert ran.out.index("planned for") < ran.out.index("Time of every rank")
    assert "gain of" in run("plan", load, "--ranks", 4).out, "beside a plan for this batch alone"


@pytest.mark.parametrize("window", [None, "law"])
def test_held_out_windows_are_not_planned_on(run: Run, load: Path, tmp_path: Path, window: str | None) -> None:
    """Score the second of two windows, with a plan that another process made from the first only."""
    first, second = ("law", "code") if window else ("code", "law")
    ask = ("--ranks", 4, "--planner", "eplb")
    found = asked(run, load, *ask, *(() if window is None else ("--window", window)))
    asked(run, load, *ask, "--window", first, "-o", tmp_path / "m")
    scored = asked(run, load, *ask, "--window", second, "--current", tmp_path / "m")
    in_order = asked(run, load, *ask, "--window", second)
    gain = 100 * (1 - scored["before_s"] / in_order["before_s"])
    assert found["held_out"]["gain_pct"] == pytest.approx(gain)
    assert found["held_out"]["gain_pct"] < found["gain_pct"]
    assert f" {change(gain, '')}" in found["verdict"]
    assert "on load not planned on" in found["verdict"]


def test_where_nothing_is_held_out_it_says_so(run: Run, tmp_path: Path) -> None:
    parts = counts(3)
    LoadTable(parts[:1], model=MODEL.name).save(tmp_path / "one")
    found = asked(run, tmp_path / "one", "--ranks", 4)
    assert (found["held_out"], found["not_held_out"]) == (None, "it is one window")
    assert "(nothing is held out: no interval)" in found["verdict"]
    assert "Nothing is held out: it is one window." in run("plan", tmp_path / "one", "--ranks", 4).out
    table = np.concatenate([parts.sum(axis=0)[None], parts])
    LoadTable(table, model=MODEL.name, labels=["merged_all", "a/0", "a/1", "b"]).save(tmp_path / "t")
    merged = asked(run, tmp_path / "t", "--ranks", 4, "--window", "merged_all")
    assert merged["not_held_out"] == "merged_all is a sum of other windows"
    LoadTable(parts * np.array([0, 1, 1], np.uint64)[:, None, None], model=MODEL.name).save(tmp_path / "zero")
    assert read_load(tmp_path / "zero", None, None, "0:2").whole_because == "one part of it has no tokens"


def test_shards_of_a_label_are_divided_by_label(tmp_path: Path) -> None:
    parts = counts(7)
    labels = ["a/0", "a/1", "a/2", "b/0", "b/1", "c", "d/0"]
    LoadTable(parts, model=MODEL.name, labels=labels).save(tmp_path / "t")
    held = read_load(tmp_path / "t", None, None, None).parts
    assert held is not None
    assert held.planned is not None
    assert np.array_equal(held.planned, parts[[0, 1, 3, 5]].sum(axis=0))  # c and d/0 are alone: in order
    assert np.array_equal(held.scored, parts[[2, 4, 6]].sum(axis=0))


@pytest.mark.parametrize("requests", [19, 20])
def test_every_other_request_of_a_trace_is_held_out(tmp_path: Path, requests: int) -> None:
    ids = np.random.default_rng(1).integers(0, EXPERTS, (3 * requests, LAYERS, 4)).astype(np.uint8)
    with ActivationWriter(tmp_path / "t", TraceMeta(MODEL.name, EXPERTS, LAYERS, 4)) as out:
        for one in np.split(ids, requests):
            out.append(one, [0] * 3)
    found = read_load(tmp_path / "t", None, None, None)
    if requests < 20:
        assert (found.parts, found.whole_because[:18]) == (None, "it has 19 requests")
        return
    assert found.parts is not None
    assert found.parts.planned is not None
    first = ids.reshape(requests, 3, LAYERS, 4)[::2].reshape(-1, LAYERS, 4)
    assert found.parts.planned[0].tolist() == np.bincount(first[:, 0].ravel(), minlength=EXPERTS).tolist()
    assert np.array_equal(found.parts.planned + found.parts.scored, found.tokens)


def test_the_next_command_runs(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    LoadTable(np.tile(counts(1), (2, 1, 1)), model=MODEL.name).save(tmp_path / "load of a day")
    load = tmp_path / "load of a day"
    found = asked(run, load, "--ranks", 4, "--batch", 4096, "--max-moves", 60)
    assert found["verdict"].startswith(f"It pays for {MODEL.name} in mxfp4 on 4 ranks of h200, 4,096 tokens a step: ")
    words = shlex.split(found["next"])
    assert words[:2] == ["coterie", "plan"]
    ran = run(*words[1:])
    assert (ran.code, ran.err) == (0, "")
    assert np.abs(maps.read_map(tmp_path / "placement.json").placement.slot_experts).sum() > 0
    assert "\nNext: COTERIE_EPLB=" in ran.out
    native = asked(run, load, "--ranks", 4, "-o", tmp_path / "native")
    assert run(*shlex.split(native["next"])[1:]).code == 0, "a native file is looked at"
    even = np.full((2, LAYERS, EXPERTS), 1000, np.uint64)
    LoadTable(even, model=MODEL.name).save(tmp_path / "even")
    kept = asked(run, tmp_path / "even", "--ranks", 4)
    assert kept["verdict"].startswith("It does not pay ")
    assert f"which stays: {kept['skip_reason']}." in kept["verdict"]
    assert run(*shlex.split(kept["next"])[1:]).code == 0


def test_the_dtype_sets_prices_and_bytes(run: Run, load: Path) -> None:
    published, wide = (asked(run, load, "--ranks", 4, *dtype) for dtype in ((), ("--dtype", "bf16")))
    assert (published["dtype"], wide["dtype"]) == ("mxfp4", "bf16")
    assert wide["memory"]["experts_bytes"] == pytest.approx(published["memory"]["experts_bytes"] * 2 / (4.25 / 8))
    assert wide["before_s"] != published["before_s"]
    refused(run("plan", load, "--dtype", "int3"), "dtype='int3' must be one of fp32, bf16, fp16, fp8, mxfp4")


def test_a_preset_without_memory_is_not_checked(run: Run, load: Path, tmp_path: Path) -> None:
    raw = json.loads((Path(sys.modules["coterie.costs"].__path__[0]) / "presets/h200.json").read_text())
    del raw["measurement"]["hardware"]["memory_bytes"]
    (tmp_path / "mine.json").write_text(json.dumps(raw))
    ran = run("plan", load, "--ranks", 4, "--preset", tmp_path / "mine.json")
    assert "not checked: the preset does not say what a device has (--memory)" in ran.out
    refused(run("plan", load, "--ranks", 4, "--preset", tmp_path / "mine.json", "--memory", 1), "needs 2.54 GB a rank")
    for name in ("h200", "rtx-pro-6000"):
        assert load_preset(name).measurement.hardware["memory_bytes"] > 90e9  # type: ignore[operator]


def test_memory_of_a_rank() -> None:
    memory = RankMemory(get_model("glm-5.2"), "bf16", 288, 8, 150e9)
    assert memory.slots_bytes == pytest.approx(36 * 75 * 3 * 6144 * 2048 * 2)
    assert memory.experts_bytes == pytest.approx(memory.slots_bytes * 256 / 288)
    assert memory.staging_bytes == 2 * 3 * 6144 * 2048 * 2
    assert memory.fits is False
    assert RankMemory(memory.spec, "fp8", 288, 8, 150e9).fits
    assert RankMemory(memory.spec, "fp8", 288, 8, None).fits is None


def test_replicas_and_kv_cache_share_the_memory(run: Run, load: Path) -> None:
    """A replica more on each rank leaves the KV cache as many tokens less as it is said to take the place of."""
    one, more = (RankMemory(get_model("glm-5.2"), "fp8", slots, 8, 150e9) for slots in (256, 264))
    assert one.replica_kv_tokens == pytest.approx(75 * 3 * 6144 * 2048 / (2 * 576 * 78))
    assert one.kv_tokens is not None
    assert more.kv_tokens is not None
    assert one.kv_tokens - more.kv_tokens == pytest.approx(one.replica_kv_tokens)
    assert RankMemory(one.spec, "fp8", 256, 8, None).kv_tokens is None
    assert RankMemory(one.spec, "fp8", 256, 8, 100e9).kv_tokens == 0
    arguments = ("plan", load, "--ranks", 4, "--planner", "popularity")
    found = json.loads(run(*arguments, "--json").out)["memory"]
    said = f"KV cache of {found['kv_tokens']:,.0f} tokens a rank; a spare slot takes that of"
    assert f"{said} {found['replica_kv_tokens']:,.0f}" in run(*arguments).out


TOO_LARGE: dict[str, tuple[tuple[object, ...], str]] = {
    "slots": (("--slots", 4294967296), "536870912 slots a rank must be at most num_experts=32"),
    "ranks": (("--ranks", 4294967296, "--slots", 4294967296), "--ranks=4294967296 must be at most 1024"),
    "windows": (("--window", "0:99999999999999999999"), "must be within the 2 windows"),
    "digits": (("--window", "9" * 5000), "must be within the 2 windows"),
    "no memory": (("--memory", 0), "memory=0.0 must be a finite number above 0"),
    "NaN memory": (("--memory", "nan"), "memory=nan must be a finite number above 0"),
}


@pytest.mark.parametrize("what", TOO_LARGE)
def test_sizes_are_refused_before_anything_is_allocated(run: Run, load: Path, what: str) -> None:
    arguments, said = TOO_LARGE[what]
    refused(run("plan", load, *arguments), said)


HELP = """
import sys
from coterie.cli.main import main
sys.argv = ["coterie", "plan", "--help"]
try:
    main()
except SystemExit as done:
    assert not done.code
loaded = {"numpy", "numba", "scipy", "matplotlib"} & {*sys.modules}
assert not loaded, loaded
from coterie.cli.verbs.plan import DTYPES, LEARNERS, PLANNERS, SPLITS
from typing import get_args
from coterie.placement import planners
from coterie.types import WeightDtype
from coterie.placement.planning.latency_optimal import LatencyOptimal
assert sorted([*PLANNERS, *LEARNERS]) == planners.names(), planners.names()
assert get_args(WeightDtype) == DTYPES
for name in SPLITS:
    planners.make("latency_optimal", {"objective": None}, split=name)
"""


def test_help_names_the_planners_without_loading_them() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", HELP],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    for name in ("latency_optimal_ilp", "round_robin", "popularity", "weighted", "mxfp4"):
        assert name in ran.stdout


def test_links_are_a_matrix_in_a_file(run: Run, load: Path, tmp_path: Path) -> None:
    """Experts come 450 GB/s fast by default; at 4.5 GB/s moves take about 100 times as long."""
    rows = np.full((4, 4), 4.5)
    np.savetxt(tmp_path / "links.txt", rows)
    arguments = ("plan", load, "--ranks", 4, "--planner", "popularity", "--json")
    fast, slow = (json.loads(run(*arguments, *more).out) for more in ((), ("--links", tmp_path / "links.txt")))
    assert slow["moves"] == fast["moves"] > 0
    assert 50 < slow["movement_s"] / fast["movement_s"] < 101
    refused(run(*arguments, "--links", tmp_path / "none.txt"), "must be rows of GB/s")
    np.savetxt(tmp_path / "links.txt", rows[:2])
    refused(run(*arguments, "--links", tmp_path / "links.txt"), "bytes_per_s must be [4][4], above 0")
