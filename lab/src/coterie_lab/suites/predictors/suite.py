"""Predictors against the truth: how well is a request's load known before it runs?

Requests are split once, by seed: predictors are fitted on one part and scored on the other, and requests with the same
prompt stay on the same side. The questions depend on what a trace holds (:mod:`.cases`, and :mod:`.model` if a model is
run); a row says under `knows` what the predictor was given (:mod:`.contenders`). docs/predictors.md has the results.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from coterie.answers.suites import Column, Report, SuiteOptions, SuiteResult, SuiteTable
from coterie.predictors import PrefixIndex, SimilarPrefix
from coterie.predictors.scoring import split_groups
from coterie.traces.readers import read_as
from coterie.traces.requests import RequestTrace
from coterie_lab.suites.predictors.cases import Case, trace_cases, trace_paths
from coterie_lab.suites.predictors.contenders import OWN_TOKENS, Contender, contenders
from coterie_lab.suites.predictors.model import model_cases
from coterie_lab.suites.predictors.scores import PredictorScore, score
from coterie_lab.suites.predictors.traces import footprint_of
from coterie_lab.suites.shared import as_is, number

NAME = "predictors"
SERVICE = Path("requests") / "mooncake" / "conversation_trace.jsonl"
"""Real requests of a service with hashes of their prompts' blocks, without routing."""


def run(options: SuiteOptions, report: Report) -> SuiteResult:
    notes: list[str] = []
    rows: list[dict[str, Any]] = []
    loads: list[Callable[[], list[Case]]] = []
    if options.model is not None:
        loads.append(partial(model_cases, options, report, notes))
    loads += [partial(trace_cases, path, options, notes) for path in trace_paths(options, notes)]
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
    """Say how often a service's requests begin like an earlier one, as far as hashes of blocks show."""
    trace = read_as(RequestTrace, file)
    assert trace.prefix_blocks is not None
    assert trace.block_tokens is not None
    index, threshold, hits = PrefixIndex(), SimilarPrefix().similarity, 0
    for blocks, tokens in zip(trace.prefix_blocks, trace.prompt_tokens.tolist(), strict=True):
        match = index.longest(blocks)
        hits += match is not None and min(tokens, match.tokens * trace.block_tokens) >= threshold * tokens
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
        groups, top_k = [case.groups[r] for r in test], case.trace.meta.top_k
        for contender in contenders(case, question, calibration, test, seed):
            rng = np.random.default_rng(seed)
            result = score(contender.predictor, contender.requests, truth, top_k, rng, groups)
            rows.append(_row(case.name, question.predicts, contender, result))
    return rows


def _row(trace: str, predicts: str, contender: Contender, result: PredictorScore) -> dict[str, Any]:
    row: dict[str, Any] = {"trace": trace, "predicts": predicts, "predictor": contender.name, "knows": contender.knows}
    row["requests"] = result.requests
    for key in ("cosine", "recall_top_k", "recall_top_2k", "recall_16"):
        row[key], row[f"{key}_low"], row[f"{key}_high"] = getattr(result, key)
    return row | {"hit_rate": contender.hit_rate, "published": None}


def _ends(key: str) -> Column:
    return Column("95%", lambda row: f"{row[f'{key}_low']:.3f}–{row[f'{key}_high']:.3f}")


_WHAT = as_is("trace", "predicts", "predictor", "knows")

TABLES = (
    SuiteTable(
        "Predictors against the truth",
        (
            *_WHAT,
            Column("cosine", number("cosine", 3)),
            _ends("cosine"),
            Column("top-k", number("recall_top_k", 3)),
            Column("top-2k", number("recall_top_2k", 3)),
        ),
        lambda _: True,
    ),
    SuiteTable(
        "Of the 16 experts used most, those among the 16 predicted most",
        (
            *_WHAT,
            Column("top-16", number("recall_16", 3)),
            _ends("recall_16"),
            Column("alike", lambda row: "" if row["hit_rate"] is None else f"{row['hit_rate']:.0%}"),
        ),
        lambda _: True,
    ),
)
