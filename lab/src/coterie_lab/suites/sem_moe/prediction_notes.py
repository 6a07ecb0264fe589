"""Notes on prediction: its rows beside the published numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coterie.models import get_model
from coterie_lab.suites.sem_moe.prediction import F1, KURTOSIS, LOOK_BACK_5, PRECISION, TEST_SHARE, Row
from coterie_lab.suites.sem_moe.token_sets import fixed_set_kurtosis
from coterie_lab.suites.shared import distinct_values


def prediction_notes(rows: Sequence[Row]) -> list[str]:
    """Compare the rows with the published numbers, in one sentence or two each."""
    notes = [
        f"Prediction: {1 - TEST_SHARE:.0%} of the requests fit, {TEST_SHARE:.0%} test; intervals are 95%, over splits. "
        "Where a trace lists token strings, as gpt-oss-20b's does, they stand for token ids. OLMoE's and Mixtral's "
        "counts have no requests: one domain fits, the others test, each in turn."
    ]
    if not any(row["part"] in ("look_back", "sets") for row in rows):
        return ["Prediction: nothing scored: set COTERIE_DATA (docs/data.md), or give a trace or a model."]
    recall = PRECISION * F1 / (2 * PRECISION - F1)
    notes.append(
        f"Token-only prediction, published: precision {PRECISION:.1%}, F1 {F1:.1%}, so recall {recall:.1%}. Sets of "
        "equal size have precision = recall: what is right must be a larger set than what is predicted, by "
        f"{PRECISION / recall:.2f} if sums are divided. Which one is not published."
    )
    notes += [_sets_note(trace, rows) for trace in distinct_values(_part(rows, "sets"), "trace")]
    notes += _kurtosis_notes(rows)
    notes += [_look_back_note(trace, rows) for trace in distinct_values(_part(rows, "look_back"), "trace")]
    return notes + [
        f"{row['trace']}, EP{row['ep']}, experts in order: {row['surer']:.1%} of activations are local on the rank "
        f"that the surer table gives, {row['tokens']:.1%} by the token's id alone, {row['contexts']:.1%} by two layers "
        f"back alone, {row['popular']:.1%} on the most popular rank; no table can pass {row['best']:.1%}."
        for row in _part(rows, "rank_tables")
    ]


def _part(rows: Sequence[Row], part: str) -> list[Row]:
    return [row for row in rows if row["part"] == part]


def _sets_note(trace: str, rows: Sequence[Row]) -> str:
    """Name the definition nearest to the published pair, over all layers and in one layer."""
    mine = [row for row in _part(rows, "sets") if row["trace"] == trace]
    own = [row for row in mine if row["predictor"] == "token_table" and row["f1"] is not None]
    base = {row["definition"]: row for row in mine if row["predictor"] == "popularity"}
    plain = next(row for row in own if row["definition"] == "occurrence")

    def away(precision: float | None, f1: float | None) -> float:
        return np.inf if precision is None or f1 is None else float(np.hypot(precision - PRECISION, f1 - F1))

    near = min(own, key=lambda row: away(row["precision"], row["f1"]))
    layers = range(len(near["f1_by_layer"]))
    pairs = ((row["precision_by_layer"][n], row["f1_by_layer"][n], n, row["definition"]) for row in own for n in layers)
    precision, f1, layer, definition = min(pairs, key=lambda pair: away(pair[0], pair[1]))
    popular = base[near["definition"]]
    known = popular["f1"] is not None
    beside = f" (most popular experts: {popular['precision']:.1%}, {popular['f1']:.1%})" if known else ""
    return (
        f"{trace}: each occurrence's k experts are hit {plain['f1']:.1%} of the time (most popular experts: "
        f"{base['occurrence']['f1']:.1%}). Nearest to the published pair is `{near['definition']}`: precision "
        f"{near['precision']:.1%}, F1 {near['f1']:.1%}{beside}; of single layers, layer {layer} by "
        f"`{definition}`: {precision:.1%}, {f1:.1%}."
    )


def _kurtosis_notes(rows: Sequence[Row]) -> list[str]:
    frequent = [row for row in _part(rows, "kurtosis") if row["min_occurrences"] == 8]
    if not frequent:
        return []
    fixed = ", ".join(
        f"{fixed_set_kurtosis(spec.num_experts, spec.top_k):.1f} for {spec.name}"
        for spec in map(get_model, ("deepseek-v2-lite", "qwen3-30b-a3b", "gpt-oss-20b"))
    )
    ours = "; ".join(
        f"{row['trace']} median {row['median']:.1f}, {row['share_above_8']:.0%} above {KURTOSIS:g} (drawn by "
        f"popularity alone: {row['by_popularity_median']:.1f}, {row['by_popularity_above_8']:.0%})"
        for row in frequent
    )
    return [
        "Kurtosis (fourth moment ÷ squared variance: a normal distribution has 3, and excess kurtosis is 3 less) of "
        f"a token's counts over a layer's experts, tokens seen at least 8 times: {ours}. Published: most above "
        f"{KURTOSIS:g}. A token that always uses the same k experts, and any token seen once, has {fixed}: on the "
        "published models a token seen once passes the bound, whatever it does next."
    ]


def _look_back_note(trace: str, rows: Sequence[Row]) -> str:
    back = {row["layers_back"]: row for row in _part(rows, "look_back") if row["trace"] == trace}
    none, two, five = back[0], back[2], back[5]
    return (
        f"{trace}, EP{five['ep']}, experts in order: the next rank is right {none['accuracy']:.1%} of the time by "
        f"popularity, {two['accuracy']:.1%} looking back at 2 layers, {five['accuracy']:.1%} at 5. Two other readings "
        f"of the published figure (about {LOOK_BACK_5:.0%} at 5): of the top-k experts {none['expert_recall']:.1%}, "
        f"{two['expert_recall']:.1%} and {five['expert_recall']:.1%} are found; and the most frequent next rank has "
        f"{five['fitted_confidence']:.1%} among the fitted tokens themselves, a share that grows even on noise."
    )
