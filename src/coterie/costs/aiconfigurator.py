"""Calibrations from public tables: kernels of deployed engines, measured by NVIDIA and shipped with AIConfigurator.

The package ``aiconfigurator-core`` (Apache-2.0) holds ``systems/data/SYSTEM/FAMILY/ENGINE/VERSION/TABLE.parquet``.
:func:`read_tables` takes the cells of a model's shape from them; :func:`~coterie.costs.presets.fit_preset` fits them
like cells measured here. A table is read in the newest version that holds the shape.

Which cells are used, and why not the others:

* MoE layers: balanced routing on one device, so that the distinct experts follow from the tokens. Triton kernels
  first, else the fastest. Left out are tables whose time falls as tokens grow (autotuned cutlass kernels), and SGLang's
  of mxfp4, which read weights unpacked to 16 bits. Cells that would read weights faster than the memory can are of
  grouped top-k (DeepSeek-V3), which left half of the experts idle: only the other half is counted.
* Attention: a 16-bit cache. Decode with at least 255 cached tokens and at most 256 requests, of plain heads without
  caches of 4 to 50 MB: repeated kernels found those in the GPU's own cache. Latent attention falls back on SGLang's
  table, since vLLM's is of whole modules with their projections; both grow with the context alike, within 20%.
* Projections: the measured sizes nearest to the model's. In fp8 by SGLang's table: vLLM's is of launches, with no
  product below 56 us.
* All-to-all: DeepEP as SGLang runs it, whatever the engine. vLLM's table says 4 times as much in small steps, probably
  launches.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import metadata, util
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from coterie.costs.attention import CACHED_BYTES, attention_shape
from coterie.costs.cells import (
    AttentionCell,
    CollectiveCell,
    ExchangeKind,
    GemmCell,
    Measurement,
    MoeCell,
    MoeTable,
    ShapeMeasurement,
)
from coterie.costs.exchange import BYTES_PER_VALUE, uniform_locality
from coterie.costs.shapes import dense_shapes
from coterie.errors import ConfigError, TraceError, UnavailableError, check, check_file, check_known
from coterie.models import models
from coterie.types import ModelSpec, Topology, WeightDtype

PACKAGE = "aiconfigurator-core"
DTYPES: dict[str, WeightDtype] = {"bfloat16": "bf16", "fp8_block": "fp8", "fp8": "fp8", "w4a16_mxfp4": "mxfp4"}
"""Weight dtypes of the tables; of two that stand for the same, the first one found is used."""
UNPACKED = ("w4a16_mxfp4", "sglang_fused_moe_triton")
"""A kernel left out: it reads weights that were unpacked to 16 bits, not those of the dtype."""
LARGEST_FALL = 0.2
"""Relative fall of the time from one number of tokens to the next at which a table is left out."""
LEAST_CONTEXT, MOST_REQUESTS = 255, 256
WARM_BYTES = range(4_000_000, 50_000_000)
"""Sizes of a layer's KV cache that stayed in the cache of a Hopper GPU while a kernel was repeated. Such cells are 8 to
20% faster than the law of the others; those of latent attention are not."""
DEEPEP_SMS = 20
"""Multiprocessors that DeepEP's kernels for large messages use by default."""
WINDOWS = {"gpt-oss-20b": 128, "gpt-oss-120b": 128}
"""Models in which every second layer attends to the last tokens only: their cells are means of both kinds of layer."""

Row = dict[str, Any]


@dataclass(frozen=True)
class _Tables:
    """The tables of one system, with the sources of the rows read so far and the kernels left out."""

    folder: Path
    engine: str
    version: str | None
    sources: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def rows(
        self, family: str, table: str, values: Sequence[str], engines: Sequence[str] = (), **wanted: Any
    ) -> list[Row]:
        """Return the columns `values` of the rows with the `wanted` values; empty if no version of the table has any.

        `engines` are tried in turn; by default the engine asked for.
        """
        for engine in engines or (self.engine,):
            version = self.version if engine == self.engine and family != "comm" else None
            paths = (self.folder / family / engine).glob(f"{version or '*'}/{table}.parquet")
            for path in sorted(paths, key=lambda path: [*map(int, re.findall(r"\d+", path.parent.name))], reverse=True):
                rows = _read(path, values, wanted)
                if rows:
                    self.sources.append(f"{engine} {path.parent.name} {table}")
                    return rows
        return []


def _read(path: Path, values: Sequence[str], wanted: Mapping[str, Any]) -> list[Row]:
    import pyarrow as pa  # slow to import
    import pyarrow.parquet as pq

    try:
        names = pq.read_schema(path).names
        missing = [name for name in (*values, *wanted) if name not in names and wanted.get(name) != 0]
        # a column that is wanted to be 0 came later
        check_file(not missing, path, "columns", f"lack {', '.join(missing)}")
        equal = [(name, "==", value) for name, value in wanted.items() if name in names]
        return list(pq.read_table(path, columns=list(values), filters=equal or None).to_pylist())
    except (pa.ArrowException, OSError) as error:
        raise TraceError(path, "table", f"cannot be read as parquet: {error}") from None


def find_tables(source: str | Path = "aiconfigurator") -> Path:
    """Return the folder ``systems`` of the tables: of the installed package by default, else of a folder."""
    package = util.find_spec("aiconfigurator_core")
    if source == "aiconfigurator" and (package is None or package.origin is None):
        raise UnavailableError(f"{PACKAGE}, which holds the tables, is not installed: pip install 'coterie[tables]'")
    folder = Path(package.origin).parent if package and package.origin and source == "aiconfigurator" else Path(source)
    systems = folder / "systems" if (folder / "systems").is_dir() else folder
    check((systems / "data").is_dir(), f"{folder} holds no tables; expected systems/data/SYSTEM as in {PACKAGE}")
    return systems


def read_tables(
    specs: Sequence[ModelSpec],
    system: str,
    engine: str,
    version: str | None = None,
    source: str | Path = "aiconfigurator",
    dtypes: Sequence[str] = (),
) -> Measurement:
    """Return the cells of these shapes on a system ("h200_sxm") in an engine: vllm, sglang or trtllm.

    `version` is that of the engine (not of DeepEP), by default the newest one that holds a shape; `source` is for
    :func:`find_tables`; `dtypes` keeps these weight dtypes.
    """
    systems = find_tables(source)
    known = [path.parent.name for path in systems.glob("data/*/moe")]
    check_known("system", system, known)
    engines = [path.name for path in systems.glob(f"data/{system}/moe/*") if path.is_dir()]
    check_known(f"engine on {system}", engine, engines)
    described = systems / f"{system}.yaml"
    try:
        facts = yaml.safe_load(described.read_text(encoding="utf-8"))
        bandwidth, gpus = 1e-6 * float(facts["gpu"]["mem_bw"]), int(facts["node"]["num_gpus_per_node"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise TraceError(described, "gpu.mem_bw, node.num_gpus_per_node", f"cannot be read: {error!r}") from None
    tables = _Tables(systems / "data" / system, engine, version)
    shapes = tuple(_shape(tables, spec, bandwidth, dtypes) for spec in specs)
    collectives = _collectives(tables, gpus)
    versions = sorted({source.split()[1] for source in tables.sources if source.endswith("moe_perf")})
    return Measurement(
        hardware={"device": system, "memory_bytes_per_us": bandwidth},
        software={
            engine: " ".join(versions),
            PACKAGE: metadata.version(PACKAGE) if source == "aiconfigurator" else str(source),
        },
        date="",
        shapes=shapes,
        collectives=collectives,
        note="; ".join(["tables: " + ", ".join(dict.fromkeys(tables.sources)), *tables.faults]),
    )


def _shape(tables: _Tables, spec: ModelSpec, bandwidth: float, dtypes: Sequence[str]) -> ShapeMeasurement:
    moe, gemm = _moe(tables, spec, bandwidth, dtypes), _gemm(tables, spec)
    decode, prefill = _attention(tables, spec, decode=True), _attention(tables, spec, decode=False)
    parts = {"MoE": moe, "decode attention": decode, "prefill attention": prefill, "GEMM": gemm}
    lacking = " and no ".join(name for name, cells in parts.items() if not cells)
    reasons = "; ".join(["", *(fault for fault in tables.faults if fault.startswith(spec.name))])
    engine = f"{tables.engine} {tables.version or '(any version)'} on {tables.folder.name}"
    check(not lacking, f"no {lacking} cells of {spec.name}'s shape in the tables of {engine}{reasons}")
    return ShapeMeasurement(
        spec.name, moe, (), gemm, decode + prefill, None if models().get(spec.name) == spec else asdict(spec)
    )


def _moe(tables: _Tables, spec: ModelSpec, bandwidth: float, dtypes: Sequence[str]) -> tuple[MoeTable, ...]:
    times: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for row in tables.rows(
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
    ):
        if "nongated" not in row["kernel_source"]:  # two matrices an expert, not three
            times[row["moe_dtype"], row["kernel_source"]][row["num_tokens"]] = round(1e3 * row["latency"], 3)
    made: dict[WeightDtype, MoeTable] = {}
    for name, dtype in DTYPES.items():
        kernels = [key for key in times if key[0] == name and (not dtypes or dtype in dtypes)]
        for key in sorted(kernels, key=lambda key: ("triton" not in key[1], sum(times[key].values()))):
            if dtype not in made:
                try:
                    check(key != UNPACKED, "weights were unpacked to 16 bits")
                    cells = _moe_cells(times[key], spec, dtype, bandwidth)
                    made[dtype] = MoeTable(
                        dtype,
                        key[1] + ", half of the experts (grouped top-k)" * (cells[-1].active < spec.num_experts),
                        cells,
                    )
                except ConfigError as fault:
                    tables.faults.append(f"{spec.name}, {key[1]} left out: {fault}")
    return tuple(made.values())


def _moe_cells(times: dict[int, float], spec: ModelSpec, dtype: WeightDtype, bandwidth: float) -> tuple[MoeCell, ...]:
    """Return the cells of one kernel; raise ConfigError with the reason why they cannot be times of such layers."""
    for few, many in pairwise(sorted(times)):
        check(
            times[many] >= (1 - LARGEST_FALL) * times[few],
            f"{few} tokens take {times[few]:.0f} us, {many} tokens {times[many]:.0f} us",
        )
    # With grouped top-k, half of a token's experts are in groups that are left out, and all tokens take the same other
    # experts instead. Which ones a few tokens take depends on the kernel: their cells are left out.
    for used, whole in ((spec.num_experts, True), (spec.num_experts // 2, False)):
        active = {tokens: min(used, (tokens if whole else (tokens + 1) / 2) * spec.top_k) for tokens in sorted(times)}
        # Few experts that are read faster than the memory can were in the GPU's own cache.
        warm = {tokens: active[tokens] * spec.expert_bytes(dtype) > bandwidth * times[tokens] for tokens in active}
        if not any(warm[tokens] for tokens in active if active[tokens] == used):
            return tuple(
                MoeCell(tokens, int(active[tokens]), times[tokens], warm=warm[tokens])
                for tokens in active
                if whole or tokens == 1 or tokens * spec.top_k >= used
            )
    raise ConfigError(f"weights would be read at more than the memory's {1e-6 * bandwidth:.1f} TB/s")


def _attention(tables: _Tables, spec: ModelSpec, decode: bool) -> tuple[AttentionCell, ...]:
    engines, family, kinds = [tables.engine, "sglang", "trtllm"], "mla", [{"num_heads": spec.num_heads}]
    if not spec.kv_lora_rank:
        engines, family = [tables.engine], "attention"
        heads = kinds[0] | {"num_key_value_heads": spec.num_kv_heads, "head_dim": spec.head_dim}
        kinds = [heads | {"window_size": window} for window in {0, WINDOWS.get(spec.name, 0)}]
    table = f"{'generation' if decode else 'context'}_{family}_perf"
    values, nbytes = ("kernel_source", "batch_size", "isl", "step", "latency"), attention_shape(spec)[CACHED_BYTES]
    times: dict[tuple[int, int, int], dict[int, float]] = defaultdict(dict)
    for number, kind in enumerate(kinds):
        rows = tables.rows(family, table, values, engines, kv_cache_dtype="bfloat16", **kind)
        common = Counter(row["kernel_source"] for row in rows).most_common(1)
        for row in rows:
            if row["kernel_source"] == common[0][0]:
                times[row["batch_size"], row["isl"], row["step"]][number] = 1e3 * row["latency"]
    cells = [
        AttentionCell(batch, query, context, round(sum(us.values()) / len(us), 3))
        for (batch, query, context), us in sorted(times.items())
        if len(us) == len(kinds) and (query > 1) != decode
    ]
    large = [cell for cell in cells if cell.context >= LEAST_CONTEXT and cell.batch <= MOST_REQUESTS]
    cold = [cell for cell in large if spec.kv_lora_rank or int(cell.batch * cell.context * nbytes) not in WARM_BYTES]
    return tuple(cold if decode else cells)


def _gemm(tables: _Tables, spec: ModelSpec) -> tuple[GemmCell, ...]:
    read = partial(tables.rows, "gemm", "gemm_perf", ("m", "n", "k", "latency"))
    fp8 = read(("sglang", tables.engine), gemm_dtype="fp8_block") if spec.weight_dtype == "fp8" else []
    rows = fp8 or read(gemm_dtype="bfloat16")
    sizes = sorted({(row["n"], row["k"]) for row in rows})
    near = {
        min(sizes, key=lambda size: abs(math.log(size[0] / n)) + abs(math.log(size[1] / k)), default=(0, 0))
        for pairs, _ in dense_shapes(spec)
        for n, k in pairs
    }
    return tuple(
        GemmCell(row["m"], row["n"], row["k"], round(1e3 * row["latency"], 3))
        for row in rows
        if (row["n"], row["k"]) in near
    )


def _collectives(tables: _Tables, gpus: int) -> tuple[CollectiveCell, ...]:
    """Return DeepEP's dispatch and combine, as the mean of both: its kernels for few rows, and for many in a node."""
    shape, node = ("hidden_size", "num_token", "num_topk", "num_experts"), Topology(gpus, gpus)
    quick = ("dispatch_avg_t_us", "combine_avg_t_us")
    large = ("dispatch_transmit_us", "dispatch_notify_us", "combine_transmit_us", "combine_notify_us")
    kinds: list[tuple[ExchangeKind, int, tuple[str, ...], dict[str, int]]] = [
        ("node", 1, quick, {}),
        *(("nodes", nodes, quick, {}) for nodes in (2, 4, 8)),
        ("bulk", 1, large, {"dispatch_sms": DEEPEP_SMS}),
    ]
    cells = []
    for kind, nodes, times, wanted in kinds:
        table = f"wideep_deepep_{'normal' if kind == 'bulk' else 'll'}_perf"
        for row in tables.rows("comm", table, (*shape, *times), ("sglang",), node_num=nodes, **wanted):
            rows, experts, top_k = row["num_token"], row["num_experts"], row["num_topk"]
            # Left out: ranks with few experts, and sizes of large messages at which the other kernel is faster.
            if experts >= 128 and top_k >= 4 and (kind != "bulk" or 16 <= rows <= 16384):
                remote = top_k * ((gpus - 1) / gpus if nodes == 1 else (nodes - 1) / nodes)
                copies = uniform_locality(experts, top_k, node).remote_ranks if kind == "bulk" else remote
                nbytes, us = rows * copies * row["hidden_size"] * BYTES_PER_VALUE, sum(row[name] for name in times) / 2
                cells.append(CollectiveCell(nodes * gpus, round(nbytes), round(us, 3), kind))
    return tuple(cells)
