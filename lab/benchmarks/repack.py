"""Repack recordings from clones of the public repositories that hold them, as the folders of COTERIE_DATA.

    git clone https://github.com/OWNER/REPOSITORY CLONE && git -C CLONE checkout COMMIT
    python lab/benchmarks/repack.py gpt-oss-20b CLONE $COTERIE_DATA/activations/gpt-oss-20b

The names below are those of the sets; docs/data.md has repository, commit and licence of each. Nothing is rounded.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SETS: dict[str, Callable[[Path, Path], None]] = {}
"""Name of a set → function that reads a clone and writes the set's folder."""


def repacks(name: str) -> Callable[[Callable[[Path, Path], None]], Callable[[Path, Path], None]]:
    def add(function: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
        SETS[name] = function
        return function

    return add


@repacks("gpt-oss-20b")
def gpt_oss(clone: Path, out: Path) -> None:
    """Repack two of three examples of each benchmark but sorry_bench_base, whose prompts ask for harm."""
    files = (file for file in clone.glob("data/*/*/*_examples.json") if file.parts[-3] != "sorry_bench_base")
    order = sorted(files, key=lambda file: file.relative_to(clone).parts)
    kept = [file for number, file in enumerate(order) if number % 3 != 2]
    experts: list[NDArray[np.uint8]] = []
    gates: list[NDArray[np.float16]] = []
    rows: list[dict[str, Any]] = []
    for number, file in enumerate(kept):
        example = json.loads(file.read_bytes())
        tokens = [
            [layer for _, layer in _by_number(token)] for step in example["router_data"] for token in step.values()
        ]
        experts.append(np.array([[layer["selected_experts"] for layer in token] for token in tokens], np.uint8))
        gates.append(np.array([[layer["selected_probs"] for layer in token] for token in tokens], np.float16))
        hidden = example["dataset"].startswith("gpqa_")  # its authors ask that its questions are not shown in the open
        first = int(next(iter(example["router_data"][0])).removeprefix("token_"))
        rows.append(
            {
                "i": number,
                "dataset": example["dataset"],
                "category": example["category"],
                "finished": example["finished_successfully"],
                "repetition": example["has_repetition"],
                "row_index": example["row_index"],
                "first_token_pos": first,
                "n_prompt_tokens": first,
                "n_full_tokens": len(example["full_text"]),
                "n_routed_tokens": len(tokens),
                "offset": sum(map(len, experts[:-1])),
                "prompt": None if hidden else example["original_prompt"],
                "generated_tokens": None if hidden else example["generated_only"],
            }
        )
    arrays: dict[str, Any] = {"expert_ids": np.concatenate(experts), "gate_probs_f16": np.concatenate(gates)}
    np.savez_compressed(out / "routing.npz", allow_pickle=False, **arrays, offsets=_offsets(experts))
    (out / "requests.jsonl.gz").write_bytes(gzip.compress(_lines(rows), mtime=0))


@repacks("deepseek-v2-lite")
def esft(clone: Path, out: Path) -> None:
    """Repack files of one line a sample for each layer: all experts, then all gate weights."""
    experts: list[NDArray[np.uint8]] = []
    gates: list[NDArray[np.uint16]] = []
    rows: list[dict[str, Any]] = []
    for domain in ("intent", "law", "summary", "translation"):
        folder = clone / "results" / "expert_scores" / domain
        files = (folder / f"expert_weights_{layer}.txt" for layer in range(1, 27))
        layers = [[line.split("\t\t") for line in file.read_text().splitlines()] for file in files]
        for number, sample in enumerate(zip(*layers, strict=True)):
            ids, weights = (
                [np.array(layer[part].split("\t"), kind) for layer in sample] for part, kind in ((0, int), (1, float))
            )
            experts.append(np.stack(ids, axis=1).reshape(-1, 6, 26).swapaxes(1, 2).astype(np.uint8))
            gates.append(np.rint(np.stack(weights, axis=1).reshape(-1, 6, 26).swapaxes(1, 2) * 1e4).astype(np.uint16))
            tokens = len(experts[-1])
            offset = sum(map(len, experts[:-1]))
            rows.append({"i": len(rows), "domain": domain, "sample": number, "n_tokens": tokens, "offset": offset})
    arrays: dict[str, Any] = {"expert_ids": np.concatenate(experts), "gate_weight_x1e4": np.concatenate(gates)}
    np.savez_compressed(out / "routing_tokens.npz", allow_pickle=False, **arrays, offsets=_offsets(experts))
    (out / "requests.jsonl").write_bytes(_lines(rows))


@repacks("glm-5.2")
def glm(clone: Path, out: Path) -> None:
    """Repack counts of llama.cpp's dump, one JSON file a window."""
    merged = sorted(clone.glob("logs/merged_*.json"))
    single = [clone / "logs" / f"sal_{name}.json" for name in ("code", "code_eval", "general")]
    tables: list[NDArray[np.uint32]] = []
    rows: list[dict[str, Any]] = []
    for file in (*merged, *single, *sorted(clone.glob("saliency/sal_*_calib_*.json"))):
        dump = json.loads(file.read_bytes())
        layers = _by_number(dump["layers"])
        tables.append(np.array([layer["cnt"] for _, layer in layers], np.uint32))
        shard = re.fullmatch(r"sal_(.+)_calib_(\d+)", file.stem)
        rows.append(
            {
                "i": len(rows),
                "file": file.relative_to(clone).as_posix(),
                "domain": shard[1] if shard else file.stem,
                "chunk": int(shard[2]) if shard else None,
                "tokens": dump["tokens"],
                "cnt_sum_layer0": float(tables[-1][0].sum()),
            }
        )
    numbers = np.array([number for number, _ in layers])
    np.savez_compressed(out / "expert_counts.npz", allow_pickle=False, counts=np.stack(tables), layer_ids=numbers)
    (out / "index.jsonl").write_bytes(_lines(rows))


@repacks("olmoe-mixtral")
def olmoe(clone: Path, out: Path) -> None:
    """Repack pickled counters: tokens of each expert, of pairs of experts in two layers, and by token."""
    counts: dict[str, Any] = {}
    by_token: dict[str, Any] = {}
    for file in sorted(clone.glob("scripts/routing_output/*/*/*.pkl")):
        folder, kind, domain = file.relative_to(clone / "scripts" / "routing_output").with_suffix("").parts
        model, experts = ("mixtral-8x7b", 8) if folder == "mistral" else (folder, 64)
        layers = _Counters(io.BytesIO(file.read_bytes())).load()
        if kind == "eid2token":
            cells = _cells(layers)
            by_token[f"{model}|{domain}"] = np.array(list(cells), np.int32)
            continue
        table = np.zeros((len(layers), *[experts] * (1 + ("crosslayer" in kind))), np.int64)
        for layer, counter in enumerate(layers):
            for place, count in counter.items():
                table[layer][place] = count
        counts[f"{model}|{kind}|{domain}"] = table
    np.savez_compressed(out / "expert_counts.npz", allow_pickle=False, **counts)
    np.savez_compressed(out / "eid2token_coo.npz", allow_pickle=False, **by_token)


@repacks("deepseek-v3")
def placements(clone: Path, out: Path) -> None:
    """Repack placements [rank, layer, expert] of omni-infer, each a .npy file."""
    folder = clone / "omni" / "accelerators" / "placement"
    names = (
        "patterns/placement_pattern_20250626_221356_58_rearrange_layers_58_layers_16_ranks_prefill_step0to100000",
        "patterns/base_patterns/DSV3_baseline_16_devices_58_MoE_Layers",
        "tests/patterns/placement_pattern_3d_v3_naivebalance3_16devices_HE",
        "tests/patterns/DSV3_0427_GSM8K_decode_RedFullLays_+10_58_MoELayers_32_dies_epmaxdeploy_12",
    )
    files = (folder / f"{name}.npy" for name in names)
    arrays: dict[str, Any] = {file.stem: np.load(file, allow_pickle=False).astype(np.uint8) for file in files}
    np.savez_compressed(out / "placements_rank_layer_expert.npz", allow_pickle=False, **arrays)


class _Counters(pickle.Unpickler):
    """Reads counters of NumPy integers and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in {("collections", "Counter"), ("collections", "defaultdict"), ("numpy", "dtype")}:
            if name != "scalar":
                raise pickle.UnpicklingError(f"{module}.{name} is not expected in a counter")
            module = "numpy._core.multiarray"
        return super().find_class(module, name)


def _cells(layers: list[dict[int, dict[int, int]]]) -> Iterator[tuple[int, int, int, int]]:
    """Yield layer, expert, token and count."""
    for number, layer in enumerate(layers):
        for expert, tokens in layer.items():
            for token, count in tokens.items():
                yield number, int(expert), int(token), int(count)


def _by_number(layers: dict[str, Any]) -> list[tuple[int, Any]]:
    """Return layers in order, by the number at the end of their names."""
    return sorted((int(name.rpartition("_")[2]), layer) for name, layer in layers.items())


def _offsets(parts: list[NDArray[Any]]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)


def _lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def main() -> None:
    if len(sys.argv) != 4 or sys.argv[1] not in SETS:
        raise SystemExit(f"usage: repack.py SET CLONE OUT; SET is one of {', '.join(SETS)}")
    out = Path(sys.argv[3])
    out.mkdir(parents=True, exist_ok=True)
    SETS[sys.argv[1]](Path(sys.argv[2]), out)


if __name__ == "__main__":
    main()
