"""One planning round on the user's own load: what ``coterie plan`` asks and prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.costs.presets import step_model
from coterie.errors import ConfigError, InputError, TraceError, UnknownNameError, check_input_file
from coterie.footprints.counting import accumulate_load
from coterie.models import get_model, model_from_config
from coterie.placement import HOST, Load, Objective, PlacementMap, Plan, Planner, Problem, planners, read_map
from coterie.placement.base import Progress, Proof, SearchProgress
from coterie.traces import ActivationTrace, LoadTable
from coterie.traces.readers import ReadOptions, Trace, read_trace
from coterie.traces.readers.trtllm import sniff_trtllm
from coterie.traces.store import ArrayFile
from coterie.types import ModelSpec, Placement, Topology
from coterie.wire.routed_experts import decode_npy

MERGED = "merged_"
"""How labels of windows begin that are sums of other windows of their table."""

TIME_LIMIT_S = 10.0
"""Seconds per layer for planners with a time limit: 75 layers then take minutes, not hours."""

Report = Callable[[str, int, int], None]
"""report(doing, done, total)"""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of a plan. None takes the setting from the load, the current placement or the planner."""

    load: Path
    load_format: str | None = None
    window: str | None = None
    sources: Path | None = None
    model: str | None = None
    ranks: int = 8
    nodes: int = 1
    slots: int | None = None
    speeds: str | None = None
    current: Path | None = None
    planner: str = "latency_optimal"
    split: str | None = None
    max_moves: int | None = None
    time_limit: float | None = None
    horizon: float | None = None
    target_balance: float | None = None
    preset: str = "h200"
    batch: int = 8192


class WindowLoad(NamedTuple):
    """A load and its model."""

    spec: ModelSpec
    tokens: NDArray[np.float64]
    """[layer, expert]"""
    layer_ids: tuple[int, ...]
    what: str
    """Which part of which file, in words."""
    labels: tuple[str, ...] = ()
    """Labels of the windows it is the sum of, if any."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and its inputs."""

    load: WindowLoad
    objective: Objective
    problem: Problem
    plan: Plan
    planner: str
    measured: bool
    """Whether the device was calibrated with this model's shape."""

    @property
    def map(self) -> PlacementMap:
        """The placement to write, with shares if they are not equal."""
        shares = None if self.plan.split == "equal" else self.plan.shares
        return PlacementMap(self.plan.placement, self.load.spec.name, self.load.layer_ids, shares)

    def busy_s(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """[layer, rank] seconds of a step, before and after."""
        plan, problem = self.plan, self.problem
        after = problem.rank_s(plan.placement.slot_experts, None if plan.split == "equal" else plan.shares)
        return problem.rank_s(problem.current.slot_experts, problem.shares), after


def make_plan(options: PlanOptions, report: Report = lambda *_: None) -> Planned:
    if options.ranks < 1 or options.nodes < 1 or options.ranks % options.nodes:
        raise ConfigError(f"--ranks={options.ranks} must be a multiple of --nodes={options.nodes}, both at least 1")
    if options.batch < 1:
        raise ConfigError(f"--batch={options.batch} must be at least 1")
    load = read_load(options.load, options.load_format, options.model, options.window)
    topology = Topology(options.ranks, options.ranks // options.nodes, speeds=_speeds(options.speeds, options.ranks))
    now = _current(options, load)
    current, shares = now.placement, now.shares
    model = step_model(load.spec, options.preset, topology=topology)
    asked = {"horizon": options.horizon, "target_balance": options.target_balance}
    objective = Objective.of(model, options.batch, **{name: v for name, v in asked.items() if v is not None})
    planner = _planner(options, objective, _layers_done(report, load.layer_ids))
    seen = load.tokens.sum(axis=1).mean() / load.spec.top_k
    sources = None
    if options.sources is not None:
        sources = read_sources(options.sources, load.tokens, load.layer_ids, load.labels, options.ranks)
        load = load._replace(what=f"{load.what}, by source rank of {options.sources.name}")
    window = Load(load.tokens, max(float(seen) / options.batch, 1e-9), sources)
    # One empty layer first: compiling or loading the machine code is no part of planning's time.
    empty = Placement(current.slot_experts[:1], current.num_ranks, current.num_experts)
    planner.plan(Load(np.zeros((1, current.num_experts))), topology, empty)
    if shares is None:
        plan = planner.plan(window, topology, current)
    else:
        plan = planner.plan(window, topology, current, shares)
    problem = objective.problem(window, topology, current, shares)
    return Planned(
        load=load, objective=objective, problem=problem, plan=plan, planner=options.planner, measured=model.measured
    )


def _layers_done(report: Report, layer_ids: tuple[int, ...]) -> Callable[[SearchProgress], None]:
    def tell(at: SearchProgress) -> None:
        gap = max(0.0, 1 - at.bound_s / at.objective_s) if at.objective_s > 0 else 0.0
        turn = f", price {at.price} of a move" if at.price else ""
        report(f"Layer {layer_ids[at.layer]}, gap {gap:.1%}{turn}", at.layer, at.layers)

    return tell


def read_load(path: Path, format: str | None, model: str | None, window: str | None) -> WindowLoad:
    """The load of a trace in any known format: all of it, or of a load table the windows asked for.

    `window` is a label (also the part before a /), a number from 0, or a range A:B that leaves B out. Without it
    windows named merged_… are left out: they are sums of others, whose tokens would count twice.
    """
    trace = read_trace(path, format, ReadOptions(model=model if model is None or not Path(model).exists() else None))
    spec = _spec(trace, model)
    labels: tuple[str, ...] = ()
    if isinstance(trace, LoadTable):
        chosen, what = _windows(path, trace, window)
        labels = tuple(trace.labels[i] for i in chosen) if trace.labels is not None else ()
        tokens = trace.counts[chosen].sum(axis=0, dtype=np.float64)
        ids = None if trace.layer_ids is None else tuple(int(n) for n in trace.layer_ids)
    elif isinstance(trace, ActivationTrace):
        if window is not None:
            raise ConfigError(f"--window={window} chooses from a load table; {path} holds activations")
        tokens, what = count_load(trace), f"{trace.num_requests:,} requests of {path.name}"
        ids = trace.meta.layer_ids
    else:
        raise ConfigError(f"{path} holds requests without their experts: a load or an activation trace is needed")
    if tokens.shape[1] != spec.num_experts:
        raise TraceError(path, "load", f"has {tokens.shape[1]} experts a layer; {spec.name} has {spec.num_experts}")
    if ids is None and len(tokens) == spec.num_layers > spec.num_moe_layers:
        dense = np.setdiff1d(np.arange(spec.num_layers), spec.moe_layer_ids)
        if tokens[dense].any():
            raise TraceError(path, "load", f"has tokens in layer {dense[0]}, which is dense in {spec.name}")
        tokens, ids = tokens[list(spec.moe_layer_ids)], spec.moe_layer_ids
    if ids is None and len(tokens) == spec.num_moe_layers:
        ids = spec.moe_layer_ids
    if ids is None or not set(ids) <= set(spec.moe_layer_ids):
        raise TraceError(path, "load", f"has {len(tokens)} layers; {spec.name} has {spec.num_moe_layers} MoE ones")
    return WindowLoad(spec, tokens, ids, what, labels)


def count_load(trace: ActivationTrace) -> NDArray[np.float64]:
    """[layer, expert] activations of a whole trace."""
    load = np.zeros((trace.meta.num_layers, trace.meta.num_experts))
    for chunk in trace.chunks():
        try:
            accumulate_load(chunk.tokens.expert_ids, load)
        except ConfigError:
            trace.validate()  # names the file
            raise
    return load


def find_model(name: str) -> ModelSpec:
    """A known name, or a folder or file that describes the shape."""
    return model_from_config(name) if Path(name).exists() else get_model(name)


def _spec(trace: Trace, model: str | None) -> ModelSpec:
    if model is not None:
        return find_model(model)
    name = trace.model if isinstance(trace, LoadTable) else getattr(getattr(trace, "meta", None), "model", "unknown")
    try:
        return get_model(name)
    except UnknownNameError:
        raise ConfigError(f"the load is of model {name!r}, which is not known: say which with --model") from None


def _windows(path: Path, table: LoadTable, window: str | None) -> tuple[list[int], str]:
    labels = list(table.labels or ())
    if window is None:
        return _all_windows(path, labels, len(table))
    chosen = [i for i, label in enumerate(labels) if label == window or label.startswith(f"{window}/")]
    if not chosen:
        first, colon, last = window.partition(":")
        if not all(part.isdecimal() or (colon and not part) for part in (first, last or first)):
            names = ", ".join(dict.fromkeys(label.split("/")[0] for label in labels))
            also = f", or one of {names}" if names else ""
            raise ConfigError(f"--window={window} must be a number or a range A:B{also}")
        known = max(len(first), len(last)) <= 18  # more digits are no number that is worth converting
        stop = ((int(last) if last else len(table)) if colon else int(first) + 1) if known else 0
        if not known or not int(first or 0) < stop <= len(table):
            raise ConfigError(f"--window={window} must be within the {len(table)} windows of {path}, counted from 0")
        chosen = list(range(int(first or 0), stop))
    return chosen, f"{window} of {path.name}"


def _all_windows(path: Path, labels: list[str], count: int) -> tuple[list[int], str]:
    merged = {i for i, label in enumerate(labels) if label.startswith(MERGED)}
    chosen = [i for i in range(count) if i not in merged]
    if not chosen and count > 1:
        raise ConfigError(f"all {count} windows of {path} are merged ones, which overlap: choose one with --window")
    if not merged or not chosen:
        return list(range(count)), f"{count} windows of {path.name}" if count > 1 else path.name
    are = f"{len(merged)} named {MERGED}… are" if len(merged) > 1 else f"1 named {MERGED}… is"
    return chosen, f"{len(chosen)} of {count} windows of {path.name} ({are} left out: sums of others)"


def _speeds(text: str | None, ranks: int) -> tuple[float, ...]:
    if text is None:
        return ()
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--speeds={text} must be {ranks} numbers with commas between them") from None


def _current(options: PlanOptions, load: WindowLoad) -> PlacementMap:
    """The current placement, with shares if they are not equal."""
    spec = load.spec
    if options.current is None:
        slots = spec.num_experts if options.slots is None else options.slots
        if slots < spec.num_experts:
            raise ConfigError(f"--slots={slots} must hold the num_experts={spec.num_experts} of {spec.name}")
        return PlacementMap(Placement.linear(len(load.tokens), spec.num_experts, options.ranks, slots))
    found = read_map(options.current, model=spec, num_ranks=options.ranks)
    rows, shares = found.placement.slot_experts, found.shares
    if found.layer_ids != load.layer_ids:
        if found.layer_ids is None or not set(load.layer_ids) <= set(found.layer_ids):
            raise ConfigError(f"{options.current} lacks layers that the load has: it has {len(rows)}")
        kept = [found.layer_ids.index(layer) for layer in load.layer_ids]
        rows, shares = rows[kept], None if shares is None else shares[kept]
    if options.slots not in (None, rows.shape[1]):
        raise ConfigError(f"--slots={options.slots} must be the {rows.shape[1]} of {options.current}, or left out")
    return PlacementMap(Placement(rows, options.ranks, spec.num_experts), shares=shares)


def _planner(options: PlanOptions, objective: Objective, progress: Progress) -> Planner:
    known = planners.parameters(options.planner)
    asked = {"split": options.split, "max_moves": options.max_moves, "time_limit_s": options.time_limit}
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    for name in given:
        if name not in known:
            option = f"--{name.removesuffix('_s').replace('_', '-')}"
            able = [other for other in planners if name in planners.parameters(other)]
            raise ConfigError(
                f"planner {options.planner} has no {option}; {', '.join(able)} {'have' if len(able) > 1 else 'has'} it"
            )
    if "time_limit_s" in known:
        given.setdefault("time_limit_s", TIME_LIMIT_S)
    return planners.make(options.planner, {"objective": objective, "progress": progress}, **given)


def summary(planned: Planned) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    plan, problem, spec = planned.plan, planned.problem, planned.load.spec
    placement, topology = plan.placement, problem.topology
    before, after = planned.busy_s()
    steps = plan.break_even_steps
    return {
        "model": spec.name,
        "load": planned.load.what,
        "planner": planned.planner,
        "split": plan.split,
        "layers": placement.num_layers,
        "experts": placement.num_experts,
        "slots": placement.num_slots,
        "ranks": placement.num_ranks,
        "nodes": topology.num_nodes,
        "horizon": planned.objective.horizon,
        "keep": plan.skip_reason is not None,
        "skip_reason": plan.skip_reason,
        "before_s": plan.before_s,
        "after_s": plan.after_s,
        "gain_pct": 100 * plan.saving_s / plan.before_s if plan.before_s else 0.0,
        "balance_before": plan.balance_before,
        "balance_after": plan.balance_after,
        "duplicates_before": problem.current.duplicates,
        "duplicates_after": placement.duplicates,
        "moves": len(plan.moves),
        "move_bytes": len(plan.moves) * planned.objective.expert_bytes,
        "moves_by_link": by_link(plan, topology, placement.slots_per_rank),
        "movement_s": plan.movement_s,
        "break_even_steps": float(steps) if np.isfinite(steps) else None,
        "break_even_s": float(steps * plan.after_s) if np.isfinite(steps) else None,
        "planning_s": plan.planning_s,
        "proof": None if plan.proof is None else _proof(plan.proof),
        "rank_s_before": before.sum(axis=0),
        "rank_s_after": after.sum(axis=0),
    }


def _proof(proof: Proof) -> dict[str, Any]:
    """Seconds over the horizon, summed over layers; gaps are shares of the objective."""
    return {
        "objective_s": float(proof.objective_s.sum()),
        "bound_s": proof.total_bound_s,
        "gap": proof.total_gap,
        "worst_gap": float(proof.gap.max()),
        "layers_closed": int(proof.closed.sum()),
    }


def by_link(plan: Plan, topology: Topology, slots_per_rank: int) -> dict[str, dict[str, float]]:
    """Moves and seconds on each link, summed as if one after the other."""
    moves, nodes = plan.moves, topology.rank_nodes
    host = moves.source == HOST
    near = ~host & (nodes[moves.source] == nodes[moves.slot // slots_per_rank])
    kinds = {"inside a node": near, "between nodes": ~host & ~near, "from the host": host}
    return {
        name: {"moves": int(chosen.sum()), "link_s": float(moves.seconds[chosen].sum())}
        for name, chosen in kinds.items()
        if chosen.any()
    }


# Where tokens come from: their counts by source rank, which make planning mind the traffic between ranks.
#
# Two forms are known: an .npy file [source rank, layer, expert], and a folder of TensorRT-LLM's expert statistics,
# where each rank counts its own tokens. They must add up to the load they are given with.

Array = NDArray[np.float64]


def read_sources(path: Path, tokens: Array, layer_ids: tuple[int, ...], labels: tuple[str, ...], ranks: int) -> Array:
    """[source rank, layer, expert] of the same tokens as `tokens` [layer, expert].

    Of TensorRT-LLM's statistics, `labels` are the iterations and `layer_ids` the layers that `tokens` was read of.
    """
    found = _of_statistics(path, tokens, layer_ids, labels, ranks) if path.is_dir() else _of_array(path)
    expected = (ranks, *tokens.shape)
    if found.shape != expected:
        raise TraceError(path, "sources", f"has shape {found.shape}; [source rank, layer, expert] is {expected} here")
    bad = np.argwhere(~((found >= 0) & (found < np.inf)))  # ~ catches NaN as well
    if bad.size:
        at = tuple(int(index) for index in bad[0])
        raise TraceError(path, f"sources{list(at)}", f"is {found[at]}; tokens must be finite and not negative")
    total = found.sum(axis=0)
    wrong = np.argwhere(~np.isclose(total, tokens, rtol=1e-6, atol=1e-6))
    if wrong.size:
        layer, expert = (int(index) for index in wrong[0])
        raise TraceError(
            path,
            "sources",
            f"of layer {layer_ids[layer]}, expert {expert} add up to {total[layer, expert]:g} tokens; "
            f"the load has {tokens[layer, expert]:g}",
        )
    return found


def _of_array(path: Path) -> Array:
    check_input_file(path)
    try:
        found = decode_npy(path.read_bytes())
    except FileNotFoundError:
        raise TraceError(path, "file", "does not exist") from None
    except (OSError, InputError) as error:
        raise TraceError(path, "file", f"is no .npy array: {error}") from None
    if found.dtype.kind not in "uif":
        raise TraceError(path, "file", "must be an .npy array of numbers")
    return found.astype(np.float64)


def _of_statistics(
    path: Path, tokens: Array, layer_ids: tuple[int, ...], iterations: tuple[str, ...], ranks: int
) -> Array:
    if not sniff_trtllm(path):
        raise TraceError(path, "sources", "is a folder, but none of TensorRT-LLM's expert statistics")
    files = sum(1 for _ in path.glob("rank*.safetensors"))
    if files != ranks:
        raise TraceError(path, "rank*.safetensors", f"are {files}; --ranks={ranks} must be as many")
    found = np.zeros((ranks, *tokens.shape))
    for rank in range(ranks):
        arrays = ArrayFile(path / f"rank{rank}.safetensors")
        for row, layer in enumerate(layer_ids):
            for iteration in iterations:
                key = f"{iteration}_{layer}"
                counts = arrays.get(key)
                if counts is not None and counts.shape != tokens.shape[1:]:
                    raise TraceError(arrays.path, key, f"has shape {counts.shape}, expected {tokens.shape[1:]}")
                if counts is not None:
                    found[rank, row] += counts
    return found
