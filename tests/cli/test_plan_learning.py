"""Plans that place experts beside the requests that call them: from a trace to the files that serve."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from command_line import Run, refused
from coterie.dispatch.tables import RankTables
from coterie.engines.tiny import tiny_model_path
from coterie.engines.vllm.eplb.files import MapFiles
from coterie.engines.vllm.settings import EplbSettings
from coterie.gateway.fleet.spec import PoolShape, RouterSpec, maker
from coterie.gateway.signals.predicted import open_predictor
from coterie.placement.maps.formats import read_map
from coterie.predictors import PredictRequest
from coterie.routing import Request
from coterie.traces import ActivationTrace
from coterie.traces.readers import read_as
from planning_commands import save_load
from tiny_traces import save_tiny_trace

RANKS = 4


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_trace(tmp_path_factory.mktemp("tiny") / "trace")


@pytest.mark.parametrize("planner", ["co_cluster", "sem_moe"])
def test_what_a_plan_writes_serves(run: Run, trace: Path, tmp_path: Path, planner: str) -> None:
    tiny = tiny_model_path()
    file, tables = tmp_path / "placement.json", tmp_path / "tables"
    ran = run(
        "plan", trace, "--model", tiny, "--ranks", RANKS, "--planner", planner,
        "-o", file, "--tables", tables, "--json",
    )  # fmt: skip
    assert (ran.code, ran.err) == (0, "")
    found = json.loads(ran.out)
    local = found["locality"]
    assert (local["items"], local["held_out"]) == ("requests", True)
    assert local["after"] > local["now"] > 0.9 / RANKS, "on requests the plan was not made on"
    assert f"{local['after']:.1%} of these there" in found["verdict"]
    assert found["next"] == f"coterie place apply {file} MODEL -o MODEL-placed"
    assert run("place", "apply", file, tiny, "-o", tmp_path / "placed").code == 0

    placement = read_map(file).placement
    kept = RankTables.load(tables / "ranks.safetensors")
    assert np.array_equal(kept.placement.slot_experts, placement.slot_experts)
    predictor = open_predictor(tables / "tokens.safetensors")
    pool = maker(RouterSpec(router="semantic", placement=str(file)))(PoolShape(RANKS, {}))
    recorded = read_as(ActivationTrace, trace)
    chosen, means = [], []
    for number in range(8):
        ids = recorded.request(number).token_ids
        assert ids is not None
        use = predictor.predict(PredictRequest(token_ids=ids))
        decision = pool.router.route(Request(str(number), len(ids), use), pool.fleet)
        chosen.append(decision.worker)
        means.append(int(kept.request_scores(ids).argmax()))
    assert len(set(chosen)) > 1, "requests go where their experts are, and these differ"
    assert np.mean(np.equal(chosen, means)) > 0.7, "the rank tables say the same of whole requests"

    config = {
        "listen": "127.0.0.1:0",
        "handshake": "none",
        "workers": [
            {"id": f"r{rank}", "url": "http://127.0.0.1:1", "data_parallel_rank": rank, "placement_rank": rank}
            for rank in range(RANKS)
        ],
        "decode": {"router": "semantic", "placement": str(file)},
        "placement": str(file),
        "predictor": str(tables / "tokens.safetensors"),
    }
    (tmp_path / "fleet.yaml").write_text(yaml.safe_dump(config))
    checked = run("serve", "--config", tmp_path / "fleet.yaml", "--check")
    assert (checked.code, checked.err) == (0, "")
    assert "decode routed by semantic" in checked.out


def test_vllms_policy_reads_the_placement(run: Run, trace: Path, tmp_path: Path) -> None:
    file, failures = tmp_path / "placement.json", list[str]()
    ran = run(
        "plan", trace, "--model", tiny_model_path(), "--ranks", RANKS, "--planner", "moetuner",
        "--time-limit", 0.1, "--to", "vllm", "-o", file, "--json",
    )  # fmt: skip
    assert (ran.code, ran.err) == (0, "")
    assert json.loads(ran.out)["locality"] is None, "it places experts after each other, not beside items"
    MapFiles(EplbSettings(initial_map=str(file)), failures.append)
    assert not failures


def test_items_may_be_token_ids(run: Run, trace: Path) -> None:
    arguments = "plan", trace, "--model", tiny_model_path(), "--ranks", RANKS, "--planner", "sem_moe", "--json"
    tokens, requests = (
        json.loads(run(*arguments, "--items", items).out)["locality"] for items in ("tokens", "requests")
    )
    assert tokens["items"] == "tokens"
    assert tokens["after"] > requests["after"], "a token has a rank in every layer, a request one for all"


@pytest.mark.parametrize("planner", ["co_cluster", "moetuner"])
def test_real_routing(run: Run, data_dir: Path, tmp_path: Path, planner: str) -> None:
    routing, file = data_dir / "activations" / "gpt-oss-20b" / "routing.npz", tmp_path / "placement.json"
    limit = ("--time-limit", 0.05) if planner == "moetuner" else ()
    ran = run("plan", routing, "--planner", planner, *limit, "-o", file, "--json")
    assert (ran.code, ran.err) == (0, "")
    found = json.loads(ran.out)
    assert found["held_out"]["gain_pct"] > 10.0, "on requests that it was not made on"
    assert read_map(file).placement.num_ranks == 8
    if planner == "co_cluster":
        assert found["locality"]["after"] > 1.2 * found["locality"]["now"]
    refused(run("plan", routing, "--planner", planner, "--tables", tmp_path / "t"), "needs token ids")


def test_refusals(run: Run, trace: Path, tmp_path: Path) -> None:
    load = save_load(tmp_path / "load")
    refused(run("plan", load, "--planner", "co_cluster"), "co_cluster learns from requests", "is a load table")
    refused(run("plan", load, "--tables", tmp_path / "t"), "needs an activation trace; a load table has no tokens")
    refused(run("plan", load, "--items", "experts"), "items='experts' must be one of requests, tokens")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    tiny = tiny_model_path()
    refused(run("plan", trace, "--model", tiny, "--tables", tmp_path / "full"), "is not empty")
