"""Speed of activation traces on disk."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from coterie.answers.suites import Report
from coterie.footprints.counting import accumulate_load
from coterie.traces import ActivationTrace
from coterie.traces.synthetic import generate_to, presets
from coterie_lab.benches.timing import Row, median_ms, median_us

TRACE_BYTES = 64_000_000
"""Size of the trace that is read and written."""


def bench_traces(report: Report) -> list[Row]:
    """Time opening, reading, writing, generating and counting activation traces."""
    rows: list[Row] = []
    settings = presets["balanced"]
    with tempfile.TemporaryDirectory() as folder:
        generate_to(Path(folder) / "warm", settings, np.random.default_rng(0), nbytes=1_000_000)
        report("generate", 0, 4)
        paths = [Path(folder) / f"trace{n}" for n in range(3)]
        draw = partial(generate_to, settings=settings, nbytes=TRACE_BYTES)
        spent = median_ms([partial(draw, path, rng=np.random.default_rng(0)) for path in paths])
        path = paths[0]
        trace = ActivationTrace.open(path)
        sizes = {"mbytes": round(trace.nbytes / 1e6, 1), "requests": trace.num_requests, "tokens": trace.num_tokens}
        rows.append({"name": "generate", **sizes, "median_ms": spent})
        report("open", 1, 4)
        rows.append({"name": "open", **sizes, "median_us": median_us(lambda: ActivationTrace.open(path))})
        read = median_us(lambda: trace.request(7).expert_ids.sum())
        rows.append({"name": "read one request", **sizes, "median_us": read})
        report("count", 2, 4)
        load = np.zeros((trace.meta.num_layers, trace.meta.num_experts), np.int64)

        def count() -> None:
            for chunk in trace.chunks():
                accumulate_load(chunk.tokens.expert_ids, load)

        rows.append({"name": "count load", **sizes, "median_ms": round(median_us(count, 5) / 1e3, 3)})
        report("copy", 3, 4)
        spent = median_ms([partial(trace.save, Path(folder) / f"copy{n}") for n in range(3)])
        rows.append({"name": "copy", **sizes, "median_ms": spent})
    return rows
