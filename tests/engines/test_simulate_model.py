"""``coterie simulate --with-model``: the router's dry run against the model's own routing, on coterie-tiny."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.torch

import torch  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from coterie.answers.batches.options import SimulateOptions  # noqa: E402
from coterie.answers.batches.requests import route_prompts  # noqa: E402
from coterie.answers.batches.what_if import simulate  # noqa: E402
from coterie.cli.main import app  # noqa: E402
from coterie.engines.tiny import tiny_model_path  # noqa: E402
from coterie.engines.transformers import RecordingSettings, dry_run, load_model, record, score_dry_run  # noqa: E402
from coterie.errors import ConfigError, UnavailableError  # noqa: E402
from coterie.prompts import load_prompts, read_prompts, take_in_turn  # noqa: E402


def quiet(doing: str, done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # small products: threads would only wait for each other
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    short = [prompt for prompt in load_prompts() if len(prompt.prompt) < 300]
    path.write_text("".join(json.dumps(p._asdict()) + "\n" for p in take_in_turn(short, 12)))
    return path


@pytest.fixture(scope="module")
def routed(prompts: Any) -> Any:
    return route_prompts(tiny_model_path(), "float32", "cpu", read_prompts(prompts), 0, quiet)


def test_what_runs_is_the_routing_that_a_recording_has(routed: Any, prompts: Any, tmp_path: Path) -> None:
    settings = RecordingSettings(max_tokens=1, batch_size=1)
    whole = record(tiny_model_path(), read_prompts(prompts), tmp_path / "trace", settings).trace
    assert whole.requests.ids is not None
    ids = list(whole.requests.ids)
    assert sorted(routed.trace.requests.ids) == sorted(ids)
    for row, name in enumerate(routed.trace.requests.ids):
        ours, theirs = routed.trace.request(row), whole.request(ids.index(name))
        np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
        # Batches are padded: to the last bit of a float it is the same, and that may decide a tie.
        assert (np.sort(ours.expert_ids) == np.sort(theirs.expert_ids)).mean() > 0.995


def test_what_is_seen_is_the_dry_run(routed: Any) -> None:
    loaded = load_model(tiny_model_path())
    tokens = [routed.trace.request(row).token_ids.tolist() for row in range(routed.trace.num_requests)]
    for row, run in enumerate(dry_run(loaded.model, tokens)):
        np.testing.assert_array_equal(routed.dry_run[row], run.footprint)


def test_the_whole_says_how_near_it_came(routed: Any, prompts: Any) -> None:
    arguments = ["simulate", "--with-model", tiny_model_path(), "--prompts", prompts, "--requests", 60, "--json"]
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exception is None, result.output
    found = json.loads(result.stdout)
    settings = found["settings"]
    assert (settings["execution"], settings["predictor"], settings["recorded_requests"]) == ("spread", "dry_run", 12)
    assert (settings["layers"], settings["experts"], settings["top_k"]) == (8, 32, 4)
    runs = dry_run(load_model(tiny_model_path()).model, [routed.trace.request(r).token_ids.tolist() for r in range(12)])
    scores = [score_dry_run(run, routed.trace.request(row).expert_ids).cosine for row, run in enumerate(runs)]
    assert settings["cosine"] == pytest.approx(float(np.mean(scores)), abs=1e-6)
    assert 0.5 < settings["cosine"] < 0.999, "a guess, and no bad one"
    assert any("dry_run" in note and f"{settings['cosine']:.3f}" in note for note in found["notes"])
    assert len(found["rows"]) == 2


def test_the_truth_runs_whatever_is_predicted(prompts: Any) -> None:
    """fcfs does not look at loads: with the dry run and with the exact load its run is the same."""
    options = {"with_model": tiny_model_path(), "prompts": prompts, "requests": 80, "rate": 100.0}
    seen, exact = (simulate(SimulateOptions(**options, predictor=name), quiet) for name in (None, "recorded"))
    assert seen.rows[0] == exact.rows[0]
    assert exact.settings["cosine"] == pytest.approx(1.0)
    assert seen.settings["cosine"] < 0.999


def test_prefill_is_timed_by_the_models_own_shape(prompts: Any) -> None:
    options = SimulateOptions(with_model=tiny_model_path(), prompts=prompts, requests=40, execution="prefill")
    found = simulate(options, quiet)
    assert found.settings["execution"] == "prefill"
    assert found.settings["measured"] is False
    assert found.settings["cosine"] < 1


def test_the_config_must_agree_and_gives_the_precision(prompts: Any, tmp_path: Path) -> None:
    path = tmp_path / "c.json"

    def run(**config: object) -> Any:
        path.write_text(json.dumps(config))
        options = SimulateOptions(with_model=tiny_model_path(), prompts=prompts, requests=20, config=path)
        return simulate(options, quiet)

    found = run(model_name="coterie-tiny", quantization="bf16", num_experts=32, top_k_experts=4)
    assert any("in bfloat16" in note for note in found.notes)
    with pytest.raises(ConfigError, match=r"c.json: num_experts=60 must equal 32, that of .*coterie-tiny"):
        run(num_experts=60)
    with pytest.raises(ConfigError, match=r"c.json: top_k_experts=8 must equal 4"):
        run(top_k_experts=8)
    with pytest.raises(ConfigError, match="quantization='int3' must be null or one of"):
        run(quantization="int3")
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        with pytest.raises(UnavailableError, match=r"nf4.*needs bitsandbytes"):
            run(quantization="nf4")


def test_no_answers_to_decode(prompts: Any) -> None:
    with pytest.raises(ConfigError, match="runs prompts, no answers"):
        simulate(SimulateOptions(with_model=tiny_model_path(), prompts=prompts, execution="decode"), quiet)


def test_prompts_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("word " * 3000 + "\n" + "a short one\n")
    found = route_prompts(tiny_model_path(), "float32", "cpu", read_prompts(path), 0, quiet)
    assert found.trace.num_requests == 1
    assert found.notes == ["1 of 2 prompts are empty or past 1024 tokens."]
    path.write_text("word " * 3000 + "\n")
    with pytest.raises(ConfigError, match="none of 1 prompts fits"):
        route_prompts(tiny_model_path(), "float32", "cpu", read_prompts(path), 0, quiet)
