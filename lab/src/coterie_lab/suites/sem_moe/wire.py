"""Bytes on the wire of the expert-parallel layer beside the prediction; what shuffles and migrations add.

Real processes joined by gloo run real routing through :mod:`coterie.engines.torch_ep`. The prediction is
:func:`~coterie_lab.suites.all_to_all.counting.counted_locality`: distinct remote ranks of each token where a dispatch
deduplicates, remote activations where each is sent by itself; times the hidden state's bytes, there and back. Slots,
weights and counts go with the rows: at the small hidden size here they are a larger share than at the model's 2,880.

Times are of gloo over the loopback, where copying rows takes a third of the time of sending them. They say little of
GPUs, where it takes a tenth or less.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.answers.suites import Report, SuiteOptions
from coterie.errors import UnavailableError
from coterie.traces.activations import ActivationTrace
from coterie.traces.readers import read_as
from coterie.types import Placement, Topology
from coterie_lab.suites.all_to_all.counting import counted_locality, sampled_steps

TRACE = "gpt-oss-20b"
RANKS = (2, 4, 8)
TOKENS, LAYERS, HIDDEN = 1024, 4, 512
"""A step of the layer: tokens of all ranks, layers taken evenly, hidden size in float32."""
SHUFFLE_TOKENS, SHUFFLE_HIDDEN = 1024, 2880
"""A prefill chunk at gpt-oss-20b's hidden size."""
PUBLISHED_OVERHEAD = 0.01
"""Share of the ring collective that its shuffle adds, as published."""
VALUE_BYTES = 4
MODES = {"deduplicated": "deduplicated", "per activation": "per_activation"}
"""Value of `dispatch` in a row, and the measurement's name for it."""


class _Sample(NamedTuple):
    experts: NDArray[np.int64]
    """[token, layer, k]"""
    num_experts: int


def wire_rows(options: SuiteOptions, report: Report) -> list[dict[str, Any]]:
    """Rows of `part` "wire" (bytes), "shuffle" (time) and "migration" (both); none where torch is missing."""
    rows: list[dict[str, Any]] = []
    sample = _sample(options)
    try:
        for number, ranks in enumerate(RANKS):
            report(f"Shuffling and moving experts between {ranks} processes", 2 * number, 2 * len(RANKS))
            rows += [_shuffle_row(ranks), _migration_row(ranks)]
            if sample is not None:
                report(f"Sending rows between {ranks} processes", 2 * number + 1, 2 * len(RANKS))
                rows += _wire_rows(sample, ranks)
    except UnavailableError:
        return []
    return rows


def wire_notes(rows: list[dict[str, Any]]) -> list[str]:
    """Say what the rows of :func:`wire_rows` show."""
    wire, shuffle, moves = ([row for row in rows if row["part"] == part] for part in ("wire", "shuffle", "migration"))
    if not shuffle:
        return ["No bytes on the wire: the expert-parallel layer needs torch: pip install 'coterie[torch]'."]
    notes = [
        "Shuffle overhead, measured on gloo: with the shuffle our reduce-scatter takes "
        f"{_span(shuffle, 'shuffled_to_gloo')} of gloo's own (which is an all-reduce inside and sends twice as much), "
        f"{_span(shuffle, 'shuffled_to_plain')} of ours without it, and {_span(shuffle, 'early_to_plain')} where the "
        "projection's input is shuffled instead of its output. Published: about 1.01 of a ring collective on GPUs, "
        "where a copy is tens of times faster than a link; NCCL was not run, for lack of a second GPU.",
        f"Migration under traffic: {sum(row['switches'] for row in moves)} switches, "
        f"{sum(row['sent_bytes'] for row in moves) / 1e6:.0f} MB of weights sent, as planned "
        f"({sum(row['planned_bytes'] for row in moves) / 1e6:.0f} MB), "
        f"{sum(row['changed_steps'] for row in moves)} of {sum(row['steps'] for row in moves)} steps with another "
        f"output; a step stalls for {_span(moves, 'stall_ms')} ms.",
    ]
    if not wire:
        return [*notes, f"No bytes on the wire: set COTERIE_DATA to the folder of real data ({TRACE}, docs/data.md)."]
    hidden = max(abs(row["hidden_bytes"] / row["predicted_bytes"] - 1) for row in wire)
    total = max(abs(row["ratio"] - 1) for row in wire)
    counted = [row["tcp_bytes"] / row["predicted_bytes"] - 1 for row in wire if row["tcp_bytes"] is not None]
    tcp = f"; the system's own count of TCP bytes differs by at most {max(map(abs, counted)):.1%}" if counted else ""
    fewer, single = ([row["hidden_bytes"] for row in wire if row["dispatch"] == mode] for mode in MODES)
    saved = [1 - a / b for a, b in zip(fewer, single, strict=True)]
    return [
        *notes,
        f"Bytes on the wire, gloo: hidden states differ from the prediction by at most {hidden:.1%}, all bytes, with "
        f"slots, weights and counts, by at most {total:.1%}{tcp}. Sending a token once to each rank saves "
        f"{min(saved):.0%} to {max(saved):.0%} of the rows.",
    ]


def _span(rows: list[dict[str, Any]], key: str) -> str:
    values = [row[key] for row in rows]
    return f"{min(values):.2f} to {max(values):.2f}"


def _sample(options: SuiteOptions) -> _Sample | None:
    """Take one step of the trace; None without the data."""
    path = None if options.data is None else options.data / "activations" / TRACE
    if path is None or not path.exists():
        return None
    trace = read_as(ActivationTrace, path, None)
    step = sampled_steps(trace, path, TOKENS, TOKENS)[0]
    layers = np.arange(LAYERS) * step.shape[1] // LAYERS
    return _Sample(np.ascontiguousarray(step[:, layers]), trace.meta.num_experts)


def _wire_rows(sample: _Sample, ranks: int) -> list[dict[str, Any]]:
    from coterie_lab.suites.sem_moe.measuring import measure_wire

    tokens, layers, _ = sample.experts.shape
    placement = Placement.linear(layers, sample.num_experts, ranks)
    locality = counted_locality(sample.experts, placement, Topology(ranks))
    measured = measure_wire(sample.experts, placement, HIDDEN)
    rows = []
    for mode, field in MODES.items():
        crossing = locality.remote_ranks if mode == "deduplicated" else locality.remote
        predicted = 2 * tokens * layers * crossing * HIDDEN * VALUE_BYTES
        sent = getattr(measured, field)
        row = {"part": "wire", "trace": TRACE, "ep": ranks, "dispatch": mode, "tokens": tokens, "layers": layers}
        row |= {"hidden_size": HIDDEN} | {f"{name}_bytes": value for name, value in sent._asdict().items()}
        ratio = (sent.hidden + sent.other) / predicted
        rows.append(row | {"predicted_bytes": round(predicted), "ratio": ratio, "published": None})
    return rows


def _shuffle_row(ranks: int) -> dict[str, Any]:
    from coterie_lab.suites.sem_moe.measuring import measure_shuffle

    times = measure_shuffle(ranks, SHUFFLE_TOKENS, SHUFFLE_HIDDEN)
    row = {"part": "shuffle", "ep": ranks, "tokens": SHUFFLE_TOKENS, "hidden_size": SHUFFLE_HIDDEN}
    return row | times._asdict() | {"published": 1 + PUBLISHED_OVERHEAD}


def _migration_row(ranks: int) -> dict[str, Any]:
    from coterie_lab.suites.sem_moe.measuring import measure_migration

    return {"part": "migration", "ep": ranks, **measure_migration(ranks)._asdict(), "published": None}
