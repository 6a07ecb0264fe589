"""Summaries of a trace, as the commands print them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.traces import ActivationTrace, LoadTable


def trace_summary(path: Path, trace: ActivationTrace | LoadTable) -> dict[str, Any]:
    """Return the sizes of a trace that was written to the folder `path`."""
    from coterie.traces import LoadTable

    if isinstance(trace, LoadTable):
        return {"path": str(path), **load_sizes(trace)}
    table, meta = trace.requests, trace.meta
    return {
        "path": str(path),
        "model": meta.model,
        "requests": trace.num_requests,
        "tokens": trace.num_tokens,
        "prompt_tokens": int(table.prompt_tokens.sum()),
        "output_tokens": int(table.output_tokens.sum()),
        "layers": meta.num_layers,
        "experts": meta.num_experts,
        "top_k": meta.top_k,
        "bytes": sum(file.stat().st_size for file in path.iterdir()),
    }


def load_sizes(table: LoadTable) -> dict[str, Any]:
    return {
        "model": table.model,
        "windows": len(table),
        "layers": table.num_layers,
        "experts": table.num_experts,
        "activations": int(table.counts.sum()),
    }
