"""The same policies asked in one process, without ranks: for more ranks and windows than a machine can run.

Loads are those that EplbState would give, maps those that it would then have. On the ranks that were run, both agree
round by round: :mod:`vllm_eplb.ranks` asks every question once more, and stops where an answer differs.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_eplb.ranks import Asked, Frame, Job, Served, Solo, planning_time, rounds_of


def ask_alone(jobs: list[Job], frame: Frame) -> list[Served]:
    from vllm.distributed.eplb.policy import EPLB_POLICIES

    return [_ask(job, frame, EPLB_POLICIES["default"]) for job in jobs]


def _ask(job: Job, frame: Frame, own: Any) -> Served:
    from coterie.engines.vllm.eplb import EplbRound, count_moves

    settings = frame.settings(job)
    planning_s = planning_time(job, frame, settings)
    rounds = rounds_of(settings, planning_s)
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
        last = None if rounds is None else rounds.last
        why = {} if last is None else {"kind": last.kind, "reason": last.reason, "planned": last.planning_s > 0}
        moves = count_moves(old, new, frame.ranks)
        asked.append(Asked(window, tokens, old, new, moves, 0.0, 0.0, took_s, **why))
        old = new
    moved = sum(one.received > 0 for one in asked)
    print(f"{job.phase:8} {job.name:22} asked {len(asked):3}, moved {moved:3}", file=sys.stderr)
    return Served(job, asked, planning_s, True)


def _own(own: Any, tokens: NDArray[np.float64], old: NDArray[np.int64], frame: Frame) -> NDArray[np.int64]:
    import torch

    found = own.rebalance_experts(
        torch.from_numpy(tokens), frame.slots, 1, 1, frame.ranks, torch.from_numpy(old.copy())
    )
    return np.asarray(found.numpy(), np.int64)
