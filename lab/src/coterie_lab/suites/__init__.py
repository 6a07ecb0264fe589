"""Suites: one folder for each published system or open question; the contract is in :mod:`coterie.answers.suites`.

Declared here without being imported: help lists all suites and the options they read, and importing them takes seconds.
"""

from __future__ import annotations

from importlib import import_module

from coterie.answers.suites import Report, Suite, SuiteOptions, SuiteResult, SuiteTable


def _suite(folder: str, help: str, reads: tuple[str, ...], writes_files: bool = False) -> Suite:
    """The suite whose module `folder`.suite has `run` and `TABLES`."""
    module = f"{__name__}.{folder}.suite"

    def run(options: SuiteOptions, report: Report) -> SuiteResult:
        result: SuiteResult = import_module(module).run(options, report)
        return result

    def tables() -> tuple[SuiteTable, ...]:
        return tuple(import_module(module).TABLES)

    return Suite(help, run, tables, writes_files, reads)


ALL_TO_ALL = _suite(
    "all_to_all",
    "Local and remote experts, bytes and time of the all-to-all: formula, trace, and an article's table.",
    ("trace", "trace_format", "batch", "seed"),
)
PREDICTORS = _suite(
    "predictors",
    "How near each predictor comes to the experts that requests then used: cosine and top-k recall.",
    ("trace", "trace_format", "seed", "model", "requests"),
)
CAPS = _suite(
    "caps",
    "Batch selection by expert load, all strategies on both arrival patterns, beside CAPS's published gains.",
    ("requests", "seeds", "rates", "strategies"),
    writes_files=True,
)
REGIMES = _suite(
    "regimes",
    "Where each batch selection strategy helps, does nothing or hurts: real routing and arrivals, modelled H200.",
    ("requests", "seeds", "rates", "strategies"),
    writes_files=True,
)
MIGRATION = _suite(
    "migration",
    "Remote experts under replication, swaps and both on real routing, and replicas against KV cache, beside an "
    "article's tables.",
    ("trace", "trace_format", "batch", "seed"),
)
LATENCY_OPTIMAL = _suite(
    "latency_optimal",
    "Latency-optimal placement: balance and moves of a plan, the interval sweep, real loads that shift.",
    ("seed", "seeds"),
    writes_files=True,
)
PLACEMENT = _suite(
    "placement",
    "Placement planned for single steps against their mean, EPLB and a greedy over steps, on steps not seen before.",
    ("seeds",),
    writes_files=True,
)
ELDR = _suite(
    "eldr",
    "Expert-locality decode routing: experts a step and TPOT by router and load, the limit, the published design.",
    ("requests", "seeds", "routers"),
    writes_files=True,
)
JOINT = _suite(
    "joint",
    "Joint routing on 8 expert-parallel ranks: standard, + expert-aware, + replication, + batch scheduling, beside an "
    "article's table; and on 8 whole workers with shared prefixes, against KV only and experts only.",
    ("requests", "seeds"),
)
DRIFT = _suite(
    "drift",
    "Changing traffic under a fitted router: TPOT and experts a step with the live loop, without it, and with a fresh "
    "fit at every change.",
    ("requests", "seeds"),
)
SEM_MOE = _suite(
    "sem_moe",
    "Tokens and experts on the same rank: local activations, layer time, serving, prediction, bytes sent.",
    ("trace", "trace_format", "model", "requests", "seeds", "rates"),
    writes_files=True,
)
TOGETHER = _suite(
    "together",
    "All decisions together, on decoders and on expert-parallel groups: batching, routing, placement and when to move, "
    "one by one, in pairs and as a whole, beside the published systems.",
    ("requests", "seeds", "quick"),
    writes_files=True,
)
