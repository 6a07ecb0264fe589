"""The all-to-all of expert parallelism, beside the table of an article that estimates it for four set-ups.

Computed for a step of `batch` tokens in total, spread evenly over the GPUs, in bf16 both ways:

    bytes_per_layer = batch x remote experts x hidden size x 2 B x 2 (dispatch and combine), each byte counted once
    time_us         = 2 x (latency + what the busiest GPU sends or receives / bandwidth of the link in one direction)

`time_us` has the vendors' bandwidths, `time_measured_us` DeepEP's law as measured on H200s (docs/costs.md).

The formula assumes uniform routing and equally busy GPUs: too few bytes for the busiest GPU, and too many remote ranks
for models whose router keeps a token within some groups (DeepSeek-V3). On a trace, experts lie in order, a step takes
tokens from all over the trace, and the busiest GPU is counted. Neither includes the kernels' own cost or overlap with
compute. docs/results/all-to-all.md has the results in words.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.answers.suites import Column, Report, Row, SuiteOptions, SuiteResult, SuiteTable
from coterie.costs.exchange import (
    ExchangeTraffic,
    Locality,
    all_to_all_us,
    exchange_us,
    expected_locality,
    traffic_links,
    uniform_locality,
)
from coterie.costs.presets import step_model
from coterie.errors import ConfigError
from coterie.models import get_model
from coterie.traces.activations import ActivationTrace
from coterie.traces.readers import read_as
from coterie.types import INFINIBAND_400G, NVLINK4, NVLINK5, Link, ModelSpec, Placement, Topology
from coterie_lab.suites.all_to_all.counting import busiest_rank, counted_locality, sampled_steps, uniform_steps
from coterie_lab.suites.shared import as_is, existing_paths, known_model, plain

NAME = "all-to-all"
GPUS_PER_NODE = 8
GPU_COUNTS = (2, 4, 8, 16, 32)
MAX_TOKENS = 20_000
"""Tokens of a trace that are counted, taken evenly: remote experts and ranks of both TRACES are then within 0.3%."""
VALUE_BYTES = 2
TRACES = ("gpt-oss-20b", "deepseek-v2-lite")
"""Folders under activations/ of the real data."""

ARTICLE_BATCH, ARTICLE_WAYS = 128, 4
"""Values that reproduce the article's bytes, in every row that can be reproduced."""


class Published(NamedTuple):
    """A row of the article's table."""

    model: str
    gpus: int
    bytes_per_layer: float
    time_us: dict[str, float]
    """Microseconds by link."""


PUBLISHED = (
    Published("mixtral-8x22b", 8, 14.6e6, {"nvlink4": 2.0, "nvlink5": 1.0}),
    Published("deepseek-v3", 8, 58.7e6, {"nvlink4": 8.2, "nvlink5": 4.1}),
    Published("deepseek-v3", 32, 55.2e6, {"nvlink4": 7.7, "nvlink5": 3.8}),
    Published("arctic-480b", 16, 29.4e6, {"nvlink4": 4.1, "nvlink5": 2.0}),
)


def article_us(nbytes: float, gpus: int, link: Link) -> float:
    """Apply the article's rule: bytes ÷ (GPUs x bandwidth); the bandwidth is the vendor's, both directions summed."""
    return nbytes / (gpus * 2 * link.bytes_per_s) * 1e6


def article_bytes(copies: int, hidden_size: int) -> int:
    """Return bytes as the article counts them: all experts of a token, remote or not, four times."""
    return ARTICLE_BATCH * copies * hidden_size * VALUE_BYTES * ARTICLE_WAYS


def layer_bytes(batch: int, copies: float, hidden_size: int) -> float:
    """Return the bytes of dispatch and combine of one layer over the whole group, each counted once, at its sender."""
    return 2.0 * batch * copies * hidden_size * VALUE_BYTES


def run(options: SuiteOptions, report: Report) -> SuiteResult:
    notes: list[str] = []
    rows: list[dict[str, Any]] = []
    traces = _traces(options, notes)
    for published in PUBLISHED:
        rows += _published_rows(published, options.batch)
    rng = np.random.default_rng(options.seed)
    for done, path in enumerate(traces):
        report(f"Counting {path.name}", done, len(traces))
        rows += _trace_rows(path, options, rng, notes)
    if traces:
        notes.append(
            "Local and remote experts of a trace are near the formula whatever the skew: tokens are dealt to GPUs in "
            "turn. Skew shows in `busiest`, the busiest ÷ the mean GPU, which uniform routing has too, by `chance`."
        )
    return SuiteResult(NAME, rows, [*_article_notes(options.batch), *notes])


def _published_rows(published: Published, batch: int) -> list[dict[str, Any]]:
    spec, gpus = get_model(published.model), published.gpus
    rows = []
    for link in (NVLINK4, NVLINK5):
        one_domain = Topology(gpus, ranks_per_node=gpus, intra=link)
        row = _formula_row("article", spec, one_domain, batch)
        beside = {"bytes_per_layer": published.bytes_per_layer, "time_us": published.time_us[link.name]}
        row["published"] = beside if batch == ARTICLE_BATCH else None
        rows.append(row)
        if gpus > GPUS_PER_NODE:
            nodes = Topology(gpus, GPUS_PER_NODE, link, INFINIBAND_400G)
            rows.append(_formula_row("article", spec, nodes, batch))
    return rows


class Shape(NamedTuple):
    """The fields of a model that a row needs."""

    model: str
    experts: int
    top_k: int
    hidden_size: int | None
    """None if the model is not shipped."""


def measured(topology: Topology) -> Topology:
    """Return the topology with DeepEP's all-to-all as measured on H200s, inside a node and between nodes."""
    return step_model(get_model("gpt-oss-20b"), "h200", topology=topology).topology


def _formula_row(beside: str, spec: ModelSpec, topology: Topology, batch: int) -> dict[str, Any]:
    locality = expected_locality(spec, topology)
    shape = Shape(spec.name, spec.num_experts, spec.top_k, spec.hidden_size)
    row = _row(beside, "formula", shape, locality, topology, batch)
    for part, tokens in (("", -(-batch // topology.num_ranks)), ("if_batch_per_gpu_", batch)):
        traffic = ExchangeTraffic.of(locality, spec, tokens, VALUE_BYTES)
        row[f"time_{part}us"] = all_to_all_us(traffic, topology)
        if topology.intra == NVLINK4 and topology.ranks_per_node <= GPUS_PER_NODE:
            links = traffic_links(traffic, measured(topology), copies=locality.remote_ranks / locality.remote)
            row[f"time_{part}measured_us"] = exchange_us(links, 1.0)
    if topology.num_nodes == 1:
        row["time_article_rule_us"] = article_us(row["bytes_per_layer"], topology.num_ranks, topology.intra)
    return row


LATER = ["time_us", "time_measured_us", "time_article_rule_us", "time_if_batch_per_gpu_us"]
LATER += ["time_if_batch_per_gpu_measured_us", "tokens_counted", "busiest_rank", "busiest_rank_if_uniform", "published"]
"""Fields of a row that are filled in only if they apply and are known."""


def _row(beside: str, source: str, shape: Shape, locality: Locality, topology: Topology, batch: int) -> dict[str, Any]:
    hidden, nodes = shape.hidden_size, topology.num_nodes > 1
    return {
        "beside": beside,
        "source": source,
        "model": shape.model,
        "gpus": topology.num_ranks,
        "experts": shape.experts,
        "top_k": shape.top_k,
        "hidden_size": hidden,
        "batch": batch,
        "local_experts": locality.local,
        "remote_experts": locality.remote,
        "remote_ranks": locality.remote_ranks,
        "inter_node_experts": locality.inter_node,
        "bytes_per_layer": None if hidden is None else layer_bytes(batch, locality.remote, hidden),
        "bytes_if_deduplicated": None if hidden is None else layer_bytes(batch, locality.remote_ranks, hidden),
        "link": f"{topology.intra.name}+{topology.inter.name}" if nodes else topology.intra.name,
        **dict.fromkeys(LATER),
    }


def _traces(options: SuiteOptions, notes: list[str]) -> list[Path]:
    """Return the trace given, else those of the real data; notes say which are not counted, and why."""
    if options.trace is not None:
        if options.batch > MAX_TOKENS:
            raise ConfigError(f"batch={options.batch} must be at most {MAX_TOKENS}, the tokens counted of a trace")
        return [options.trace]
    if options.batch > MAX_TOKENS:
        notes.append(f"No trace counted: batch={options.batch} is more than the {MAX_TOKENS:,} tokens counted of one.")
        return []
    if options.data is None:
        notes.append("No trace counted: give --trace, or set COTERIE_DATA to the folder of real data (docs/data.md).")
        return []
    missing = "No trace counted for {path.name}: {path} does not exist."
    return existing_paths(options.data / "activations", TRACES, notes, missing)


def _trace_rows(path: Path, options: SuiteOptions, rng: np.random.Generator, notes: list[str]) -> list[dict[str, Any]]:
    trace = read_as(ActivationTrace, path, options.trace_format)
    meta, batch = trace.meta, options.batch
    counts = [gpus for gpus in GPU_COUNTS if meta.num_experts % gpus == 0]
    if not counts:
        known = ", ".join(map(str, GPU_COUNTS))
        raise ConfigError(f"{path}: num_experts={meta.num_experts} must be a multiple of one of {known} GPUs")
    ids = sampled_steps(trace, path, batch, MAX_TOKENS)
    drawn = uniform_steps(len(ids), batch, meta.num_experts, meta.top_k, rng)
    spec = known_model(meta.model)
    if spec is not None and (spec.num_experts, spec.top_k) != (meta.num_experts, meta.top_k):
        spec = None  # another model of that name: its hidden size would be wrong
    shape = Shape(meta.model, meta.num_experts, meta.top_k, None if spec is None else spec.hidden_size)
    tokens = ids.reshape(-1, meta.num_layers, meta.top_k)
    rows = []
    for gpus in counts:
        topology = Topology(gpus, GPUS_PER_NODE, NVLINK4, INFINIBAND_400G)
        if spec is None:
            even = uniform_locality(meta.num_experts, meta.top_k, topology)
            rows.append(_row("trace", "formula", shape, even, topology, batch))
        else:
            rows.append(_formula_row("trace", spec, topology, batch))
        placement = Placement.linear(meta.num_layers, meta.num_experts, gpus)
        locality = counted_locality(tokens, placement, topology)
        row = _row("trace", "trace", shape, locality, topology, batch)
        busiest = busiest_rank(ids, placement, topology)
        if spec is not None:
            row["time_us"] = busiest.mean_us(spec.hidden_size * VALUE_BYTES, topology)
            row["time_measured_us"] = busiest.mean_us(spec.hidden_size * VALUE_BYTES, measured(topology))
        row["tokens_counted"], row["busiest_rank"] = len(tokens), busiest.ratio
        one_layer = Placement.linear(1, meta.num_experts, gpus)
        row["busiest_rank_if_uniform"] = busiest_rank(drawn, one_layer, topology).ratio
        rows.append(row)
    notes.append(_trace_note(path, trace, ids, counts, spec))
    return rows


def _trace_note(
    path: Path, trace: ActivationTrace, ids: NDArray[np.int64], counts: list[int], spec: ModelSpec | None
) -> str:
    steps, batch = ids.shape[:2]
    note = (
        f"Trace {path.name}: {steps * batch:,} of its {trace.num_tokens:,} tokens, taken evenly, as {steps:,} steps of "
        f"{batch}, all {trace.meta.num_layers} recorded layers; nodes of {GPUS_PER_NODE} GPUs."
    )
    left_out = [str(gpus) for gpus in GPU_COUNTS if gpus not in counts]
    if left_out:
        note += f" Left out, as {trace.meta.num_experts} experts do not divide: {', '.join(left_out)} GPUs."
    if spec is None:
        note += (
            f" No bytes or times: no shipped model {trace.meta.model!r} has {trace.meta.num_experts} experts, "
            f"top-{trace.meta.top_k}."
        )
    return note


def _article_notes(batch: int) -> list[str]:
    notes = [
        f"Ours: {batch} tokens in total over all GPUs, bf16 both ways, remote experts only, dispatch + combine, each "
        "byte counted once. Time: busiest GPU, bandwidth of one direction (NVLink 4.0: 450 GB/s), a latency each way; "
        "measured: DeepEP on H200s, 11 us + bytes ÷ 312 GB/s in a node and 25 us + bytes ÷ 61 GB/s between nodes.",
        "The formula assumes uniform routing. DeepSeek-V3 keeps a token within 4 of 8 groups of experts, so its real "
        "remote ranks are fewer.",
    ]
    if batch != ARTICLE_BATCH:
        return [*notes, f"Nothing published for batch={batch}: the article's table is for {ARTICLE_BATCH} tokens."]
    mixtral, deepseek, arctic = (get_model(name) for name in ("mixtral-8x22b", "deepseek-v3", "arctic-480b"))
    eight = expected_locality(deepseek, Topology(8))
    ours = layer_bytes(batch, eight.remote, deepseek.hidden_size)
    theirs = article_bytes(deepseek.top_k, deepseek.hidden_size)
    on_32, on_16 = article_us(55.2e6, 32, NVLINK4), article_us(29.4e6, 16, NVLINK4)
    bf16, fp8, layers = deepseek.expert_bytes("bf16"), deepseek.expert_bytes("fp8"), deepseek.num_moe_layers
    return [
        *notes,
        f"Reproduced: {eight.local:g} local and {eight.remote:g} remote experts for DeepSeek-V3 on 8 GPUs, "
        f"{eight.remote / deepseek.top_k:.1%} remote.",
        "Reproduced: 58.7 MB = 128 tokens x 8 experts x 7168 x 2 B x 4. The 8 includes the local expert; the 4 can be "
        "read as dispatch and combine, each at both ends. The counting its text describes (remote experts only, twice) "
        f"gives {_mb(ours)}, which is ours.",
        "Reproduced: all eight times, as the printed bytes ÷ (8 GPUs x 900 or 1800 GB/s). Those bandwidths are of both "
        "directions, which is fair to bytes counted at both ends; latency is left out.",
        f"Not right: 8 GPUs also in the rows of 16 and 32. By its own rule 55.2 MB on 32 GPUs take {on_32:.1f} us, not "
        f"7.7, and 29.4 MB on 16 take {on_16:.1f} us, not 4.1. Nor does NVLink 4.0 usually join more than 8 GPUs: see "
        "the rows with InfiniBand between nodes.",
        "Not right: Mixtral's 14.6 MB needs a hidden size of 7168 (14.68 MB, cut off, not rounded). The model has "
        f"{mixtral.hidden_size}; the same counting then gives "
        f"{_mb(article_bytes(mixtral.top_k, mixtral.hidden_size))}.",
        f"Not right: Arctic's 29.4 MB is twice what the same counting gives for top-{arctic.top_k}, "
        f"{_mb(article_bytes(arctic.top_k, arctic.hidden_size))}; it would fit top-4.",
        "Not reproduced: DeepSeek-V3's 55.2 MB on 32 GPUs. It is less than on 8, though more experts are remote. The "
        f"same counting gives {_mb(theirs)} on both, or with remote experts only {_mb(theirs * 31 / 32)} on 32 against "
        f"{_mb(theirs * 7 / 8)} on 8.",
        "Not right: 176 MB for one expert of one layer of DeepSeek-V3, 10.7 GB over 61 layers: a factor 2 too much. "
        f"Three matrices of 2048 x 7168 are {_mb(bf16)} in bf16 ({_mb(fp8)} in fp8, as published), and {layers} layers "
        f"have experts: {bf16 * layers / 1e9:.2f} GB ({fp8 * layers / 1e9:.2f} GB).",
    ]


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f} MB"


def _mega(row: Row) -> float | None:
    return None if row["bytes_per_layer"] is None else row["bytes_per_layer"] / 1e6


def _theirs(row: Row, key: str, scale: float = 1.0) -> float | None:
    return None if row["published"] is None else row["published"][key] / scale


_PLACES = (
    Column("local", plain("local_experts")),
    Column("remote", plain("remote_experts")),
    Column("ranks", plain("remote_ranks")),
)


TABLES = (
    SuiteTable(
        "By formula, beside the published table",
        (
            *as_is("model"),
            Column("GPUs", plain("gpus")),
            Column("link", lambda row: row["link"].replace(INFINIBAND_400G.name, "ib")),
            *_PLACES,
            Column("MB", _mega),
            Column("MB pub.", lambda row: _theirs(row, "bytes_per_layer", 1e6)),
            Column("us", plain("time_us")),
            Column("us meas.", plain("time_measured_us")),
            Column("us pub.", lambda row: _theirs(row, "time_us")),
        ),
        lambda row: row["beside"] == "article",
    ),
    SuiteTable(
        "Counted on a trace, beside the formula",
        (
            *as_is("model"),
            Column("GPUs", plain("gpus")),
            *as_is("source"),
            *_PLACES,
            Column("inter", plain("inter_node_experts")),
            Column("MB", _mega),
            Column("us", plain("time_us")),
            Column("us meas.", plain("time_measured_us")),
            Column("busiest", plain("busiest_rank")),
            Column("chance", plain("busiest_rank_if_uniform")),
        ),
        lambda row: row["beside"] == "trace",
    ),
)
