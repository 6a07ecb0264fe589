"""Predictors against the truth: how well is a request's load known before it runs?

Requests are split once, by seed: predictors are fitted on one part and scored on the other, and requests with the same
prompt stay on the same side. What is asked depends on what a trace holds (`predictors_cases`, and `predictors_model`
where a model is run); a row says what the predictor was given, under `knows` (`predictors_contenders`).
docs/predictors.md has the results in words.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from coterie.answers.suites import Column, Report, SuiteOptions, SuiteResult, SuiteTable
from coterie.predictors import PredictorScore, PrefixIndex, SimilarPrefix, score
from coterie.predictors.scoring import split_groups
from coterie.traces.readers import read_as
from coterie.traces.requests import RequestTrace
from coterie_lab.suites.predictors.cases import Case, trace_cases, trace_paths
from coterie_lab.suites.predictors.contenders import OWN_TOKENS, Contender, contenders
from coterie_lab.suites.predictors.model import model_cases
from coterie_lab.suites.predictors.traces import footprint_of

NAME = "predictors"
SERVICE = Path("requests") / "mooncake" / "conversation_trace.jsonl"
"""Real requests of a service with hashes of their prompts' blocks, without routing."""


def run(options: SuiteOptions, report: Report) -> SuiteResult:
    notes: list[str] = []
    rows: list[dict[str, Any]] = []
    loads: list[Callable[[], list[Case]]] = []
    if options.model is not None:
        loads.append(lambda: model_cases(options, report, notes))
    for path in trace_paths(options, notes):
        loads.append(lambda path=path: trace_cases(path, options, notes))  # type: ignore[misc]
    for done, load in enumerate(loads):
        report("Reading", done, len(loads))
        for case in load():
            report(f"Scoring on {case.name}", done, len(loads))
            rows += _case_rows(case, options.seed, notes)
    service = None if options.data is None or options.trace or options.model else options.data / SERVICE
    if service is not None and service.exists():
        notes.append(_alike_in_service(service))
    if rows:
        notes.append(
            f"Intervals are 95%, over test requests drawn anew. `knows: {OWN_TOKENS}` bounds what a table of tokens "
            "can do: before a request runs, no one has its output. `alike` is the share of test requests for which an "
            "earlier one that began alike was found."
        )
    return SuiteResult(NAME, rows, notes)


def _alike_in_service(file: Path) -> str:
    """How often a service's requests begin as an earlier one, as far as hashes of blocks tell."""
    trace = read_as(RequestTrace, file)
    assert trace.prefix_blocks is not None
    assert trace.block_tokens is not None
    index, threshold, hits = PrefixIndex(), SimilarPrefix().similarity, 0
    for blocks, tokens in zip(trace.prefix_blocks, trace.prompt_tokens.tolist(), strict=True):
        found = index.longest(blocks)
        hits += found is not None and min(tokens, found.tokens * trace.block_tokens) >= threshold * tokens
        index.add(blocks)
    return (
        f"{file.parent.name}: {hits / len(trace):.0%} of {len(trace):,} requests of a service share {threshold:.0%} of "
        f"their prompt with an earlier one, by blocks of {trace.block_tokens} tokens: so often would similar_prefix "
        "find one there. Its routing is not known."
    )


def _case_rows(case: Case, seed: int, notes: list[str]) -> list[dict[str, Any]]:
    # The same split for every case of a trace, and the same draws for every row.
    calibration, test = case.parts or split_groups(case.groups, np.random.default_rng(seed))
    note = f"{case.name}: {len(calibration)} requests calibrate, {len(test)} test."
    if note not in notes:
        notes.append(note)
    rows = []
    for question in case.questions:
        truth = np.stack([footprint_of(case.trace, int(r), question.truth) for r in test])
        for contender in contenders(case, question, calibration, test, seed):
            found = score(
                contender.predictor,
                contender.requests,
                truth,
                case.trace.meta.top_k,
                np.random.default_rng(seed),
                [case.groups[r] for r in test],
            )
            rows.append(_row(case.name, question.predicts, contender, found))
    return rows


def _row(trace: str, predicts: str, contender: Contender, found: PredictorScore) -> dict[str, Any]:
    return {
        "trace": trace,
        "predicts": predicts,
        "predictor": contender.name,
        "knows": contender.knows,
        "requests": found.requests,
        "cosine": found.cosine.over_requests.mean,
        "cosine_low": found.cosine.over_requests.low,
        "cosine_high": found.cosine.over_requests.high,
        "recall_top_k": found.recall_top_k.over_requests.mean,
        "recall_top_k_low": found.recall_top_k.over_requests.low,
        "recall_top_k_high": found.recall_top_k.over_requests.high,
        "recall_top_2k": found.recall_top_2k.over_requests.mean,
        "recall_top_2k_low": found.recall_top_2k.over_requests.low,
        "recall_top_2k_high": found.recall_top_2k.over_requests.high,
        "recall_16": found.recall_16.over_requests.mean,
        "recall_16_low": found.recall_16.over_requests.low,
        "recall_16_high": found.recall_16.over_requests.high,
        "hit_rate": contender.hit_rate,
        "cosine_by_layer": found.cosine.by_layer.tolist(),
        "recall_top_k_by_layer": found.recall_top_k.by_layer.tolist(),
        "published": None,
    }


_WHAT = (
    Column("trace", lambda row: row["trace"]),
    Column("predicts", lambda row: row["predicts"]),
    Column("predictor", lambda row: row["predictor"]),
    Column("knows", lambda row: row["knows"]),
)


TABLES = (
    SuiteTable(
        "Predictors against the truth",
        (
            *_WHAT,
            Column("cosine", lambda row: f"{row['cosine']:.3f}"),
            Column("95%", lambda row: f"{row['cosine_low']:.3f}–{row['cosine_high']:.3f}"),
            Column("top-k", lambda row: f"{row['recall_top_k']:.3f}"),
            Column("top-2k", lambda row: f"{row['recall_top_2k']:.3f}"),
        ),
        lambda _: True,
    ),
    SuiteTable(
        "Of the 16 experts used most, those among the 16 predicted most",
        (
            *_WHAT,
            Column("top-16", lambda row: f"{row['recall_16']:.3f}"),
            Column("95%", lambda row: f"{row['recall_16_low']:.3f}–{row['recall_16_high']:.3f}"),
            Column("alike", lambda row: "" if row["hit_rate"] is None else f"{row['hit_rate']:.0%}"),
        ),
        lambda _: True,
    ),
)
