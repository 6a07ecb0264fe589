"""Verdict of a what-if run: the best strategy, its gain, how certain the gain is, and the next command to run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.answers.verdicts import PAYS, Verdict, change, nothing_compared, opening_of, verdict_of
from coterie.types import Interval
from coterie.units import counted

NOISE_PCT = 2.0
"""Gain in percent up to which one run shows nothing: another seed changes p99 by as much."""
OVERLOAD = "judged by throughput, as more arrives than is served"
FEWEST = 32
"""Fewest recorded requests for a fleet of eight decoders: half of the requests are served, two on each decoder."""


def batches_verdict(rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], trace: Path | None) -> Verdict:
    """Return the verdict on the rows of a :class:`~coterie.answers.batches.what_if.Simulated`; `trace` was replayed."""
    base, again, where = rows[0]["strategy"], _again(settings, trace), _where(settings)
    if len(rows) < 2:
        return Verdict(nothing_compared(where, base), f"{again} --strategy all")
    overload = (settings["load"] or 0.0) > 1.0
    key = "throughput_gain_pct" if overload else "p99_reduction_pct"
    best = max(rows[1:], key=lambda row: float(row[key]))
    p99, more = change(best["p99_reduction_pct"], "p99 latency"), change(-best["throughput_gain_pct"], "throughput")
    gain, *facts = (more, f"it {p99}", OVERLOAD) if overload else (p99, f"it {more}")
    name, percent, seed = best["strategy"], Interval(best[key], None, None), f"--seed {settings['seed'] + 1}"
    opening = opening_of(percent, NOISE_PCT)
    said = verdict_of(where, percent, f"{name} {gain}", base, "no interval: one run", *facts, opening=opening)
    if opening != PAYS:
        return Verdict(said, _fleet(settings, trace) or f"{again} {seed}")
    use = "" if settings["execution"] == "spread" else " In vLLM: docs/engines/vllm.md."
    return Verdict(f"{said}{use}", f"{again} --strategy {name} {seed}")


def _where(settings: Mapping[str, Any]) -> str:
    """Say what was simulated: model, dtype, device, phase and load."""
    load, server = settings["load"], "batches timed by "
    if "model" in settings:
        server = (
            f"{settings['model']} in {settings['dtype']} on {counted(settings['ranks'], 'rank')} of "
            f"{settings['preset']}, "
        )
    return f"for {server}{settings['execution']}, " + (f"at {load:.0%} of what fcfs serves" if load else "all at once")


def _again(settings: Mapping[str, Any], trace: Path | None) -> str:
    if trace is None:
        return "coterie simulate"
    execution = "" if settings["execution"] == "spread" else f" --execution {settings['execution']}"
    return f"coterie simulate {shlex.quote(str(trace))}{execution}"


def _fleet(settings: Mapping[str, Any], trace: Path | None) -> str | None:
    """Return the command that tries routing instead of batching; None if the trace has too few answers for a fleet."""
    recorded = settings["recorded_requests"]
    if trace is None or settings["execution"] != "decode" or recorded is None or recorded < FEWEST:
        return None
    return f"coterie fleet {shlex.quote(str(trace))} --decoders 8 --in-flight {min(16, recorded // 16)}"
