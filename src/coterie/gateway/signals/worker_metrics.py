"""Requests and KV use of a worker, by its own metrics: ``GET /metrics`` in Prometheus's text format.

Only the few lines that are needed are looked for, by the names of vLLM, SGLang and Coterie's reference worker. The text
is a stranger's: it is bounded, and a value that cannot be makes the whole report unusable. Several engines behind one
URL (data-parallel ranks) report with a label, `engine` or `dp_rank`: a worker that stands for one rank takes that
rank's values, any other the sum of the requests and the mean of the KV use. Tensor-parallel ranks of an engine repeat
its values, so the largest of them counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from statistics import fmean
from typing import NamedTuple

from coterie.errors import CoterieError

MOST_SERIES = 1024
"""Most lines that begin with the name of a metric: every rank has one."""
MOST_LINE = 4096
"""Longest line of a metric that is read, in bytes."""
MOST_REQUESTS = 1 << 20
"""Most requests that a worker is believed to have."""
RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "coterie_worker_running")
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "coterie_worker_waiting")
KV_USED = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
KV_BLOCKS = "coterie_worker_kv_blocks"
EXPERTS, EXPERT_STEPS = "coterie_worker_distinct_experts_sum", "coterie_worker_distinct_experts_steps_total"
MOST_COUNTED = float(1 << 53)
RANKS = ("engine", "dp_rank")
"""Labels with the data-parallel rank."""
SERIES = re.compile(r"(?:\{(.*)\})?[ \t]+(\S+)")
"""What follows the name of a metric in its line: labels, if any, and the value."""

Ranked = dict[str | None, float]
"""Data-parallel rank → value; None for series without a rank."""


class ReportError(CoterieError):
    """Metrics of a worker that cannot be used; `kind` is the label in counters."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class WorkerReport(NamedTuple):
    """What a worker says of itself. Requests of all its front ends are counted."""

    running: int
    waiting: int
    kv_used: float
    """Share of KV blocks in use; 0 if not reported."""
    experts: float = 0.0
    """Distinct experts of a mean layer, summed over `steps`; 0 if not reported."""
    steps: float = 0.0
    """Decode steps since the worker's start."""


def read_report(text: bytes, rank: int | None = None) -> WorkerReport:
    """Read a worker's metrics; `rank` is the data-parallel rank that the worker stands for. Raises ReportError."""
    text = b"\n" + text
    running = _first(text, RUNNING, MOST_REQUESTS)
    if running is None:
        raise ReportError("unknown", f"none of {', '.join(RUNNING)} is there")
    waiting = _first(text, WAITING, MOST_REQUESTS) or {}
    used = _first(text, KV_USED, 1) or _share_of_blocks(text)
    experts = [
        value for labels, value in _series(text, EXPERTS, MOST_COUNTED) if _label(labels, "over_layers") == "mean"
    ]
    steps = [value for _, value in _series(text, EXPERT_STEPS, MOST_COUNTED)]
    return WorkerReport(
        round(_of_rank(running, rank, sum)),
        round(_of_rank(waiting, rank, sum)),
        _of_rank(used, rank, fmean),
        sum(experts),
        sum(steps),
    )


def _first(text: bytes, names: tuple[str, ...], most: float) -> Ranked | None:
    """Return the values of the first metric that the text has, by rank."""
    for name in names:
        values: Ranked = {}
        for labels, value in _series(text, name, most):
            rank = next(filter(None, (_label(labels, label) for label in RANKS)), None)
            values[rank] = max(value, values.get(rank, 0.0))
        if values:
            return values
    return None


def _share_of_blocks(text: bytes) -> Ranked:
    """Return the share of a reference worker's KV blocks that are in use; empty for any other worker."""
    blocks = {_label(labels, "state"): value for labels, value in _series(text, KV_BLOCKS, float(1 << 40))}
    return {None: blocks.get("used", 0.0) / sum(blocks.values())} if sum(blocks.values()) else {}


def _series(text: bytes, name: str, most: float) -> list[tuple[str, float]]:
    """Return labels and value of every line of a metric. Raises ReportError for values outside of 0 … `most`."""
    series: list[tuple[str, float]] = []
    _, *rests = text.split(b"\n" + name.encode(), MOST_SERIES)
    if len(rests) == MOST_SERIES:
        raise ReportError("malformed", f"{name} has {MOST_SERIES} lines or more")
    for rest in rests:
        if not rest.startswith((b" ", b"\t", b"{")):
            continue  # a longer name
        line = rest[:MOST_LINE].partition(b"\n")[0].decode(errors="replace")
        labels, number = read.groups("") if (read := SERIES.match(line)) else ("", "")
        try:
            value = float(number)
        except ValueError:
            raise ReportError("malformed", f"{name}{line[:80]!r} is no line of a metric") from None
        if not 0 <= value <= most:
            raise ReportError("impossible", f"{name}={value:g} must be in 0 … {most:g}")
        series.append((labels, value))
    return series


def _label(labels: str, name: str) -> str | None:
    """Return the value of a label; None if it is missing or empty."""
    return f",{labels}".partition(f',{name}="')[2].partition('"')[0] or None


def _of_rank(values: Ranked, rank: int | None, whole: Callable[[list[float]], float]) -> float:
    """Return the rank's own value, or what `whole` makes of all ranks' if the worker stands for no rank."""
    if not values or rank is None:
        return float(whole(list(values.values()))) if values else 0.0
    if str(rank) not in values:
        raise ReportError("unknown", f"data_parallel_rank={rank} is none of the engines {sorted(map(str, values))}")
    return values[str(rank)]
