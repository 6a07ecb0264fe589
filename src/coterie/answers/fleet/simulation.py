"""Simulate the gain of a decode fleet from routing, on a user's recorded requests.

Half of the recorded requests fit the routers, the other half is served; no recorded request is in flight twice. A
closed loop keeps a mean of `in_flight` requests per decoder; otherwise requests arrive at given times. Every split of
the requests is one run of all routers on the same work, so savings are computed run by run. Step times come from the
step model: results are predictions, not measurements, and hold for the recorded traffic only.

Splits serve halves of the same requests, so their savings are not independent, and intervals are corrected for it: they
are as wide as if other requests of the same traffic had been recorded. Requests are not resampled within a run, as the
time of each depends on the others in its steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from coterie.answers.fleet.bench import BASE, REQUESTS, ROOM, Bench, Halves, ServedRun, Source, bench_of, split
from coterie.answers.plan.memory import RankMemory
from coterie.answers.runs import error_bars, interval
from coterie.answers.suites import Report
from coterie.answers.verdicts import (
    NOT,
    PAYS,
    change,
    is_outweighed,
    is_recommended,
    nothing_compared,
    opening_of,
    tail_said,
    verdict_of,
)
from coterie.costs.step import StepModel, in_order
from coterie.errors import ConfigError, check, check_at_least, check_positive, refuse
from coterie.routing import Fleet, Router, RouterFit
from coterie.routing.base import routers as known_routers
from coterie.routing.calibration import calibration
from coterie.sim import FleetConfig, FleetSummary, run_fleet, summarise_fleet
from coterie.sim.fleet.front_ends import ONE, FrontEnds
from coterie.sim.fleet.requests import FleetRequests, Recordings, draw_requests, phase_recordings, split_recordings
from coterie.traces.activations import ActivationTrace
from coterie.traces.requests import RequestTrace
from coterie.types import INFINIBAND_400G, Interval

if TYPE_CHECKING:  # matplotlib takes a second to import: only to draw
    from matplotlib.figure import Figure

    from coterie.answers.figures import Theme

SHORTEST_QUEUE = "join_shortest_queue"
SPLITS = 6
FEW_REQUESTS = 200
"""Measured requests per split below which a note says that p99 is one of the two longest requests."""
LEAST_PLACES = 16
"""Smallest capacity of a decoder in requests, because arrivals are bursty."""
PROBE_PLACES = 1024
"""Capacity of a decoder in the run that finds the mean load of timed arrivals: practically no limit."""
GROWING = 1.5
"""Growth of requests in flight, second half of a run over first half, above which the fleet is overloaded."""
WAITED_SHARE = 0.02
"""Share of arrivals postponed because their recording was in flight, above which a note says so."""


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Settings of a fleet, its requests and the routers to compare."""

    decoders: int = 8
    in_flight: int = 16
    """Mean requests per decoder of a closed loop."""
    prefill: int = 0
    """Prefill workers; with 0, requests arrive at the decoders with their prompts already computed."""
    prompts: bool = False
    """Whether decoders compute the prompts as well; there are then no prefill workers."""
    kv_tokens: int | None = None
    """KV memory of a decoder in tokens, cached prefixes included; None is unbounded."""
    strategy: str | None = None
    """Batching strategy that chooses from the decoders' queues; None serves them in order."""
    routers: tuple[str, ...] | None = None
    """Routers to compare; None takes every registered router that can be made from the trace."""
    base: str = SHORTEST_QUEUE
    """Router that the others are compared with."""
    arrivals: RequestTrace | None = None
    """Requests whose arrival times and lengths are used; None keeps a closed loop, unless `rate` is given."""
    rate: float | None = None
    """Requests per second: `arrivals` scaled to this mean rate, or a Poisson process without `arrivals`."""
    places: int | None = None
    """Most requests that a decoder runs at once; None takes four times the mean (at least 16) for a choice."""
    splits: int = SPLITS
    """Number of random halvings of the recorded requests, one run each; one gives no intervals."""
    requests: int = REQUESTS
    """Requests served per split."""
    seed: int = 0
    front_ends: FrontEnds = ONE
    """Gateways that route to the fleet, and what they tell each other."""
    device_bytes: float | None = None
    """Memory of a device, for a note on the KV cache; None if unknown."""
    fitted: RouterFit | None = None
    """Saved fit to use in all splits, on halves of the requests it was not fitted on; None fits one per split."""

    def __post_init__(self) -> None:
        check_at_least(1, decoders=self.decoders, in_flight=self.in_flight, splits=self.splits, requests=self.requests)
        check_at_least(0, prefill=self.prefill, seed=self.seed)
        check_at_least(1, places=self.places, kv_tokens=self.kv_tokens)
        for name in (self.base, *(self.routers or ())):
            known_routers.check(name)
        check_positive(rate=self.rate)
        if self.fitted is not None:
            self.fitted.check_workers(self.decoders)
        least, untimed = (
            2 * self.decoders * self.in_flight,
            self.arrivals is not None and self.arrivals.arrival_s is None,
        )
        refuse(
            {
                "routers=[] must name at least one, or be left out for all": self.routers == (),
                "arrivals has no arrival times: leave it out, or give rate alone": untimed,
                f"requests={self.requests} must be at least {least}, twice what is in flight": self.closed
                and self.requests < least,
            }
        )

    @property
    def closed(self) -> bool:
        return self.arrivals is None and self.rate is None

    @property
    def names(self) -> list[str]:
        """Routers to compare, the base first."""
        return list(dict.fromkeys((self.base, *(known_routers.names() if self.routers is None else self.routers))))


class FleetRow(NamedTuple):
    """Results of one router: means over splits, and savings relative to the base router."""

    router: str
    experts_per_step: float
    """Distinct experts per layer in a token's decode step."""
    tpot_p50_ms: float
    tpot_p99_ms: float
    tpot_mean_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    saved_pct: Interval
    """Saving of the mean TPOT relative to the base router, percent; the 95% interval is corrected for overlap."""
    saved_p99_pct: Interval
    """Saving of the 99th percentile of TPOT, percent."""
    saved_experts_pct: Interval
    """Saving of distinct experts per step, percent."""

    @property
    def is_recommended(self) -> bool:
        return is_recommended(self.saved_pct, self.saved_p99_pct)


@dataclass(frozen=True, slots=True)
class FleetReport:
    """Comparison of routers on the same requests."""

    model: str
    dtype: str
    decoders: int
    in_flight: float
    """Mean requests per decoder: the setting in a closed loop, otherwise measured under the base router."""
    prefill: int
    places: int
    splits: int
    recorded: int
    """Number of recorded requests to serve; the others fitted the routers."""
    measured: int
    """Fewest requests measured in any run."""
    rows: list[FleetRow]
    """One row per router: the base router first, then the others by saving, best first."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Router that could not be made → reason."""
    notes: list[str] = field(default_factory=list)
    overlap: float = np.inf
    """Requests to serve ÷ those left out, for the intervals."""
    summaries: list[dict[str, FleetSummary]] = field(default_factory=list, repr=False)
    """[split] summary of every router's run."""

    @property
    def best(self) -> FleetRow:
        """Router that saves most of those that are recommended; of all but the base if none is."""
        return max(self.rows[1:] or self.rows, key=lambda row: (row.is_recommended, row.saved_pct.mean))

    @property
    def pays(self) -> bool:
        """Whether the best router is recommended and saves at least `WORTH_PCT`; False with one split."""
        return self.best.is_recommended and opening_of(self.best.saved_pct) == PAYS

    @property
    def verdict(self) -> str:
        """Sentence that names the best router, its saving against the base router, and the interval."""
        where = f"for {self.model} in {self.dtype} on {self.decoders} decoders, {self.in_flight:.3g} requests on each"
        if len(self.rows) < 2:
            return nothing_compared(where, self.rows[0].router)
        best = self.best
        return verdict_of(
            where,
            best.saved_pct,
            f"{best.router} {change(best.saved_pct.mean, 'mean TPOT')}",
            self.rows[0].router,
            f"no interval: {'one split' if self.splits == 1 else 'every split serves all requests'}",
            tail_said(best.saved_pct, best.saved_p99_pct),
            opening=NOT if is_outweighed(best.saved_pct, best.saved_p99_pct) else None,
        )

    def to_json(self) -> dict[str, Any]:
        rows = [
            {key: value._asdict() if isinstance(value, Interval) else value for key, value in row._asdict().items()}
            for row in self.rows
        ]
        kept = replace(self, summaries=[])
        return asdict(kept) | {"rows": rows, "verdict": self.verdict, "pays": self.pays}

    def saved(self, metric: str, router: str, base: str, other: FleetReport | None = None) -> Interval:
        """Return the percent that a router saves of a metric against `base`, in this report or in `other`.

        `other` must have served the same requests, in the same splits.
        """
        runs, others = self.summaries, (other or self).summaries
        return saved_of(metric, [run[router] for run in runs], [run[base] for run in others], self.overlap)


def saved_of(metric: str, ours: Sequence[FleetSummary], base: Sequence[FleetSummary], overlap: float) -> Interval:
    """Return the percent of a metric that runs save against others, split by split."""
    value = attrgetter(metric)
    return interval([100.0 * (1.0 - value(one) / value(other)) for one, other in zip(ours, base, strict=True)], overlap)


class _Served(NamedTuple):
    """Metrics of one router's run."""

    summary: FleetSummary
    """Summary of the measured part."""
    waited: float
    """Share of arrivals postponed because their recording was in flight."""
    growth: float
    """Mean requests in flight in the second half of the measured part, relative to the first half."""


class _Split(NamedTuple):
    served: dict[str, _Served]
    recorded: int
    overlap: float
    """Requests to serve ÷ those left out."""
    places: int
    skipped: dict[str, str]


def simulate_fleet(
    trace: ActivationTrace,
    model: StepModel,
    settings: FleetSettings,
    report: Report = lambda *_: None,
    source: Source | None = None,
) -> FleetReport:
    """Simulate the trace's requests under each router, once per split; `source` is the trace, counted already."""
    spec, meta = model.spec, trace.meta
    check(
        (meta.num_layers, meta.num_experts) == (spec.num_moe_layers, spec.num_experts),
        f"the trace has {meta.num_layers} layers of {meta.num_experts} experts; {spec.name} has "
        f"{spec.num_moe_layers} MoE layers of {spec.num_experts}: name the model it was recorded on",
    )
    if source is None:
        report("Counting requests", 0, settings.splits)
        source = Source(trace, calibration(trace))
    runs: list[_Split] = []
    for number in range(settings.splits):
        runs.append(_run(source, model, settings, settings.seed + number))
        report("Serving", len(runs), settings.splits)
    served = [run.served for run in runs]
    summaries = [{name: one.summary for name, one in run.items()} for run in served]
    everyone = [one for run in served for one in run.values()]
    rows = [_row(name, settings.base, summaries, runs[0].overlap) for name in settings.names if name in served[0]]
    loads = [run[settings.base].summary.worker_in_flight.mean() for run in served]
    return FleetReport(
        model=model.spec.name,
        dtype=model.dtype,
        decoders=settings.decoders,
        in_flight=settings.in_flight if settings.closed else float(np.mean(loads)),
        prefill=settings.prefill,
        places=runs[0].places,
        splits=settings.splits,
        recorded=runs[0].recorded,
        measured=min(one.summary.requests for one in everyone),
        rows=rows[:1] + sorted(rows[1:], key=lambda row: -row.saved_pct.mean),
        skipped=runs[0].skipped,
        notes=_notes(source, model, settings, everyone, runs[0].overlap),
        overlap=runs[0].overlap,
        summaries=summaries,
    )


def _run(source: Source, model: StepModel, settings: FleetSettings, seed: int) -> _Split:
    halves = split(source, seed) if settings.fitted is None else _unseen(source, settings.fitted, settings, seed)
    cut = split_recordings if source.counts.halved else phase_recordings
    recordings = cut(source.trace, halves.test)
    most = settings.decoders * settings.in_flight
    if settings.closed and most > len(recordings):
        rest = "half of the trace has" if settings.fitted is None else "those that the router was not fitted on are"
        raise ConfigError(
            f"decoders={settings.decoders} x in_flight={settings.in_flight} need as many recorded requests to serve; "
            f"{rest} {len(recordings)}: record more, or ask for fewer in flight"
        )
    rng = np.random.default_rng([seed, 2])
    requests = None if settings.closed else _timed(recordings, settings, rng)
    per_decoder = settings.in_flight if requests is None else _mean_load(requests, model, settings)
    bench = bench_of(
        source,
        halves,
        recordings,
        settings.decoders,
        per_decoder,
        seed,
        settings.requests,
        model,
        in_order(model),
        settings.fitted,
    )
    config = _config(settings, settings.places or max(LEAST_PLACES, ROOM * per_decoder))
    bench = replace(bench, config=config, strategy=settings.strategy)
    if requests is not None:
        bench = replace(bench, requests=requests, in_flight=None)
    chosen, skipped = _routers(bench, settings)
    served = {one.router: _metrics(one) for one in bench.runs(chosen) if one.router in chosen}
    left_out = len(source.counts.requests) - len(halves.test) - (len(halves.fit) if settings.fitted else 0)
    overlap = len(halves.test) / left_out if left_out > 0 else np.inf
    return _Split(served, len(recordings), overlap, bench.config.places, skipped)


def _unseen(source: Source, fitted: RouterFit, settings: FleetSettings, seed: int) -> Halves:
    """Return the requests that the router was fitted on, and those to serve.

    Half of the others are served, or as many as must be in flight and a quarter more; all if there is one split.
    """
    counts, learned = source.counts, fitted.learned
    check(
        (learned.num_layers, learned.num_experts) == counts.prefill.shape[1:],
        f"the router was fitted for {learned.model}, {learned.num_layers} layers of {learned.num_experts} experts; "
        f"the trace has {counts.prefill.shape[1]} of {counts.prefill.shape[2]}",
    )
    known = np.isin(counts.digests, [] if learned.seen is None else learned.seen)
    check(not known.all(), "the router was fitted on every request of this trace: none is left to serve")
    order = np.random.default_rng([seed, 0]).permutation(counts.requests[~known])
    least = settings.decoders * settings.in_flight * 5 // 4 if settings.closed else 1
    served = len(order) if settings.splits == 1 else max(len(order) // 2, least)
    return Halves(counts.requests[known], np.sort(order[:served]))


def _timed(recordings: Recordings, settings: FleetSettings, rng: np.random.Generator) -> FleetRequests:
    """Draw requests with the arrival times of `arrivals`, or of a Poisson process."""
    if settings.arrivals is not None:
        return draw_requests(recordings, settings.requests, rng, settings.arrivals.in_order(), settings.rate)
    assert settings.rate is not None
    times = np.cumsum(rng.exponential(1.0 / settings.rate, settings.requests))
    return replace(draw_requests(recordings, settings.requests, rng), arrival_s=times - times[0])


def _config(settings: FleetSettings, places: int) -> FleetConfig:
    return FleetConfig(
        decode_workers=settings.decoders,
        prefill_workers=settings.prefill,
        both=settings.prompts,
        places=places,
        kv_tokens=settings.kv_tokens,
        link=INFINIBAND_400G if settings.prefill else None,
        front_ends=settings.front_ends,
    )


def _mean_load(requests: FleetRequests, model: StepModel, settings: FleetSettings) -> int:
    """Return the mean requests per decoder under round robin, with practically unlimited capacity."""
    run = run_fleet(
        requests,
        model,
        known_routers.make(BASE),
        _config(settings, PROBE_PLACES),
        fleet=Fleet([PROBE_PLACES] * settings.decoders),
        placement=in_order(model),
        duplicates="postpone",
    )
    return max(1, round(float(summarise_fleet(run).worker_in_flight.mean())))


def _routers(bench: Bench, settings: FleetSettings) -> tuple[dict[str, Router], dict[str, str]]:
    chosen: dict[str, Router] = {}
    skipped: dict[str, str] = {}
    for name in settings.names:
        try:
            chosen[name] = bench.router(name)
        except ConfigError as error:
            if settings.routers is not None or name == settings.base:
                raise
            skipped[name] = str(error)
    return chosen, skipped


def _metrics(served: ServedRun) -> _Served:
    run, (since_s, until_s) = served.run, served.window
    middle_s = (since_s + until_s) / 2
    whole, before, after = (
        summarise_fleet(run, since_s=since, until_s=until)
        for since, until in ((since_s, until_s), (since_s, middle_s), (middle_s, until_s))
    )
    growth = after.mean_in_flight / max(before.mean_in_flight, 1e-9)
    return _Served(whole, run.postponed / len(run.arrival_s), growth)


def _row(name: str, base: str, runs: Sequence[dict[str, FleetSummary]], overlap: float) -> FleetRow:
    def mean(metric: str) -> float:
        return float(np.mean([attrgetter(metric)(run[name]) for run in runs]))

    def saved(metric: str) -> Interval:
        return saved_of(metric, [run[name] for run in runs], [run[base] for run in runs], overlap)

    return FleetRow(
        router=name,
        experts_per_step=mean("distinct_by_token"),
        tpot_p50_ms=mean("tpot.p50"),
        tpot_p99_ms=mean("tpot.p99"),
        tpot_mean_ms=mean("tpot.mean"),
        ttft_p50_ms=mean("ttft.p50"),
        ttft_p99_ms=mean("ttft.p99"),
        saved_pct=saved("tpot.mean"),
        saved_p99_pct=saved("tpot.p99"),
        saved_experts_pct=saved("distinct_by_token"),
    )


def _notes(
    source: Source, model: StepModel, settings: FleetSettings, runs: Sequence[_Served], overlap: float
) -> list[str]:
    fitted, waited = settings.fitted, max(run.waited for run in runs)
    notes = {
        "95% intervals are for other requests of this traffic, other fits and other orders; they are corrected for the "
        "overlap of splits. They do not cover other traffic or the error of predicted times.": settings.splits > 1,
        "No intervals: every split serves all requests, as so many must be in flight.": (
            settings.splits > 1 and np.isinf(overlap)
        ),
        model.caveat: bool(model.caveat),
        _memory(source.trace, model, settings): settings.device_bytes is not None,
        "The trace has one phase: the first half of a request stands for its prompt.": source.counts.halved,
        "The router's file does not say which requests it was fitted on: savings may look too good.": (
            fitted is not None and fitted.learned.seen is None
        ),
        "The router was fitted once: the intervals do not cover other fits.": fitted is not None,
        f"The router was fitted for {fitted and fitted.batch} requests on a decoder.": (
            fitted is not None and settings.closed and fitted.batch != settings.in_flight
        ),
        f"Fewer than {FEW_REQUESTS} requests were measured in a split: p99 is that of one or two of them.": (
            min(run.summary.requests for run in runs) < FEW_REQUESTS
        ),
        f"{waited:.0%} of arrivals waited because their recording was in flight: the trace has too few requests "
        "for this rate.": not settings.closed and waited > WAITED_SHARE,
        "Requests in flight grow during the run: this fleet cannot keep up with this rate.": (
            not settings.closed and max(run.growth for run in runs) > GROWING
        ),
        "TTFT is from handoff to the first decoded token: prompts are not computed without prefill workers.": (
            not settings.prefill and not settings.prompts
        ),
    }
    return [note for note, holds in notes.items() if holds]


def _memory(trace: ActivationTrace, model: StepModel, settings: FleetSettings) -> str:
    """Say how many requests' KV cache a decoder holds, and how many a replica would displace."""
    spec, ranks = model.spec, model.topology.num_ranks
    memory = RankMemory(spec, model.dtype, spec.num_experts, ranks, settings.device_bytes)
    tokens = float((trace.requests.prompt_tokens + trace.requests.output_tokens).mean())
    return (
        f"Memory: a decoder holds the KV cache of about {ranks * (memory.kv_tokens or 0) / tokens:,.0f} requests of "
        f"{tokens:,.0f} tokens; a replica of an expert, in all layers, takes that of "
        f"{memory.replica_kv_tokens / tokens:.3g}."
    )


def draw_fleets(reports: Sequence[FleetReport], figure: Figure, theme: Theme) -> None:
    """Draw the savings of mean and p99 TPOT: two bars per router, a panel per weight dtype."""
    panels = np.atleast_1d(figure.subplots(len(reports), 1, sharex=True))
    for axes, report in zip(panels, reports, strict=True):
        rows = sorted(report.rows[1:], key=lambda row: row.saved_pct.mean)
        at = np.arange(len(rows))
        for offset, color, label, key in (
            (0.18, theme.series[0], "mean TPOT", "saved_pct"),
            (-0.18, theme.series[1], "p99 of TPOT", "saved_p99_pct"),
        ):
            values = [getattr(row, key) for row in rows]
            means = [value.mean for value in values]
            axes.barh(at + offset, means, 0.34, color=color, label=label)
            if (spread := error_bars(values)) is not None:
                axes.errorbar(means, at + offset, xerr=spread, color=theme.text, ls="none", lw=1)
        axes.set_yticks(at, [row.router for row in rows])
        axes.tick_params(axis="y", colors=theme.text, length=0)
        axes.axvline(0, color=theme.muted, lw=0.8)
        axes.grid(axis="x")
        axes.set_title(
            f"{report.model} in {report.dtype}: {report.decoders} decoders, {report.in_flight:.3g} requests on each",
            loc="left",
        )
    sure = " (95%)" if reports[0].splits > 1 else ""
    panels[-1].set_xlabel(f"% less than {reports[0].rows[0].router}{sure}")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=2, fontsize=9)
