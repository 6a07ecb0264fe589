"""What a what-if run comes to: which strategy pays, how much, how sure, and the command to type next."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, NamedTuple

from coterie.evaluation.simulate.what_if import BASELINE, Simulated

PAYS_PCT = 2.0
"""Gain below which one run says nothing: another seed moves p99 by as much."""


class Verdict(NamedTuple):
    sentence: str
    then: str
    """Command to type next."""


def verdict(found: Simulated, trace: Path | None) -> Verdict:
    """`trace` is the one that was replayed, if any."""
    again = _again(found, trace)
    if len(found.rows) < 2:
        return Verdict(f"Only {BASELINE} ran: there is nothing to compare it with.", f"{again} --strategy all")
    overload = (found.settings["load"] or 0.0) > 1.0
    key = "throughput_gain_pct" if overload else "p99_reduction_pct"
    best = max(found.rows[1:], key=lambda row: float(row[key]))
    gains = f"{_p99(best)} and {best['throughput_gain_pct'] + 0.0:+.1f}% throughput"
    why = " by throughput, as more arrives than is served" if overload else ""
    sure = "one run: nothing tells how sure that is"
    if best[key] < PAYS_PCT:
        said = f"No strategy pays here{why}: the best, {best['strategy']}, has {gains} against {BASELINE}; {sure}."
        return Verdict(said, _elsewhere(found, trace) or f"{again} --seed {found.settings['seed'] + 1}")
    said = f"{best['strategy']} pays most{why}: {gains} against {BASELINE}; {sure}, so repeat it with another seed."
    use = "" if found.settings["execution"] == "spread" else " In vLLM: docs/engines/vllm.md."
    return Verdict(said + use, f"{again} --strategy {best['strategy']} --seed {found.settings['seed'] + 1}")


def _p99(row: dict[str, Any]) -> str:
    cut = float(row["p99_reduction_pct"])
    return "the same p99" if abs(cut) < 0.05 else f"a p99 {abs(cut):.1f}% {'shorter' if cut > 0 else 'longer'}"


def _again(found: Simulated, trace: Path | None) -> str:
    settings = found.settings
    words = ["coterie simulate", *([shlex.quote(str(trace))] if trace is not None else [])]
    if trace is not None and settings["execution"] != "spread":
        words += ["--execution", settings["execution"]]
    return " ".join(words)


def _elsewhere(found: Simulated, trace: Path | None) -> str | None:
    """Where like requests may still pay: routing, if the recorded answers fill a fleet."""
    recorded = found.settings["recorded_requests"]
    if trace is None or found.settings["execution"] != "decode" or recorded is None or recorded < 32:
        return None
    return f"coterie fleet {shlex.quote(str(trace))} --decoders 8 --in-flight {min(16, recorded // 16)}"
