"""When to rearrange in vLLM: until a change pays, against fixed intervals, by vLLM's and Coterie's own policies.

    python lab/benchmarks/vllm_eplb.py --ranks 8 --windows 40 [--steps 500] [--output rows.json]

GLM-5.2's recorded loads turn from one domain to the next, a new one every four windows. vLLM's own policy rearranges at
fixed intervals; Coterie's is asked after every window and keeps the map until a change pays. Every map serves the
window after the one it was made from. Step time and movement are the calibrated cost model's (H200, NVLink); planning
is the policy's own processor time (one core), charged in full, as without use_async.

Policies are asked in one process with the loads that vLLM's EplbState would give them. Four ranks with a real EplbState
are a test (tests/engines/vllm/test_vllm_eplb_paying.py). It says nothing about NCCL or NIXL transfers, CUDA streams or
the asynchronous worker.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.engines.vllm.eplb import Agreement, EplbRound, Rounds, count_moves
from coterie.engines.vllm.settings import EplbSettings
from coterie.placement import Load
from coterie.types import Placement, balancedness
from coterie_lab.suites.latency_optimal.domains import DomainSetting, Fleet, domain_loads, shifting

Array = NDArray[np.float64]


class Job(NamedTuple):
    """One policy over all windows."""

    name: str
    phase: str
    ours: bool
    """Whether Coterie's policy is asked, or vLLM's own."""
    every: int
    """Windows between two rearrangements."""
    loads: Array
    """[window, layer, expert] tokens a step, over all ranks."""


class Frame(NamedTuple):
    """Settings that all jobs share."""

    ranks: int
    slots: int
    steps: int
    """Steps a window lasts."""
    window: int
    """The last steps of an interval, whose tokens vLLM counts."""


class Asked(NamedTuple):
    """One rearrangement."""

    window: int
    new: NDArray[np.int64]
    received: int
    """Experts that came from another rank, over all ranks."""
    alone_s: float
    """Processor time of the policy, as planned on one core."""
    planned: bool = True


class Served(NamedTuple):
    job: Job
    asked: list[Asked]
    planning_s: float
    """Planning time given to a policy that weighs it."""


def main() -> None:
    options = _options()
    from vllm.distributed.eplb.policy import EPLB_POLICIES

    setting = DomainSetting(windows=options.windows, steps=options.steps, ranks=options.ranks, slots=options.slots)
    shares = shifting(domain_loads(options.data / "activations" / "glm-5.2"), setting)
    frame = Frame(options.ranks, options.slots, options.steps, options.window)
    fleets = {phase: Fleet.of(phase, tokens, setting) for phase, tokens in setting.tokens}
    jobs = _jobs(shares, {phase: fleet.rows for phase, fleet in fleets.items()}, options.intervals)
    served = [ask(job, frame, EPLB_POLICIES["default"]) for job in jobs]
    rows = []
    for phase, fleet in fleets.items():
        kept = Served(Job("kept", phase, False, 1, shares * fleet.rows), [], 0.0)
        # What vLLM's own policy does is the same whatever a token costs.
        mine = [one for one in served if one.job.phase == phase or not one.job.ours]
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
    parser.add_argument("--output", type=Path, help="file for the rows, as JSON")
    options = parser.parse_args()
    if options.data is None:
        parser.error("set COTERIE_DATA or give --data: the folder that holds activations/glm-5.2")
    return options


def _jobs(shares: Array, rows: dict[str, int], intervals: list[int]) -> list[Job]:
    first = next(iter(rows))
    jobs = [Job(f"vLLM every {every}", first, False, every, shares * rows[first]) for every in intervals]
    for phase, count in rows.items():
        jobs.append(Job("Coterie when it pays", phase, True, 1, shares * count))
    return jobs


def ask(job: Job, frame: Frame, own: Any) -> Served:
    planning_s = planning_time(job, frame) if job.ours else 0.0
    rounds = rounds_of(frame, planning_s) if job.ours else None
    _, layers, experts = job.loads.shape
    old: NDArray[np.int64] = np.tile(np.arange(frame.slots) % experts, (layers, 1))
    asked: list[Asked] = []
    for window in range(0, len(job.loads), job.every):
        tokens = np.rint(job.loads[window] * frame.window)
        began = time.process_time()
        if rounds is None:
            new = _own(own, tokens, old, frame)
        else:
            new = rounds.run(EplbRound(tokens, frame.slots, 1, frame.ranks, old), old.copy, Solo())
        took_s = time.process_time() - began
        planned = rounds is None or (rounds.last is not None and rounds.last.planning_s > 0)
        asked.append(Asked(window, new, count_moves(old, new, frame.ranks), took_s, planned))
        old = new
    moved = sum(one.received > 0 for one in asked)
    print(f"{job.phase:8} {job.name:22} asked {len(asked):3}, moved {moved:3}", file=sys.stderr)
    return Served(job, asked, planning_s)


def _own(own: Any, tokens: NDArray[np.float64], old: NDArray[np.int64], frame: Frame) -> NDArray[np.int64]:
    import torch

    found = own.rebalance_experts(
        torch.from_numpy(tokens), frame.slots, 1, 1, frame.ranks, torch.from_numpy(old.copy())
    )
    return np.asarray(found.numpy(), np.int64)


def rounds_of(frame: Frame, planning_s: float) -> Rounds:
    return Rounds(
        EplbSettings(
            window=frame.window, horizon=frame.steps, when="pays", planning_s=planning_s, model="glm-5.2", device="h200"
        )
    )


def planning_time(job: Job, frame: Frame) -> float:
    """Processor time of a plan from vLLM's first map."""
    rounds = rounds_of(frame, 0.0)
    asked = EplbRound(job.loads[0] * frame.window, frame.slots, 1, frame.ranks, None)
    times = []
    for _ in range(4):  # the first compiles
        began = time.process_time()
        rounds._planned(asked, asked.linear())
        times.append(time.process_time() - began)
    return min(times)


class Solo:
    """A rank that is asked alone."""

    rank = 1
    writes = False

    def agree(self, digest: int, planning_s: float = 0.0) -> Agreement:  # noqa: ARG002
        return Agreement(True, planning_s)


def _row(phase: str, served: Served, shares: Array, fleet: Fleet, frame: Frame) -> dict[str, Any]:
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
        "plan_ms": _median_ms([one.alone_s for one in served.asked if one.planned]),
        "keep_ms": _median_ms([one.alone_s for one in served.asked if not one.planned]),
    }


def _median_ms(times_s: list[float]) -> float | None:
    return 1e3 * float(np.median(times_s)) if times_s else None


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
}


def _print(rows: list[dict[str, Any]], frame: Frame) -> None:
    for row in rows:
        kept = next(one for one in rows if one["phase"] == row["phase"])
        row["total_ms"] = row["moe_ms"] + row["movement_ms"] + row["planning_ms"]
        row["gain_pct"] = 100 * (kept["moe_ms"] / row["total_ms"] - 1)
    print(f"{frame.ranks} ranks, {frame.slots} slots, windows of {frame.steps} steps; ms a step")
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
        f"{ours['gain_pct']:+.2f} % against a map that is kept."
    )


if __name__ == "__main__":
    main()
