"""``coterie record`` as a user runs it: a model run here, interrupted, resumed, and every refusal in one line."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from command_line import Run, refused, runner
from coterie.engines.recording import Sending
from coterie.prompts import Prompt, load_prompts
from coterie.traces import ActivationTrace, ActivationWriter, LoadTable, TraceMeta


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys, "record")


# Without an engine ---------------------------------------------------------------------------------------------------


def test_an_unknown_engine_lists_the_known(run: Run, tmp_path: Path) -> None:
    ran = run("--engine", "vlm", "-o", tmp_path / "t")
    refused(ran, "Unknown engine 'vlm'. Did you mean 'vllm'?", "Known: sglang, transformers, vllm")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--url", "http://x"], ["--url is for a server"]),
        (["--duration", "3"], ["--duration is for a server"]),
        (["--dtype", "int3"], ["dtype='int3' must be one of"]),
        (["--prompts", "none.txt"], ["none.txt: file: does not exist"]),
        (["--model", "nowhere/at-all"], ["nowhere/at-all: model: does not exist; nothing is downloaded"]),
        (["--resume"], ["does not exist"]),
        (["--max-tokens", "0"], ["--max-tokens"]),
        (["--engine", "vllm", "--resume", "--url", "x"], ["--resume is for engine transformers"]),
        (["--engine", "sglang"], ["engine sglang needs --url"]),
    ],
)
def test_refusals_write_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: list[str]
) -> None:
    if arguments[:1] == ["--engine"]:
        serve(monkeypatch, arguments[1], lambda *_, **__: pytest.fail("called"))
    monkeypatch.chdir(tmp_path)
    refused(run("-o", "t", "--model", "some-model", *arguments), *words)
    assert not (tmp_path / "t").exists()


def test_the_shipped_model_is_found_or_its_absence_said(run: Run, tmp_path: Path) -> None:
    from coterie.engines.tiny import tiny_model_path
    from coterie.errors import UnavailableError

    try:
        folder = tiny_model_path()
    except UnavailableError as error:
        refused(run("-o", tmp_path / "t"), str(error))
        return
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3_moe"
    assert sorted(p.suffix for p in folder.iterdir()).count(".safetensors") == 1


def serve(monkeypatch: pytest.MonkeyPatch, engine: str, function: Callable[..., Any]) -> None:
    """Put a recorder where the branch imports it from, whether or not the engine's package is there."""
    names = [f"coterie.engines.{engine}", f"coterie.engines.{engine}.recording"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    setattr(sys.modules[names[1]], f"record_{engine}", function)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_servers_recorder_gets_what_was_asked(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """Only the seam to the other engines' functions; they have tests of their own."""
    asked: dict[str, Any] = {}

    def recorder(url: str, out: Path, sending: Sending, **options: Any) -> Any:
        asked.update(url=url, sending=sending, **options)
        sending.report("Recording", 1, 2)
        with ActivationWriter(out, TraceMeta("served", 4, 1, 2)) as writer:
            writer.append(np.array([[[0, 3]]]), [0])
        trace = ActivationTrace.open(out)
        return SimpleNamespace(trace=trace, tally=SimpleNamespace(failed=2), lost=3, unknown=4)

    serve(monkeypatch, engine, recorder)
    events = ["--events", "tcp://h:2"]
    ran = run("--engine", engine, "--url", "http://h:1", "-o", tmp_path / "a", *events * (engine == "vllm"), "--json")
    assert ran.code == 0, ran.err
    summary = json.loads(ran.out)
    assert (summary["tokens"], summary["failed"]) == (1, 2)
    assert engine == "sglang" or (summary["lost_messages"], summary["without_ids"]) == (3, 4)
    assert asked["url"] == "http://h:1"
    assert replace(asked["sending"], report=print) == Sending(report=print)
    assert asked.get("events") == ("tcp://h:2" if engine == "vllm" else None)
    options = ["--prompts", "bundled", "--limit", 9, "--no-chat", "--duration", 1.5, "--concurrency", 3]
    run("--engine", engine, "--url", "u", "-o", tmp_path / "b", *options, "--max-tokens", 7)
    prompts = asked["sending"].prompts
    assert len(prompts) == 9
    assert all(isinstance(p, Prompt) for p in prompts)
    assert len({p.domain for p in prompts}) == min(9, len({p.domain for p in load_prompts()}))
    assert replace(asked["sending"], report=print) == Sending(prompts, 1.5, 3, 7, False, print)
    refused(run("--engine", engine, "--url", "u", "-o", tmp_path / "c", "--duration", "0"), "duration_s=0.0 must be")
    if engine == "sglang":
        refused(run("--engine", engine, "--url", "u", "-o", tmp_path / "c", *events), "SGLang publishes no expert")


def test_a_recording_of_loads_is_summed_up(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def recorder(_: str, out: Path, __: Sending) -> Any:
        LoadTable(np.full((2, 3, 4), 5, np.uint64), "served").save(out)
        return SimpleNamespace(trace=LoadTable.open(out), tally=SimpleNamespace(failed=0))

    serve(monkeypatch, "sglang", recorder)
    ran = run("--engine", "sglang", "--url", "u", "-o", tmp_path / "t", "--json")
    summary = json.loads(ran.out)
    assert (summary["windows"], summary["layers"], summary["experts"], summary["activations"]) == (2, 3, 4, 120)


# With transformers ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5")
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        ["some text"],
        trainers.BpeTrainer(vocab_size=280, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False),
    )
    config = transformers.Qwen3MoeConfig(
        vocab_size=280,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=2,
        pad_token_id=0,
        eos_token_id=0,
        bos_token_id=None,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("cli") / "small"
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>").save_pretrained(folder)
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [{"prompt": f"prompt number {n} " * (n % 3 + 1), "domain": "ab"[n % 2], "id": f"x{n}"} for n in range(12)]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "own.jsonl"


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.torch
def test_records_and_prints_one_object(run: Run, model: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "t"
    ran = run(
        "--engine",
        "transformers",
        "--model",
        model,
        "--prompts",
        prompts,
        "-o",
        out,
        "--limit",
        8,
        "--max-tokens",
        4,
        "--gate-weights",
        "--json",
    )
    assert (ran.code, ran.err) == (0, ""), ran.err
    assert ran.out.count("\n") == 1
    summary = json.loads(ran.out)
    trace = ActivationTrace.open(out)
    trace.validate()
    assert (summary["requests"], summary["tokens"], summary["kept"]) == (8, trace.num_tokens, 0)
    assert (summary["layers"], summary["experts"], summary["top_k"]) == (2, 8, 2)
    assert trace.requests.ids is not None
    assert trace.requests.domains is not None
    assert sorted(trace.requests.ids) == [f"x{n}" for n in range(8)]
    assert sorted(trace.requests.domains) == ["a"] * 4 + ["b"] * 4
    assert trace.request(0).gate_weights is not None
    again = run("--model", model, "--prompts", prompts, "-o", out)
    refused(again, "holds a trace already")
    refused(run("--model", model, "--prompts", prompts, "-o", out, "--resume"), "is closed")
    refused(run("--model", model, "--prompts", prompts, "-o", tmp_path / "u", "--chat"), "small has no chat template")
    table = run("--model", model, "-o", tmp_path / "shipped", "--limit", 3, "--max-tokens", 1)
    assert table.code == 0, table.err
    assert "small" in table.out
    assert ActivationTrace.open(tmp_path / "shipped").num_requests == 3


@pytest.mark.torch
def test_interrupted_it_says_how_to_go_on_and_does(
    run: Run, model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real signal, while the fourth batch is under way."""
    from coterie.engines.transformers import recording

    real = recording.generate_batch
    calls: list[Any] = []

    def interrupted(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
            signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    out = tmp_path / "t"
    arguments = ["--model", model, "--prompts", prompts, "-o", out, "--batch-size", 2, "--max-tokens", 4]
    monkeypatch.setattr(recording, "generate_batch", interrupted)
    ran = run(*arguments, "--json")
    assert (ran.code, ran.out) == (130, "")
    assert ran.err.splitlines()[0] == f"{out} holds 6 requests; repeat the command with --resume to continue"
    assert "Traceback" not in ran.err
    kept = ActivationTrace.open(out)
    kept.validate()
    first = kept.requests.ids
    refused(run(*arguments, "--resume", "--seed", 5), "recorded with seed=0, not 5")
    ran = run(*arguments, "--resume", "--json")
    assert ran.code == 0, ran.err
    assert (json.loads(ran.out)["kept"], json.loads(ran.out)["requests"]) == (6, 12)
    assert list(ActivationTrace.open(out).requests.ids or ())[:6] == first
    whole = [out.with_name("whole") if one == out else one for one in arguments]
    assert run(*whole).code == 0
    assert bytes_of(out.with_name("whole")) == bytes_of(out)
