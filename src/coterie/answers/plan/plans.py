"""One planning round on the user's own load, for ``coterie plan``.

Gains are relative to the current placement. Without a file, the current placement is experts in order without spare
slots. An engine started with spare slots fills them with replicas of its first experts; that is slower than no spare
slots, and as a baseline it would make any plan look better.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

import numpy as np

from coterie.answers.plan.learning import ItemKind, LocalShares, SeenRequests, check_tables
from coterie.answers.plan.loads import MEAN, WindowLoad, read_load
from coterie.answers.plan.memory import RankMemory, device_bytes
from coterie.answers.plan.pricing import DomainRow, HeldOutReport, Placed, Pricing, Scoring, gain_pct
from coterie.answers.plan.samples import Sampling
from coterie.answers.suites import Report
from coterie.costs.movement import Movement
from coterie.costs.presets import load_preset, step_model
from coterie.errors import ConfigError, check, check_one_of, check_positive, refuse
from coterie.placement import Load, Objective, PlacementMap, Plan, Planner, Problem, planners, read_map
from coterie.placement.base import Progress, SearchProgress
from coterie.placement.maps.targets import Target
from coterie.registry import Offers, PolicyText
from coterie.types import Placement, Topology, WeightDtype
from coterie.units import parse_speeds

T = TypeVar("T")

TIME_LIMIT_S = 10.0
"""Default seconds per layer for planners with a time limit: 75 layers then take minutes, not hours."""

MOST_RANKS = 1024
"""Largest number of ranks. Deployments have a few hundred at most, and arrays grow with the number."""

BATCH = 8192
"""Default number of tokens per step to plan for, over all ranks."""

BATCHES = (16, 64, 256, 1024, 4096, 8192, 16384)
"""Tokens per step, over all ranks, at which a plan is also priced, besides the batch it was made for."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of a plan. None takes the setting from the load, the current placement or the planner."""

    load: Path
    load_format: str | None = None
    window: str | None = None
    model: str | None = None
    ranks: int = 8
    nodes: int = 1
    slots: int | None = None
    speeds: str | None = None
    links: Path | None = None
    """File with a row of GB/s to every rank for each rank; None takes one link inside a node and one between nodes."""
    current: Path | None = None
    planner: str = "latency_optimal"
    split: str | None = None
    max_moves: int | None = None
    time_limit: float | None = None
    horizon: float | None = None
    target_balance: float | None = None
    movement: Movement = "stops"
    preset: str = "h200"
    dtype: WeightDtype | None = None
    memory_gb: float | None = None
    batch: int = BATCH
    """Tokens per step over all ranks; ignored if steps are drawn from requests, which have their own sizes."""
    sampling: Sampling = MEAN
    """Steps to plan for."""
    items: ItemKind = "requests"
    """Items that planners which place experts beside them learn from."""
    tables: Path | None = None
    """Folder to write tables of the trace to."""
    to: str | None = None
    """Engine that will execute the plan, as a map format; None for one that executes the split, whichever it is."""

    @property
    def target(self) -> Target | None:
        return None if self.to is None else Target.parse(self.to)

    @property
    def planned_split(self) -> str | None:
        """Split to plan for: the asked one, or the one that the engine executes; None for the planner's own."""
        target, asked = self.target, {"split"} & PolicyText.parse(self.planner).settings.keys()
        if self.split is None and target is not None and not asked and "split" in planners.parameters(self.planner):
            return target.engine.splits[0]
        return self.split


class BatchRow(NamedTuple):
    """Prices of the plan at one batch size."""

    tokens: int
    """Tokens per step, over all ranks."""
    now_s: float
    after_s: float
    replanned_gain_pct: float | None
    """Gain of a plan made for this batch size; None if no such plan was made."""
    kept: bool | None
    """Whether the plan for this batch size keeps its starting placement; None if no such plan was made."""
    no_spare_gain_pct: float | None
    """Gain of the plan without spare slots; None if there are no spare slots."""

    @property
    def gain_pct(self) -> float:
        return gain_pct(self.now_s, self.after_s)


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and its inputs."""

    options: PlanOptions
    load: WindowLoad
    pricing: Pricing
    now: Placed
    """Current placement."""
    plan: Plan
    problem: Problem
    """Planning problem; it starts from the given placement, or from an engine's initial one with these slots."""
    no_spare: Plan | None
    """Plan without spare slots; None if the plan has no spare slots."""
    memory: RankMemory
    held_out: HeldOutReport | None
    domains: list[DomainRow]
    """Balancedness on the mix and on the worst domain; empty unless the plan is over domains or mixtures of domains."""
    batches: list[BatchRow]
    locality: LocalShares | None
    """Local activations with items on the ranks of their experts; None unless the planner learns from items."""

    @property
    def map(self) -> PlacementMap:
        """Placement to write, with the shares of replicas if they are not equal."""
        shares = None if self.plan.split == "equal" else self.plan.shares
        return PlacementMap(self.plan.placement, self.load.spec.name, self.load.layer_ids, shares)

    def both(self, price: Callable[[int, Placed], T]) -> tuple[T, T]:
        """Return a price of the current placement and of the planned one, on the load that the plan was made for."""
        after = self.pricing.placed(self.plan)._replace(resplit=False)  # the shares are already solved for this load
        return price(self.options.batch, self.now), price(self.options.batch, after)


def make_plan(options: PlanOptions, report: Report = lambda *_: None) -> Planned:
    _check(options)
    load = read_load(options.load, options.load_format, options.model, options.window, options.sampling, options.items)
    check(
        load.learned is not None or not _learns(options.planner),
        f"planner {options.planner} learns from requests, of an activation trace; {options.load} is a load table",
    )
    if load.steps is not None and load.steps.sized:
        own = load.tokens.sum(axis=1).mean() / load.spec.top_k
        options = replace(options, batch=max(1, round(float(own))))
    speeds = () if options.speeds is None else parse_speeds(options.speeds, options.ranks)
    links = _links(options.links)
    topology = Topology(options.ranks, options.ranks // options.nodes, speeds=speeds, bytes_per_s=links)
    given = None if options.current is None else _current(options, options.current, load)
    slots = _slots(options, load.spec.num_experts, load.spec.name) if given is None else given.placement.num_slots
    model = step_model(load.spec, options.preset, options.dtype, topology=topology)
    given_bytes = None if options.memory_gb is None else options.memory_gb * 1e9
    has = given_bytes or device_bytes(load_preset(options.preset))
    memory = RankMemory(load.spec, model.dtype, slots, options.ranks, has)
    memory.check(options.preset)
    asked = {"horizon": options.horizon, "target_balance": options.target_balance}
    settings = {name: value for name, value in asked.items() if value is not None}
    check_tables(options.tables, load.learned)
    learned = {} if load.learned is None else load.learned.offers()
    pricing = Pricing(
        model, model.topology, load.tokens, settings, options.movement, load.steps, learned, options.target
    )
    in_order = _in_order(load, topology)
    start = given or Placed(Placement.linear(len(load.tokens), load.spec.num_experts, options.ranks, slots))
    asking = _Round(options, load, pricing, given or in_order or start, start, _layers_done(report, load.layer_ids))
    if not _learns(options.planner):  # what was learned is of all layers, and the warm-up has one
        asking.warm_up()
    plan = asking.plan(pricing, options.batch, start)
    no_spare = None
    if in_order is not None and slots > load.spec.num_experts:
        no_spare = asking.plan(pricing, options.batch, in_order)
    held_out, domains, locality = asking.scored(plan, no_spare, in_order)
    return Planned(
        options=options,
        load=load,
        pricing=pricing,
        now=asking.now,
        plan=plan,
        problem=pricing.problem(options.batch, start),
        no_spare=no_spare,
        memory=memory,
        held_out=held_out,
        domains=domains,
        batches=asking.rows(plan, no_spare),
        locality=locality,
    )


def _in_order(load: WindowLoad, topology: Topology) -> Placed | None:
    """Return experts in order without spare slots; None if ranks cannot share them equally, or a rank has speed 0."""
    layers, experts = load.tokens.shape
    if experts % topology.num_ranks or not topology.rank_speeds.all():
        return None
    return Placed(Placement.linear(layers, experts, topology.num_ranks))


@dataclass(frozen=True, slots=True, eq=False)
class _Round:
    """Planning with the same settings for the whole load, for a part of it, and for other batch sizes."""

    options: PlanOptions
    load: WindowLoad
    pricing: Pricing
    now: Placed
    start: Placed
    progress: Progress

    def plan(self, on: Pricing, batch: int, begin: Placed) -> Plan:
        shares = () if begin.shares is None else (begin.shares,)
        planner = self._planner(batch, on.learned)
        plan = planner.plan(on.load(batch), on.topology, begin.placement, *shares)
        if on.target is not None:  # the planner's own setting, or the shares in force, may be another split
            on.target.check_split(plan.split)
        return plan

    def warm_up(self) -> None:
        """Plan one empty layer, so that the planning time does not include compiling or loading machine code."""
        placement = self.start.placement
        empty = Placement(placement.slot_experts[:1], placement.num_ranks, placement.num_experts)
        nothing = Load(np.zeros((1, placement.num_experts)))
        self._planner(self.options.batch, {}).plan(nothing, self.pricing.topology, empty)

    def scored(
        self, plan: Plan, no_spare: Plan | None, in_order: Placed | None
    ) -> tuple[HeldOutReport | None, list[DomainRow], LocalShares | None]:
        """Score plans made on one part of the load on the other part; if the load is not divided, only locality."""
        batch = self.options.batch
        if self.load.parts is None:
            return None, [], self._locality(self.pricing.placed(plan), self.load.learned, held_out=False)
        score = Scoring(self.load.parts, self.pricing, batch, self.now, lambda on, begin: self.plan(on, batch, begin))
        made, mean = score.of_part(plan, self.start), score.for_the_mean(self.start)
        beside = None if no_spare is None or in_order is None else score.of_part(no_spare, in_order)
        local = self._locality(made, self.load.parts.learned and self.load.parts.learned[1], held_out=True)
        return score.held_out(made, mean, beside), score.domains(made, mean), local

    def _locality(self, made: Placed, learned: SeenRequests | None, held_out: bool) -> LocalShares | None:
        """Return the locality on some requests, if the planner places experts beside items."""
        if learned is None or "items" not in planners.parameters(self.options.planner):
            return None
        now, after = (learned.local_share(placed.placement) for placed in (self.now, made))
        return LocalShares(self.options.items, now, after, held_out)

    def rows(self, plan: Plan, no_spare: Plan | None) -> list[BatchRow]:
        """Price the plan at other batch sizes; also plan for each of them if planning takes milliseconds."""
        spare = self.start.placement.num_slots > self.start.placement.num_experts
        slow = _learns(self.options.planner) or "time_limit_s" in planners.parameters(self.options.planner)
        quick = not spare and not slow
        price, rows = self.pricing, []
        others = () if price.steps is not None and price.steps.sized else BATCHES
        for tokens in sorted({*others, self.options.batch}):
            made = plan if tokens == self.options.batch else None
            if made is None and quick:
                made = self.plan(price, tokens, self.start)
            rows.append(
                BatchRow(
                    tokens=tokens,
                    now_s=price.step_s(tokens, self.now),
                    after_s=price.step_s(tokens, price.placed(plan)),
                    replanned_gain_pct=None if made is None else price.gain_pct(tokens, self.now, price.placed(made)),
                    kept=None if made is None else made.skip_reason is not None,
                    no_spare_gain_pct=None
                    if no_spare is None
                    else price.gain_pct(tokens, self.now, price.placed(no_spare)),
                )
            )
        return rows

    def _planner(self, batch: int, learned: Mapping[str, Callable[[], Any]]) -> Planner:
        return _planner(self.options, self.pricing.objective(batch), self.progress, learned)


def _check(options: PlanOptions) -> None:
    """Raise for errors in the options that show before the load is read."""
    requests, (ranks, nodes) = options.sampling.requests, (options.ranks, options.nodes)
    refuse(
        {
            f"--batch={options.batch}: a step of --requests={requests} has the tokens it has": requests is not None
            and options.batch != BATCH,
            f"--ranks={ranks} must be a multiple of --nodes={nodes}, both at least 1": (
                ranks < 1 or nodes < 1 or ranks % nodes
            ),
            f"--ranks={ranks} must be at most {MOST_RANKS}": ranks > MOST_RANKS,
            f"--batch={options.batch} must be at least 1": options.batch < 1,
        }
    )
    if options.dtype is not None:
        check_one_of(get_args(WeightDtype), dtype=options.dtype)
    check_one_of(get_args(Movement), movement=options.movement)
    check_one_of(get_args(ItemKind), items=options.items)
    check_positive(memory=options.memory_gb)
    planners.check(options.planner)
    if options.target is not None and options.split is not None:
        options.target.check_split(options.split)
    load_preset(options.preset)


def _slots(options: PlanOptions, experts: int, name: str) -> int:
    slots = experts if options.slots is None else options.slots
    refuse(
        {
            f"--slots={slots} must hold the num_experts={experts} of {name}": slots < experts,
            f"--slots={slots}: {slots // options.ranks} slots a rank must be at most num_experts={experts}; "
            "none is held twice": slots > experts * options.ranks,
        }
    )
    return slots


def _layers_done(report: Report, layer_ids: tuple[int, ...]) -> Callable[[SearchProgress], None]:
    def tell(at: SearchProgress) -> None:
        gap = max(0.0, 1 - at.bound_s / at.objective_s) if at.objective_s > 0 else 0.0
        report(f"Layer {layer_ids[at.layer]}, gap {gap:.1%}", at.layer, at.layers)

    return tell


def _links(path: Path | None) -> tuple[tuple[float, ...], ...]:
    try:
        rows = np.zeros((0, 0)) if path is None else np.loadtxt(path, ndmin=2)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--links={path} must be rows of GB/s with spaces between them: {error}") from None
    return tuple(map(tuple, (1e9 * rows).tolist()))


def _current(options: PlanOptions, path: Path, load: WindowLoad) -> Placed:
    """Read the current placement from a file, with the layers of the load and the shares, if the file has any."""
    spec = load.spec
    map = read_map(path, model=spec, num_ranks=options.ranks)
    rows, shares = map.placement.slot_experts, map.shares
    if map.layer_ids != load.layer_ids:
        if map.layer_ids is None or not set(load.layer_ids) <= set(map.layer_ids):
            raise ConfigError(f"{path} lacks layers that the load has: it has {len(rows)}")
        kept = [map.layer_ids.index(layer) for layer in load.layer_ids]
        rows, shares = rows[kept], None if shares is None else shares[kept]
    check(
        options.slots in (None, rows.shape[1]),
        f"--slots={options.slots} must be the {rows.shape[1]} of {path}, or left out",
    )
    return Placed(Placement(rows, options.ranks, spec.num_experts), shares)


def _learns(planner: str) -> bool:
    """Return whether the planner needs more than a load: items or transitions, from the requests of a trace."""
    return bool({"items", "transitions"} & {*planners.parameters(planner)})


def _planner(
    options: PlanOptions, objective: Objective, progress: Progress, learned: Mapping[str, Callable[[], Any]]
) -> Planner:
    known = planners.parameters(options.planner)
    asked = {"split": options.planned_split, "max_moves": options.max_moves, "time_limit_s": options.time_limit}
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    for name in given:
        if name not in known:
            option = f"--{name.removesuffix('_s').replace('_', '-')}"
            able = [other for other in planners if name in planners.parameters(other) and not _learns(other)]
            raise ConfigError(
                f"planner {options.planner} has no {option}; {', '.join(able)} {'have' if len(able) > 1 else 'has'} it"
            )
    if "time_limit_s" in known and not _learns(options.planner):  # the default of one that learns is 2 s
        given.setdefault("time_limit_s", TIME_LIMIT_S)
    context = Offers(learned, objective=lambda: objective, progress=lambda: progress)
    return planners.make(options.planner, context, **given)
