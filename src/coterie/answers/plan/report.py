"""Report of ``coterie plan``: numbers, a verdict of one sentence, and the next command to run."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import fields
from typing import Any

from coterie.answers.plan.learning import LocalShares
from coterie.answers.plan.plans import BatchRow, Planned, PlanOptions
from coterie.answers.plan.pricing import gain_pct
from coterie.answers.runs import WORTH_PCT
from coterie.answers.verdicts import NOT, change, opening_of, verdict_of
from coterie.costs.cells import preset_names
from coterie.costs.movement import staged_exposed
from coterie.models import models
from coterie.placement import HOST, Plan
from coterie.placement.maps.targets import executors
from coterie.types import Interval, Topology
from coterie.units import counted

MEMORY = (
    "experts_bytes",
    "replicas_bytes",
    "staging_bytes",
    "rest_bytes",
    "device_bytes",
    "left_bytes",
    "fits",
    "kv_tokens",
    "replica_kv_tokens",
)
"""Fields of the memory of a rank in the report."""
SHARING = {"equal": "equally", "weighted": "by weights", "optimal": "by the best split of each load"}
TIME, NOW = "the MoE layers' time", "the placement that runs now"


def summary(planned: Planned) -> dict[str, Any]:
    """Return the object that ``--json`` prints, without the verdict."""
    plan, problem, spec, options = planned.plan, planned.problem, planned.load.spec, planned.options
    placement, topology, pricing = plan.placement, problem.topology, planned.pricing
    before, after = planned.both(pricing.busy_s)
    before_s, after_s = planned.both(pricing.step_s)
    balance_before, balance_after = planned.both(pricing.balance)
    steps, proof, other = pricing.steps, plan.proof, planned.no_spare
    saving = before_s - after_s
    paid = 0.0 if not plan.movement_s else plan.movement_s / saving if saving > 0 else math.inf
    return {
        "model": spec.name,
        "load": planned.load.what,
        "batch": options.batch,
        "preset": options.preset,
        "dtype": pricing.model.dtype,
        "measured": pricing.model.measured,
        "planner": options.planner,
        "split": plan.split,
        "to": options.to,
        "layers": placement.num_layers,
        "experts": placement.num_experts,
        "slots": placement.num_slots,
        "ranks": placement.num_ranks,
        "nodes": topology.num_nodes,
        "horizon": problem.objective.horizon,
        "keep": plan.skip_reason is not None,
        "skip_reason": plan.skip_reason,
        "before_s": before_s,
        "start_s": plan.before_s,
        "after_s": after_s,
        "gain_pct": gain_pct(before_s, after_s),
        "balancedness_before": balance_before,
        "balancedness_after": balance_after,
        "steps": None if steps is None else {"what": steps.what, "scenarios": steps.load.num_scenarios},
        "unseen": None if plan.unseen is None else plan.unseen._asdict(),
        "domains": [row._asdict() for row in planned.domains],
        "duplicates_before": planned.now.placement.duplicates,
        "duplicates_after": placement.duplicates,
        "moves": len(plan.moves),
        "move_bytes": len(plan.moves) * problem.objective.expert_bytes,
        "moves_by_link": by_link(plan, topology, placement.slots_per_rank),
        "movement_s": plan.movement_s,
        "break_even_steps": paid if math.isfinite(paid) else None,
        "break_even_s": paid * after_s if math.isfinite(paid) else None,
        "movement": options.movement,
        "trade": trade(planned, saving),
        "planning_s": plan.planning_s,
        # Seconds over the horizon, summed over layers; gaps as shares of the objective.
        "proof": None
        if proof is None
        else {
            "objective_s": float(proof.objective_s.sum()),
            "bound_s": float(proof.bound_s.sum()),
            "gap": proof.total_gap,
            "worst_gap": float(proof.gap.max()),
            "layers_closed": int(proof.closed.sum()),
        },
        "rank_s_before": before.sum(axis=0),
        "rank_s_after": after.sum(axis=0),
        "no_spare": None
        if other is None
        else {
            "slots": other.placement.num_slots,
            "after_s": other.after_s,
            "gain_pct": gain_pct(before_s, other.after_s),
            "balancedness_after": other.balance_after,
            "moves": len(other.moves),
        },
        "held_out": None if planned.held_out is None else planned.held_out._asdict(),
        "not_held_out": planned.load.whole_because or None,
        "batches": [row._asdict() | {"gain_pct": row.gain_pct} for row in planned.batches],
        "memory": {name: getattr(planned.memory, name) for name in MEMORY},
        "locality": None if planned.locality is None else planned.locality._asdict(),
    }


def trade(planned: Planned, saving_s: float) -> dict[str, Any]:
    """Return after how many steps the moves pay off, for an engine that stops for moves and for one that stages them.

    Both numbers are for the moves of this plan; a plan made for the other engine would have other moves. A staged move
    takes effect when it has arrived, `in_flight_steps` steps later; until then it only slows the steps.
    """
    objective, model = planned.problem.objective, planned.pricing.model
    link_s = planned.plan.movement_s / objective.exposed if objective.exposed else 0.0
    known = {"device", "host-to-device"} <= model.contention.keys()
    staged = staged_exposed(model.contention, planned.problem.topology) if known else None
    now_s = planned.pricing.step_s(planned.options.batch, planned.now)

    def steps(exposed: float | None) -> float | None:
        if exposed is None or (link_s and saving_s <= 0):
            return None
        return exposed * link_s / saving_s if link_s else 0.0

    return {
        "link_s": link_s,
        "staged_exposed": staged,
        "stops_steps": steps(1.0),
        "staged_steps": steps(staged),
        "in_flight_steps": link_s / now_s if now_s else 0.0,
    }


def by_link(plan: Plan, topology: Topology, slots_per_rank: int) -> dict[str, dict[str, float]]:
    """Return the moves and the seconds on each kind of link; seconds are summed as if moves were sequential."""
    moves, nodes = plan.moves, topology.rank_nodes
    host = moves.source == HOST
    near = ~host & (nodes[moves.source] == nodes[moves.slot // slots_per_rank])
    kinds = {"inside a node": near, "between nodes": ~host & ~near, "from the host": host}
    return {
        name: {"moves": int(chosen.sum()), "link_s": float(moves.seconds[chosen].sum())}
        for name, chosen in kinds.items()
        if chosen.any()
    }


def _local(locality: LocalShares | None, ranks: int) -> str:
    if locality is None:
        return ""
    sent = "Requests" if locality.items == "requests" else "Tokens"
    unseen = "requests it was not made on" if locality.held_out else "the requests it was made on"
    return (
        f" {sent} sent to the ranks of their experts would find {locality.after:.1%} of these there, "
        f"{locality.now:.1%} today and {1 / ranks:.1%} by chance, on {unseen}."
    )


def plan_verdict(planned: Planned, found: dict[str, Any]) -> str:
    """Say whether the plan pays, at which batch size, and how certain that is; then what is local under it."""
    where = (
        f"for {found['model']} in {found['dtype']} on {counted(found['ranks'], 'rank')} of {found['preset']}, "
        f"{found['batch']:,} tokens a step{_sharing(planned)}"
    )
    held, plain, steps = found["held_out"], found["no_spare"], found["break_even_steps"]
    sure = "on load planned on (nothing is held out" if held is None else "on load not planned on (one split"
    what, sure, facts = "the plan", f"{sure}: no interval)", [_beside(planned, found)]
    percent, opening = (held or found)["gain_pct"], opening_of(Interval(_expected(found), None, None), 0.0)
    now = NOW if planned.options.current else f"{NOW} (experts in order)"
    if _spare_slots_cost(found):
        where, what, opening = f"to add spare slots {where}", f"a plan with {found['slots']} slots", NOT
        less = plain["gain_pct"] if held is None else held["no_spare_gain_pct"]
        facts = [f"one with {plain['slots']} slots {change(less, 'it')}"]
    elif found["keep"] and not found["gain_pct"] > 0:
        percent, sure, opening, facts = found["gain_pct"], f"which stays: {found['skip_reason']}", NOT, []
    elif opening != NOT and (steps is None or steps > found["horizon"]):
        opening, facts = NOT, [*facts, f"its moves are not paid for within {counted(found['horizon'], 'step')}"]
    elif opening != NOT and found["moves"]:
        facts.append(f"moves are paid for after {counted(max(1, math.ceil(steps)), 'step')}")
    gain = f"{what} {change(percent, TIME)}"
    said = verdict_of(where, Interval(percent, None, None), gain, now, sure, *facts, opening=opening)
    return said + _local(planned.locality, found["ranks"])


def _sharing(planned: Planned) -> str:
    """Say how replicas share tokens in this plan, and in which engines; empty without spare slots."""
    split, target = planned.plan.split, planned.pricing.target
    if planned.plan.placement.num_slots == planned.plan.placement.num_experts:
        return ""
    if target is not None:
        return f", replicas sharing tokens as in {target.engine.name}"
    assumed = "" if split == "equal" else f" ({', '.join(executors(split))})"
    return f", replicas sharing tokens {SHARING[split]}{assumed}"


def next_command(planned: Planned, found: dict[str, Any]) -> str:
    """Return the next command to run."""
    options, local = planned.options, planned.locality
    if local is not None and local.after > local.now and found["slots"] == found["experts"]:
        if "written" in found:
            return shlex.join(["coterie", "place", "apply", found["written"], "MODEL", "-o", "MODEL-placed"])
        tables = " --tables tables" if planned.load.learned is not None and planned.load.learned.has_tokens else ""
        return f"{command(options, tables=None)} -o placement.json{tables}"
    if _spare_slots_cost(found):
        to = {} if options.to else {"to": "vllm"}
        return f"{command(options, slots=None, split=None, current=None, **to)} -o placement.json"
    steps = found["break_even_steps"]
    if _expected(found) >= WORTH_PCT and steps is not None and steps <= found["horizon"]:
        if "written" in found:
            return _load_it(planned, found)
        to = {} if options.to else {"to": "vllm" if found["split"] == "equal" else "native"}
        return f"{command(options, **to)} -o placement.json"
    best = max(planned.batches, key=_best_gain)
    if found["gain_pct"] < WORTH_PCT <= _best_gain(best) and best.tokens != options.batch:
        return command(options, batch=best.tokens)
    if options.window is not None:  # no gain for this window: try the whole load
        return command(options, window=None)
    return f"coterie inspect {shlex.quote(str(options.load))}"


def _best_gain(row: BatchRow) -> float:
    return row.gain_pct if row.replanned_gain_pct is None else row.replanned_gain_pct


def _load_it(planned: Planned, found: dict[str, Any]) -> str:
    """Return the command that starts the engine with the file; for other formats, the command that inspects it."""
    file, options = shlex.quote(found["written"]), planned.options
    if found["format"] == "vllm":
        known = found["model"] in models() and found["preset"] in preset_names()
        prices = {"model": found["model"], "device": found["preset"]} if known else {}
        setting = shlex.quote(json.dumps(prices | {"initial_map": found["written"]}))
        spare = found["slots"] - found["experts"]
        slots = f" --eplb-config {shlex.quote(json.dumps({'num_redundant_experts': spare}))}" if spare else ""
        return f"COTERIE_EPLB={setting} vllm serve MODEL --enable-expert-parallel --enable-eplb{slots}"
    target = planned.pricing.target
    if found["format"] == "sglang" and target is not None:
        spare, a2a = found["slots"] - found["experts"], target.settings.get("a2a", "none")
        flags = f" --moe-a2a-backend {a2a}" if a2a != "none" else ""
        flags += f" --moe-runner-backend {target.settings['runner']}" if "runner" in target.settings else ""
        if spare:
            flags += f" --ep-num-redundant-experts {spare} --ep-dispatch-algorithm dynamic"
        return (
            f"python -m sglang.launch_server --model-path MODEL --tp-size {options.ranks} --ep-size {options.ranks} "
            f"--init-expert-location {file}{flags}"
        )
    load = shlex.quote(str(options.load))
    return f"coterie place inspect {file} --model {found['model']} --ranks {options.ranks} --load {load}"


def command(options: PlanOptions, **changes: Any) -> str:
    """Return the command line for these options, without those that have their default."""
    flags, plain = {"load_format": "--from", "memory_gb": "--memory"}, _given(PlanOptions(options.load))
    words = ["coterie", "plan", str(options.load)]
    for name, value in (_given(options) | changes).items():
        own = name == "batch" and options.sampling.requests is not None
        if not own and value is not None and value != plain[name]:
            words += [flags.get(name, "--" + name.replace("_", "-")), str(value)]
    return shlex.join(words)


def _given(options: PlanOptions) -> dict[str, Any]:
    return {
        field.name: getattr(part, field.name)
        for part in (options, options.sampling)
        for field in fields(part)
        if field.name not in ("load", "sampling")
    }


def _expected(found: dict[str, Any]) -> float:
    """Return the gain to expect, in percent: the smaller of the planned and the held-out gain."""
    held = found["held_out"]
    return float(found["gain_pct"] if held is None else min(found["gain_pct"], held["gain_pct"]))


def _spare_slots_cost(found: dict[str, Any]) -> bool:
    """Return whether the plan without spare slots is at least as good, on the held-out load if there is one."""
    plain, held = found["no_spare"], found["held_out"]
    if plain is None or held is None:
        return plain is not None and bool(plain["gain_pct"] >= found["gain_pct"])
    return bool(held["no_spare_gain_pct"] >= held["gain_pct"])


def _beside(planned: Planned, found: dict[str, Any]) -> str:
    """Name the gains without spare slots, on the load planned on, and at the batch size with clearly less."""
    held, least = found["held_out"], min(planned.batches, key=lambda row: row.gain_pct)
    other = None if held is None else held["no_spare_gain_pct"]
    facts = {
        f"without spare slots {other or 0.0:.1f}%": other is not None,
        f"{found['gain_pct']:.1f}% on the load planned on": held is not None,
        f"{least.gain_pct:.1f}% at {least.tokens:,} tokens a step": found["gain_pct"] - least.gain_pct >= WORTH_PCT,
    }
    return ", ".join(fact for fact, holds in facts.items() if holds)
