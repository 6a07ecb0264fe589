"""Four ranks as processes: each holds real expert weights, asks Coterie's policy, and moves them by vLLM's own code.

vLLM refuses EPLB on a CPU before it gets here, so what it would build is built by hand: the gloo groups, and a model of
expert weights that its EplbState can hold. Two things of torch that only an accelerator has are stood in for: the
current stream, on which there is nothing to wait for, and events, which are the host's clock.

A program of its own, started by `run_ranks`: it imports vLLM once and forks. The planner's loops run uncompiled, which
for so few slots is as fast, gives the same maps and saves most of a minute.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

Work = Callable[[int, Path, dict[str, Any]], dict[str, Any]]
"""What a rank does: its number, the folder and the settings in, what it saw out."""

LAYERS, EXPERTS, SLOTS, RANKS = 3, 16, 24, 4
PER_RANK = SLOTS // RANKS
HIDDEN, INNER, TOP_K, TOKENS = 32, 24, 2, 96
ROUNDS = 6
WINDOW = 4
"""Steps of EplbState's window, and between two rearrangements."""

DEVICE = os.environ.get("EPLB_DEVICE", "cpu")
"""Where the weights and EplbState's tensors are; with cuda, on one GPU for all ranks, nothing is stood in for."""

TIMEOUT_S = 240
"""Timeout of a whole run: minutes on busy cores, seconds on idle ones; ranks that wait for each other wait for ever."""


def drifting_loads(rounds: int = ROUNDS, seed: int = 0) -> np.ndarray:
    """[round, layer, expert] tokens: Zipf's, scaled and with two experts exchanged between rounds."""
    rng = np.random.default_rng(seed)
    popularity = rng.permuted(np.tile(1.0 / np.arange(1, EXPERTS + 1), (LAYERS, 1)), axis=1)
    loads = []
    for _ in range(rounds):
        loads.append(np.round(popularity / popularity.sum(axis=1, keepdims=True) * 400_000))
        popularity = popularity * rng.lognormal(0.0, 0.3, popularity.shape)
        for row in popularity:
            one, other = rng.choice(EXPERTS, 2, replace=False)
            row[[one, other]] = row[[other, one]]
    return np.array(loads)


def run_ranks(
    folder: Path, settings: dict[str, Any], program: str = __file__, env: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """What every rank saw; `folder` holds the map that EplbState begins from."""
    done = subprocess.run(
        [sys.executable, program, folder, json.dumps(settings)],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S + 10,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    found: list[dict[str, Any]] = [json.loads(path.read_text()) for path in _answers(folder)]
    return found


def _answers(folder: Path) -> list[Path]:
    return [folder / f"rank-{rank}.json" for rank in range(RANKS)]


def main(work: Work) -> None:
    """Run `work` on every rank; for a program's last line."""
    import vllm.distributed.eplb.eplb_state
    import vllm.distributed.kv_transfer.kv_connector.factory  # noqa: F401

    import coterie.engines.vllm.eplb  # noqa: F401

    context = multiprocessing.get_context("fork")
    arguments = work, Path(sys.argv[1]), json.loads(sys.argv[2])
    ranks = [context.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    until = time.monotonic() + TIMEOUT_S
    while any(process.is_alive() for process in ranks) and not any(process.exitcode for process in ranks):
        if time.monotonic() > until:
            sys.exit(f"ranks {[rank for rank, process in enumerate(ranks) if process.is_alive()]} did not end")
        time.sleep(0.05)
    sys.exit(any(process.exitcode for process in ranks))  # ends those that wait for one that failed


def _rank(rank: int, work: Work, folder: Path, settings: dict[str, Any]) -> None:
    try:
        found = work(rank, folder, settings)
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    _answers(folder)[rank].write_text(json.dumps(found))


def stand_in() -> None:
    """For what of torch only an accelerator has."""
    import torch

    torch.set_num_threads(1)
    torch.accelerator.current_stream = lambda: SimpleNamespace(synchronize=lambda: None)
    torch.Event = HostEvent


def _work(rank: int, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    import torch
    from vllm.distributed.eplb.policy import EPLB_POLICIES
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from coterie.engines.vllm import EPLB_VARIABLE
    from coterie.engines.vllm.plugin import NAME, register

    if DEVICE == "cpu":
        stand_in()
    own = EPLB_POLICIES["default"]
    register()
    assert EPLB_POLICIES["default"] is own, "nothing unless asked"
    KVConnectorFactory._registry.pop(NAME)
    os.environ[EPLB_VARIABLE] = json.dumps(settings)
    register()
    register()
    policy = EPLB_POLICIES["default"]
    assert policy is not own
    assert issubclass(policy, own)
    join(rank, folder / "store")
    found = {
        "rounds": drift(policy),
        "default": vllms_own(own),
        "elastic": elastic(policy),
        "state": engine_state(settings, own, folder),
        "one_fails": one_rank_fails(own),
    }
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return found


class HostEvent:
    """torch.Event where there is no accelerator."""

    def __init__(self, **_: object) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: HostEvent) -> float:
        return (end.at - self.at) * 1e3


def join(rank: int, store: Path) -> None:
    from vllm.distributed import parallel_state

    parallel_state.init_distributed_environment(RANKS, rank, f"file://{store}", 0, "gloo")
    for name in ("_EP", "_EPLB"):
        group = parallel_state.init_model_parallel_group(
            [list(range(RANKS))], rank, "gloo", group_name=name.strip("_").lower(), use_device_communicator=False
        )
        setattr(parallel_state, name, group)


def expert(layer: int, number: int) -> tuple[Any, Any]:
    """The weights of an expert, as fused MoE layers hold them: gate and up in one [2 inner, hidden], down."""
    import torch

    generator = torch.Generator().manual_seed(1000 * layer + number)
    up = torch.randn(2 * INNER, HIDDEN, generator=generator) / HIDDEN**0.5
    down = torch.randn(HIDDEN, INNER, generator=generator) / INNER**0.5
    return up.to(DEVICE), down.to(DEVICE)


class Model:
    """The expert weights of one rank, in the shape of vLLM's MixtureOfExperts."""

    num_moe_layers = LAYERS
    num_expert_groups = 1
    num_logical_experts = num_routed_experts = EXPERTS
    num_physical_experts = SLOTS
    num_local_physical_experts = PER_RANK
    num_redundant_experts = SLOTS - EXPERTS
    moe_layers: tuple[Any, ...] = ()

    def __init__(self) -> None:
        import torch

        self.rank = torch.distributed.get_rank()
        self.map = torch.arange(SLOTS).remainder(EXPERTS).repeat(LAYERS, 1)
        self.expert_weights = [
            [torch.stack(tensors) for tensors in zip(*(expert(layer, e) for e in self.held(layer)), strict=True)]
            for layer in range(LAYERS)
        ]
        generator = torch.Generator().manual_seed(7)
        self.hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(DEVICE)
        self.chosen = torch.rand(LAYERS, TOKENS, EXPERTS, generator=generator).topk(TOP_K).indices
        self.dense = self.dense_output()

    def held(self, layer: int) -> list[int]:
        """What the map says this rank holds."""
        own: list[int] = self.map[layer, self.rank * PER_RANK : (self.rank + 1) * PER_RANK].tolist()
        return own

    def set_eplb_state(self, *views: Any) -> None:
        self.views = views

    def weights_right(self) -> bool:
        import torch

        return all(
            torch.equal(mine, theirs)
            for layer in range(LAYERS)
            for slot, number in enumerate(self.held(layer))
            if number >= 0
            for mine, theirs in zip(
                (tensor[slot] for tensor in self.expert_weights[layer]), expert(layer, number), strict=True
            )
        )

    def dense_output(self) -> Any:
        """Every layer's experts on every token, all in one place."""
        import torch

        out = torch.zeros(LAYERS, TOKENS, HIDDEN)
        for layer in range(LAYERS):
            for number in range(EXPERTS):
                rows = (self.chosen[layer] == number).any(dim=1)
                out[layer, rows] += mlp(self.hidden[rows], *expert(layer, number)).cpu()
        return out

    def parallel_output(self) -> Any:
        """The same with each rank computing its own slots; replicas take turns with the tokens, as in vLLM."""
        import torch
        from vllm.distributed.eplb.eplb_state import compute_logical_maps

        slots_of, replicas = compute_logical_maps(self.map, EXPERTS)
        out = torch.zeros(LAYERS, TOKENS, HIDDEN)
        turn = torch.arange(TOKENS)[:, None]
        for layer in range(LAYERS):
            chosen = self.chosen[layer]
            slots = slots_of[layer][chosen, turn % replicas[layer][chosen]]  # [token, k]
            for local in range(PER_RANK):
                rows = (slots == self.rank * PER_RANK + local).any(dim=1)
                out[layer, rows] += mlp(self.hidden[rows], *(t[local] for t in self.expert_weights[layer])).cpu()
        torch.distributed.all_reduce(out)
        return out

    def check(self) -> dict[str, Any]:
        """Check the state that a rearrangement left behind."""
        import torch

        maps = [torch.empty_like(self.map) for _ in range(RANKS)]
        torch.distributed.all_gather(maps, self.map)
        return {
            "weights_right": self.weights_right(),
            "same_on_all": all(torch.equal(self.map, other) for other in maps),
            "error": float((self.parallel_output() - self.dense).abs().max()),
            "map": self.map.tolist(),
        }


def mlp(rows: Any, up: Any, down: Any) -> Any:
    import torch

    gate, value = (rows @ up.T).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * value) @ down.T


def counting_communicator() -> Any:
    """vLLM's communicator over gloo, which counts the experts that it receives."""
    from vllm.distributed import parallel_state
    from vllm.distributed.eplb.eplb_communicator import TorchDistGlooStagedEplbCommunicator

    class Counting(TorchDistGlooStagedEplbCommunicator):  # type: ignore[misc]
        received = 0

        def add_recv(self, tensors: Any, src_rank: int, expert_id: int) -> None:
            self.received += 1
            super().add_recv(tensors, src_rank, expert_id)

    return Counting(cpu_group=parallel_state.get_eplb_group().cpu_group)


def rearrange(
    model: Model, policy: Any, load: np.ndarray, ranks: int = RANKS, rank_mapping: dict[int, int] | None = None
) -> dict[str, Any]:
    """One round by the policy and by vLLM's rearrangement; counts what really came from another rank.

    `ranks` are left afterwards; vLLM gives `rank_mapping` where some leave.
    """
    import torch
    from vllm.distributed import parallel_state
    from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace

    group = parallel_state.get_eplb_group()
    communicator = counting_communicator()
    old = model.map
    new = policy.rebalance_experts(torch.from_numpy(load), ranks * PER_RANK, 1, 1, ranks, old)
    assert new.dtype == old.dtype
    rearrange_expert_weights_inplace(
        old,
        new,
        model.expert_weights,
        [torch.empty_like(w) for w in model.expert_weights[0]],
        group.device_group,
        communicator,
        rank_mapping=rank_mapping,
    )
    new = torch.nn.functional.pad(new, (0, SLOTS - new.shape[1]), value=-1)
    model.map = new
    received = torch.tensor([communicator.received])
    torch.distributed.all_reduce(received)
    return {"changed": int((old != new).sum()), "received": int(received), **model.check()}


def drift(policy: Any) -> list[dict[str, Any]]:
    """Coterie's policy over drifting loads, from vLLM's first map."""
    model = Model()
    found = [{"changed": 0, "received": 0, "planned": 0, **model.check()}]
    for load in drifting_loads():
        record = rearrange(model, policy, load)
        found.append({**record, "planned": len(policy.rounds.last.plan.moves)})
    return found


def vllms_own(own: Any) -> list[dict[str, Any]]:
    """The same loads by vLLM's policy."""
    model = Model()
    return [rearrange(model, own, load) for load in drifting_loads()]


def elastic(policy: Any) -> list[dict[str, Any]]:
    """A rank leaves and comes back, with whatever its slots held."""
    model, loads = Model(), drifting_loads()
    left = rearrange(model, policy, loads[0], RANKS - 1, {0: 0, 1: 1, 2: 2, 3: -1})
    if model.rank == RANKS - 1:
        for tensor in (tensor for layer in model.expert_weights for tensor in layer):
            tensor.zero_()
    return [left, rearrange(model, policy, loads[1])]


def engine_state(settings: dict[str, Any], own: Any, folder: Path) -> dict[str, Any]:
    """vLLM's EplbState end to end: record loads, step, rearrange; from a map on file, each new one kept on file."""
    import torch
    from vllm.config.parallel import EPLBConfig
    from vllm.distributed.eplb.eplb_state import EplbState
    from vllm.distributed.eplb.policy import EPLB_POLICIES

    from coterie.engines.vllm.eplb import Rounds, make_policy
    from coterie.engines.vllm.settings import EplbSettings
    from coterie.placement.maps.formats import read_map

    kept = str(folder / "kept.json")
    files = {"initial_map": str(folder / "initial.json"), "save_map": kept, "window": WINDOW}
    EPLB_POLICIES["default"] = make_policy(own, Rounds(EplbSettings(**{**settings, **files})))
    config = EPLBConfig(window_size=WINDOW, step_interval=WINDOW, use_async=False, communicator="torch_gloo")
    parallel = SimpleNamespace(eplb_config=config, enable_elastic_ep=False, num_ubatches=1)
    state, model = EplbState(parallel, torch.device(DEVICE)), Model()
    state.add_model(model, SimpleNamespace(compute_hash=lambda: "model", model="model"))
    held = state.model_states["model"]

    def snapshot() -> dict[str, Any]:
        model.map = held.physical_to_logical_map.to("cpu", copy=True)
        return model.check()

    published = Published(folder, model) if model.rank == 0 else None
    state.step(is_profile=True)
    found = {"profiled": snapshot()}
    for name, load in zip(("first", "second"), drifting_loads(), strict=False):
        state.expert_rearrangement_step = 0
        for _ in range(WINDOW):
            each = torch.from_numpy(load).to(DEVICE) / WINDOW / RANKS / held.logical_replica_count
            held.expert_load_pass.copy_(torch.gather(each, 1, held.physical_to_logical_map))
            state.step()
        torch.distributed.barrier()
        found[name] = {**snapshot(), "kept": read_map(kept).placement.slot_experts.tolist()}
        if published is not None:
            found[name]["published"] = published.next()
        torch.distributed.barrier()
    return found


class Published:
    """What a subscriber gets of the maps that the plugin reads from EplbState's own tensors and publishes."""

    def __init__(self, folder: Path, model: Model) -> None:
        from coterie.engines.vllm.engine import MapReader
        from coterie.engines.vllm.publisher import EventPublisher
        from coterie.gateway.control.messages import StreamEntry
        from coterie.gateway.control.streams import ExpertStreams

        self.reader = MapReader([model.views[1][layer] for layer in range(LAYERS)])
        self.publisher, self.version = EventPublisher(f"ipc://{folder}/experts", 0, 16), 0
        self.streams = ExpertStreams(None)
        self.streams.follow([StreamEntry("rank-0", self.publisher.endpoint)])
        while not self.publisher.wanted:
            time.sleep(0.01)

    def next(self) -> str:
        """The event of the next map, as it travels; a step passes after a rearrangement before a map is read."""
        from coterie.wire.expert_events import ExpertEvents, ExpertMap, encode_expert_events

        assert self.reader.changed() is None, "it may still change"
        slots = self.reader.changed()
        assert slots is not None
        assert self.reader.changed() is None, "told once"
        self.version += 1
        self.publisher.publish(ExpertMap(num_experts=EXPERTS, num_ranks=RANKS, version=self.version, slots=slots))
        while True:
            self.streams.wait_for(60.0)
            for received in self.streams.read():
                return encode_expert_events(ExpertEvents(0.0, [received.event])).hex()


def one_rank_fails(own: Any) -> dict[str, Any]:
    """A planner that raises on one rank must not leave the others waiting for it."""
    import torch

    from coterie.engines.vllm.eplb import Rounds, make_policy
    from coterie.engines.vllm.settings import EplbSettings
    from coterie.placement import planners
    from coterie.placement.planning.eplb import Eplb

    class Fails(Eplb):
        def plan(self, *args: Any) -> Any:
            if torch.distributed.get_rank() == 2:
                raise RuntimeError("out of order")
            return super().plan(*args)

    planners.add("fails_on_rank_2", Fails)
    policy = make_policy(own, Rounds(EplbSettings(planner="fails_on_rank_2")))
    model = Model()
    record = rearrange(model, policy, drifting_loads()[0])
    counters = policy.rounds.counters
    return {**record, "failures": counters["failures"], "disagreements": counters["disagreements"]}


if __name__ == "__main__":
    main(_work)
