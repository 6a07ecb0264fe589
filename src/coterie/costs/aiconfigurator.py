"""Calibrations from public tables: kernels of deployed engines, measured by NVIDIA and shipped with AIConfigurator.

The package ``aiconfigurator-core`` (Apache-2.0) holds ``systems/data/SYSTEM/FAMILY/ENGINE/VERSION/TABLE.parquet``.
:func:`read_tables` takes the cells of a model's shape from them; :func:`~coterie.costs.presets.fit_preset` fits them
like cells measured here. A table is read in the newest version that holds the shape.

Which cells are used, and why not the others:

* MoE layers: balanced routing on one device, so that the distinct experts follow from the tokens. Triton kernels first,
  else the fastest. Left out are tables whose time falls as tokens grow (autotuned cutlass kernels), and cells that would
  read weights faster than the memory: grouped top-k (DeepSeek-V3) left half of the experts idle, so that half is counted.
* Attention: a 16-bit cache; decode with at least 255 cached tokens and at most 256 requests. Below that, tiles of idle
  rows decide, for which the law has no term. Latent attention falls back on SGLang's table, since vLLM's is of whole
  modules with their projections; their growth with the context differs by 20% at most.
* Projections: the measured sizes nearest to the model's.
* All-to-all: DeepEP as SGLang runs it, whatever the engine: vLLM's table has 4 times its time in small steps, probably
  launches.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata, util
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from coterie.costs.attention import CACHED_BYTES, attention_shape
from coterie.costs.cells import (
    AttentionCell,
    CollectiveCell,
    GemmCell,
    Measurement,
    MoeCell,
    MoeTable,
    ShapeMeasurement,
)
from coterie.costs.exchange import BYTES_PER_VALUE, uniform_locality
from coterie.costs.shapes import dense_shapes
from coterie.errors import ConfigError, TraceError, UnavailableError, UnknownNameError
from coterie.models import models
from coterie.types import ModelSpec, Topology, WeightDtype

PACKAGE = "aiconfigurator-core"
DTYPES: dict[str, WeightDtype] = {"bfloat16": "bf16", "fp8_block": "fp8", "fp8": "fp8", "w4a16_mxfp4": "mxfp4"}
"""Weight dtypes of the tables; of two that stand for the same, the first one found is used."""
LARGEST_FALL = 0.2
"""Relative fall of the time from one number of tokens to the next at which a table is left out."""
LEAST_CONTEXT, MOST_REQUESTS = 255, 256
WARM_BYTES = range(4_000_000, 50_000_000)
"""Sizes of a layer's KV cache that stayed in the cache of a Hopper GPU while a kernel was repeated."""
DEEPEP_SMS = 20
"""Multiprocessors that DeepEP's kernels for large messages use by default."""
WINDOWS = {"gpt-oss-20b": 128, "gpt-oss-120b": 128}
"""Models in which every second layer attends to the last tokens only: their cells are means of both kinds of layer."""

Row = dict[str, Any]


@dataclass(frozen=True)
class _Tables:
    """The tables of one system, with the sources of the rows read so far."""

    folder: Path
    engine: str
    version: str | None
    sources: list[str] = field(default_factory=list)

    def rows(
        self, family: str, table: str, values: Sequence[str], engines: Sequence[str] = (), **wanted: Any
    ) -> list[Row]:
        """Return the columns `values` of the rows with the `wanted` values; empty if no version of the table has any.

        `engines` are tried in turn; by default the engine asked for.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        for engine in engines or (self.engine,):
            paths = (self.folder / family / engine).glob(
                f"{engine == self.engine and self.version or '*'}/{table}.parquet"
            )
            for path in sorted(paths, key=lambda path: [int(part) for part in re.findall(r"\d+", path.parent.name)])[
                ::-1
            ]:
                try:
                    names = pq.read_schema(path).names
                    missing = [name for name in (*values, *wanted) if name not in names and wanted.get(name) != 0]
                    if missing:
                        raise TraceError(path, "columns", f"lack {', '.join(missing)}")
                    equal = [(name, "==", value) for name, value in wanted.items() if name in names]
                    rows: list[Row] = pq.read_table(path, columns=list(values), filters=equal or None).to_pylist()
                except (pa.ArrowException, OSError) as error:
                    raise TraceError(path, "table", f"is no parquet file that can be read: {error}") from None
                if rows:
                    self.sources.append(f"{engine} {path.parent.name} {table}")
                    return rows
        return []


def find_tables(folder: Path | None = None) -> Path:
    """Return the folder ``systems`` of the tables, in a folder given or in the installed package."""
    package = util.find_spec("aiconfigurator_core")
    if folder is None and (package is None or not package.submodule_search_locations):
        raise UnavailableError(f"the tables are in {PACKAGE}, which is not installed: pip install 'coterie[tables]'")
    root = folder or Path((package and package.submodule_search_locations or [""])[0])
    for systems in (root / "systems", root):
        if (systems / "data").is_dir():
            return systems
    raise ConfigError(f"{root} holds no tables; expected systems/data/SYSTEM as in the package {PACKAGE}")


def read_tables(
    specs: Sequence[ModelSpec],
    system: str,
    engine: str,
    version: str | None = None,
    folder: Path | None = None,
    dtypes: Sequence[str] = (),
) -> Measurement:
    """Return the cells of these shapes on a system ("h200_sxm") in an engine: vllm, sglang or trtllm.

    `version` is that of the engine, by default the newest one that holds a shape; `dtypes` keeps these weight dtypes.
    """
    systems = find_tables(folder)
    known = sorted(path.parent.name for path in systems.glob("data/*/moe"))
    if system not in known:
        raise UnknownNameError("system", system, known)
    engines = sorted(path.name for path in (systems / "data" / system / "moe").iterdir() if path.is_dir())
    if engine not in engines:
        raise UnknownNameError(f"engine on {system}", engine, engines)
    described = systems / f"{system}.yaml"
    try:
        facts = yaml.safe_load(described.read_text(encoding="utf-8"))
        bandwidth, gpus = 1e-6 * float(facts["gpu"]["mem_bw"]), int(facts["node"]["num_gpus_per_node"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise TraceError(described, "gpu.mem_bw, node.num_gpus_per_node", f"cannot be read: {error!r}") from None
    tables = _Tables(systems / "data" / system, engine, version)
    notes: list[str] = []
    shapes = tuple(_shape(tables, spec, bandwidth, dtypes, notes) for spec in specs)
    collectives = _collectives(tables, gpus)
    versions = sorted({source.split()[1] for source in tables.sources if source.startswith(engine)})
    return Measurement(
        hardware={"device": system, "memory_bytes_per_us": bandwidth},
        software={
            engine: " ".join(versions),
            PACKAGE: metadata.version(PACKAGE) if folder is None else "from a folder",
        },
        date="",
        shapes=shapes,
        collectives=collectives,
        note="; ".join(["tables: " + ", ".join(dict.fromkeys(tables.sources)), *notes]),
    )


def _shape(
    tables: _Tables, spec: ModelSpec, bandwidth: float, dtypes: Sequence[str], notes: list[str]
) -> ShapeMeasurement:
    moe = _moe(tables, spec, bandwidth, dtypes, notes)
    attention = _attention(tables, spec, decode=True) + _attention(tables, spec, decode=False)
    gemm = _gemm(tables, spec)
    lacking = [name for name, cells in (("MoE", moe), ("attention", attention), ("GEMM", gemm)) if not cells]
    if lacking:
        version = f" {tables.version}" if tables.version else ""
        reasons = "; ".join(note for note in notes if note.startswith(spec.name))
        raise ConfigError(
            f"{tables.folder.name} has no {' and no '.join(lacking)} cells of {spec.name}'s shape in {tables.engine}{version}"
            + (f" that can be used: {reasons}" if reasons else "")
        )
    plain = models().get(spec.name) == spec
    fields = None if plain else {name: getattr(spec, name) for name in spec.__dataclass_fields__}
    return ShapeMeasurement(spec.name, moe, (), gemm, attention, fields)


def _moe(
    tables: _Tables, spec: ModelSpec, bandwidth: float, dtypes: Sequence[str], notes: list[str]
) -> tuple[MoeTable, ...]:
    rows = tables.rows(
        "moe",
        "moe_perf",
        ("kernel_source", "moe_dtype", "num_tokens", "latency"),
        hidden_size=spec.hidden_size,
        inter_size=spec.expert_intermediate_size,
        num_experts=spec.num_experts,
        topk=spec.top_k,
        distribution="balanced",
        moe_tp_size=1,
        moe_ep_size=1,
    )
    times: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for row in rows:
        if "nongated" not in row["kernel_source"]:  # two matrices an expert, not three
            times[row["moe_dtype"], row["kernel_source"]][row["num_tokens"]] = round(1e3 * row["latency"], 3)
    made: dict[WeightDtype, MoeTable] = {}
    for name, dtype in DTYPES.items():
        kernels = [key for key in times if key[0] == name and (not dtypes or dtype in dtypes)]
        for key in sorted(kernels, key=lambda key: ("triton" not in key[1], sum(times[key].values()))):
            if dtype not in made:
                try:
                    made[dtype] = MoeTable(dtype, key[1], _moe_cells(times[key], spec, dtype, bandwidth))
                except ConfigError as fault:
                    notes.append(f"{spec.name}, {key[1]} left out: {fault}")
    return tuple(made.values())


def _moe_cells(times: dict[int, float], spec: ModelSpec, dtype: WeightDtype, bandwidth: float) -> tuple[MoeCell, ...]:
    """Return the cells of one kernel; raise ConfigError with the reason why they cannot be times of such layers."""
    for few, many in pairwise(sorted(times)):
        if times[many] < (1 - LARGEST_FALL) * times[few]:
            raise ConfigError(f"{few} tokens take {times[few]:.0f} us, {many} tokens {times[many]:.0f} us")
    # With grouped top-k, half of a token's experts are in groups that are left out, and all tokens take the same other
    # experts instead. Which ones a few tokens take depends on the kernel: their cells are left out.
    for used, whole in ((spec.num_experts, True), (spec.num_experts // 2, False)):
        cells = tuple(
            MoeCell(tokens, min(used, tokens * spec.top_k if whole else (tokens + 1) * spec.top_k // 2), us)
            for tokens, us in sorted(times.items())
            if whole or tokens == 1 or tokens * spec.top_k >= used
        )
        if all(cell.active * spec.expert_bytes(dtype) <= bandwidth * cell.us for cell in cells):
            return cells
    raise ConfigError(f"weights would be read at more than the memory's {1e-6 * bandwidth:.1f} TB/s")


def _attention(tables: _Tables, spec: ModelSpec, decode: bool) -> tuple[AttentionCell, ...]:
    phase, wanted, engines = "generation" if decode else "context", {"num_heads": spec.num_heads}, (tables.engine,)
    family = "mla" if spec.kv_lora_rank else "attention"
    if spec.kv_lora_rank:
        engines = tuple(dict.fromkeys((tables.engine, "sglang", "trtllm")))
        kinds: tuple[dict[str, int], ...] = ({},)
    else:
        wanted |= {"num_key_value_heads": spec.num_kv_heads, "head_dim": spec.head_dim}
        kinds = tuple({"window_size": window} for window in {0, WINDOWS.get(spec.name, 0)})
    values = ("kernel_source", "batch_size", "isl", "step", "latency")
    times: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for kind in kinds:
        rows = tables.rows(
            family, f"{phase}_{family}_perf", values, engines, kv_cache_dtype="bfloat16", **wanted, **kind
        )
        sources = [row["kernel_source"] for row in rows]
        for row in rows:
            if row["kernel_source"] == max(sorted(set(sources)), key=sources.count):
                times[row["batch_size"], row["isl"], row["step"]].append(1e3 * row["latency"])
    return tuple(
        AttentionCell(batch, query, context, round(sum(us) / len(us), 3))
        for (batch, query, context), us in sorted(times.items())
        if len(us) == len(kinds)
        and (_cold(batch, context, attention_shape(spec)[CACHED_BYTES]) if decode else query > 1)
    )


def _cold(batch: int, context: int, nbytes: float) -> bool:
    """Return whether a decode cell is as in a model, in which other layers pass through the cache in between."""
    return context >= LEAST_CONTEXT and batch <= MOST_REQUESTS and int(batch * context * nbytes) not in WARM_BYTES


def _gemm(tables: _Tables, spec: ModelSpec) -> tuple[GemmCell, ...]:
    rows: list[Row] = []
    for dtype in ("fp8_block",) * (spec.weight_dtype == "fp8") + ("bfloat16",):
        rows = rows or tables.rows("gemm", "gemm_perf", ("m", "n", "k", "latency"), gemm_dtype=dtype)
    sizes = sorted({(row["n"], row["k"]) for row in rows})

    def nearest(n: int, k: int) -> tuple[int, int]:
        return min(sizes, key=lambda size: abs(math.log(size[0] / n)) + abs(math.log(size[1] / k)))

    near = {nearest(n, k) for pairs, _ in dense_shapes(spec) for n, k in pairs} if rows else set()
    return tuple(
        GemmCell(row["m"], row["n"], row["k"], round(1e3 * row["latency"], 3))
        for row in rows
        if (row["n"], row["k"]) in near
    )


def _collectives(tables: _Tables, gpus: int) -> tuple[CollectiveCell, ...]:
    """Return DeepEP's dispatch and combine, as the mean of both: its kernels for few rows, and for many in a node."""
    shape = ("hidden_size", "num_token", "num_topk", "num_experts")
    cells: list[CollectiveCell] = []

    def add(kind: Any, nodes: int, names: Sequence[str], rows: list[Row], copies: Callable[[Row], float]) -> None:
        for row in rows:
            if row["num_experts"] >= 128 and row["num_topk"] >= 4:  # with few experts, some ranks hold one or none
                nbytes = row["num_token"] * copies(row) * row["hidden_size"] * BYTES_PER_VALUE
                us = sum(row[name] for name in names) / 2
                cells.append(CollectiveCell(nodes * gpus, round(nbytes), round(us, 3), kind))

    quick = ("dispatch_avg_t_us", "combine_avg_t_us")
    for nodes in (1, 2, 4, 8):
        rows = tables.rows("comm", "wideep_deepep_ll_perf", (*shape, *quick), ("sglang",), node_num=nodes)
        remote = (gpus - 1) / gpus if nodes == 1 else (nodes - 1) / nodes
        add("node" if nodes == 1 else "nodes", nodes, quick, rows, lambda row, share=remote: share * row["num_topk"])  # type: ignore[misc]
    large = ("dispatch_transmit_us", "dispatch_notify_us", "combine_transmit_us", "combine_notify_us")
    rows = tables.rows(
        "comm", "wideep_deepep_normal_perf", (*shape, *large), ("sglang",), node_num=1, dispatch_sms=DEEPEP_SMS
    )
    few = [row for row in rows if 16 <= row["num_token"] <= 16384]
    group = Topology(gpus, gpus)
    add("bulk", 1, large, few, lambda row: uniform_locality(row["num_experts"], row["num_topk"], group).remote_ranks)
    return tuple(cells)
