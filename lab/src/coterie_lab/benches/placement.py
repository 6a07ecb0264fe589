"""Planners of expert placement: how fast, how even, how many moves, and how far from the best there is.

The drift is :func:`~coterie.traces.load.zipf_drift`'s at DeepSeek-V3's size, from the map that EPLB made for the
window before. A planner has to reach a balance of at least `target_balance`, then make as few moves as possible: the
horizon is so long that a thousandth of balance is worth a hundred moves. Two more groups of rows compare with the
integer program: moves at the same balance, and the objective if processing and movement both count, on layers that the
program closed. Rows count the others too, but do not use them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np

from coterie.answers.suites import Report
from coterie.placement import DEEPSEEK_V3_PREFILL, Load, Objective, Plan, Problem, planners
from coterie.placement.planning.latency_optimal_ilp import LatencyOptimalIlp
from coterie.placement.splits.shares import optimal_shares
from coterie.traces.load import zipf_drift
from coterie.types import Placement, Topology
from coterie_lab.benches.placement_steps import plan_row, scenario_rows
from coterie_lab.benches.timing import Row, median_us

LAYERS, EXPERTS, SEEDS = 58, 256, range(5)
ROWS_A_STEP = 65_536.0
"""Rows of a layer in a step: 8,192 tokens of eight experts each, about 1.2 ms on eight ranks."""
REPEATS = 21
HORIZON, MOVE_PRICE = 1e6, 100.0
"""Horizon and price that make balance come first and moves second."""
EXCESS = ("mean_excess_pct", "worst_excess_pct")
BOUNDS = ("ilp_moves", "closed", *EXCESS, "worst_gap_pct", "saved_pct", "moving_pct", "setting")
"""What the integer program says of a plan, in rows of their own."""


class Size(NamedTuple):
    """One setting of the planners' table."""

    slots: int
    ranks: int
    target_balance: float
    exponent: float = 1.0
    first: str = "eplb"
    """Planner of the map before the drift: eplb, for the window before, or linear."""
    free_target: float | None = None
    """`target_balance` of every layer with the optimal split, which gives the same mean balance; None: the same."""

    @property
    def free(self) -> Size:
        """The setting of the optimal split."""
        return self._replace(target_balance=self.free_target or self.target_balance)

    @property
    def setting(self) -> str:
        return f"Zipf {self.exponent}, from {self.first}, enough {self.target_balance}"


SIZES = (
    Size(288, 32, 0.984, free_target=0.981),
    Size(288, 8, 0.988),
    Size(256, 8, 0.996),
    Size(256, 8, 0.996, 0.7, "linear"),
)
"""The last has the paper's start: a map with a balance of about .65, and a load for which .996 can be reached."""

BASELINES = ("linear", "round_robin", "popularity", "eplb", "flashlb")
EXACT = "latency_optimal_ilp"
"""It takes minutes at these sizes: fewer layers are given to it."""


class Case(NamedTuple):
    """Input of a planner."""

    load: Load
    topology: Topology
    current: Placement


def drifted(size: Size, seed: int, layers: int = LAYERS, experts: int = EXPERTS) -> Case:
    """Return the load after a drift and the map before it, on equal ranks."""
    drift = zipf_drift(layers, experts, np.random.default_rng(seed), exponent=size.exponent, tokens=ROWS_A_STEP)
    topology = Topology(size.ranks, ranks_per_node=size.ranks)
    current = Placement.linear(layers, experts, size.ranks, size.slots)
    first = planners.make(size.first, {"objective": DEEPSEEK_V3_PREFILL})  # such a planner decides without prices
    current = first.plan(Load(drift.before), topology, current).placement
    return Case(Load(drift.after), topology, current)


def balance_first(target_balance: float) -> Objective:
    return replace(DEEPSEEK_V3_PREFILL, horizon=HORIZON, move_price=MOVE_PRICE, target_balance=target_balance)


def bench_placement(report: Report) -> list[Row]:
    """Planners, then plans over scenarios, then moves and objective against the integer program; about five minutes."""
    size = ("split", "slots", "ranks")
    planned = in_two(_planner_rows(report), size, ("attainable", "seeds", "setting"))
    over = list(scenario_rows(report, LAYERS, EXPERTS, ROWS_A_STEP))
    heuristic = ("heuristic_moves", "heuristic_balancedness", "ratio", "least_moves", "closed", "setting")
    moved = in_two(_move_rows(report), (*size, "layers"), heuristic)
    *tried, together = _objective_rows(report)
    return [*planned, *over, *moved, *in_two(tried, ("trial",), BOUNDS), together]


def in_two(rows: Iterable[Row], names: tuple[str, ...], apart: tuple[str, ...]) -> list[Row]:
    """Put some columns into rows of their own, beside those that name a row: one table of all is too wide to read."""
    rows = list(rows)
    others = [{key: row[key] for key in (*names, *apart)} for row in rows]
    plans = [{key: value for key, value in row.items() if key not in apart} for row in rows]
    return plans + [row for index, row in enumerate(others) if row not in others[:index]]


def _planner_rows(report: Report) -> Iterator[Row]:
    for size in SIZES:
        cases = [drifted(size, seed) for seed in SEEDS]
        objective = balance_first(size.target_balance)
        yield _kept_row(size, cases, "equal")
        alone = [name for name in planners if _needs_prices_only(name) and name != EXACT]
        names = dict.fromkeys((*BASELINES, "latency_optimal", *alone))
        for done, name in enumerate(names):
            report(f"{name}, {size.slots} slots, {size.ranks} ranks", done, len(names))
            yield _planner_row(name, planners.make(name, {"objective": objective}), size, cases)
        if size.slots > EXPERTS:
            yield _kept_row(size.free, cases, "optimal")
            priced = {"objective": balance_first(size.free.target_balance)}
            free = planners.make("latency_optimal", priced, split="optimal")
            yield _planner_row("latency_optimal", free, size.free, cases)


def _needs_prices_only(name: str) -> bool:
    """Whether a planner decides from the load alone: some learn from items or transitions too."""
    return all(part == "objective" for part, required in planners.parameters(name).items() if required)


def _planner_row(name: str, planner: Any, size: Size, cases: Sequence[Case]) -> Row:
    spent = median_us(lambda: planner.plan(*cases[0]), REPEATS) / 1e3
    plans: list[Plan] = [planner.plan(*case) for case in cases]
    evenness = [plan.balance_after for plan in plans]
    return _row(name, plans[0].split, size, spent, evenness, [len(plan.moves) for plan in plans]) | {
        "duplicates": sum(plan.placement.duplicates for plan in plans),
        **_about(size, cases),
    }


def _kept_row(size: Size, cases: Sequence[Case], split: str) -> Row:
    """Keep the old map; its replicas share tokens equally or optimally."""
    problems = [balance_first(size.target_balance).problem(*case) for case in cases]

    def shares(problem: Problem) -> Any:
        return optimal_shares(problem, problem.current.slot_experts) if split == "optimal" else None

    spent = median_us(lambda: shares(problems[0]), REPEATS) / 1e3
    evenness = [problem.balance(problem.rank_s(problem.current.slot_experts, shares(problem))) for problem in problems]
    return _row("keep", split, size, spent, evenness, [0] * len(cases)) | {
        "duplicates": sum(case.current.duplicates for case in cases),
        **_about(size, cases),
    }


def _row(
    name: str, split: str, size: Size, ms: float, evenness: Sequence[float], moves: Sequence[int], layers: int = LAYERS
) -> Row:
    return plan_row(name, split, (layers, EXPERTS, size.slots, size.ranks), ms, fmean(evenness), round(fmean(moves), 1))


def _about(size: Size, cases: Sequence[Case]) -> Row:
    """Return the largest balance that the heaviest experts allow for, the number of seeds, and the setting."""
    problems = [balance_first(size.target_balance).problem(*case) for case in cases]
    attainable = fmean(float((problem.even / problem.reach).mean()) for problem in problems)
    return {"attainable": round(attainable, 4), "seeds": len(cases), "setting": size.setting}


class Contest(NamedTuple):
    """Moves at the same balance, a few layers of a size."""

    size: Size
    split: Literal["equal", "optimal"]
    layers: int
    seconds: float
    """A layer, for the integer program."""


CONTESTS = (
    Contest(SIZES[3], "equal", 4, 12.0),
    Contest(SIZES[2], "equal", 3, 6.0),
    Contest(SIZES[0].free, "optimal", 2, 10.0),
    Contest(SIZES[1], "optimal", 4, 4.0),
)


def _move_rows(report: Report) -> Iterator[Row]:
    for done, contest in enumerate(CONTESTS):
        report(f"integer program, {contest.split}, {contest.size.slots} slots", done, len(CONTESTS))
        yield move_row(contest)


def move_row(contest: Contest) -> Row:
    """Compare moves of the heuristic and of the integer program that starts from it, at the same balance."""
    size, split = contest.size, contest.split
    case = first_layers(drifted(size, 0), contest.layers)
    objective = balance_first(size.target_balance)
    problem = objective.problem(*case)
    plan = planners.make("latency_optimal", {"objective": objective}, split=split).plan(*case)
    ilp = LatencyOptimalIlp(objective, split, gap=0.0, gap_moves=0.99, time_limit_s=contest.seconds)
    best = ilp.solve(problem, starts=[plan.placement.slot_experts])
    ours, theirs = len(plan.moves), len(best.moves)
    row = _row(EXACT, split, size, best.planning_s * 1e3, [best.balance_after], [theirs], contest.layers)
    return row | {
        "duplicates": best.placement.duplicates,
        "heuristic_moves": ours,
        "heuristic_balancedness": round(plan.balance_after, 4),
        "ratio": round(ours / theirs, 3) if theirs else 1.0,
        "least_moves": _least_moves(problem, best.proven.bound_s),
        "closed": int(best.proven.closed.sum()),
        "setting": size.setting,
    }


def _least_moves(problem: Problem, bound_s: Any) -> int:
    """Return a lower bound on the moves of any placement of the same processing, by the bound on the objective."""
    per_move = problem.load_in.max() * (1 + problem.objective.move_price)
    return int(np.ceil((bound_s - problem.objective.horizon * problem.floor) / per_move - 1e-6).clip(0).sum())


def first_layers(case: Case, layers: int) -> Case:
    sources = None if case.load.sources is None else case.load.sources[:, :layers]
    load = Load(case.load.tokens[:layers], case.load.steps, sources)
    return case._replace(load=load, current=replace(case.current, slot_experts=case.current.slot_experts[:layers]))


@dataclass(frozen=True, slots=True)
class Trial:
    """Layers on which the objective is compared with that of the integer program."""

    name: str
    experts: int
    slots: int
    ranks: int
    split: Literal["equal", "optimal"] = "equal"
    rows: float = ROWS_A_STEP
    prices: dict[str, float] = field(default_factory=dict)
    ranks_per_node: int | None = None
    speeds: tuple[float, ...] = ()
    exponent: float = 0.8
    sources: bool = False
    """Whether tokens of an expert come from some ranks more than from others, and the exchange counts."""
    layers: int = 4

    def case(self, seed: int = 11) -> Case:
        size = Size(self.slots, self.ranks, 1.0, self.exponent)
        load, _, current = drifted(size, seed, self.layers, self.experts)
        topology = Topology(self.ranks, self.ranks_per_node or self.ranks, speeds=self.speeds)
        tokens = load.tokens / ROWS_A_STEP * self.rows
        rng = np.random.default_rng(seed)
        mix = rng.dirichlet(np.ones(self.ranks), tokens.shape).transpose(2, 0, 1)  # [rank, layer, expert]
        return Case(Load(tokens, sources=mix * tokens if self.sources else None), topology, current)

    def objective(self) -> Objective:
        prices: dict[str, Any] = {"horizon": 300.0} | self.prices
        return replace(DEEPSEEK_V3_PREFILL, **prices)


SLOW = (1.0, 1.0, 1.0, 0.7, 1.0, 1.0, 0.85, 1.0)
TRIALS = (
    Trial("plain", 256, 256, 8, exponent=0.7),
    Trial("replicas", 64, 72, 8),
    Trial("few ranks", 64, 72, 4, prices={"horizon": 100.0}),
    Trial("no replicas", 64, 64, 8, prices={"horizon": 100.0}, exponent=0.5),
    Trial("priced moves", 64, 72, 4, prices={"horizon": 100.0, "move_price": 1.0}),
    Trial("two nodes", 64, 72, 8, ranks_per_node=4),
    Trial("two nodes, short", 64, 64, 4, ranks_per_node=2, prices={"horizon": 100.0}),
    Trial("two nodes, few rows", 64, 72, 4, rows=16_384.0, ranks_per_node=2, prices={"horizon": 200.0}),
    Trial("mixed speeds", 64, 72, 8, speeds=SLOW),
    Trial("mixed speeds, two nodes", 64, 80, 8, speeds=SLOW, ranks_per_node=4),
    Trial("streaming", 64, 72, 8, rows=8_192.0, prices={"touch_s": 1.3e-5}),
    Trial("sources", 64, 64, 4, prices={"row_bytes": 14_336.0}, sources=True),
    Trial("sources, two nodes", 64, 64, 4, ranks_per_node=2, prices={"row_bytes": 14_336.0}, sources=True),
    Trial("optimal split", 64, 72, 8, "optimal"),
    Trial("optimal split, two nodes", 64, 72, 8, "optimal", ranks_per_node=4, speeds=SLOW),
    Trial("optimal split, large", 256, 288, 8, "optimal", exponent=1.0),
)
TRIAL_SECONDS = 4.0
"""A layer, for the integer program."""


class Outcome(NamedTuple):
    """Result of the heuristic in a trial."""

    excess: list[float]
    """[closed layer] relative excess of its objective over the bound, at least that over the optimum."""
    row: Row


def _objective_rows(report: Report) -> Iterator[Row]:
    excess: list[float] = []
    for done, trial in enumerate(TRIALS):
        report(f"objective: {trial.name}", done, len(TRIALS))
        outcome = try_out(trial)
        excess += outcome.excess
        yield outcome.row
    yield {
        "planner": "latency_optimal",
        "against": "latency_optimal_ilp's bound",
        "trials": len(TRIALS),
        "layers": sum(trial.layers for trial in TRIALS),
        "closed": len(excess),
        **_percent(excess),
    }


def try_out(trial: Trial, seconds: float = TRIAL_SECONDS) -> Outcome:
    """Compare the heuristic's objective with the integer program's bound on each layer that the program closes."""
    case, objective = trial.case(), trial.objective()
    problem = objective.problem(*case)
    planner = planners.make("latency_optimal", {"objective": objective}, split=trial.split)
    spent = median_us(lambda: planner.plan(*case), REPEATS) / 1e3
    plan: Plan = planner.plan(*case)
    ours = problem.score(plan.placement.slot_experts, None if trial.split == "equal" else plan.shares).total_s
    kept = problem.score(case.current.slot_experts).total_s
    ilp = LatencyOptimalIlp(objective, trial.split, time_limit_s=seconds)
    best = ilp.solve(problem, starts=[plan.placement.slot_experts])
    proof = best.proven
    excess = (ours / proof.bound_s - 1)[proof.closed].tolist()
    shape = (trial.layers, trial.experts, trial.slots, trial.ranks)
    row = (
        {"trial": trial.name}
        | plan_row("latency_optimal", trial.split, shape, spent, plan.balance_after, len(plan.moves))
        | {
            "duplicates": plan.placement.duplicates,
            "ilp_moves": len(best.moves),
            "closed": len(excess),
            **_percent(excess),
            "worst_gap_pct": round(100 * float(proof.gap.max()), 2),
            "saved_pct": round(100 * float(1 - ours.sum() / kept.sum()), 1),
            "moving_pct": round(100 * float(plan.movement_s / ours.sum()), 2),
            "setting": _words(trial, problem),
        }
    )
    return Outcome(excess, row)


def _percent(excess: Sequence[float]) -> Row:
    of_all = (fmean(excess), max(excess)) if excess else (None, None)
    return {name: pct if pct is None else round(100 * pct, 3) for name, pct in zip(EXCESS, of_all, strict=True)}


def _words(trial: Trial, problem: Problem) -> str:
    prices = ", ".join(f"{name} {value:g}" for name, value in ({"horizon": 300.0} | trial.prices).items())
    return f"{problem.even.mean() * 1e3:.2f} ms a layer, Zipf {trial.exponent}, {prices}"
