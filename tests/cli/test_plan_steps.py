"""``coterie plan`` and ``coterie place inspect`` for single steps: of requests, of windows, of domains."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import coterie
from command_line import Run, refused
from coterie.placement.scenarios import load_scenarios
from coterie.traces import ActivationWriter, LoadTable, TraceMeta
from coterie.types import DECODE, PREFILL, Topology
from planning_commands import EXPERTS, LAYERS, MODEL, save_load

DOMAINS = ("code", "law", "poems")
TASTES = np.random.default_rng(2).dirichlet(np.full(EXPERTS, 0.3), (len(DOMAINS), LAYERS))


def trace(path: Path, requests: int = 40, tokens: int = 30) -> Path:
    """Requests of three subjects in turn; half of their tokens are prompts."""
    rng = np.random.default_rng(0)
    meta = TraceMeta(MODEL.name, EXPERTS, LAYERS, MODEL.top_k)
    with ActivationWriter(path, meta) as out:
        for request in range(requests):
            noise = rng.gumbel(size=(tokens, LAYERS, EXPERTS)) + np.log(TASTES[request % 3])
            ids = np.argsort(-noise, axis=2)[..., : MODEL.top_k].astype(np.uint8)
            phase = np.where(np.arange(tokens) < tokens // 2, PREFILL, DECODE).astype(np.uint8)
            out.append(ids, phase, domain=DOMAINS[request % 3])
    return path


def table(path: Path, windows: int = 4) -> Path:
    rng = np.random.default_rng(1)
    counts = [rng.poisson(20_000 * taste) for _ in range(windows) for taste in TASTES]
    labels = [f"{name}/{window}" for window in range(windows) for name in DOMAINS]
    LoadTable(np.array(counts, np.uint64), model=MODEL.name, labels=labels).save(path)
    return path


def asked(run: Run, *arguments: object) -> dict[str, Any]:
    ran = run("plan", *arguments, "--ranks", 4, "--json")
    assert (ran.code, ran.err) == (0, "")
    found: dict[str, Any] = json.loads(ran.out)
    return found


@pytest.mark.parametrize(
    ("options", "tokens"),
    [(("--phase", "all"), 60), ((), 30), (("--phase", "decode"), 2), (("--phase", "mixed", "--bursts", 0.5), 16)],
    ids=["all", "prefill", "decode", "mixed"],
)
def test_steps_of_requests(run: Run, tmp_path: Path, options: tuple[object, ...], tokens: int) -> None:
    found = asked(run, trace(tmp_path / "t"), "--requests", 2, "--steps", 24, *options)
    held = found["held_out"]
    assert found["steps"]["scenarios"] == 24
    assert found["unseen"]["scenarios"] == 24, "each is held out once"
    assert "scored on steps of the rest" in held["what"]
    assert 0 < held["balancedness_before"] < 1
    assert found["batch"] == tokens
    assert [row["tokens"] for row in found["batches"]] == [found["batch"]], "their own size"
    if tokens > 16:
        assert held["balancedness_after"] > held["balancedness_mean"], "on steps that no plan has seen"


def test_the_page_says_both_and_writes_the_steps(run: Run, tmp_path: Path) -> None:
    load, file = trace(tmp_path / "t"), tmp_path / "steps.safetensors"
    ran = run("plan", load, "--ranks", 4, "--requests", 2, "--steps", 24, "--phase", "all", "--save-scenarios", file)
    assert (ran.code, ran.err) == (0, "")
    for said in (
        "Planned for 24 steps of 2 requests, all of their tokens; times and balancedness are means over steps.",
        "On steps it was not planned on, balancedness is 0.",
        "a plan for the mean step has 0.",
        f"Steps written: {file}",
    ):
        assert said in ran.out
    steps = load_scenarios(file)
    assert steps.whole_steps
    assert steps.num_scenarios == 24
    assert steps.tokens.sum(axis=1) == pytest.approx(60 * MODEL.top_k)
    refused(run("plan", load, "--ranks", 4, "--requests", 2, "--save-scenarios", file), "exists already")


def test_the_next_command_asks_for_the_same_steps(run: Run, tmp_path: Path) -> None:
    found = asked(run, trace(tmp_path / "t"), "--requests", 2, "--steps", 24, "--phase", "all")
    words = shlex.split(found["next"])
    if words[1] == "plan":
        assert "--batch" not in words
        assert words[words.index("--requests") + 1] == "2"


@pytest.mark.parametrize("over", ["windows", "domains", "mixtures"])
def test_steps_of_a_load_table(run: Run, tmp_path: Path, over: str) -> None:
    found = asked(run, table(tmp_path / "l"), "--over", over, "--steps", 24)
    held = found["held_out"]
    assert found["steps"]["scenarios"] == {"windows": 12, "domains": 12, "mixtures": 24}[over]
    assert held["balancedness_after"] > held["balancedness_mean"] > held["balancedness_before"]
    assert len(found["batches"]) > 3, "shapes, at any batch"
    rows = {row["placement"]: row for row in found["domains"]}
    if over == "windows":
        assert rows == {}
        return
    mean, ours = rows["a plan for the mean"], rows["this plan"]
    assert ours["worst"] > max(mean["worst"], rows["now"]["worst"]), "the worst domain gains"
    assert ours["mix"] < mean["mix"], "and the mix of today pays for it"
    assert ours["worst_domain"] in DOMAINS


def test_the_trade_is_on_the_page(run: Run, tmp_path: Path) -> None:
    ran = run("plan", table(tmp_path / "l"), "--ranks", 4, "--over", "domains")
    for said in ("Balancedness on domains held out", "mix of today", "worst domain", "a plan for the mean"):
        assert said in ran.out


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--requests", 2), "needs an activation trace"),
        (("--over", "weeks"), "must be one of windows, domains, mixtures"),
        (("--over", "domains", "--requests", 2), "is of load tables"),
        (("--bursts", 0.5), "--phase and --bursts say what is in a step"),
        (("--over", "domains", "--window", "law"), "needs two or more of them"),
        (("--save-scenarios", "steps"), "needs steps: --requests or --over"),
    ],
)
def test_wrong_options_are_named(run: Run, tmp_path: Path, options: tuple[object, ...], told: str) -> None:
    refused(run("plan", save_load(tmp_path / "load"), "--ranks", 4, *options), told)


def test_wrong_options_of_a_trace_are_named(run: Run, tmp_path: Path) -> None:
    load = trace(tmp_path / "t")
    refused(run("plan", load, "--over", "domains"), "chooses from a load table")
    refused(run("plan", load, "--requests", 2, "--batch", 64), "a step of --requests=2 has the tokens it has")
    refused(run("plan", load, "--requests", 2, "--phase", "both"), "phase='both' must be one of")


def test_the_front_door_takes_steps() -> None:
    steps = np.random.default_rng(0).poisson(300 * TASTES[np.arange(12) % 3]).astype(float)
    model = coterie.step_model(MODEL.name)
    found = coterie.plan(steps, Topology(4), model=model)
    assert found.unseen is not None
    assert found.after_s < found.before_s


def test_real_requests_gain_on_steps_that_were_not_seen(run: Run, data_dir: Path) -> None:
    """gpt-oss-20b, eight ranks, four requests a step."""
    ran = run("plan", data_dir / "activations/gpt-oss-20b", "--requests", 4, "--phase", "all", "--json")
    held = json.loads(ran.out)["held_out"]
    assert held["balancedness_after"] > held["balancedness_mean"] + 0.02
