"""Mutated input files, each given to the reader of its kind: ``python -m fuzz.files COUNT SEED FOLDER``.

A reader may refuse a file with one of Coterie's errors, or read it. Prints one JSON object: how many were read and
refused, every other exception with the file that raised it, and the peak memory of the process.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import resource
import shutil
import sys
import tarfile
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import save_file

from coterie.answers.plan.learning import fit_rank_tables
from coterie.batching.scheduler import CapsConfig
from coterie.costs.presets import load_preset, step_model
from coterie.dispatch.tables import RankTables
from coterie.errors import CoterieError
from coterie.models import get_model, model_from_config
from coterie.placement.maps.formats import PlacementMap, map_formats, read_map, write_map
from coterie.predictors import TokenTable
from coterie.prompts import read_prompts
from coterie.routing import RouterFit
from coterie.traces import ActivationTrace, ActivationWriter, LoadTable, RequestTrace, TraceMeta
from coterie.traces.readers import ReadOptions, read_trace
from coterie.traces.writers import write_trace
from coterie.types import Placement

NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
EXTREMES = b"0 -1 1e999 NaN Infinity -0.0 1e-320 2147483648 4294967296 9223372036854775808 null [] {} true".split()
EXTREMES += [b"1180591620717411303424", b"9" * 4400, b'"x"']


class Sample(NamedTuple):
    """A good file or folder, and what reads it."""

    path: Path
    read: Callable[[Path], object]


def trace_of(format: str | None = None, **options: Any) -> Callable[[Path], object]:
    def read(path: Path) -> object:
        trace = read_trace(path, format, ReadOptions(**options))
        if isinstance(trace, ActivationTrace):
            trace.validate()
            len(trace.requests)
        return trace

    return read


def preset(path: Path) -> object:
    return step_model(get_model("gpt-oss-20b"), load_preset.__wrapped__(str(path)))


def samples(folder: Path) -> list[Sample]:
    """A sample of every kind of input."""
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((60, 2, 8)), axis=2)[:, :, :3]
    offsets = np.array([0, 10, 25, 40, 60])
    made = [Sample(folder / name, trace_of()) for name in text_traces(folder)]
    trace = ActivationTrace.from_arrays(
        TraceMeta("any", 8, 2, 3), ids, offsets, phase=(np.arange(60) % 2).astype(np.uint8)
    )
    for name, table in (
        ("activations", trace),
        ("loads", LoadTable(rng.integers(1, 90, (3, 2, 8)).astype(np.uint64), labels=["a", "b", "c"])),
        ("requests", RequestTrace(np.array([5, 6]), np.array([1, 2]), np.array([0.0, 1.5]), ids=["a", "b"])),
    ):
        made.append(Sample(write_trace(table, folder / name).path, trace_of()))
    out = ActivationWriter(folder / "unfinished", trace.meta, flush_tokens=1)
    out.append_many(*trace.arrays(), trace.requests)
    out.suspend()
    made.append(Sample(folder / "unfinished", trace_of()))
    np.savez(folder / "own.npz", expert_ids=ids, offsets=offsets, num_experts=np.array(8))
    np.savez(folder / "counts.npz", counts=rng.integers(1, 9, (2, 2, 8)), layer_ids=np.arange(2))
    made += [Sample(folder / name, trace_of()) for name in ("own.npz", "counts.npz")]
    gpt = folder / "gpt-oss-20b"
    gpt.mkdir()
    gates = np.zeros(ids.shape, np.float16)
    np.savez_compressed(gpt / "routing.npz", expert_ids=ids.astype(np.uint8), gate_probs_f16=gates, offsets=offsets)
    rows = [
        {"n_routed_tokens": int(n), "offset": int(o), "n_prompt_tokens": 5, "category": "a", "dataset": "d"}
        for n, o in zip(np.diff(offsets), offsets, strict=False)
    ]
    (gpt / "requests.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in rows).encode()))
    made.append(Sample(gpt, trace_of()))
    statistics = folder / "statistics"
    statistics.mkdir()
    (statistics / "meta_info.json").write_text(json.dumps({"num_experts": 8, "num_experts_per_token": 3}))
    counts = np.bincount(ids[:, 0].ravel(), minlength=8)
    save_file({f"{step}_3": counts for step in (7, 8)}, statistics / "rank0.safetensors")
    made.append(Sample(statistics, trace_of("trtllm")))
    made += placements(folder)
    made += settings(folder)
    fitted = RouterFit(2, batch=4).fit(trace, np.random.default_rng(0))
    fitted.save(folder / "router.safetensors")
    made.append(Sample(folder / "router.safetensors", RouterFit.load))
    with_ids = ActivationTrace.from_arrays(trace.meta, ids, offsets, token_ids=rng.integers(0, 50, 60).astype(np.int32))
    TokenTable().fit(with_ids).save(folder / "table.safetensors")
    made.append(Sample(folder / "table.safetensors", TokenTable.load))
    fit_rank_tables(with_ids, Placement.linear(2, 8, 4)).save(folder / "ranks.safetensors")
    made.append(Sample(folder / "ranks.safetensors", RankTables.load))
    return made


def text_traces(folder: Path) -> list[str]:
    lines = {
        "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2024-05-10 00:00:01.5,10,1\n" * 4,
        "burstgpt.csv": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        + "45,GPT-4,9,2,11,API log\n" * 4,
        "plain.csv": "arrival_s,prompt_tokens,output_tokens\n" + "1.5,10,2\n" * 4,
        "plain.jsonl": '{"arrival_s": 1.5, "prompt_tokens": 10, "output_tokens": 2}\n' * 4,
        "mooncake.jsonl": '{"timestamp": 30, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n' * 4,
        "history.json": '{"load_history": [{"logical_expert_load": [[1, 2, 3], [4, 5, 6]]}]}',
    }
    for name, text in lines.items():
        (folder / name).write_text(text)
    (folder / "packed.csv.gz").write_bytes(gzip.compress(lines["plain.csv"].encode()))
    service = folder / "service"
    service.mkdir()
    (service / "chunk-0-trace.csv").write_text("0,0.1,1.0,Gamma,1.0,10.0\n600,0.5,2.0,Weibull,0.6,1.0\n")
    spread = {"input_tokens": "{10: 0.25, 20: 0.75}", "output_tokens": "{1: 1.0}", "reason_ratio": "{}"}
    (service / "chunk-0-dataset.json").write_text(json.dumps({"0": spread}))
    with tarfile.open(folder / "service.tar.gz", "w:gz") as tar:
        tar.add(service, arcname="service")
    return [*lines, "packed.csv.gz", "service", "service.tar.gz"]


def placements(folder: Path) -> list[Sample]:
    rows = np.array([[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 3, 2]], np.int32)
    made = []
    for format in map_formats:
        if map_formats[format].write is not None and format != "sglang-das":  # which is only written
            path = folder / f"{format}.{'yaml' if format == 'tensorrt-llm' else 'json'}"
            write_map(path, PlacementMap(Placement(rows, 2, 4)), format, force=True)
            made.append(Sample(path, lambda path: read_map(path, num_ranks=2)))
    held = np.zeros((2, 2, 4), np.uint8)
    held[0, :, :3] = held[1, :, 1:] = 1
    np.savez(folder / "ranks.npz", placed=held)
    return [*made, Sample(folder / "ranks.npz", read_map)]


def settings(folder: Path) -> list[Sample]:
    (folder / "caps.json").write_bytes(msgspec.json.encode(CapsConfig()))
    (folder / "config.json").write_text(
        json.dumps(
            {
                "num_hidden_layers": 4,
                "hidden_size": 64,
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": 100,
                "torch_dtype": "bfloat16",
            }
        )
    )
    (folder / "p.txt").write_text("one\ntwo\n")
    (folder / "p.jsonl").write_text('{"prompt": "one", "id": 1, "domain": "a"}\n{"prompt": "two"}\n')
    (folder / "p.csv").write_text('prompt,id,domain\none,1,"a"\ntwo,2,b\n')
    shipped = load_preset("h200")
    model = "gpt-oss-20b"
    kept = [shape for shape in shipped.measurement.shapes if shape.model == model]
    small = msgspec.structs.replace(
        shipped,
        fits={model: shipped.fits[model]},
        measurement=msgspec.structs.replace(shipped.measurement, shapes=tuple(kept)),
    )
    (folder / "preset.json").write_bytes(msgspec.json.encode(small))
    readers: dict[str, Callable[[Path], object]] = {
        "caps.json": CapsConfig.read,
        "config.json": model_from_config,
        "preset.json": preset,
    }
    readers |= dict.fromkeys(("p.txt", "p.jsonl", "p.csv"), read_prompts)
    return [Sample(folder / name, read) for name, read in readers.items()]


# ------------------------------------------------------------------------------------------------------- mutations


def mutate(data: bytes, rng: Random) -> bytes:
    """Cut, flip, splice, repeat or delete bytes, or put an extreme in place of a number."""
    kind, size = rng.randrange(7), len(data)
    start, length = rng.randrange(size + 1), rng.choice((1, 2, 8, 64, size // 3 + 1))
    if kind == 0:
        return data[:start]
    if kind == 1:
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 4, 32)) if size else 0):
            changed[rng.randrange(size)] = rng.choice((0, 255, rng.randrange(256)))
        return bytes(changed)
    if kind == 2:
        source = rng.randrange(size + 1)
        return data[:start] + data[source : source + length] + data[start + length :]
    if kind == 3:
        return data[:start] + data[start + length :]
    if kind == 4:
        return data[:start] + data[start : start + length] * 3 + data[start + length :]
    numbers = list(NUMBER.finditer(data))
    if not numbers:
        return data[:start] + rng.randbytes(length) + data[start:]
    found = rng.choice(numbers)
    return data[: found.start()] + rng.choice(EXTREMES) + data[found.end() :]


def mutate_inside(name: str, data: bytes, rng: Random) -> bytes:
    """As :func:`mutate`, below the checksums and lengths of archives, safetensors and parquet."""
    if name.endswith(".npz"):
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(out, "w") as changed:
            chosen = rng.choice(archive.namelist())
            for member in archive.namelist():
                content = archive.read(member)
                changed.writestr(member, mutate(content, rng) if member == chosen else content)
        return out.getvalue()
    if name.endswith(".gz"):
        return gzip.compress(mutate(gzip.decompress(data), rng))
    if name.endswith(".safetensors"):
        size = int.from_bytes(data[:8], "little")
        header = mutate(data[8 : 8 + size], rng)
        return len(header).to_bytes(8, "little") + header + data[8 + size :]
    if name.endswith(".parquet"):
        return other_table(data, rng)
    return mutate(data, rng)


def other_table(data: bytes, rng: Random) -> bytes:
    """A parquet table whose columns have other names, types or values."""
    table = pq.ParquetFile(io.BytesIO(data), pre_buffer=False).read(use_threads=False)
    name, rows = rng.choice(table.column_names), table.num_rows
    wrong = rng.choice(
        (
            pa.array(["x"] * rows),
            pa.array([None] * rows),
            pa.array([2**63] * rows, pa.uint64()),
            pa.array([-1] * rows),
            pa.array([float("nan")] * rows),
            pa.array([[1]] * rows),
            pa.array([b"\xff"] * rows),
            pa.array([True] * rows),
        )
    )
    at = table.column_names.index(name)
    table = table.set_column(at, rng.choice((name, name, "", "a\x1b", table.column_names[0])), wrong)
    out = io.BytesIO()
    pq.write_table(table, out)
    return out.getvalue()


def run(count: int, seed: int, folder: Path) -> dict[str, Any]:
    rng = Random(seed)
    (folder / "good").mkdir(parents=True)
    made = samples(folder / "good")
    for sample in made:
        sample.read(sample.path)
    read = refused = 0
    failures: list[str] = []
    target = folder / "mutated"
    for number in range(count):
        sample = made[number % len(made)]
        target.mkdir()
        copy = target / sample.path.name
        if sample.path.is_dir():
            shutil.copytree(sample.path, copy)
        else:
            shutil.copy(sample.path, copy)
        file = rng.choice(sorted(one for one in copy.rglob("*") if one.is_file())) if copy.is_dir() else copy
        data = file.read_bytes()
        changed = (mutate_inside if rng.random() < 0.5 else lambda _, *rest: mutate(*rest))(file.name, data, rng)
        file.write_bytes(changed)
        try:
            sample.read(copy)
            read += 1
        except CoterieError as error:
            refused += 1
            if "\n" in str(error):
                failures.append(f"{number}: {file.name}: two lines: {error!r}")
        except Exception:
            kept = folder / "kept" / str(number)
            kept.mkdir(parents=True)
            shutil.move(str(copy), kept)
            failures.append(f"{number}: {kept}/{copy.name}: {traceback.format_exc()}")
        if file.exists() and file.read_bytes() != changed:
            failures.append(f"{number}: {file.name} was changed by its reader")
        shutil.rmtree(target)
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"kinds": len(made), "read": read, "refused": refused, "failures": failures, "peak_bytes": 1024 * peak_kb}


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_DATA, (6 << 30, 6 << 30))
    print(json.dumps(run(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))))  # noqa: T201
