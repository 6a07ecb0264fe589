"""Sections of an inspection, for the terminal and the page: a table, a few sentences, and for most a figure.

The sentences are built from the numbers and say what the numbers mean for serving.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from coterie.answers import figures
from coterie.answers.inspect.inspection import Inspection, best_grouping
from coterie.answers.inspect.loads import HOT_EXPERTS, LayerLoad
from coterie.answers.page import Cell, Part, Section, write_report

PUBLISHED_CORRELATION = (0.70, 0.92)
"""Range of prefill-decode correlation in published measurements."""

PAGE = "report.html"


def write_inspection(found: Inspection, folder: Path) -> list[Path]:
    """Write the report of an inspection, and return the page and the figures."""
    shown, missing = sections(found), not_there(found)
    trace = Part("The trace", found.notes, ("field", "value"), overview(found))
    last = [Part("Not in this trace", missing)] if missing else []
    title = f"Coterie inspect: {Path(found.trace).name or found.trace}"
    return write_report(folder, PAGE, title, [Part("Findings", shown), trace, *shown, *last])


def sections(found: Inspection) -> list[Section]:
    """Return the sections for which the trace has numbers, in reading order."""
    makers = (_load, _ranks, _distinct, _domains, _phases, _drift, _arrivals, _lengths)
    return [section for maker in makers if (section := maker(found)) is not None]


def overview(found: Inspection) -> list[tuple[str, Cell]]:
    """Return the rows (field, value) on the size and origin of the trace."""
    rows: list[tuple[str, Cell]] = [
        ("kind", found.kind),
        ("model", found.model),
        ("requests", found.requests),
        ("tokens", found.tokens),
        ("decode tokens", found.decode_tokens),
        ("windows", found.windows),
        ("MoE layers", None if found.layers is None else len(found.layers)),
        ("experts", found.experts),
        ("top-k", found.top_k),
        ("duration (s)", None if found.arrivals is None else round(found.arrivals.duration_s, 1)),
    ]
    return [row for row in rows if row[1] is not None]


def not_there(found: Inspection) -> list[str]:
    """Return the statistics that could not be computed, one line per reason."""
    by_reason: dict[str, list[str]] = {}
    for name, why in found.missing.items():
        by_reason.setdefault(why, []).append(name.replace("_", " "))
    return [f"{', '.join(names)}: {why}" for why, names in by_reason.items()]


def typical_layers(layers: Sequence[LayerLoad]) -> list[tuple[str, LayerLoad]]:
    """Return the first layer, and the median and worst by max ÷ mean: a table of all layers is too long to read."""
    loaded = sorted((x for x in layers if x.max_over_mean is not None), key=lambda x: x.max_over_mean or 0.0)
    if not loaded:
        return []
    return [("first", layers[0]), ("median", loaded[(len(loaded) - 1) // 2]), ("worst", loaded[-1])]


def _load(found: Inspection) -> Section | None:
    if found.load is None or not found.layers:
        return None
    typical = typical_layers(found.layers)
    rows: list[tuple[Cell, ...]] = [
        (
            which,
            str(layer.layer),
            layer.max_over_mean,
            ", ".join(f"{h.expert} ({100 * h.share:.1f}%)" for h in layer.hot),
            _percent(sum(h.share for h in layer.hot)),
        )
        for which, layer in typical
    ]
    worst = typical[-1][1]
    meaning = (
        f"In layer {worst.layer}, the most skewed, expert {worst.hot[0].expert} gets {worst.max_over_mean:.1f} times "
        "the mean load. Across ranks such experts make stragglers and are the ones to replicate; inside one GPU in "
        "decode, skew means fewer experts to stream and is no loss."
    )
    return Section(
        key="load",
        title="Load per expert",
        meaning=meaning,
        columns=(
            *("layer", "id", "max ÷ mean", "hottest experts (share of the layer)"),
            f"top {min(HOT_EXPERTS, found.experts or 0)}",
        ),
        rows=rows,
        plot=partial(figures.heat_map, found.load, _ids(found)),
        alt="Heat map of load relative to the layer's mean: a row a layer, experts sorted from hot to cold.",
    )


def _ranks(found: Inspection) -> Section | None:
    if not found.rank_imbalance:
        return None
    rows: list[tuple[Cell, ...]] = [
        (r.ranks, r.mean, r.median, r.worst, None if r.most_gain is None else _percent(r.most_gain))
        for r in found.rank_imbalance
    ]
    meaning = "Imbalance is the busiest rank's load ÷ the mean rank's: 1 is even. "
    last = found.rank_imbalance[-1]
    if last.mean is not None and last.most_gain is not None:
        meaning += (
            f"With experts laid out in order on {last.ranks} ranks it is {last.mean:.3g}, mean over layers: a better "
            f"placement or replicas can take away {_percent(last.most_gain)} at most of the MoE part of steps that are "
            "bound by compute."
        )
    shown = [r for r in found.rank_imbalance if r.ranks in (2, 8, 32)] or found.rank_imbalance[:1]
    return Section(
        key="ranks",
        title="Rank imbalance under linear placement",
        meaning=meaning,
        columns=("ranks", "imbalance, mean layer", "median layer", "worst layer", "to win at most"),
        rows=rows,
        plot=partial(
            figures.layer_lines,
            _ids(found),
            {f"{r.ranks} ranks": r.per_layer for r in shown},
            "imbalance: busiest ÷ mean rank load",
            None,
        ),
        alt="Lines of the imbalance (busiest ÷ mean rank load) of every layer, for several numbers of ranks.",
    )


def _distinct(found: Inspection) -> Section | None:
    if not found.distinct_experts or found.experts is None:
        return None
    steps = found.distinct_experts
    rows: list[tuple[Cell, ...]] = [
        (d.batch, d.uniform, d.mixed, d.same_domain, None if d.saved is None else f"{100 * d.saved:.1f}%")
        for d in steps
    ]
    best = best_grouping(steps, 1)
    series = {"requests of all domains": [d.mixed for d in steps]}
    meaning = "Decode streams every distinct expert's weights once a step, so fewer are faster. "
    if best is not None and best.saved is not None:
        series["requests of one domain"] = [d.same_domain for d in steps]
        meaning += (
            f"At batch {best.batch}, requests of one domain touch {best.same_domain:.1f} experts a layer and mixed "
            f"ones {best.mixed:.1f}: {100 * best.saved:.1f}% fewer is what grouping by domain can save."
        )
    else:
        meaning += "No domain has requests enough to compare grouped with mixed batches."
    if found.padding:
        costs = ", ".join(f"{100 * cost.share:.1f}% ({cost.batch} run as {cost.padded})" for cost in found.padding)
        meaning += f" Padding rows that no mask skips add to a step, by vLLM's prices on an H200, about {costs}."
    return Section(
        key="distinct",
        title="Distinct experts per decode step",
        meaning=meaning,
        columns=("batch", "uniform", "mixed", "same domain", "saved"),
        rows=rows,
        plot=partial(
            figures.against_batch, [d.batch for d in steps], series, [d.uniform for d in steps], found.experts
        ),
        alt="Distinct experts of a layer against batch size, beside uniform random routing.",
    )


def _domains(found: Inspection) -> Section | None:
    if found.domains is None:
        return None
    similar = found.domains
    rows: list[tuple[Cell, ...]] = []
    for i, name in enumerate(similar.domains):
        others = [(c, j) for j, c in enumerate(similar.cosine[i]) if j != i and c is not None]
        ends = [f"{similar.domains[j]} ({cosine:.2f})" for cosine, j in (max(others), min(others))] if others else None
        rows.append((name, int(similar.tokens[i]), *(ends or (None, None))))
    meaning = "The domains have no loads to compare."
    if similar.mean is not None and similar.least is not None:
        meaning = (
            f"Loads of two domains have a cosine of {similar.mean:.2f} on average and {similar.least:.2f} at least. "
            "Near 1, grouping requests by domain changes little; the lower, the more it saves, and the worse a "
            "placement made for one domain serves another."
        )
    if similar.left_out:
        smaller = "1 smaller one is" if similar.left_out == 1 else f"{similar.left_out} smaller ones are"
        meaning += f" The {len(similar.domains)} largest domains are shown, {smaller} not."
    return Section(
        key="domains",
        title="Similarity of domains",
        meaning=meaning,
        columns=("domain", "tokens", "most alike", "least alike"),
        rows=rows,
        plot=partial(figures.matrix, similar.domains, similar.cosine, "cosine of loads"),
        alt="Matrix of the cosine similarity of the domains' loads.",
        height_in=1.9 + 0.32 * len(similar.domains),
    )


def _phases(found: Inspection) -> Section | None:
    both = found.phase_correlation
    if both is None or both.pearson is None:
        return None
    known = sorted((p, i) for i, p in enumerate(both.pearson_per_layer) if p is not None)
    rows: list[tuple[Cell, ...]] = [
        ("mean", None, both.pearson),
        *((which, str(_ids(found)[i]), value) for which, (value, i) in (("lowest", known[0]), ("highest", known[-1]))),
    ]
    low, high = PUBLISHED_CORRELATION
    shown = round(both.pearson, 2)
    verdict = "within" if low <= shown <= high else "below" if shown < low else "above"
    meaning = (
        f"A request's prefill counts correlate with its decode counts at {both.pearson:.2f} ({both.requests:,} "
        f"requests), {verdict} the published {low:.2f} to {high:.2f}. The higher, the better a router can choose "
        "the decode worker from the prefill footprint; short requests lower it by noise alone."
    )
    return Section(
        key="phases",
        title="Prefill against decode",
        meaning=meaning,
        columns=("layer", "id", "correlation"),
        rows=rows,
        plot=partial(
            figures.layer_lines,
            _ids(found),
            {"Pearson": both.pearson_per_layer},
            "correlation",
            (low, high, "published"),
        ),
        alt="Line of the prefill-decode correlation of every layer, with the published range shaded.",
    )


def _drift(found: Inspection) -> Section | None:
    drift = found.drift
    if drift is None:
        return None
    picks = sorted({round(i) for i in np.linspace(0, len(drift.lag) - 1, min(8, len(drift.lag)))})
    rows: list[tuple[Cell, ...]] = [(drift.lag[i], drift.skew_left[i]) for i in picks]
    fitted = None
    if drift.half_life is not None and drift.floor is not None:
        fitted = (drift.half_life, drift.floor)
        meaning = (
            "Half of what the load will lose of its first skew is lost after "
            f"{drift.half_life:,.{'0f' if drift.half_life >= 100 else '3g'}} {drift.unit}"
            f", and {_percent(drift.floor)} of it stays. A placement planned on past load should be renewed in "
            "less than that, or not at all if moving the weights costs more than it wins."
        )
    else:
        meaning = f"No half-life: {drift.reason}."
        if drift.lag:
            meaning += " A placement planned on the start of the trace is not outdated by a steady drift within it."
    return Section(
        key="drift",
        title="Drift of the load",
        meaning=meaning,
        columns=(f"lag ({drift.unit})", "share of the first skew left"),
        rows=rows,
        plot=partial(figures.drift_curve, drift.lag, drift.skew_left, drift.unit, fitted) if drift.lag else None,
        alt="Share of the skew at the start of the trace that is left, against lag.",
    )


def _arrivals(found: Inspection) -> Section | None:
    rate = found.arrivals
    if rate is None:
        return None
    rows: list[tuple[Cell, ...]] = [
        ("mean rate (requests a second)", rate.mean),
        (f"peak rate (bins of {rate.bin_s:,.3g} s)", rate.peak),
        ("CV of gaps", rate.gap_cv),
        *((f"dispersion, {d.window_s:g} s", d.index) for d in rate.dispersion),
    ]
    meaning = f"{rate.mean:,.3g} requests a second on average, {rate.peak:,.3g} in the busiest bin. "
    if rate.dispersion:
        worst = max(rate.dispersion, key=lambda d: d.index)
        kind = "burstier than Poisson" if worst.index > 1.5 else "about as even as Poisson arrivals"
        meaning += (
            f"Counts in {worst.window_s:g} s vary {worst.index:,.3g} times as much as Poisson's: {kind}. Size for the "
            "peak, and test policies on these arrivals rather than on Poisson ones if the two differ."
        )
    else:
        meaning += "The trace is too short to say how bursty arrivals are."
    return Section(
        key="arrivals",
        title="Arrivals",
        meaning=meaning,
        columns=("number", "value"),
        rows=rows,
        plot=partial(figures.steps, rate.rate, rate.bin_s, rate.mean),
        alt="Requests a second over time.",
    )


def _lengths(found: Inspection) -> Section | None:
    rows: list[tuple[Cell, ...]] = [
        (name, x.mean, x.p50, x.p90, x.p95, x.p99, x.longest)
        for name, x in (("prompt", found.prompt_lengths), ("output", found.output_lengths))
        if x is not None
    ]
    if not rows:
        return None
    meaning = "Prompts set prefill work, outputs how long a request holds its place in the decode batch."
    if found.prefix_sharing is not None:
        shared = found.prefix_sharing
        meaning += (
            f" Of {shared.blocks:,} prompt blocks ({shared.block_tokens} tokens each), {_percent(shared.seen_before)} "
            "were seen before: what a prefix cache without limits, shared by all workers, could skip at most."
        )
    return Section("lengths", "Lengths", meaning, ("tokens", "mean", "p50", "p90", "p95", "p99", "longest"), rows)


def _ids(found: Inspection) -> list[int]:
    return [x.layer for x in found.layers or []]


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"
