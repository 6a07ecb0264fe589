"""Every built-in reader keeps the contract that a reader of others is held to; a reader that breaks it is told how."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from coterie.errors import TraceError
from coterie.testing import check_reader
from coterie.traces import ActivationTrace, LoadTable, RequestTrace, TraceMeta
from coterie.traces.readers import Reader, ReadOptions, Trace, readers
from coterie.traces.writers import write_trace
from routed_experts_payloads import encode_vllm

RNG = np.random.default_rng(0)
IDS = np.argsort(RNG.random((24, 2, 8)), axis=2)[:, :, :3]
LINES = {
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2024-05-10 00:00:01.5,10,1\n" * 4,
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    + "45,GPT-4,9,2,11,API log\n" * 4,
    "csv": "arrival_s,prompt_tokens,output_tokens\n" + "1.5,10,2\n" * 4,
    "jsonl": '{"arrival_s": 1.5, "prompt_tokens": 10, "output_tokens": 2}\n' * 4,
    "mooncake": '{"timestamp": 30, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n' * 4,
}
"""Formats of one line a request: a file does not say how many there are."""


def activations(path: Path) -> Path:
    trace = ActivationTrace.from_arrays(TraceMeta("any", 8, 2, 3), IDS, np.array([0, 10, 24]))
    return write_trace(trace, path / "activations").path


def loads(path: Path) -> Path:
    counts = RNG.integers(1, 90, (3, 2, 8)).astype(np.uint64)
    return write_trace(LoadTable(counts, labels=["a", "b", "c"]), path / "loads").path


def requests(path: Path) -> Path:
    table = RequestTrace(np.array([5, 6]), np.array([1, 2]), np.array([0.0, 1.5]))
    return write_trace(table, path / "requests").path


def npz(path: Path) -> Path:
    np.savez(path / "t.npz", expert_ids=IDS, offsets=np.array([0, 10, 24]), num_experts=np.array(8))
    return path / "t.npz"


def answers(path: Path) -> Path:
    usage = {"prompt_tokens": 4, "completion_tokens": len(IDS) - 3}
    body = {"id": "r", "model": "any", "choices": [{"index": 0, "routed_experts": encode_vllm(IDS, 8)}], "usage": usage}
    (path / "answers.jsonl").write_text((json.dumps(body) + "\n") * 3)
    return path / "answers.jsonl"


def trtllm(path: Path) -> Path:
    folder = path / "statistics"
    folder.mkdir()
    (folder / "meta_info.json").write_text(json.dumps({"num_experts": 8, "num_experts_per_token": 3}))
    save_file(
        {f"{step}_3": np.bincount(IDS[:, 0].ravel(), minlength=8) for step in (7, 8)}, folder / "rank0.safetensors"
    )
    return folder


def load_history(path: Path) -> Path:
    windows = [{"logical_expert_load": [[1, 2, 3], [4, 5, 6]]}, {"logical_expert_load": [[0, 0, 2], [1, 1, 0]]}]
    (path / "history.json").write_text(json.dumps({"load_history": windows}))
    return path / "history.json"


def servegen(path: Path) -> Path:
    folder = path / "service"
    folder.mkdir()
    (folder / "chunk-0-trace.csv").write_text("0,0.1,1.0,Gamma,1.0,10.0\n600,0.5,2.0,Weibull,0.6,1.0\n")
    spread = {"input_tokens": "{10: 0.25, 20: 0.75}", "output_tokens": "{1: 1.0}", "reason_ratio": "{}"}
    (folder / "chunk-0-dataset.json").write_text(json.dumps({"0": spread}))
    with tarfile.open(path / "service.tar.gz", "w:gz") as tar:
        tar.add(folder, arcname="service")
    return path / "service.tar.gz"


COUNTED: dict[str, tuple[Callable[[Path], Path], ...]] = {
    "coterie": (activations, loads, requests),
    "npz": (npz,),
    "trtllm": (trtllm,),
    "load-history": (load_history,),
    "servegen": (servegen,),
}


def test_all_built_in_formats_are_here() -> None:
    elsewhere = {"sglang-recorder"}  # needs torch: tests/engines/test_torch_files.py
    assert {*LINES, *COUNTED, "routed-experts"} | elsewhere >= set(readers.names())


@pytest.mark.parametrize(("name", "make"), [(name, make) for name, all_of in COUNTED.items() for make in all_of])
def test_formats_that_say_how_much_they_hold(name: str, make: Callable[[Path], Path], tmp_path: Path) -> None:
    check_reader(readers[name], make(tmp_path))


@pytest.mark.parametrize("name", LINES)
def test_formats_of_lines(name: str, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text(LINES[name])
    check_reader(readers[name], tmp_path / "lines", counted=False)


def test_answers_of_servers(tmp_path: Path) -> None:
    check_reader(readers["routed-experts"], answers(tmp_path), ReadOptions(num_experts=8), counted=False)


# A reader of one whole number a line, wrong in one way at a time.


def read_numbers(path: Path, _: ReadOptions) -> Trace:
    try:
        first, *numbers = (int(line) for line in path.read_text().splitlines())
    except ValueError:
        raise TraceError(path, "line", "is no whole number") from None
    if len(numbers) != first:
        raise TraceError(path, "lines", f"are {len(numbers)}; the first says {first}")
    return RequestTrace(np.array(numbers), np.ones(first, np.int64))


def sniff_numbers(path: Path) -> bool:
    return path.is_file() and path.read_bytes()[:2] == b"6\n"


def no_count(path: Path, _: ReadOptions) -> Trace:
    numbers = [int(line) for line in path.read_text().splitlines()[1:]]
    return RequestTrace(np.array(numbers, np.int64), np.ones(len(numbers), np.int64))


def no_name(path: Path, options: ReadOptions) -> Trace:
    try:
        return read_numbers(path, options)
    except TraceError:
        raise TraceError("file", "line", "is wrong") from None


def another_error(path: Path, options: ReadOptions) -> Trace:
    try:
        return read_numbers(path, options)
    except TraceError:
        raise IndexError("list index out of range") from None


def another_each_time(path: Path, options: ReadOptions) -> Trace:
    read_numbers(path, options)
    return RequestTrace(RNG.integers(0, 1 << 30, 6), np.ones(6, np.int64))


GOOD = Reader(read_numbers, sniff_numbers, "whole numbers, of nobody")


@pytest.mark.parametrize(
    ("reader", "words"),
    [
        (GOOD, None),
        (Reader(read_numbers, lambda _: True, "any"), "sniff must be false of a foreign file"),
        (Reader(read_numbers, lambda _: False, "any"), "must be true: the file is of its own format"),
        (Reader(read_numbers, lambda path: path.read_bytes()[:2] == b"6\n", "any"), "raised FileNotFoundError"),
        (Reader(no_count, sniff_numbers, "any"), "read must raise TraceError; it returned a RequestTrace"),
        (Reader(no_name, sniff_numbers, "any"), "the TraceError must name the file"),
        (Reader(another_error, sniff_numbers, "any"), "read must raise TraceError; it raised IndexError"),
        (Reader(another_each_time, sniff_numbers, "any"), "gave another trace the second time"),
        (Reader(read_numbers, sniff_numbers, ""), "help='' must be one line"),
    ],
)
def test_what_is_wrong_is_said(reader: Reader, words: str | None, tmp_path: Path) -> None:
    (tmp_path / "numbers").write_text("6\n1\n2\n3\n4\n5\n6")
    if words is None:
        check_reader(reader, tmp_path / "numbers")
        return
    with pytest.raises(AssertionError, match=words):
        check_reader(reader, tmp_path / "numbers")
