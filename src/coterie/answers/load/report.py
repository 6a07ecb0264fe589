"""Report of a measurement: a summary per contender, changes relative to the first, notes, a verdict and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.answers.load.client import METRICS
from coterie.answers.load.measure import LoadMeasurement, LoadSettings
from coterie.answers.load.run import Change, Contender, changes
from coterie.answers.load.summary import Percentiles, Summary, summarise, values_of

if TYPE_CHECKING:  # matplotlib takes a second to import: only to draw
    from matplotlib.figure import Figure

    from coterie.answers.figures import Theme

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
HEADLINES = {"hit_rate": "points of hit rate", "ttft_mean": "mean TTFT", "tpot_mean": "mean TPOT"}
"""Statistic → its words in the verdict. Only a few: among many statistics, some would differ by chance."""


class Row(NamedTuple):
    """Results of one contender."""

    name: str
    summary: Summary
    changes: list[Change]
    """Changes relative to the first contender; empty for the first."""

    @property
    def told_apart(self) -> bool:
        """Whether a statistic of the verdict differs from the first contender's: its interval excludes 0."""
        return any(one.sure and one.statistic in HEADLINES for one in self.changes)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            **self.summary.to_json(),
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
        summary = summarise(contender.runs, np.random.default_rng(settings.seed), settings.targets, skip)
        against = changes(measured.contenders[0], contender, skip) if rows else []
        rows.append(Row(contender.name, summary, against))
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
        notes += [
            f"{of}{summary.failures[kind]} {FAILED[kind]}, such as: {problem}"
            for kind, problem in summary.problems.items()
        ]
        typical = summary.metrics.get("ttft") or summary.metrics.get("e2e")
        if typical is not None and summary.late_p99_s > LATE * typical.p50.mean:
            notes.append(
                f"{of}this client sent requests up to {1e3 * summary.late_p99_s:.3g} ms late (p99): it was too slow "
                "for this rate, and times count that."
            )
    fewest = min((row.summary.answered for row in rows if row.summary.answered), default=MOST_UNBOUND)
    if fewest < MOST_UNBOUND:
        notes.append(f"{fewest} answers are too few to bound p99 from above; that takes {MOST_UNBOUND}.")
    if len({sum(len(run.outcomes) for run in one.runs) for one in contenders}) > 1:
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
    times = {name: (_ms(found, "p50"), _ms(found, "p99")) for name, found in summary.metrics.items()}
    if "ttft" in times:
        said = "half had their first token within {}, 99% within {}".format(*times["ttft"])
        said += f"; a token then took {times['tpot'][0]} (median)" if "tpot" in times else ""
    else:
        said = "half within {}, 99% within {}".format(*times["e2e"])
    met = f"; {100 * summary.within.mean:.1f}% met the targets" if settings.targets != (None, None) else ""
    behind = (
        f". The server fell behind: {summary.offered_per_s:.3g} requests a second came, it answered "
        f"{summary.requests_per_s:.3g}, so times grow with the length of the run"
        if summary.behind
        else ""
    )
    answered = f"{summary.answered} of {summary.requests} requests were answered"
    return f"{answered}{failed and f' ({failed})'}: {said}{met}{behind}."


def _against(first: Row, row: Row) -> str:
    """Say in words which statistics changed beyond doubt, and which show no difference."""
    if not row.summary.answered or not first.summary.answered:
        none = row if not row.summary.answered else first
        failed = failures_of(none.summary)
        return f"{none.name} answered no request{failed and f': {failed}'}."
    known = {one.statistic: one for one in row.changes}
    sure, unsure = [], []
    for change, words in [(known[name], words) for name, words in HEADLINES.items() if name in known]:
        if change.sure:
            less = "fewer" if change.statistic == "hit_rate" else "less"
            how = less if change.pct.mean < 0 else "more"
            unit = "" if change.statistic == "hit_rate" else "%"
            low, high = sorted(abs(end or 0.0) for end in (change.pct.low, change.pct.high))
            sure.append(f"{abs(change.pct.mean):.1f}{unit} {how} {words} (95% {low:.1f} to {high:.1f})")
        else:
            unsure.append(words.removeprefix("points of "))
    said = f"{row.name} against {first.name}: " + (", ".join(sure) if sure else "no difference that this run can tell")
    if sure and unsure:
        said += f"; no difference in {' or '.join(unsure)} that this run can tell"
    lost = failures_of(row.summary)
    return f"{said}{lost and f'; {lost}'}."


def _ms(times: Percentiles, level: str) -> str:
    seconds = getattr(times, level).mean
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


_TICKS = (0.0, 0.5, 0.9, 0.99, 0.999, 0.9999)


def draw_load(contenders: Sequence[Contender], skip: int, figure: Figure, theme: Theme) -> None:
    """Draw one panel per metric: time against the percentile of requests, with the tail stretched."""
    from coterie.answers.figures import short

    answered = [
        [one for run in contender.runs for one in run.outcomes if one.request >= skip and one.failure is None]
        for contender in contenders
    ]
    shown = {name: [values_of(outcomes, name) for outcomes in answered] for name in METRICS if name != "gap"}
    shown = {name: values for name, values in shown.items() if any(map(len, values))}
    panels = np.atleast_1d(figure.subplots(1, max(1, len(shown))))
    for axes, (name, series) in zip(panels, shown.items(), strict=False):
        most = max(map(len, series))
        for index, (contender, values) in enumerate(zip(contenders, series, strict=True)):
            if len(values):
                shares = np.arange(len(values)) / len(values)
                color, style = theme.series[index % len(theme.series)], ("-", "--", ":")[index // len(theme.series) % 3]
                label = short(contender.name)
                axes.plot(_stretched(shares), 1e3 * np.sort(values), style, color=color, label=label)
        ticks = [tick for tick in _TICKS if (1 - tick) * most >= 1 or tick <= 0.5]
        axes.set_xticks(_stretched(np.array(ticks)), [f"{100 * tick:g}" for tick in ticks])
        axes.set(title=WORDS[name], xlabel="% of requests", ylim=(0, None))
        axes.grid(True)
    panels[0].set_ylabel("ms, at most")
    if len(contenders) > 1 and shown:
        figure.legend(
            *panels[0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=min(4, len(contenders)),
            fontsize=9,
        )


def _stretched(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return -log10(1 - share), so that each further 9 of 99.9…% takes the same width."""
    return np.asarray(-np.log10(1 - np.minimum(shares, 1 - 1e-9)), np.float64)
