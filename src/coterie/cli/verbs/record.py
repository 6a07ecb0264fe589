"""``coterie record``: record the experts of real tokens, from a model run on this machine or from a running server."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.markup import escape

from coterie.cli.output import JsonOption, err, print_json, print_table, print_verdict, reporting, shell
from coterie.errors import ConfigError, TraceError, UnknownNameError
from coterie.prompts import Prompt, load_prompts, read_prompts, take_in_turn

if TYPE_CHECKING:
    from coterie.engines.recording import Sending
    from coterie.traces import ActivationTrace, LoadTable

BUNDLED = "bundled"
PER_DECODER = 64
"""Requests to record per simulated decoder: 16 in flight, 16 that replace them, and 32 more to fit a router on."""

Progress = Callable[[str, int, int], None]


class _Asked(NamedTuple):
    """Values of the command line; each engine reads some of them."""

    model: str
    prompts: str | None
    out: Path
    limit: int | None
    max_tokens: int
    batch_size: int
    dtype: str
    device: str
    gate_weights: bool
    temperature: float
    seed: int
    chat: bool | None
    resume: bool
    url: str | None
    events: str | None
    duration_s: float | None
    concurrency: int


class _Done(NamedTuple):
    trace: ActivationTrace | LoadTable
    counts: dict[str, int]
    """Counts reported by the engine: requests kept from an earlier recording, failed requests, lost messages."""


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
    if engine not in _ENGINES:
        raise UnknownNameError("engine", engine, _ENGINES)
    asked = _Asked(
        model=model,
        prompts=prompts,
        out=output,
        limit=limit,
        max_tokens=max_tokens,
        batch_size=batch_size,
        dtype=dtype,
        device=device,
        gate_weights=gate_weights,
        temperature=temperature,
        seed=seed,
        chat=chat,
        resume=resume,
        url=url,
        events=events,
        duration_s=duration,
        concurrency=concurrency,
    )
    from coterie.cli.summaries import trace_summary

    started = time.perf_counter()
    try:
        with reporting("Starting") as report:
            done = _ENGINES[engine](asked, report)
    except KeyboardInterrupt:
        _print_kept(asked, engine)
        raise
    summary = {
        "engine": engine,
        **trace_summary(output, done.trace),
        **done.counts,
        "wall_s": time.perf_counter() - started,
    }
    verdict, then = _verdict(output, done.trace)
    if json_output:
        print_json({**summary, "verdict": verdict, "next": then})
        return
    print_table("Recorded", ["field", "value"], list(summary.items()))
    print_verdict(verdict, then)


def _verdict(output: Path, trace: ActivationTrace | LoadTable) -> tuple[str, str]:
    """Say what was recorded and whether it suffices to simulate a fleet; return that and the next command to run."""
    from coterie.traces import LoadTable

    if isinstance(trace, LoadTable):
        said = f"Recorded the load of {len(trace):,} windows, without requests: enough to plan where experts live."
        return said, shell("coterie", "plan", output)
    said = f"Recorded {trace.num_requests:,} requests, {trace.num_tokens:,} tokens"
    decoders = trace.num_requests // PER_DECODER
    if decoders < 2:
        return (
            f"{said}: too few to tell what a fleet would gain (at least {2 * PER_DECODER} requests, for two decoders).",
            shell("coterie", "inspect", output),
        )
    decoders = min(decoders, 8)
    return (
        f"{said}: enough to tell what a fleet of {decoders} decoders would gain.",
        shell("coterie", "fleet", output, "--decoders", decoders),
    )


def _transformers(asked: _Asked, report: Progress) -> _Done:
    from coterie.engines.tiny import TINY, tiny_model_path
    from coterie.engines.transformers.recording import RecordingSettings, record

    for name in ("url", "events", "duration_s"):
        if getattr(asked, name) is not None:
            raise ConfigError(f"--{name.removesuffix('_s')} is for a server; engine transformers runs the model itself")
    settings = RecordingSettings(
        max_tokens=asked.max_tokens,
        batch_size=asked.batch_size,
        dtype=asked.dtype,
        device=asked.device,
        gate_weights=asked.gate_weights,
        temperature=asked.temperature,
        seed=asked.seed,
        chat=asked.chat,
    )
    prompts = _prompts(asked) or _limited(load_prompts(), asked.limit)
    model = tiny_model_path() if asked.model == TINY and not Path(TINY).is_dir() else Path(asked.model)
    done = record(model, prompts, asked.out, settings, resume=asked.resume, on_progress=report)
    return _Done(done.trace, {"kept": done.kept})


def _vllm(asked: _Asked, report: Progress) -> _Done:
    from coterie.engines.vllm.recording import record_vllm

    done = record_vllm(_url(asked, "vllm"), asked.out, _sending(asked, report), events=asked.events)
    return _Done(done.trace, {"failed": done.tally.failed, "lost_messages": done.lost, "without_ids": done.unknown})


def _sglang(asked: _Asked, report: Progress) -> _Done:
    from coterie.engines.sglang.recording import record_sglang

    if asked.events is not None:
        raise ConfigError(f"--events={asked.events!r}: SGLang publishes no expert events; they are for engine vllm")
    done = record_sglang(_url(asked, "sglang"), asked.out, _sending(asked, report))
    return _Done(done.trace, {"failed": done.tally.failed})


_ENGINES: dict[str, Callable[[_Asked, Progress], _Done]] = {
    "transformers": _transformers,
    "vllm": _vllm,
    "sglang": _sglang,
}


def _url(asked: _Asked, engine: str) -> str:
    if asked.resume:
        raise ConfigError(f"--resume is for engine transformers; a recording of {engine} cannot be continued")
    if asked.url is None:
        raise ConfigError(f"engine {engine} needs --url: the address of the server")
    return asked.url


def _sending(asked: _Asked, report: Progress) -> Sending:
    from coterie.engines.recording import Sending

    return Sending(
        prompts=_prompts(asked) or (),
        duration_s=asked.duration_s,
        concurrency=asked.concurrency,
        max_tokens=asked.max_tokens,
        chat=asked.chat is not False,
        report=report,
    )


def _prompts(asked: _Asked) -> list[Prompt] | None:
    if asked.prompts is None:
        return None
    found = load_prompts() if asked.prompts == BUNDLED else read_prompts(asked.prompts)
    return _limited(found, asked.limit)


def _limited(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    return prompts if limit is None else take_in_turn(prompts, limit)


def _print_kept(asked: _Asked, engine: str) -> None:
    from coterie.traces import ActivationTrace

    try:
        kept = ActivationTrace.open(asked.out).num_requests
    except (TraceError, OSError):
        return  # interrupted before anything was written
    on = "; repeat the command with --resume to continue" if engine == "transformers" else ""
    err.print(escape(f"{asked.out} holds {kept} requests{on}"), highlight=False, soft_wrap=True)
