"""Report of a measurement: a summary per contender, changes relative to the first, notes and a verdict in words."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from coterie.answers.load.compare import Change, Contender, changes
from coterie.answers.load.measure import LoadMeasurement, LoadSettings
from coterie.answers.load.summary import Percentiles, Summary, summarise
from coterie.types import Interval

WORDS = {"ttft": "TTFT", "tpot": "TPOT", "gap": "longest gap", "e2e": "E2E"}
FAILED = {
    "refused": "refused the connection",
    "http_429": "answered 429",
    "http_4xx": "answered 4xx",
    "http_5xx": "answered 5xx",
    "reset": "reset before the first byte",
    "timeout": "timed out",
    "malformed": "malformed",
    "cut": "cut after the first byte",
}
"""Kind of failure → its description in the report."""
MOST_UNBOUND = 368
"""Fewest answers that bound p99 from above: with fewer, all are below p99 with a probability above 2.5%."""
LATE = 0.1
"""Sending delay (p99), as a share of the median TTFT or E2E, above which a note says that the client was too slow."""
HEADLINES = {
    "experts": "experts a step",
    "hit_rate": "points of hit rate",
    "ttft_mean": "mean TTFT",
    "tpot_mean": "mean TPOT",
}
"""Statistic → its words in the verdict. Only a few: among many statistics, some would differ by chance."""


class Row(NamedTuple):
    """Results of one contender."""

    name: str
    summary: Summary
    changes: list[Change]
    """Changes relative to the first contender; empty for the first."""
    experts_per_step: float | None
    """Distinct experts per layer in a decode step, mean over steps; None if step logs were not read."""
    experts_by_token: float | None
    """Distinct experts per layer, mean over tokens: steps weighted by their rows."""
    rows_per_step: float | None

    @property
    def told_apart(self) -> bool:
        """Whether a statistic of the verdict differs from the first contender's: its interval excludes 0."""
        return any(one.sure and one.statistic in HEADLINES for one in self.changes)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            **self.summary.to_json(),
            "experts_per_step": self.experts_per_step,
            "experts_by_token": self.experts_by_token,
            "rows_per_step": self.rows_per_step,
            "changes": {
                one.statistic: {"value": one.pct.mean, "low": one.pct.low, "high": one.pct.high} for one in self.changes
            },
        }


class LoadReport(NamedTuple):
    model: str
    workload: str
    paced: str
    reachable_hit_rate: float
    """Hit rate that one unlimited prefix cache would reach, counted in characters."""
    interrupted: bool
    rows: list[Row]
    notes: list[str]
    verdict: str

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "rows": [row.to_json() for row in self.rows]}


def report_of(settings: LoadSettings, measured: LoadMeasurement, interrupted: bool = False) -> LoadReport:
    """Return the report of a measurement, complete or interrupted."""
    skip = settings.warmup
    rows: list[Row] = []
    for contender in measured.contenders:
        found = summarise(contender.runs, np.random.default_rng(settings.seed), settings.targets, skip)
        against = changes(measured.contenders[0], contender, skip) if rows else []
        steps = contender.all_steps
        if steps is not None and not steps.steps.any():
            steps = None  # the workers whose logs are read made no decode step
        rows.append(
            Row(
                contender.name,
                found,
                against,
                None if steps is None else steps.experts_per_step,
                None if steps is None else steps.experts_by_token,
                None if steps is None else steps.rows_per_step,
            )
        )
    return LoadReport(
        model=measured.model,
        workload="" if measured.workload is None else measured.workload.name,
        paced=settings.paced,
        reachable_hit_rate=0.0 if measured.workload is None else measured.workload.hit_rate(skip),
        interrupted=interrupted,
        rows=rows,
        notes=_notes(rows, measured.contenders),
        verdict=_verdict(rows, settings, interrupted),
    )


def failures_of(summary: Summary) -> str:
    """Return the failures in words; empty if there were none."""
    return ", ".join(f"{count} {FAILED[kind]}" for kind, count in summary.failures.items())


def _notes(rows: list[Row], contenders: list[Contender]) -> list[str]:
    notes = []
    for row in rows:
        summary, of = row.summary, f"{row.name}: " if len(rows) > 1 else ""
        for kind, problem in summary.problems.items():
            notes.append(f"{of}{summary.failures[kind]} {FAILED[kind]}, such as: {problem}")
        typical = summary.metrics.get("ttft") or summary.metrics.get("e2e")
        if typical is not None and summary.late_p99_s > LATE * typical.p50.mean:
            notes.append(
                f"{of}this client sent requests up to {1e3 * summary.late_p99_s:.3g} ms late (p99): it was too slow "
                "for this rate, and times count that."
            )
    fewest = min((row.summary.answered for row in rows if row.summary.answered), default=MOST_UNBOUND)
    if fewest < MOST_UNBOUND:
        notes.append(f"{fewest} answers are too few to bound p99 from above; that takes {MOST_UNBOUND}.")
    if len(rows) > 1:
        pairs = [sum(len(run.outcomes) for run in one.runs) for one in contenders]
        if len(set(pairs)) > 1:
            notes.append("Contenders served different numbers of requests; changes are over those that both answered.")
    return notes


def _verdict(rows: list[Row], settings: LoadSettings, interrupted: bool) -> str:
    if not any(row.summary.requests for row in rows):
        return "Interrupted before any request was answered." if interrupted else "No request was measured."
    began = "Interrupted; what follows is of the requests so far. " if interrupted else ""
    if len(rows) == 1:
        return began + _alone(rows[0].summary, settings)
    return began + " ".join(_against(rows[0], row) for row in rows[1:])


def _alone(summary: Summary, settings: LoadSettings) -> str:
    failed = failures_of(summary)
    if not summary.answered:
        return f"None of {summary.requests} requests was answered: {failed}."
    said = f"{summary.answered} of {summary.requests} requests were answered"
    said += f" ({failed})" if failed else ""
    if "ttft" in summary.metrics:
        said += f": half had their first token within {_ms(summary.metrics['ttft'], 'p50')}"
        said += f", 99% within {_ms(summary.metrics['ttft'], 'p99')}"
        if "tpot" in summary.metrics:
            said += f"; a token then took {_ms(summary.metrics['tpot'], 'p50')} (median)"
    else:
        said += f": half within {_ms(summary.metrics['e2e'], 'p50')}, 99% within {_ms(summary.metrics['e2e'], 'p99')}"
    if settings.targets.ttft_s is not None or settings.targets.tpot_s is not None:
        said += f"; {100 * summary.within.mean:.1f}% met the targets"
    if summary.behind:
        said += (
            f". The server fell behind: {summary.offered_per_s:.3g} requests a second came, it answered "
            f"{summary.requests_per_s:.3g}, so times grow with the length of the run"
        )
    return said + "."


def _against(first: Row, row: Row) -> str:
    """Say in words which statistics changed beyond doubt, and which show no difference."""
    if not row.summary.answered or not first.summary.answered:
        none = row if not row.summary.answered else first
        failed = failures_of(none.summary)
        return f"{none.name} answered no request{failed and f': {failed}'}."
    told = {one.statistic: one for one in row.changes}
    sure, unsure = [], []
    for statistic, words in HEADLINES.items():
        change = told.get(statistic)
        if change is None:
            continue
        if change.sure:
            less = "fewer" if statistic in ("experts", "hit_rate") else "less"
            how = less if change.pct.mean < 0 else "more"
            unit = "" if statistic == "hit_rate" else "%"
            sure.append(f"{abs(change.pct.mean):.1f}{unit} {how} {words} (95% {_range(change.pct)})")
        else:
            unsure.append(words.removeprefix("points of "))
    said = f"{row.name} against {first.name}: " + (", ".join(sure) if sure else "no difference that this run can tell")
    if sure and unsure:
        said += f"; no difference in {' or '.join(unsure)} that this run can tell"
    lost = failures_of(row.summary)
    return said + (f"; {lost}" if lost else "") + "."


def _range(found: Interval) -> str:
    assert found.low is not None
    assert found.high is not None
    low, high = sorted((abs(found.low), abs(found.high)))
    return f"{low:.1f} to {high:.1f}"


def _ms(found: Percentiles, level: str) -> str:
    seconds = getattr(found, level).mean
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
