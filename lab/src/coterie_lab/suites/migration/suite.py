"""Moving experts to the ranks that use them: the remote share of real routing, beside the tables of an article.

Eight ranks, one node. Requests are routed by domain (:mod:`.traffic`), so ranks use different experts; the same is
computed for requests spread at random, where they do not. A placement is planned on some requests and scored on others.
Dynamic strategies decide every 60 s on the window that just ended and are scored on the next one, over the second half
of half an hour; all start from the popularity-aware placement.

Published settings are for 32 experts a rank; 8 extra slots are a quarter of that, and other models get a quarter too.
The remote share says nothing about how evenly ranks are loaded, nor about what a replica costs in memory and streaming
(:mod:`.memory`). docs/migration.md has the results in words.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coterie.answers.suites import Column, Report, SuiteOptions, SuiteResult, SuiteTable
from coterie.costs.exchange import ExchangeTraffic, Locality, all_to_all_us
from coterie.placement.holdings import Held, held_by, remote_share
from coterie.placement.migration.rounds import MigrationLimits, Schedule, schedule_moves
from coterie.placement.triggers.actions import ActionManager, ActionSettings
from coterie.types import ModelSpec, Placement, Topology
from coterie_lab.suites.all_to_all.suite import measured
from coterie_lab.suites.held import cheapest_homes, placement_from_held
from coterie_lab.suites.migration.memory import memory_notes, memory_rows
from coterie_lab.suites.migration.traffic import TRACES, Domains, Windows, make_windows, read_domains
from coterie_lab.suites.shared import Rows, as_is, distinct_values, existing_paths, known_model, number, plain

NAME = "migration"
RANKS = 8
WINDOWS = 30
WANDER = 0.6
"""Shares of domains at the end of shifting traffic: two thirds lie within a factor 1.8 of where they began."""
ORDER = ("static", "popularity", "swap", "replication", "both")
"""From the most remote to the least, as published."""
PUBLISHED = {
    "static": (87.5, 8.2, 0.0, 0.0),
    "popularity": (72.3, 6.7, 18.0, 0.0),
    "replication": (58.1, 5.4, 34.0, 6.2),
    "swap": (65.4, 6.1, 26.0, 0.0),
    "both": (51.7, 4.8, 41.0, 6.2),
}
"""Strategy → remote %, all-to-all us a layer, throughput +%, memory +%."""
STEADY, SHIFTING, RANDOM = "steady", "shifting", "at random"
"""Requests routed by domain, whose shares stay or wander; or spread over ranks at random."""
STAGING = (1, 2, 8, None)
"""Staging buffers per rank, in experts; None: as many as the rank has slots."""
EXPERT_BYTES, HIDDEN_SIZE = 44e6, 4096
"""Assumed for models that are not shipped."""


class Outcome(NamedTuple):
    """Result of a strategy."""

    remote: float
    """Share of activations that are remote."""
    held: Held
    actions: int
    moved: float
    """Experts of single layers."""


def run(options: SuiteOptions, report: Report) -> SuiteResult:
    notes: list[str] = []
    rows: list[dict[str, Any]] = []
    paths = _paths(options, notes)
    popularity = None
    for done, path in enumerate(paths):
        report(f"Moving experts of {path.name}", done, len(paths))
        domains = read_domains(path, options)
        rows += _remote_rows(domains, options)
        notes.append(_data_note(path, domains))
        if domains.model == "glm-5.2":
            popularity = np.sum([requests.sum(axis=0) for requests in domains.requests.values()], axis=0)
    memory = memory_rows(popularity, options.seed)
    notes = [*_remote_notes(rows), *memory_notes(memory), *notes]
    return SuiteResult(NAME, rows + memory, notes)


def _paths(options: SuiteOptions, notes: list[str]) -> list[Path]:
    if options.trace is not None:
        return [options.trace]
    if options.data is None:
        notes.append("No routing counted: give --trace, or set COTERIE_DATA to the folder of real data (docs/data.md).")
        return []
    missing = "No routing of {path.name}: {path} does not exist."
    return existing_paths(options.data / "activations", TRACES, notes, missing)


def _remote_rows(domains: Domains, options: SuiteOptions) -> list[dict[str, Any]]:
    spec = known_model(domains.model)
    rows = []
    for traffic, wander in ((SHIFTING, WANDER), (STEADY, 0.0), (RANDOM, 0.0)):
        windows = make_windows(domains, RANKS, WINDOWS, wander, options.seed)
        if traffic == RANDOM:
            windows = Windows(*(np.broadcast_to(a.mean(axis=-3, keepdims=True), a.shape).copy() for a in windows))
        bench = Bench(windows, options.batch, spec)
        outcomes = bench.strategies()
        rows += [_row(domains.model, traffic, name, outcomes[name], bench) for name in ORDER]
        if traffic == SHIFTING:
            rows += _replica_rows(domains.model, bench, outcomes["popularity"].held)
            rows += _execution_rows(domains.model, bench, outcomes["popularity"].held)
    return rows


class Bench:
    """One kind of traffic on one model."""

    def __init__(self, windows: Windows, batch: int, spec: ModelSpec | None) -> None:
        self.windows, self.batch, self.spec = windows, batch, spec
        ranks, layers, experts = windows.planned_on.shape
        self.experts_per_rank = experts // ranks
        self.static = held_by(Placement.linear(layers, experts, ranks))
        settings = ActionSettings()
        # Activations per layer of the steps that a decayed demand stands for.
        self.scale = max(1, batch // ranks) * (spec.top_k if spec else 1) * settings.window_steps
        hidden_size, expert_bytes = (spec.hidden_size, spec.expert_bytes()) if spec else (HIDDEN_SIZE, EXPERT_BYTES)
        self.manager = ActionManager(Topology(ranks), 2.0 * hidden_size, expert_bytes, settings)

    def with_settings(self, **settings: Any) -> ActionManager:
        return replace(self.manager, settings=replace(self.manager.settings, **settings))

    def strategies(self) -> dict[str, Outcome]:
        planner = self.with_settings(extra_slots=0, min_saving_s=0.0)
        popular = cheapest_homes(planner, self.windows.planned_on * self.scale, self.static)
        extra = max(1, self.experts_per_rank // 4)
        return {
            "static": self.fixed(self.static),
            "popularity": self.fixed(popular)._replace(moved=float((popular & ~self.static).sum())),
            "swap": self.dynamic(popular, self.with_settings(extra_slots=0, replicate_top=0)),
            "replication": self.dynamic(popular, self.with_settings(extra_slots=extra, swap_top=0)),
            "both": self.dynamic(popular, self.with_settings(extra_slots=extra)),
        }

    def fixed(self, held: Held) -> Outcome:
        later = self.windows.scored_on[1 + len(self.windows.scored_on) // 2 :]
        return Outcome(float(np.mean([remote_share(window, held) for window in later])), held, 0, 0.0)

    def dynamic(self, held: Held, manager: ActionManager) -> Outcome:
        """Decide at the end of each window, score on the next."""
        scored, shares, actions, moved = self.windows.scored_on, [], 0, 0.0
        for before, after in pairwise(scored):
            cycle = manager.cycle(before * self.scale, held)
            held = cycle.held
            actions += len(cycle.actions)
            moved += sum(event.moved_bytes for event in cycle.actions) / manager.expert_bytes
            shares.append(remote_share(after, held))
        return Outcome(float(np.mean(shares[len(scored) // 2 :])), held, actions, moved)


def _row(model: str, traffic: str, name: str, outcome: Outcome, bench: Bench) -> dict[str, Any]:
    keys = ("remote_pct", "all_to_all_us", "throughput_pct", "memory_overhead_pct")
    return {
        "table": "remote",
        "model": model,
        "traffic": traffic,
        "strategy": name,
        "remote_pct": 100 * outcome.remote,
        "all_to_all_us": _exchange_us(bench, outcome.remote),
        "memory_overhead_pct": 100 * (float(outcome.held.sum()) / float(bench.static.sum()) - 1),
        "actions": outcome.actions,
        "moved_experts": outcome.moved / bench.static.shape[1],
        "published": None if traffic == RANDOM else dict(zip(keys, PUBLISHED[name], strict=True)),
    }


def _exchange_us(bench: Bench, remote: float) -> float | None:
    """Return the time of a rank's part of the batch, both ways; None for models of unknown hidden size."""
    if bench.spec is None:
        return None
    away = bench.spec.top_k * remote
    locality = Locality(bench.spec.top_k - away, away, away, 0.0)
    return all_to_all_us(ExchangeTraffic.of(locality, bench.spec, -(-bench.batch // RANKS)), measured(Topology(RANKS)))


def _replica_rows(model: str, bench: Bench, popular: Held) -> list[dict[str, Any]]:
    """Vary the replicas, from a sixteenth of a rank's experts (+6.2% memory) to half of them."""
    rows = []
    for extra in (bench.experts_per_rank // part for part in (16, 8, 4, 2) if not bench.experts_per_rank % part):
        outcome = bench.dynamic(popular, bench.with_settings(extra_slots=extra, swap_top=0))
        row = _row(model, SHIFTING, "replication", outcome, bench)
        rows.append(row | {"table": "replicas", "extra_slots": extra, "published": None})
    return rows


def _execution_rows(model: str, bench: Bench, target: Held) -> list[dict[str, Any]]:
    """Schedule the largest migration here, from the static to the popularity-aware placement, by staging."""
    current = placement_from_held(bench.static, bench.experts_per_rank)
    wanted = placement_from_held(target, bench.experts_per_rank, current)
    expert_bytes = bench.manager.expert_bytes
    rows = []
    for staging in sorted({min(staging or bench.experts_per_rank, bench.experts_per_rank) for staging in STAGING}):
        limits = MigrationLimits(expert_bytes, expert_bytes * staging)
        schedule = schedule_moves(current, wanted, Topology(RANKS), limits)
        rows.append(
            {
                "table": "execution",
                "model": model,
                "staging_experts": staging,
                "layers": current.num_layers,
                "refused_layers": len(schedule.refusals),
                "transfers": len(schedule.transfers),
                "switches": len(schedule.switches),
                "rounds": sum(len(switch.rounds) for switch in schedule.switches),
                "staging_mb": _peak_staging_bytes(schedule) / 1e6,
                "movement_ms": schedule.movement_s * 1e3,
                "published": None,
            }
        )
    return rows


def _peak_staging_bytes(schedule: Schedule) -> float:
    """Return the largest number of bytes that a rank has in staging during any single switch."""
    per_rank = schedule.current.slots_per_rank
    most = [max(Counter(t.slot // per_rank for t in switch.transfers).values()) for switch in schedule.switches]
    return max(most, default=0) * schedule.limits.expert_bytes


def _data_note(path: Path, domains: Domains) -> str:
    sizes = ", ".join(f"{name} {len(requests)}" for name, requests in domains.requests.items())
    layers = next(iter(domains.requests.values())).shape[1]
    left = f"; {domains.left_out} requests of smaller domains left out" if domains.left_out else ""
    return (
        f"{path.name}: {layers} layers, taken evenly; requests or shards by domain: {sizes}{left}. Every other one is "
        "planned on, the rest is scored on."
    )


def _remote_notes(rows: Rows) -> list[str]:
    notes = [
        "Reproduced by its own numbers: all-to-all times are 8.2 us x remote ÷ 87.5%. Its 'throughput impact' is the "
        "cut of that time (1 - 6.7 ÷ 8.2 = 18%), as if a step were nothing but exchange: of its own 40 ms step, 58 "
        "layers of 8.2 us are 1.2%, and -18% of that is 0.2%.",
        "Not right: +6.2% memory for the top 16 experts. 16 of 256 more copies are two a rank; 'top 16' on every rank "
        "are 112 more copies, +44%. The replicas table has what each buys.",
    ]
    remote = [row for row in rows if row["table"] == "remote"]
    for traffic in (SHIFTING, STEADY):
        for model in distinct_values(remote, "model"):
            mine = _remote_by_strategy(remote, model, traffic)
            ours = sorted(mine, key=lambda name: -mine[name])
            agrees = "Same order as published" if tuple(ours) == ORDER else "Not the published order"
            notes.append(f"{agrees}, {model}, {traffic}: {' > '.join(ours)}.")
    if remote:
        notes.append(
            "At random every rank asks for the same: without replicas exactly 1 - 1/8 is remote wherever experts are, "
            "and a replica makes local an eighth of its expert's traffic. No placement changes that; a router that "
            "keeps domains together does, and the article's figures need one."
        )
    return notes


def _remote_by_strategy(rows: Rows, model: str, traffic: str) -> dict[str, float]:
    mine = [row for row in rows if (row["model"], row["traffic"]) == (model, traffic)]
    return {row["strategy"]: row["remote_pct"] for row in mine}


def _table(title: str, table: str, *columns: Column, **only: str) -> SuiteTable:
    """Describe one table: its rows, filtered by the values in `only`."""
    wanted = {"table": table, **only}
    return SuiteTable(title, columns, lambda row: all(row.get(key) == value for key, value in wanted.items()))


def _published(heading: str, key: str, digits: int | None = None) -> Column:
    value = plain(key) if digits is None else number(key, digits)
    return Column(heading, lambda row: None if row["published"] is None else value(row["published"]))


TABLES = (
    _table(
        "Remote experts on 8 ranks: requests by domain, shares shifting or steady, or requests at random",
        "remote",
        *as_is("model", "traffic", "strategy"),
        Column("remote %", number("remote_pct", 1)),
        _published("publ.", "remote_pct"),
        Column("us", plain("all_to_all_us")),
        _published("publ.", "all_to_all_us"),
        Column("mem. +%", plain("memory_overhead_pct")),
        _published("publ.", "memory_overhead_pct"),
        Column("moved", plain("moved_experts")),
    ),
    _table(
        "Replication alone, by extra slots a rank, shifting",
        "replicas",
        *as_is("model"),
        Column("extra slots", plain("extra_slots")),
        Column("memory +%", plain("memory_overhead_pct")),
        Column("remote %", plain("remote_pct")),
        Column("us/layer", plain("all_to_all_us")),
    ),
    _table(
        "Executing static → popularity, by staging",
        "execution",
        *as_is("model"),
        Column("staging", plain("staging_experts")),
        Column("MB a rank", plain("staging_mb")),
        *as_is("transfers", "switches", "rounds"),
        Column("layers refused", plain("refused_layers")),
        Column("ms", plain("movement_ms")),
    ),
    _table(
        "Replicas against KV cache, the article's sizes",
        "memory",
        *as_is("replicas"),
        Column("KV GB", number("kv_gb", 1)),
        _published("published", "kv_gb", 1),
        Column("sessions", number("sessions", 1)),
        _published("published", "sessions", 1),
        Column("x by its formula", number("formula_ratio", 4)),
        _published("published", "ratio", 2),
        Column("x with sessions", number("throughput_ratio")),
        sizes="article",
    ),
    _table(
        "Replicas against KV cache, DeepSeek-V3 on H200",
        "memory",
        *as_is("ranks", "context"),
        Column("at hand", plain("at_hand")),
        *as_is("replicas"),
        Column("KV GB", plain("kv_gb")),
        *as_is("sessions"),
        Column("remote %", plain("remote_pct")),
        Column("step ms", plain("step_ms")),
        Column("throughput", plain("throughput_ratio")),
        *as_is("best"),
        sizes="ours",
    ),
)
