"""Semantic parallelism (Sem-MoE): tokens and experts on the same rank, from the table to the collective.

    locality      local activation rate and imbalance on unseen requests, by planner, schedule and number of ranks
    layer_time, layer_saving          a MoE layer against the rate, by phase and link: where fewer bytes pay
    serving       throughput within latency limits, attention data parallel
    latency       TTFT and E2E at one request a second, attention tensor parallel
    sets, kurtosis, confidence, look_back, rank_tables, table_bytes       prediction of a token's experts from its id
    wire, shuffle, migration          real processes joined by gloo: bytes beside the prediction, what shuffles add

A fifth of the recorded requests fits and the rest tests, as published (prediction: a quarter). Rates are counted on
recorded routing. Times are the step model's, of an H200, but for those of gloo: docs/results/sem-moe.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from coterie.answers.suites import Column, Report, Row, SuiteOptions, SuiteResult, SuiteTable
from coterie.errors import ConfigError
from coterie_lab.suites.sem_moe.latency import latency_notes, latency_rows
from coterie_lab.suites.sem_moe.layer_time import draw_layer_time, layer_time_notes, layer_time_rows
from coterie_lab.suites.sem_moe.locality import locality_notes, locality_rows
from coterie_lab.suites.sem_moe.prediction import prediction_rows
from coterie_lab.suites.sem_moe.prediction_notes import prediction_notes
from coterie_lab.suites.sem_moe.serving import serving_notes, serving_rows
from coterie_lab.suites.sem_moe.wire import wire_notes, wire_rows

NAME = "sem-moe"


class Part(NamedTuple):
    """Rows of one question, and notes on them."""

    rows: Callable[[SuiteOptions, Report], list[dict[str, Any]]]
    notes: Callable[[list[dict[str, Any]]], list[str]]


PARTS = (
    Part(locality_rows, locality_notes),
    Part(layer_time_rows, layer_time_notes),
    Part(serving_rows, serving_notes),
    Part(latency_rows, latency_notes),
    Part(prediction_rows, prediction_notes),
    Part(wire_rows, wire_notes),
)
OF_A_TRACE = (PARTS[0], PARTS[4])
"""Parts that a user's own trace can answer; the others have their own models and traffic."""


def run(options: SuiteOptions, report: Report) -> SuiteResult:
    if options.trace_format is not None and options.trace is None:
        raise ConfigError(f"trace_format={options.trace_format} is of a trace; there is none")
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    if options.requests is not None:
        notes.append(f"Local activations and prediction: at most {options.requests:,} requests of a trace, drawn.")
    for part in PARTS if options.trace is None else OF_A_TRACE:
        own = part.rows(options, report)
        rows += own
        notes += part.notes(own)
    drawn = [row for row in rows if row["part"] == "layer_time"]
    if options.out is not None and drawn:
        draw_layer_time(options.out, drawn)
    return SuiteResult(NAME, rows, notes)


def _of(part: str, **wanted: Any) -> Callable[[Row], bool]:
    """Show rows of a part with these values."""
    return lambda row: row["part"] == part and all(row.get(key) == value for key, value in wanted.items())


def _text(key: str) -> Callable[[Row], str]:
    return lambda row: "" if row.get(key) is None else str(row[key])


def _number(key: str, digits: int = 1, scale: float = 1.0) -> Callable[[Row], str]:
    return lambda row: "" if row.get(key) is None else f"{scale * row[key]:,.{digits}f}"


def _with_ends(key: str, digits: int = 1, scale: float = 1.0) -> Callable[[Row], str]:
    """Show a mean with the ends of its interval, from fields KEY (or KEY_pct), KEY_low and KEY_high."""

    def show(row: Row) -> str:
        mean, low, high = row.get(key, row.get(f"{key}_pct")), row.get(f"{key}_low"), row.get(f"{key}_high")
        if mean is None:
            return ""
        ends = "" if low is None or high is None else f" ({scale * low:.{digits}f} to {scale * high:.{digits}f})"
        return f"{scale * mean:.{digits}f}{ends}"

    return show


def _planner(row: Row) -> str:
    return f"{row['planner']}, {row['setting']}" if row.get("setting") else str(row["planner"])


def _shown_rate(row: Row) -> bool:
    return _of("locality", ep=8)(row) and row["schedule"] != "round_robin"


def _columns(*columns: str | tuple[str, Callable[[Row], Any]]) -> tuple[Column, ...]:
    """Make columns: keys to show as they are, with spaces between, or a heading and a function of the row."""
    given = ([(key, _text(key)) for key in one.split()] if isinstance(one, str) else [one] for one in columns)
    return tuple(Column(*column) for one in given for column in one)


TABLES: Sequence[SuiteTable] = (
    SuiteTable(
        "Local activations of unseen requests on 8 ranks, %; 12.5 by chance",
        _columns(
            "trace items",
            ("planner", _planner),
            "schedule",
            ("local, %", _with_ends("local_activation_rate", scale=100)),
            ("max ÷ median load", _number("imbalance", 2)),
        ),
        _shown_rate,
    ),
    SuiteTable(
        "Exchange in a MoE layer at the rate of chance, 8 ranks of an H200",
        _columns(
            "model phase",
            ("tokens a rank", _text("tokens_per_rank")),
            "link dispatch",
            ("layer, us", _number("layer_us", 0)),
            ("exchange, % of layer", _number("communication_pct")),
            ("% of step", _number("communication_of_step_pct")),
        ),
        _of("layer_time", local_activation_rate=0.125),
    ),
    SuiteTable(
        "Attention data parallel: rate within 5 x the lightest latency, against the best baseline, %",
        _columns(
            "trace link dispatch planner",
            ("local, %", _number("local_activation_rate", 1, 100)),
            ("TTFT limit", _with_ends("ttft_over_best")),
            ("E2E limit", _with_ends("e2e_over_best")),
        ),
        _of("serving", baseline=False),
    ),
    SuiteTable(
        "Attention tensor parallel, one request a second: latency saved against the best baseline, %",
        _columns(
            "trace link",
            ("prompt", _text("prompt_tokens")),
            "planner collectives",
            ("TTFT p99, ms", _number("ttft_p99_ms", 2)),
            ("saved", _with_ends("ttft_saved")),
            ("by the shuffle alone", _with_ends("ttft_saved_by_shuffle")),
        ),
        _of("latency", link="nvlink4"),
    ),
    SuiteTable(
        "Experts of a token by its id: sets compared, %",
        _columns(
            "trace",
            ("sets compared", _text("definition")),
            "predictor",
            ("precision", _with_ends("precision", scale=100)),
            ("recall", _with_ends("recall", scale=100)),
            ("F1", _with_ends("f1", scale=100)),
        ),
        _of("sets"),
    ),
    SuiteTable(
        "Bytes on the wire between processes joined by gloo",
        _columns(
            ("ranks", _text("ep")),
            "dispatch",
            ("sent, MB", _number("hidden_bytes", 2, 1e-6)),
            ("predicted, MB", _number("predicted_bytes", 2, 1e-6)),
            ("all bytes ÷ predicted", _number("ratio", 4)),
        ),
        _of("wire"),
    ),
)
