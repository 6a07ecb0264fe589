"""Recording with a real model: what each token used, interrupted and resumed, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.torch

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import transformers_models as models  # noqa: E402
from coterie.engines.transformers import ExpertCapture, RecordingSettings, record, recording  # noqa: E402
from coterie.errors import ConfigError, TraceError, UnavailableError  # noqa: E402
from coterie.prompts import Prompt  # noqa: E402
from coterie.traces import ActivationTrace  # noqa: E402
from coterie.types import DECODE, PREFILL  # noqa: E402
from transformers_models import same_routes  # noqa: E402

# Recording -----------------------------------------------------------------------------------------------------------

PROMPTS = [
    Prompt(f"p{n}", "law" if n % 2 else "math", "en", "a text about routers " * (1 + n % 4) + str(n)) for n in range(11)
]
SETTINGS = RecordingSettings(max_tokens=5, batch_size=3, gate_weights=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save("qwen3_moe", tmp_path_factory.mktemp("models") / "small-qwen")


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "t"
    record(folder, PROMPTS, out, SETTINGS)
    return out


def bytes_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_a_recording_holds_every_prompt_and_what_each_token_used(whole: Path) -> None:
    trace = ActivationTrace.open(whole)
    trace.validate()
    table = trace.requests
    assert (trace.meta.model, trace.meta.num_experts, trace.meta.top_k) == ("small-qwen", models.EXPERTS, models.TOP_K)
    assert trace.meta.layer_ids == (0, 2)
    assert table.ids is not None
    assert sorted(table.ids) == sorted(p.id for p in PROMPTS)
    by_id = {p.id: p for p in PROMPTS}
    assert table.domains == [by_id[one].domain for one in table.ids]
    tokenizer, model = models.tokenizer(), models.build("qwen3_moe")
    for index, name in enumerate(table.ids):
        tokens = trace.request(index)
        ids = tokenizer(f"<user>{by_id[name].prompt}</user><model>")["input_ids"]
        prompt, output = int(table.prompt_tokens[index]), int(table.output_tokens[index])
        assert tokens.token_ids is not None
        assert tokens.gate_weights is not None
        assert tokens.token_ids[:prompt].tolist() == ids
        assert tokens.phase.tolist() == [PREFILL] * prompt + [DECODE] * (output - 1)
        with ExpertCapture(model, gate_weights=True) as capture, torch.no_grad():
            logits = model(torch.from_numpy(tokens.token_ids[None].astype(np.int64))).logits[0]
            truth = capture.take()
        assert same_routes(tokens.expert_ids, truth.expert_ids) == 1.0
        assert truth.gate_weights is not None
        np.testing.assert_allclose(tokens.gate_weights, truth.gate_weights, rtol=2e-3, atol=1e-3)  # stored as float16
        answer = [*tokens.token_ids[prompt:].tolist(), table.extra["last_token_id"][index]]
        assert logits[prompt - 1 :].argmax(dim=1).tolist() == answer, "greedy, token by token"
        ended = answer[-1] == models.END
        assert table.extra["finish_reason"][index] == ("stop" if ended else "length")
        assert len(answer) == output == (answer.index(models.END) + 1 if ended else 5)


def test_batch_size_changes_the_order_of_requests_and_nothing_else(folder: Path, whole: Path, tmp_path: Path) -> None:
    record(folder, PROMPTS, tmp_path / "t", RecordingSettings(max_tokens=5, batch_size=1, gate_weights=True))
    one, other = ActivationTrace.open(whole), ActivationTrace.open(tmp_path / "t")
    assert one.requests.ids is not None
    assert other.requests.ids is not None
    place = {name: index for index, name in enumerate(other.requests.ids)}
    for index, name in enumerate(one.requests.ids):
        mine, theirs = one.request(index), other.request(place[name])
        assert mine.token_ids is not None
        assert theirs.token_ids is not None
        assert mine.token_ids.tolist() == theirs.token_ids.tolist()
        assert same_routes(mine.expert_ids, theirs.expert_ids) == 1.0


def test_no_chat_records_the_bare_prompt_and_a_missing_domain_is_not_made_up(folder: Path, tmp_path: Path) -> None:
    prompts = [Prompt("a", "", "", "bare text"), Prompt("b", "", "", "more")]
    trace = record(folder, prompts, tmp_path / "t", RecordingSettings(max_tokens=1, chat=False)).trace
    assert trace.requests.ids is not None
    row = trace.request(trace.requests.ids.index("a"))
    assert row.token_ids is not None
    assert row.token_ids.tolist() == models.tokenizer()("bare text")["input_ids"]
    assert trace.requests.domains is None
    assert row.gate_weights is None
    mixed = [Prompt("a", "law", "", "bare text"), Prompt("b", "", "", "more")]
    trace = record(folder, mixed, tmp_path / "mixed", RecordingSettings(max_tokens=1)).trace
    assert trace.requests.domains is not None
    assert sorted(trace.requests.domains) == ["law", "unknown"]


def test_progress_counts_requests_up_to_all(folder: Path, tmp_path: Path) -> None:
    seen = []
    record(folder, PROMPTS, tmp_path / "t", SETTINGS, on_progress=lambda *now: seen.append(now))
    assert [what for what, _, _ in seen] == ["Loading the model", *["Recording requests"] * 5]
    assert [done for _, done, _ in seen[1:]] == sorted(done for _, done, _ in seen[1:])
    assert seen[-1] == ("Recording requests", 11, 11)


# Interrupted and resumed ---------------------------------------------------------------------------------------------


class Stopped(BaseException):
    """As Ctrl-C: no Exception."""


def interrupted(folder: Path, out: Path, at: int, **change: Any) -> None:
    calls = 0

    def stop(what: str, *_: object) -> None:
        nonlocal calls
        calls += what == "Recording requests"
        if calls == at:
            raise Stopped

    with pytest.raises(Stopped):
        record(folder, PROMPTS, out, SETTINGS, on_progress=stop, **change)


@pytest.mark.parametrize("at", [[1], [2], [4], [2, 2, 1]])
def test_a_resumed_recording_ends_with_the_same_bytes(folder: Path, whole: Path, tmp_path: Path, at: list[int]) -> None:
    interrupted(folder, tmp_path / "t", at[0])
    for again in at[1:]:
        interrupted(folder, tmp_path / "t", again, resume=True)
    kept = ActivationTrace.open(tmp_path / "t").num_requests
    ActivationTrace.open(tmp_path / "t").validate()
    done = record(folder, PROMPTS, tmp_path / "t", SETTINGS, resume=True)
    assert (done.kept, done.trace.num_requests) == (kept, len(PROMPTS))
    assert bytes_of(tmp_path / "t") == bytes_of(whole)


def test_what_was_recorded_is_not_run_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(folder, tmp_path / "t", 3)
    kept = ActivationTrace.open(tmp_path / "t").requests.ids
    ran = []
    real = recording.generate_batch
    monkeypatch.setattr(recording, "generate_batch", lambda *a: ran.append(len(a[2])) or real(*a))  # type: ignore[func-returns-value]
    record(folder, PROMPTS, tmp_path / "t", SETTINGS, resume=True)
    assert kept is not None
    assert len(kept) in (5, 6)
    assert sum(ran) == len(PROMPTS) - len(kept)


def test_a_crash_loses_only_what_was_not_flushed(
    folder: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the process had died in its third batch: no tidying up, only what earlier flushes wrote."""
    monkeypatch.setattr(recording, "FLUSH_S", 0.0)
    real = recording.generate_batch
    folders: list[Any] = []

    def dies(*args: Any) -> Any:
        if len(folders) == 2:
            shutil.copytree(tmp_path / "t", tmp_path / "left")
            raise Stopped
        folders.append(1)
        return real(*args)

    monkeypatch.setattr(recording, "generate_batch", dies)
    with pytest.raises(Stopped):
        record(folder, PROMPTS, tmp_path / "t", SETTINGS)
    monkeypatch.setattr(recording, "generate_batch", real)
    assert ActivationTrace.open(tmp_path / "left").num_requests in (5, 6)
    record(folder, PROMPTS, tmp_path / "left", SETTINGS, resume=True)
    assert bytes_of(tmp_path / "left") == bytes_of(whole)


def other_weights(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to / folder.name)
    weights = load_file(to / folder.name / "model.safetensors")
    save_file({name: w + 1e-3 for name, w in weights.items()}, to / folder.name / "model.safetensors", {"format": "pt"})
    return to / folder.name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "recorded with seed=0, not 1$"),
        ({"max_tokens": 6}, "max_tokens=5, not 6"),
        ({"batch_size": 4}, "batch_size=3, not 4"),
        ({"gate_weights": False}, "gate_weights=True, not False"),
        ({"temperature": 0.5}, r"temperature=0\.0, not 0\.5"),
        ({"chat": False}, "chat=True, not False"),
        ({"dtype": "float16"}, "dtype='float32', not 'float16'"),
    ],
)
def test_other_settings_are_refused(folder: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    interrupted(folder, tmp_path / "t", 2)
    before = bytes_of(tmp_path / "t")
    values = {name: getattr(SETTINGS, name) for name in SETTINGS.__slots__}
    with pytest.raises(ConfigError, match=message):
        record(folder, PROMPTS, tmp_path / "t", RecordingSettings(**{**values, **change}), resume=True)
    assert bytes_of(tmp_path / "t") == before


def test_another_model_or_other_prompts_are_refused(folder: Path, tmp_path: Path) -> None:
    interrupted(folder, tmp_path / "t", 2)
    with pytest.raises(ConfigError, match=r"recorded with model_digest='.*', not '.*'$"):
        record(other_weights(folder, tmp_path / "other"), PROMPTS, tmp_path / "t", SETTINGS, resume=True)
    changed = [*PROMPTS[:-1], PROMPTS[-1]._replace(prompt="something else")]
    with pytest.raises(ConfigError, match=r"recorded with prompts_digest='.*', not '.*'$"):
        record(folder, changed, tmp_path / "t", SETTINGS, resume=True)
    with pytest.raises(ConfigError, match="prompts=11, not 10; prompts_digest"):
        record(folder, PROMPTS[:-1], tmp_path / "t", SETTINGS, resume=True)


def test_a_finished_or_missing_recording_is_refused_before_the_model_is_loaded(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is closed: its recording was finished"):
        record(tmp_path / "no model", PROMPTS, whole, SETTINGS, resume=True)
    with pytest.raises(TraceError, match="does not exist"):
        record(tmp_path / "no model", PROMPTS, tmp_path / "none", SETTINGS, resume=True)
    with pytest.raises(ConfigError, match="holds a trace already"):
        record(tmp_path / "no model", PROMPTS, whole, SETTINGS)


# Refusals ------------------------------------------------------------------------------------------------------------


def test_prompts_that_cannot_be_recorded_are_named_before_anything_is_written(folder: Path, tmp_path: Path) -> None:
    long = Prompt("long", "", "", "word " * 300)
    with pytest.raises(ConfigError, match=r"prompt 'long' has \d+ tokens; with max_tokens=64 .* the model's 256"):
        record(folder, [PROMPTS[0], long], tmp_path / "t")
    with pytest.raises(ConfigError, match="prompt 'none' has no tokens"):
        record(folder, [Prompt("none", "", "", "")], tmp_path / "t", RecordingSettings(chat=False))
    with pytest.raises(ConfigError, match="must have ids that differ"):
        record(folder, [PROMPTS[0], PROMPTS[0]], tmp_path / "t")
    bare = models.save("mixtral", tmp_path / "bare", chat=False)
    with pytest.raises(ConfigError, match="bare has no chat template"):
        record(bare, PROMPTS, tmp_path / "t", RecordingSettings(chat=True))
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("change", [{"max_tokens": 0}, {"batch_size": 0}, {"temperature": -1.0}, {"seed": -1}])
def test_settings_check_themselves(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RecordingSettings(**change)


def test_running_out_of_memory_is_one_line_and_keeps_what_there_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = recording.generate_batch
    calls = []

    def exhausted(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return real(*args)

    monkeypatch.setattr(recording, "generate_batch", exhausted)
    with pytest.raises(UnavailableError, match="cpu is out of memory with batch_size=3"):
        record(folder, PROMPTS, tmp_path / "t", SETTINGS)
    assert ActivationTrace.open(tmp_path / "t").num_requests in (2, 3)


def test_the_trace_says_how_it_was_made(whole: Path) -> None:
    source = json.loads((whole / "meta.json").read_text())["source"]
    assert source.keys() >= {"engine", "version", "model_digest", "prompts_digest", "seed", "dtype", "chat"}
    assert (source["engine"], source["chat"], source["prompts"]) == ("transformers", True, 11)
