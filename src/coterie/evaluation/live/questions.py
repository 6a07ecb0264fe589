"""Does the expert term pay, live? Two comparisons on a running Coterie gateway.

`joint`: the joint router against KV only (expert weight 0) and experts only (KV weight 0), on conversations with shared
prefixes. `experts`: routing by experts against round robin. Each router serves the same requests in interleaved blocks;
distinct experts come from the workers' own logs of steps.

The joint router's expert term asks which experts a worker *holds*. Where every worker holds all of them it is the same
for each, and can change nothing: a difference is then one of the load alone.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

from coterie.errors import check_one_of
from coterie.evaluation.load.compare import Change
from coterie.evaluation.load.measure import Keys, LoadSettings, Measured, measure
from coterie.evaluation.load.report import LoadReport, Row, report_of
from coterie.evaluation.load.run import Progress
from coterie.evaluation.load.workload import SharedPrefixes
from coterie.evaluation.runs import with_ends
from coterie.prompts import load_prompts


class Question(NamedTuple):
    workload: str
    base: str
    """Router without what is asked about."""
    asked: str
    """Router with it."""
    others: tuple[str, ...]
    """Further routers on the same requests."""
    what: str
    """What `asked` has and `base` has not."""


QUESTIONS = {
    "joint": Question("shared-prefix", "joint:experts=0", "joint", ("joint:kv=0",), "the expert term"),
    "experts": Question("prompts", "round_robin", "latency_aware", ("join_shortest_queue",), "routing by experts"),
}
LATENCIES = {"ttft_mean": "mean TTFT", "tpot_mean": "mean TPOT"}
CPU = "Reference workers compute on a CPU, which reading fewer experts speeds up less than it would a GPU."


class LiveReport(NamedTuple):
    question: str
    load: LoadReport
    answer: str
    """In a plain sentence or two."""

    def to_json(self) -> dict[str, Any]:
        return {"question": self.question, "answer": self.answer, **self.load.to_json()}


def ask_live(
    question: str,
    gateway: str,
    workers: Sequence[str],
    *,
    requests: int = 240,
    concurrency: int = 12,
    max_tokens: int = 32,
    blocks: int = 8,
    hit_rate: float = 0.75,
    pool: str | None = None,
    keys: Keys = Keys(),
    seed: int = 0,
    report: Progress | None = None,
) -> LiveReport:
    """Put one of :data:`QUESTIONS` to a gateway; `workers` are the reference workers of the pool, by URL."""
    check_one_of(QUESTIONS, question=question)
    asked = QUESTIONS[question]
    settings = LoadSettings(
        urls=(gateway,),
        workload=asked.workload,
        requests=requests,
        warmup=min(concurrency, requests),
        max_tokens=max_tokens,
        concurrency=concurrency,
        prefixes=SharedPrefixes(hit_rate=hit_rate),
        routers=(asked.base, asked.asked, *asked.others),
        pool=pool,
        blocks=blocks,
        expert_steps=tuple(workers),
        marker=secrets.token_hex(3),
        seed=seed,
    )
    measured = Measured()
    asyncio.run(measure(settings, load_prompts(), measured, keys, report))
    found = report_of(settings, measured)
    return LiveReport(question, found, answer_of(asked, found))


def answer_of(asked: Question, report: LoadReport) -> str:
    """Whether the router with it is faster, reads fewer experts, or cannot be told from the one without."""
    row = next(row for row in report.rows if row.name == asked.asked)
    told = {change.statistic: change for change in row.changes}
    experts = told.get("experts")
    faster = [_said(told[name], words) for name, words in LATENCIES.items() if _below(told.get(name))]
    slower = [_said(told[name], words) for name, words in LATENCIES.items() if _above(told.get(name))]
    against = f"{asked.asked} against {asked.base}"
    if not faster and not slower and not _below(experts) and not _above(experts):
        return f"{asked.what.capitalize()} adds nothing that this run can tell ({against}: {_all(row)})."
    said = []
    if experts is not None and (_below(experts) or _above(experts)):
        said.append(_said(experts, "experts a step"))
    said += faster + slower
    answer = f"{asked.what.capitalize()} ({against}): {', '.join(said)}."
    if _below(experts) and not faster:
        answer += f" Fewer experts did not make it faster here. {CPU}"
    if not faster and (slower or _above(experts)):
        answer += " It does not pay here."
    return answer


def _said(change: Change, words: str) -> str:
    return f"{words} {with_ends(change.pct)}%"


def _below(change: Change | None) -> bool:
    return change is not None and change.sure and change.pct.mean < 0


def _above(change: Change | None) -> bool:
    return change is not None and change.sure and change.pct.mean > 0


def _all(row: Row) -> str:
    told = {change.statistic: change for change in row.changes}
    words = {"experts": "experts a step", **LATENCIES}
    return ", ".join(_said(told[name], label) for name, label in words.items() if name in told) or "nothing measured"
