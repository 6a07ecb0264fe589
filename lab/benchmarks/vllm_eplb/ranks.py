"""Ranks as gloo processes that run vLLM's real EplbState over given loads, one policy after another.

vLLM refuses EPLB on a CPU before it gets here, so its groups and a model of expert weights are made by hand, and what
only an accelerator has of torch is stood in for: the current stream, and events. Weights are small (they are moved for
real and checked, but their bytes are not a model's), so the time of a move is the cost model's, not this machine's.
"""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

HIDDEN = 16
LIMIT_S = 3600.0

Array = NDArray[np.float64]


class Job(NamedTuple):
    """One policy over all windows."""

    name: str
    phase: str
    settings: dict[str, Any] | None
    """Settings of Coterie's policy; None for vLLM's own."""
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

    def settings(self, job: Job) -> dict[str, Any] | None:
        """Settings of Coterie's policy for a job, with the clock."""
        if job.settings is None:
            return None
        return {"window": self.window, "horizon": self.steps * job.every} | job.settings


class Asked(NamedTuple):
    """One rearrangement, as the first rank saw it."""

    window: int
    tokens: Array
    """[layer, expert] load that vLLM gave to the policy."""
    old: NDArray[np.int64]
    new: NDArray[np.int64]
    received: int
    """Experts that came from another rank, over all ranks."""
    wall_s: float
    """Wall time of the vLLM step that rearranged, policy included, with all ranks on this machine."""
    policy_s: float
    """Part of it inside the policy."""
    alone_s: float = 0.0
    """Processor time of the policy when it is asked the same once more, the other ranks idle: as planned on one core,
    whatever else runs on the machine."""
    kind: str = ""
    reason: str = ""
    planned: bool = True


class Served(NamedTuple):
    job: Job
    asked: list[Asked]
    planning_s: float
    """Planning time given to a policy that weighs it."""
    weights_right: bool


def run_jobs(jobs: list[Job], frame: Frame, folder: Path) -> list[Served]:
    import vllm.distributed.eplb.eplb_state  # noqa: F401  (once, before the ranks are forked)

    import coterie.engines.vllm.eplb  # noqa: F401

    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_rank, args=(rank, jobs, frame, folder), daemon=True) for rank in range(frame.ranks)
    ]
    for process in ranks:
        process.start()
    until = time.monotonic() + LIMIT_S
    while any(process.is_alive() for process in ranks):
        if any(process.exitcode for process in ranks) or time.monotonic() > until:
            sys.exit("a rank failed or did not end")
        time.sleep(0.1)
    found: list[Served] = pickle.loads((folder / "served.pickle").read_bytes())
    return found


def _rank(rank: int, jobs: list[Job], frame: Frame, folder: Path) -> None:
    import torch
    from vllm.distributed import parallel_state
    from vllm.distributed.eplb.policy import EPLB_POLICIES

    try:
        torch.set_num_threads(1)
        torch.accelerator.current_stream = lambda: SimpleNamespace(synchronize=lambda: None)
        torch.Event = _HostEvent
        parallel_state.init_distributed_environment(frame.ranks, rank, f"file://{folder / 'store'}", rank, "gloo")
        for name in ("_EP", "_EPLB"):
            group = parallel_state.init_model_parallel_group(
                [list(range(frame.ranks))],
                rank,
                "gloo",
                group_name=name.strip("_").lower(),
                use_device_communicator=False,
            )
            setattr(parallel_state, name, group)
        own = EPLB_POLICIES["default"]
        if rank == 0:
            _compile(jobs, frame)
        torch.distributed.barrier()  # the others find what was compiled
        served = []
        for job in jobs:
            served.append(_Engine(job, frame, own).serve())
            if rank == 0:
                (folder / "served.pickle").write_bytes(pickle.dumps(served))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        sys.exit(1)


def _compile(jobs: list[Job], frame: Frame) -> None:
    """The loops of Coterie's policy."""
    from coterie.engines.vllm.eplb import EplbRound, Rounds
    from coterie.engines.vllm.settings import EplbSettings

    job = next(job for job in jobs if job.settings is not None)
    settings = {**(job.settings or {}), "when": "pays", "window": frame.window, "horizon": frame.steps}
    rounds = Rounds(EplbSettings(**settings))
    asked = EplbRound(job.loads[0] * frame.window, frame.slots, 1, frame.ranks, None)
    old = asked.linear().slot_experts.astype(np.int64)
    for load in (0 * job.loads[0], job.loads[0], job.loads[1]):
        old = rounds.run(asked._replace(tokens=load * frame.window, old=old), old.copy, Solo())


def rounds_of(settings: dict[str, Any] | None, planning_s: float) -> Any:
    """Coterie's rounds; None where vLLM's own policy is asked."""
    if settings is None:
        return None
    from coterie.engines.vllm.eplb import Rounds
    from coterie.engines.vllm.settings import EplbSettings

    price: dict[str, Any] = {"planning_s": planning_s} if settings.get("when") == "pays" else {}
    return Rounds(EplbSettings(**(settings | price)))


def planning_time(job: Job, frame: Frame, settings: dict[str, Any] | None) -> float:
    """Processor time of a plan, for a policy that weighs it."""
    if settings is None or settings.get("when") != "pays":
        return 0.0
    from coterie.engines.vllm.eplb import EplbRound

    rounds = rounds_of(settings, 0.0)
    asked = EplbRound(job.loads[0] * frame.window, frame.slots, 1, frame.ranks, None)
    times = []
    for _ in range(4):  # the first compiles
        began = time.process_time()
        rounds._planned(asked, asked.linear())
        times.append(time.process_time() - began)
    return min(times)


class _HostEvent:
    """torch.Event where there is no accelerator."""

    def __init__(self, **_: object) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _HostEvent) -> float:
        return (end.at - self.at) * 1e3


class _Model:
    """The expert weights of one rank, in the shape of vLLM's MixtureOfExperts; each says whose it is."""

    num_expert_groups = 1
    moe_layers: tuple[Any, ...] = ()

    def __init__(self, layers: int, experts: int, frame: Frame) -> None:
        import torch

        self.num_moe_layers = layers
        self.num_logical_experts = self.num_routed_experts = experts
        self.num_physical_experts = frame.slots
        self.num_local_physical_experts = frame.slots // frame.ranks
        self.num_redundant_experts = frame.slots - experts
        first = torch.distributed.get_rank() * self.num_local_physical_experts
        self.mine = slice(first, first + self.num_local_physical_experts)
        linear = torch.arange(frame.slots).remainder(experts).repeat(layers, 1)
        self.expert_weights = [[weights] for weights in self._weights(linear)]

    def _weights(self, slot_experts: Any) -> Any:
        """[layer, local slot, hidden] what this rank's slots must hold."""
        import torch

        layer = torch.arange(self.num_moe_layers)[:, None]
        number = (layer * self.num_logical_experts + slot_experts[:, self.mine]).float()
        return number[:, :, None] + torch.linspace(0, 0.5, HIDDEN)

    def set_eplb_state(self, *views: Any) -> None:
        self.views = views

    def right(self, slot_experts: Any) -> bool:
        import torch

        held = torch.stack([layer[0] for layer in self.expert_weights])
        return bool(torch.equal(held, self._weights(slot_experts)))


class Solo:
    """A rank that is asked alone."""

    rank = 1
    writes = False

    def agree(self, digest: int, planning_s: float = 0.0) -> Any:  # noqa: ARG002
        from coterie.engines.vllm.eplb import Agreement

        return Agreement(True, planning_s)


class _Engine:
    """vLLM's EplbState under one job."""

    def __init__(self, job: Job, frame: Frame, own: Any) -> None:
        import torch

        self.job, self.frame, self.own = job, frame, own
        self.rank = torch.distributed.get_rank()
        self.settings = frame.settings(job)
        self.planning_s = self._agreed_s()
        self.rounds = rounds_of(self.settings, self.planning_s)
        self.calls: list[tuple[Array, NDArray[np.int64]]] = []
        self.policy_s = 0.0
        self.state, self.model = self._start()
        self.held = self.state.model_states["model"]

    def _round(self, tokens: Array, old: NDArray[np.int64]) -> Any:
        from coterie.engines.vllm.eplb import EplbRound

        return EplbRound(tokens, self.frame.slots, 1, self.frame.ranks, old)

    def _agreed_s(self) -> float:
        """Planning time that all ranks are given: the first measures, the others wait."""
        import torch

        found = torch.zeros(1, dtype=torch.float64)
        if self.rank == 0:
            found[0] = planning_time(self.job, self.frame, self.settings)
        torch.distributed.broadcast(found, 0)
        return float(found[0])

    def _start(self) -> tuple[Any, _Model]:
        import torch
        from vllm.config.parallel import EPLBConfig
        from vllm.distributed.eplb.eplb_state import EplbState
        from vllm.distributed.eplb.policy import EPLB_POLICIES

        from coterie.engines.vllm.eplb import make_policy

        EPLB_POLICIES["default"] = self._timed(self.own if self.rounds is None else make_policy(self.own, self.rounds))
        interval = self.frame.steps * self.job.every
        config = EPLBConfig(
            window_size=self.frame.window, step_interval=interval, use_async=False, communicator="torch_gloo"
        )
        state = EplbState(
            SimpleNamespace(eplb_config=config, enable_elastic_ep=False, num_ubatches=1), torch.device("cpu")
        )
        _, layers, experts = self.job.loads.shape
        model = _Model(layers, experts, self.frame)
        state.add_model(model, SimpleNamespace(compute_hash=lambda: "model", model="model"))
        state.step(is_profile=True)
        state.expert_rearrangement_step = interval - self.frame.steps  # all policies first act after one window
        return state, model

    def _timed(self, policy: Any) -> Any:
        """The policy, with its time and what it was asked written down."""
        engine = self

        class Timed(policy):  # type: ignore[misc]
            @classmethod
            def rebalance_experts(cls, weight: Any, *arguments: Any) -> Any:
                began = time.perf_counter()
                found = super().rebalance_experts(weight, *arguments)
                engine.policy_s = time.perf_counter() - began
                engine.calls.append((weight.numpy().astype(np.float64), arguments[-1].numpy().copy()))
                return found

        return Timed

    def serve(self) -> Served:
        import torch

        asked: list[Asked] = []
        self.calls.clear()
        began = time.perf_counter()
        for window, load in enumerate(self.job.loads):
            before = len(self.calls)
            wall_s = self._steps(load)
            if len(self.calls) == before:
                continue
            tokens, old = self.calls[-1]
            new = self.held.physical_to_logical_map.numpy().copy()
            asked.append(
                Asked(window, tokens, old, new, self._received(old, new), wall_s, self.policy_s, **self._why())
            )
        right = torch.tensor([int(self.model.right(self.held.physical_to_logical_map))])
        torch.distributed.all_reduce(right, torch.distributed.ReduceOp.MIN)
        if self.rank == 0:
            asked = self._again(asked)
            moved, took_s = sum(one.received > 0 for one in asked), time.perf_counter() - began
            print(
                f"{self.job.phase:8} {self.job.name:22} asked {len(asked):3}, moved {moved:3}; ran {took_s:.0f} s",
                file=sys.stderr,
            )
        torch.distributed.barrier()
        return Served(self.job, asked, self.planning_s, bool(right))

    def _steps(self, load: Array) -> float:
        """A window's steps; seconds of the last, in which vLLM may rearrange."""
        import torch

        held, frame = self.held, self.frame
        each = torch.from_numpy(load) / frame.ranks / held.logical_replica_count
        share = torch.gather(each, 1, held.physical_to_logical_map)
        for step in range(frame.steps):
            if step >= frame.steps - frame.window:  # vLLM counts no others
                # Whole tokens, as many over the window as the load says: each rank rounds at another step.
                at = step + self.rank / frame.ranks
                held.expert_load_pass.copy_(torch.floor(share * (at + 1)) - torch.floor(share * at))
            if step == frame.steps - 1:
                torch.distributed.barrier()
            began = time.perf_counter()
            self.state.step()
        return time.perf_counter() - began

    def _received(self, old: NDArray[np.int64], new: NDArray[np.int64]) -> int:
        from coterie.engines.vllm.eplb import count_moves

        return count_moves(old, new, self.frame.ranks)

    def _why(self) -> dict[str, Any]:
        if self.rounds is None:
            return {}
        last = self.rounds.last
        return {"kind": last.kind, "reason": last.reason, "planned": last.planning_s > 0}

    def _again(self, asked: list[Asked]) -> list[Asked]:
        """Ask the same once more, alone, for the time; the answers must be those of before."""
        import torch

        rounds = rounds_of(self.settings, self.planning_s)
        found = []
        for one in asked:
            began = time.process_time()
            if rounds is None:
                slots = self.own.rebalance_experts(
                    torch.from_numpy(one.tokens), self.frame.slots, 1, 1, self.frame.ranks, torch.from_numpy(one.old)
                ).numpy()
            else:
                slots = rounds.run(self._round(one.tokens, one.old), None, Solo())
            took_s = time.process_time() - began
            assert np.array_equal(slots, one.new), f"{self.job.name}: window {one.window} was decided otherwise"
            found.append(one._replace(alone_s=took_s))
        return found
