"""Verdict of a what-if run: the best strategy, its gain, how certain the gain is, and the next command to run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.answers.runs import Verdict

PAYS_PCT = 2.0
"""Gain in percent below which one run shows nothing: another seed changes p99 by as much."""
FEWEST = 32
"""Fewest recorded requests for a fleet of eight decoders: half of the requests are served, two on each decoder."""


def batches_verdict(rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], trace: Path | None) -> Verdict:
    """Return the verdict on the rows of a :class:`~coterie.answers.batches.what_if.Simulated`; `trace` was replayed."""
    base, again = rows[0]["strategy"], _again(settings, trace)
    if len(rows) < 2:
        return Verdict(f"Only {base} ran: there is nothing to compare it with.", f"{again} --strategy all")
    overload = (settings["load"] or 0.0) > 1.0
    key = "throughput_gain_pct" if overload else "p99_reduction_pct"
    best = max(rows[1:], key=lambda row: float(row[key]))
    gains = f"{_p99(best)} and {round(best['throughput_gain_pct'], 1) + 0.0:+.1f}% throughput against {base}"
    why = " by throughput, as more arrives than is served" if overload else ""
    sure = "one run: nothing tells how sure that is"
    seed = f"--seed {settings['seed'] + 1}"
    if best[key] < PAYS_PCT:
        said = f"No strategy pays here{why}: the best, {best['strategy']}, has {gains}; {sure}."
        return Verdict(said, _fleet(settings, trace) or f"{again} {seed}")
    said = f"{best['strategy']} pays most{why}: {gains}; {sure}, so repeat it with another seed."
    use = "" if settings["execution"] == "spread" else " In vLLM: docs/engines/vllm.md."
    return Verdict(said + use, f"{again} --strategy {best['strategy']} {seed}")


def _p99(row: Mapping[str, Any]) -> str:
    cut = float(row["p99_reduction_pct"])
    return "the same p99" if abs(cut) < 0.05 else f"a p99 {abs(cut):.1f}% {'shorter' if cut > 0 else 'longer'}"


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
