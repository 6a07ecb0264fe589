"""When to rearrange in vLLM: until a change pays, against fixed intervals, in vLLM's real EplbState on gloo ranks.

    python lab/benchmarks/vllm_eplb [--ranks 4] [--windows 20] [--steps 500] [--output rows.json]
    python lab/benchmarks/vllm_eplb --alone --ranks 8 --windows 40

GLM-5.2's recorded loads turn from one domain to the next, a new one every four windows. vLLM's own policy rearranges at
fixed intervals; Coterie's is asked after every window and keeps the map until a change pays. Every map serves the
window after the one it was made from. Step time and movement are the calibrated cost model's (H200, NVLink); planning
is the policy's own processor time (one core), charged in full, as without use_async.

No vLLM server runs EPLB on a CPU: the state, the rearrangement and the policy are vLLM's and Coterie's own code, the
model around them is made here. It says nothing about NCCL or NIXL transfers, CUDA streams or the asynchronous worker.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_eplb.alone import ask_alone
from vllm_eplb.ranks import Asked, Frame, Job, Served, run_jobs

Array = NDArray[np.float64]

PRICES = {"model": "glm-5.2", "device": "h200"}


def main() -> None:
    options = _options()
    from coterie_lab.suites.latency_optimal.domains import DomainSetting, Fleet, domain_loads, shifting

    setting = DomainSetting(windows=options.windows, steps=options.steps, ranks=options.ranks, slots=options.slots)
    shares = shifting(domain_loads(options.data / "activations" / "glm-5.2"), setting)
    frame = Frame(options.ranks, options.slots, options.steps, options.window)
    fleets = {phase: Fleet.of(phase, tokens, setting) for phase, tokens in setting.tokens}
    jobs = _jobs(shares, {phase: fleet.rows for phase, fleet in fleets.items()}, options.intervals)
    if options.alone:
        served = ask_alone(jobs, frame)
    else:
        with tempfile.TemporaryDirectory() as folder:
            served = run_jobs(jobs, frame, Path(folder))
    rows = []
    for phase, fleet in fleets.items():
        kept = Served(Job("kept", phase, None, 1, shares * fleet.rows), [], 0.0, True)
        # What vLLM's own policy does is the same whatever a token costs.
        mine = [one for one in served if one.job.phase == phase or one.job.settings is None]
        rows += [_row(phase, one, shares, fleet, frame) for one in (kept, *mine)]
    _print(rows, frame)
    if options.output is not None:
        options.output.write_text(json.dumps(rows, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("COTERIE_DATA"), help="folder of recorded data")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--slots", type=int, default=288)
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument(
        "--intervals",
        type=int,
        nargs="+",
        default=[1, 2, 4, 6],
        help="windows between vLLM's rearrangements; 6 of 500 steps are its default",
    )
    parser.add_argument("--steps", type=int, default=500, help="steps of a window, after which Coterie's is asked")
    parser.add_argument("--window", type=int, default=100, help="last steps whose tokens vLLM counts")
    parser.add_argument("--alone", action="store_true", help="ask the policies in one process, without ranks")
    parser.add_argument("--output", type=Path, help="file for the rows, as JSON")
    options = parser.parse_args()
    if options.data is None:
        parser.error("set COTERIE_DATA or give --data: the folder that holds activations/glm-5.2")
    return options


def _jobs(shares: Array, rows: dict[str, int], intervals: list[int]) -> list[Job]:
    first = next(iter(rows))
    jobs = [Job(f"vLLM every {every}", first, None, every, shares * rows[first]) for every in intervals]
    for phase, count in rows.items():
        jobs.append(Job("Coterie when it pays", phase, {**PRICES, "when": "pays"}, 1, shares * count))
    return jobs


def _row(phase: str, served: Served, shares: Array, fleet: Any, frame: Frame) -> dict[str, Any]:
    from coterie.placement import Load
    from coterie.types import Placement, balancedness

    ranks, experts = frame.ranks, shares.shape[2]
    current = Placement.linear(shares.shape[1], experts, ranks, frame.slots)
    changes = {one.window: one for one in served.asked}
    moe_s, movement_s, planning_s, balance = np.zeros((4, len(shares) - 1))
    for window in range(len(shares) - 1):
        one = changes.get(window)
        if one is not None:
            new = Placement(one.new.astype(np.int32), ranks, experts)
            problem = fleet.objective.problem(Load(shares[window] * fleet.rows), fleet.model.topology, current)
            movement_s[window] = float(problem.score(new.slot_experts).movement_s.sum())
            planning_s[window], current = one.alone_s, new
        counts = np.rint(shares[window + 1] * fleet.rows).astype(np.int64)
        moe_s[window] = float(fleet.model.step(counts, fleet.batch, current).moe_s.sum())
        balance[window] = balancedness(current.rank_load(shares[window + 1]))
    steps = frame.steps * (len(shares) - 1)
    return {
        "phase": phase,
        "policy": served.job.name,
        "asked": len(served.asked),
        "planned": sum(one.planned for one in served.asked),
        "rounds": sum(one.received > 0 for one in served.asked),
        "moves": sum(one.received for one in served.asked),
        "balancedness": float(balance.mean()),
        "moe_ms": 1e3 * float(moe_s.mean()),
        "movement_ms": 1e3 * float(movement_s.sum()) / steps,
        "planning_ms": 1e3 * float(planning_s.sum()) / steps,
        "planning_s": served.planning_s,
        "weights_right": served.weights_right,
        **_walls(served.asked),
    }


def _walls(asked: list[Asked]) -> dict[str, float | None]:
    """Medians over rounds, in ms: the policy alone, and vLLM's step around it with all ranks on this machine."""

    def median(values: list[float]) -> float | None:
        return 1e3 * float(np.median(values)) if values else None

    moved = [one for one in asked if one.received and one.wall_s]
    kept = [one for one in asked if not one.received and one.wall_s]
    return {
        "plan_alone_ms": median([one.alone_s for one in asked if one.planned]),
        "keep_alone_ms": median([one.alone_s for one in asked if not one.planned]),
        "wall_moved_ms": median([one.wall_s for one in moved]),
        "wall_kept_ms": median([one.wall_s for one in kept]),
        "around_kept_ms": median([one.wall_s - one.policy_s for one in kept]),
    }


COLUMNS = {
    "asked": "asked",
    "rounds": "moved",
    "moves": "moves",
    "balancedness": "balance",
    "moe_ms": "MoE ms",
    "movement_ms": "moving",
    "planning_ms": "planning",
    "total_ms": "total",
    "gain_pct": "gain %",
    "wall_moved_ms": "wall moved",
    "wall_kept_ms": "wall kept",
}


def _print(rows: list[dict[str, Any]], frame: Frame) -> None:
    for row in rows:
        kept = next(one for one in rows if one["phase"] == row["phase"])
        row["total_ms"] = row["moe_ms"] + row["movement_ms"] + row["planning_ms"]
        row["gain_pct"] = 100 * (kept["moe_ms"] / row["total_ms"] - 1)
    print(f"{frame.ranks} ranks, {frame.slots} slots, windows of {frame.steps} steps; ms a step, wall in ms a round")
    for phase in dict.fromkeys(row["phase"] for row in rows):
        print(f"\n{phase:24}" + "".join(f"{title:>11}" for title in COLUMNS.values()))
        mine = [row for row in rows if row["phase"] == phase]
        for row in mine:
            print(f"{row['policy']:24}" + "".join(f"{_cell(row[name]):>11}" for name in COLUMNS))
        print(_verdict(mine))


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _verdict(rows: list[dict[str, Any]]) -> str:
    ours = rows[-1]
    best = min((row for row in rows if row["policy"].startswith("vLLM")), key=lambda row: row["total_ms"])
    than = f"the best fixed interval ({best['policy']})"
    change = 100 * (ours["total_ms"] / best["total_ms"] - 1)
    word = "less" if change < 0 else "more"
    return (
        f"{ours['policy']}: {abs(change):.2f} % {word} MoE time a step than {than}, "
        f"{ours['moves']} moves against {best['moves']}; "
        f"{ours['gain_pct']:+.2f} % against a map that is kept. "
        + (
            "All weights were where the maps say."
            if all(row["weights_right"] for row in rows)
            else "WEIGHTS ARE WRONG."
        )
    )
