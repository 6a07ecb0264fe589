"""Snapshot of the gateway for the dashboard, as plain values, with a bounded size.

Names and reasons come from workers, clients and plugins: they are truncated here, and the page shows them as text only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from coterie.gateway.config import ControlSection
from coterie.gateway.parts import GatewayParts

MOST_WORKERS = 128
MOST_DECISIONS = 30
MOST_CANDIDATES = 32
MOST_EVENTS = 50
MOST_ACTIONS = 6
MOST_LAYERS = 8
"""Most layers of an action that are listed."""
MOST_RANKS = 256
MOST_VALUES = 24
"""Most values of an event, of the loop's status, or of an advice."""
MOST_TEXT = 300
MINUTE_S = 60.0
NO_LOOP = "No control loop runs in this gateway: nothing watches the experts of its workers."
NO_NEWS = "The control loop has started and has not told anything yet."


class PageQuery(msgspec.Struct, frozen=True):
    """Selection of one listener: the heat map's worker, and a filter of decisions."""

    heat: str | None = None
    """Id of the worker whose heat map is shown; None for the first that has one."""
    pool: str | None = None
    worker: str | None = None
    """`pool` and `worker` select the decisions shown; None for all."""


def snapshot(parts: GatewayParts, now_s: float, asked: PageQuery) -> dict[str, Any]:
    """Return the values of all panels but the heat map; `now_s` is the time in seconds since 1970."""
    last = parts.decisions.last(MOST_DECISIONS, pool=asked.pool, worker=asked.worker)
    routers = {name: pool.spec.router for name, pool in parts.pools.items()}
    decisions = [_decision(decision, routers.get(decision["pool"])) for decision in last]
    workers, loop = _workers(parts), _loop(parts)
    switchback, comparison = parts.described_switchback(), parts.described_comparison()
    minute = parts.watcher.recent.over(now_s, MINUTE_S)
    return {
        "at_s": now_s,
        "verdict": verdict(workers, minute, loop, switchback, comparison),
        "workers": workers[:MOST_WORKERS],
        "workers_left_out": max(0, len(workers) - MOST_WORKERS),
        "pools": [{"name": name, "router": cut(router, 100)} for name, router in routers.items()],
        "in_flight": parts.line.in_use,
        "waiting": parts.line.waiting,
        "decided": parts.decisions.recorded,
        "decisions": decisions,
        "minute": minute,
        "series": parts.watcher.recent.series(now_s),
        "switchback": switchback,
        "no_turns": parts.no_turns(),
        "comparison": comparison,
        "loop": loop,
    }


def heat(parts: GatewayParts, worker: str | None) -> dict[str, Any]:
    """Return the tokens of a worker's last window, [layer, expert], layer by layer, or why there are none."""
    view = None if parts.control is None else parts.control.view
    if view is None:
        return {"worker": worker, "workers": [], "reason": NO_LOOP if parts.control is None else NO_NEWS}
    known = [cut(name, 128) for name in sorted(view.loads)[:MOST_WORKERS]]
    if worker is None and known:
        worker = known[0]
    load = view.loads.get(worker or "")
    if load is None or not load.layers * load.experts:
        said = "No worker has" if worker is None else f"{cut(worker, 128)} has not"
        return {"worker": worker, "workers": known, "reason": f"{said} told of its experts yet."}
    return {
        "worker": worker,
        "workers": known,
        "layers": load.layers,
        "layers_left_out": load.layers_left_out,
        "experts": load.experts,
        "values": msgspec.Raw(load.values),
    }


def _workers(parts: GatewayParts) -> list[dict[str, Any]]:
    return [
        {
            "id": cut(id, 128),
            "pool": pool.name,
            "role": member.entry.role,
            "running": pool.keeper.running(id),
            "others": pool.others(member),
            "reported": pool.described_report(member),
            "places": member.entry.places,
            "open": pool.keeper.members[id].open,
            "healthy": member.health.healthy,
            "checked": member.health.checks > 0,
            "breaker": str(member.breaker.state(pool.clock())),
            "experts": _rounded(pool.keeper.distinct(pool.row_of(member))),
            "kv_events": parts.knowledge.streams[pool.name].connected(id),
            "unreached": member.health.unreached,
            "lost_streams": sorted(member.lost_streams),
            "map_version": getattr(parts.knowledge.maps.get(id), "version", None),
        }
        for pool in parts.pools.values()
        for id, member in pool.members.items()
    ]


def _decision(one: Mapping[str, Any], router: str | None) -> dict[str, Any]:
    """Return a decision with its best candidates, which include the chosen worker.

    `by` names the router that chose if it is another than `router`, which the pool has now.
    """
    scores, chosen = one["scores"], one["worker"]
    order = sorted(scores, key=lambda name: (name != chosen, math.inf if scores[name] is None else scores[name]))
    kept = set(order[:MOST_CANDIDATES])
    return {
        "id": cut(one["id"], 100),
        "time": one["time"],
        "pool": one["pool"],
        "worker": cut(chosen, 128),
        "reason": cut(one["reason"], MOST_TEXT),
        "fallback": one["fallback"],
        "by": None if one["fallback"] or one["router"] in ("", router) else cut(one["router"], 100),
        "prompt_tokens": one["prompt_tokens"],
        "cached_tokens": one["cached_tokens"],
        "scores": {cut(name, 128): _rounded(score) for name, score in scores.items() if name in kept},
        "candidates": len(scores),
    }


def _loop(parts: GatewayParts) -> dict[str, Any]:
    """Return the control loop's state, its events (newest last) and its placement advice."""
    view = None if parts.control is None else parts.control.view
    if view is None:
        reason = NO_LOOP if parts.control is None else NO_NEWS
        loop = {"running": parts.control is not None, "reason": reason, "status": {}, "events": [], "advice": None}
        return {**loop, "can_apply": False, "to_apply": None}
    can_apply = _can_apply(parts)
    return {
        "running": True,
        "reason": None,
        "status": _plain(view.status),
        "events": [_event(one) for one in view.events[-MOST_EVENTS:]],
        "advice": None if view.advice is None else _advice(view.advice),
        "measured": (parts.plan_measured() or {}).get("sentence"),
        "can_apply": can_apply,
        "to_apply": _to_apply(parts.config.control) if can_apply else None,
    }


def _can_apply(parts: GatewayParts) -> bool:
    """Whether engines here can take a plan: one is told of the map's file, states its rank, or reports its map."""
    ranked = any(worker.placement_rank is not None for worker in parts.entries())
    return parts.config.control.map is not None or ranked or bool(parts.knowledge.maps)


def _to_apply(section: ControlSection) -> str | None:
    """Say what an operator does to have plans applied; None if the loop applies them."""
    if section.apply:
        return None
    file = "" if section.map is not None else ", and control.map to the file that vLLM's policy loads"
    return f"set control.apply to true{file}"


def _event(one: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "at_s": _rounded(one.get("at_s"), 14),
        "kind": cut(one.get("kind", ""), 40),
        "reason": cut(one.get("reason", ""), MOST_TEXT),
        "values": _plain(one.get("values")),
    }


def _advice(advice: Mapping[str, Any]) -> dict[str, Any]:
    actions = _listed(advice.get("actions"))
    return {
        **_plain(advice),
        "before": _ranks(advice.get("before")),
        "after": _ranks(advice.get("after")),
        "actions": [_action(action) for action in actions[:MOST_ACTIONS]],
        "actions_left_out": max(0, len(actions) - MOST_ACTIONS),
    }


def _ranks(side: object) -> dict[str, Any] | None:
    """Return the balance of a placement, and the microseconds of each rank in a mean layer of a step."""
    if not isinstance(side, Mapping):
        return None
    rank_us = [1e6 * (_rounded(seconds) or 0.0) for seconds in _listed(side.get("rank_s"))[:MOST_RANKS]]
    return {"balance": _rounded(side.get("balance")), "rank_us": rank_us}


def _action(action: object) -> dict[str, Any]:
    if not isinstance(action, Mapping):
        return {"action": cut(action, MOST_TEXT)}
    return {**_plain(action), "layers": [_rounded(layer) for layer in _listed(action.get("layers"))[:MOST_LAYERS]]}


def _listed(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else ()


def _plain(values: object) -> dict[str, Any]:
    """Return the numbers, flags and texts of a mapping; nested values are dropped."""
    if not isinstance(values, Mapping):
        return {}
    found: dict[str, Any] = {}
    for name, value in list(values.items())[: 4 * MOST_VALUES]:
        if value is None or isinstance(value, bool):
            found[cut(name, 60)] = value
        elif isinstance(value, int | float):
            found[cut(name, 60)] = _rounded(value, 14)
        elif isinstance(value, str):
            found[cut(name, 60)] = cut(value, MOST_TEXT)
        if len(found) == MOST_VALUES:
            break
    return found


def cut(value: object, most: int) -> str:
    text = str(value)
    return text if len(text) <= most else text[: most - 1] + "…"


def _rounded(value: object, digits: int = 5) -> float | None:
    """Round a number to `digits` significant digits; return None if it is not a finite number."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


Told = Mapping[str, Any]


CHANGES = {
    "drift": "The traffic has changed, and the router is being fitted anew",
    "refit_taken": "The router was fitted anew to the present traffic",
    "refit_kept": "A new fit of the router would gain too little, so the present one stays",
    "refit_failed": "The router could not be fitted anew; the present fit stays",
    "swap_failed": "A new fit could not be put in force; the present one stays",
    "fall_back": "The fit before did better than the last one and is in force again",
    "plan_made": "Moving experts would save time",
    "plan_kept": "Moving experts would not pay, so they stay",
    "plan_confirmed": "The last plan for the experts is in force",
    "plan_not_taken": "The engine has not taken the last plan for the experts",
}
"""Kind of an event of the loop → what it did, in words for a reader who knows nothing of it."""
TO_DO = {
    **dict.fromkeys(("refit_failed", "swap_failed", "plan_not_taken"), "read why under What the control loop decided")
}


def verdict(
    workers: Sequence[Told], minute: Told, loop: Told, switchback: Told | None, comparison: Told | None = None
) -> str:
    """Summarise a snapshot in a few sentences: the workers, the last minute, the router, the loop, what to do."""
    kinds = [one["kind"] for one in loop["events"] if one["kind"] in CHANGES]
    if not loop["can_apply"]:
        kinds = [kind for kind in kinds if not kind.startswith("plan_")]  # no engine here can take a plan
    if (loop["advice"] or {}).get("state") == "pending":
        kinds = [kind for kind in kinds if kind != "plan_made"]  # it is being applied
    away = [str(worker["id"]) for worker in workers if not worker["open"]]
    to_do = [f"look after {_cut(', '.join(away), 60)}"] if away else [] if workers else ["add a worker"]
    unreached = _unreached(workers)
    to_do += ["see what coterie serve --config FILE --check --live says"] if unreached else []
    todos = {**TO_DO, "plan_made": loop["to_apply"] and f"{loop['to_apply']}: the plan is under Placement"}
    to_do += [todos[kind] for kind in kinds[-1:] if todos.get(kind)]
    said = [f"{_fleet(workers)}{_minute(minute)}"]
    if switchback is not None and switchback["pairs"]:
        said.append(f"With {_cut(switchback['router'], 60)}: {switchback['verdict']}")
    if comparison is not None:
        said.append(comparison["sentence"].partition(";")[0].rstrip("."))  # the panel has all of it
    said += [CHANGES[kind] for kind in kinds[-1:]]
    said += [f"Not reached: {_cut(', '.join(unreached), 100)}"] if unreached else []
    said.append(f"To do: {'; '.join(to_do)}" if to_do else "Nothing is to be done")
    return f"{'. '.join(said)}."


def _fleet(workers: Sequence[Told]) -> str:
    if not workers:
        return "The fleet has no workers: every request is refused"
    away = [str(worker["id"]) for worker in workers if not worker["open"]]
    if len(away) == len(workers):
        return f"None of {len(workers)} workers is open: requests wait or are refused"
    running = sum(int(worker["running"]) for worker in workers)
    requests = "no request" if not running else f"{running} request{'s' if running > 1 else ''}"
    if away:
        left = len(workers) - len(away)
        return f"{left} of {len(workers)} workers are open (not {_cut(', '.join(away), 60)}) and serve {requests} now"
    who = "The one worker is open and serves" if len(workers) == 1 else f"All {len(workers)} workers are open and serve"
    return f"{who} {requests} now"


def _unreached(workers: Sequence[Told]) -> list[str]:
    """Return the workers, and the event streams of workers, without a connection."""
    streams = [f"{name} of {worker['id']}" for worker in workers for name in worker.get("lost_streams", ())]
    return [str(worker["id"]) for worker in workers if worker.get("unreached")] + streams


def _minute(minute: Told) -> str:
    said = f"; {minute['ended'] or 'none'} ended in the last {minute['seconds']:g} s"
    if minute["failed"]:
        said += f", {minute['failed']} of them without an answer"
    if minute["refused"]:
        said += f", {minute['refused']} refused"
    medians = [
        f"{name} {_ms(minute[key]['p50'])}"
        for name, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"))
        if minute[key]["p50"] is not None
    ]
    return f"{said} (medians: {', '.join(medians)})" if medians else said


def _cut(value: object, most: int) -> str:
    return cut(str(value).rstrip(". "), most)


def _ms(value: float) -> str:
    return f"{value / 1e3:.2f} s" if value >= 1000 else f"{value:.3g} ms"
