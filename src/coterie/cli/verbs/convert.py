"""``coterie convert``: read a trace in any known format, write it in another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.files import load_sizes
from coterie.cli.output import FromOption, JsonOption, NumExpertsOption, TraceModelOption, print_json, print_table
from coterie.traces import ActivationTrace, LoadTable
from coterie.traces.readers import ReadOptions, Trace, detect, kind_of, read_trace
from coterie.traces.writers import check_trace_target, write_trace


def convert_command(
    src: Annotated[Path, typer.Argument(help="File or folder to read.")],
    dst: Annotated[Path, typer.Argument(help="File or folder to write; it must not exist.")],
    to: Annotated[str, typer.Option("--to", help="Format to write; an unknown name lists all formats.")] = "coterie",
    from_: FromOption = None,
    model: TraceModelOption = None,
    num_experts: NumExpertsOption = None,
    json_output: JsonOption = False,
) -> None:
    """Convert a trace between formats; the source is never changed."""
    check_trace_target(dst, to)
    format = from_ or detect(src)
    trace = read_trace(src, format, ReadOptions(model=model, num_experts=num_experts))
    if isinstance(trace, ActivationTrace):
        trace.validate()  # a memory-mapped trace is unread so far; the error for a bad id must name the file
    written = write_trace(trace, dst, to)
    summary: dict[str, Any] = {"path": str(dst), "from": format, "to": to, "kind": kind_of(trace), **_sizes(trace)}
    if json_output:
        print_json({**summary, "left_out": list(written.left_out)})
    else:
        note = f"{to} cannot store {', '.join(written.left_out)}: left out." if written.left_out else None
        print_table("Converted", ["field", "value"], summary.items(), note)


def _sizes(trace: Trace) -> dict[str, Any]:
    if isinstance(trace, LoadTable):
        return load_sizes(trace)
    if isinstance(trace, ActivationTrace):
        return {
            "model": trace.meta.model,
            "requests": trace.num_requests,
            "tokens": trace.num_tokens,
            "layers": trace.meta.num_layers,
            "experts": trace.meta.num_experts,
            "top_k": trace.meta.top_k,
            "unfinished": trace.unfinished,
        }
    return {
        "requests": len(trace),
        "prompt_tokens": int(trace.prompt_tokens.sum()),
        "output_tokens": int(trace.output_tokens.sum()),
        "duration_s": trace.duration_s,
        "prefix_blocks": sum(map(len, trace.prefix_blocks or ())),
    }
