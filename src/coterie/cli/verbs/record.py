"""``coterie record``: record the experts of real tokens, from a model run on this machine or from a running server."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from coterie.cli.files import trace_summary
from coterie.cli.output import JsonOption, err, print_json, print_table, print_verdict, reporting, shell
from coterie.errors import TraceError, check_known, refuse
from coterie.prompts import load_prompts, read_prompts, take_in_turn

if TYPE_CHECKING:
    from coterie.engines.recording import Sending
    from coterie.traces import ActivationTrace, LoadTable

BUNDLED = "bundled"
ENGINES = ("transformers", "vllm", "sglang")
PER_DECODER = 64
"""Requests to record per simulated decoder: 16 in flight, 16 that replace them, and 32 more to fit a router on."""


def record_command(
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write the trace to.")],
    engine: Annotated[
        str,
        typer.Option(
            help="transformers runs the model on this machine; vllm (also for coterie worker) and sglang record a "
            "running server."
        ),
    ] = ("transformers"),
    model: Annotated[
        str, typer.Option(help="Checkpoint folder, or coterie-tiny, which ships with the package (transformers).")
    ] = ("coterie-tiny"),
    prompts: Annotated[
        str | None,
        typer.Option(
            help="Prompts to send: .txt (one per line), .jsonl or .csv; 'bundled' for the shipped ones. Default: "
            "shipped prompts (transformers), or none: only record the server's own traffic (vllm, sglang)."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Largest number of tokens to generate per prompt.")] = 64,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per batch (transformers).")] = 8,
    dtype: Annotated[
        str, typer.Option(help="Precision of the weights: float32, float16, bfloat16 or nf4 (transformers).")
    ] = "float32",
    device: Annotated[str, typer.Option(help="Device to run on: cpu, cuda or cuda:N (transformers).")] = "cpu",
    gate_weights: Annotated[
        bool, typer.Option("--gate-weights", help="Also record the gate weights of the chosen experts.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use at most this many prompts, taken from the domains in turn.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy (transformers).")
    ] = 0.0,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed for the order of batches and for sampling (transformers).")
    ] = 0,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Apply the model's chat template, or not. Default: if it has one."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted recording.")] = False,
    url: Annotated[str | None, typer.Option(help="Address of the server (vllm, sglang).")] = None,
    events: Annotated[str | None, typer.Option(help="ZMQ endpoint of the server's expert events (vllm).")] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds to record (vllm, sglang).")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests to keep in flight (vllm, sglang).")] = 8,
    json_output: JsonOption = False,
) -> None:
    """Record which experts the tokens of real requests activate, in prefill and in decode."""
    check_known("engine", engine, ENGINES)
    served = engine != "transformers"
    asked = {"url": url, "events": events, "duration": duration}
    refuse(
        {
            **{
                f"--{name} is for a server; engine transformers runs the model itself": not served and value is not None
                for name, value in asked.items()
            },
            f"--events={events!r}: SGLang publishes no expert events; they are for engine vllm": engine == "sglang"
            and events is not None,
            f"--resume is for engine transformers; a recording of {engine} cannot be continued": served and resume,
            f"engine {engine} needs --url: the address of the server": served and url is None,
        }
    )
    texts = [] if prompts is None else load_prompts() if prompts == BUNDLED else read_prompts(prompts)
    texts = texts or ([] if served else load_prompts())
    texts = texts if limit is None else take_in_turn(texts, limit)
    started = time.perf_counter()
    try:
        with reporting("Starting") as report:
            if url is not None:
                from coterie.engines.recording import Sending

                sending = Sending(texts or (), duration, concurrency, max_tokens, chat is not False, report)
                trace, counts = _record_server(engine, url, output, sending, events)
            else:
                from coterie.engines.tiny import TINY, tiny_model_path
                from coterie.engines.transformers.recording import RecordingSettings, record

                settings = RecordingSettings(
                    max_tokens=max_tokens,
                    batch_size=batch_size,
                    dtype=dtype,
                    device=device,
                    gate_weights=gate_weights,
                    temperature=temperature,
                    seed=seed,
                    chat=chat,
                )
                checkpoint = tiny_model_path() if model == TINY and not Path(TINY).is_dir() else Path(model)
                done = record(checkpoint, texts, output, settings, resume=resume, on_progress=report)
                trace, counts = done.trace, {"kept": done.kept}
    except (KeyboardInterrupt, OSError):  # the latter of a full disk
        _print_kept(output, engine)
        raise
    summary = {"engine": engine, **trace_summary(output, trace), **counts, "wall_s": time.perf_counter() - started}
    verdict, then = _verdict(output, trace)
    if json_output:
        print_json({**summary, "verdict": verdict, "next": then})
    else:
        print_table("Recorded", ["field", "value"], list(summary.items()))
        print_verdict(verdict, then)


def _verdict(output: Path, trace: ActivationTrace | LoadTable) -> tuple[str, str]:
    """Say what was recorded and whether it suffices to simulate a fleet; return that and the next command to run."""
    from coterie.traces import LoadTable

    if isinstance(trace, LoadTable):
        said = f"Recorded the load of {len(trace):,} windows, without requests: enough to plan where experts live."
        return said, shell("coterie", "plan", output)
    said = f"Recorded {trace.num_requests:,} requests, {trace.num_tokens:,} tokens"
    decoders = min(trace.num_requests // PER_DECODER, 8)
    if decoders < 2:
        return (
            f"{said}: too few to tell what a fleet would gain (at least {2 * PER_DECODER} requests, for two decoders).",
            shell("coterie", "inspect", output),
        )
    return (
        f"{said}: enough to tell what a fleet of {decoders} decoders would gain.",
        shell("coterie", "fleet", output, "--decoders", decoders),
    )


def _record_server(
    engine: str, url: str, output: Path, sending: Sending, events: str | None
) -> tuple[ActivationTrace | LoadTable, dict[str, int]]:
    """Record a server; return the trace, and the numbers of failed requests and lost messages."""
    if engine == "sglang":
        from coterie.engines.sglang.recording import record_sglang

        loads = record_sglang(url, output, sending)
        return loads.trace, {"failed": loads.tally.failed}
    from coterie.engines.vllm.recording import record_vllm

    done = record_vllm(url, output, sending, events=events)
    return done.trace, {"failed": done.tally.failed, "lost_messages": done.lost, "without_ids": done.unknown}


def _print_kept(output: Path, engine: str) -> None:
    from coterie.traces import ActivationTrace

    try:
        kept = ActivationTrace.open(output).num_requests
    except (TraceError, OSError):
        return  # ended before anything was written
    on = "; repeat the command with --resume to continue" if engine == "transformers" else ""
    err.print(escape(f"{output} holds {kept} requests{on}"), highlight=False, soft_wrap=True)
