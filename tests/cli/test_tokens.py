"""``coterie tokens`` writes the table that the scheduler of vLLM reads as `loads`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from command_line import Run, refused, runner
from coterie.engines.waiting_settings import LoadSource
from coterie.traces import ActivationTrace, RequestTrace, TraceMeta
from coterie.types import DECODE, PREFILL
from tiny_traces import save_tiny_trace


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys, "tokens")


def traced(folder: Path, requests: int, with_tokens: bool = True) -> Path:
    """A token's id decides its experts: those of token t are t and t + 1, modulo 8. A request repeats one token."""
    token = np.repeat(np.arange(requests) % 5, 10).astype(np.int32)
    ids = np.stack([np.stack([token % 8, (token + 1) % 8], axis=1)] * 2, axis=1)
    table = RequestTrace(np.full(requests, 6), np.full(requests, 5))
    phase = np.tile(np.repeat([PREFILL, DECODE], [6, 4]), requests).astype(np.uint8)
    offsets = np.arange(0, 10 * requests + 1, 10)
    meta = TraceMeta("demo", num_experts=8, num_layers=2, top_k=2)
    trace = ActivationTrace.from_arrays(meta, ids, offsets, table, phase, token if with_tokens else None)
    trace.save(folder / "trace")
    return folder / "trace"


def test_the_schedulers_loader_reads_the_file(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "loads.safetensors"
    ran = run(traced(tmp_path, 40), "-o", file, "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert (found["tokens"], found["requests"], found["layers"], found["experts"]) == (5, 40, 2, 8)
    assert found["scores"]["token_table"] == pytest.approx(1.0)
    assert found["scores"]["popularity"] < 0.9
    assert "better than their popularity" in found["verdict"]
    assert f'"loads": "{file}"' in found["next"]
    load = LoadSource.open(str(file), num_layers=2, num_experts=8).share([3, 3], None)
    assert load is not None
    assert np.flatnonzero(load[0] > 0.5).tolist() == [3, 4]
    again = run(tmp_path / "trace", "-o", file)
    assert again.code == 0, again.err
    assert again.out.splitlines()[-1].startswith("Next: vllm serve MODEL --scheduler-cls")


def test_few_requests_give_a_table_without_a_score(run: Run, tmp_path: Path) -> None:
    ran = run(traced(tmp_path, 4), "-o", tmp_path / "loads.safetensors", "--json")
    assert json.loads(ran.out)["scores"] is None
    assert "too few requests" in json.loads(ran.out)["verdict"]


def test_refusals(run: Run, tmp_path: Path) -> None:
    trace = traced(tmp_path, 4, with_tokens=False)
    refused(run(trace, "-o", tmp_path / "loads.safetensors"), "has no token ids")
    refused(run(trace, "-o", trace / "loads.safetensors"), "is an input or lies in one")
    (tmp_path / "mine.txt").write_text("keep")
    refused(run(trace, "-o", tmp_path / "mine.txt"), "is not a token table")
    assert (tmp_path / "mine.txt").read_text() == "keep"


def test_transitions_say_how_layers_follow(run: Run, tmp_path: Path) -> None:
    """Token t activates t and t + 1 in both layers: its experts tell those of the next layer exactly."""
    trace, file = traced(tmp_path, 40, with_tokens=False), tmp_path / "flows.npy"
    ran = run(trace, "--transitions", file, "--json")
    assert ran.code == 0, ran.err
    found, flows = json.loads(ran.out), np.load(file)
    assert found["next_layer"]["transitions"] == pytest.approx(1.0)
    assert found["next_layer"]["popularity"] < 0.7
    assert found["next"] == f"coterie plan {trace} --planner moetuner"
    assert flows.shape == (1, 8, 8)
    assert flows.sum() == 400 * 2 * 2, "pairs of the experts of 400 tokens"
    assert np.array_equal(np.flatnonzero(flows[0, 0]), [0, 1]), "expert 0 is of token 0 alone"
    refused(run(trace, "--transitions", file), "exists already")
    refused(run(trace, "--transitions", tmp_path / "flows.txt"), "must end in .npy")
    refused(run(trace), "name a file: --output for the table, or --transitions")


def test_other_predictors_are_scored_beside_the_table(run: Run, tmp_path: Path) -> None:
    """A prompt repeats one of five tokens: an earlier request of the same prompt tells its experts exactly."""
    trace, file = traced(tmp_path, 40), tmp_path / "loads.safetensors"
    published = "similar_prefix:similarity=0.8"
    scores = json.loads(run(trace, "-o", file, "--predictor", published, "--predictor", "prefix", "--json").out)[
        "scores"
    ]
    assert list(scores) == ["requests", "token_table", "popularity", published, "prefix"]
    assert scores[published] == pytest.approx(1.0)
    shown = run(trace, "-o", file, "--predictor", published)
    assert "popularity, the same for all" in shown.out
    assert published in shown.out
    refused(
        run(trace, "-o", file, "--predictor", "similar"), "Unknown predictor 'similar'. Did you mean 'similar_prefix'?"
    )
    refused(run(trace, "-o", file, "--predictor", "similar_prefix:likeness=1"), "has no setting 'likeness'")


def test_what_is_refused_leaves_no_file(run: Run, tmp_path: Path) -> None:
    trace, flows = traced(tmp_path, 40, with_tokens=False), tmp_path / "flows.npy"
    refused(run(trace, "-o", tmp_path / "loads.safetensors", "--transitions", flows), "has no token ids")
    refused(run(trace, "--transitions", flows, "--predictor", "popularity"), "name its file with --output")
    assert not flows.exists()


def test_table_and_transitions_of_coterie_tiny(run: Run, tmp_path: Path) -> None:
    table, flows = tmp_path / "loads.safetensors", tmp_path / "flows.npy"
    ran = run(save_tiny_trace(tmp_path / "tiny"), "-o", table, "--transitions", flows)
    assert ran.code == 0, ran.err
    assert f"Table: {table}" in ran.out
    assert f"Transitions: {flows}" in ran.out
    assert "a request's experts better" in ran.out
    assert "transitions find" in ran.out
    assert np.load(flows).shape == (7, 32, 32)
