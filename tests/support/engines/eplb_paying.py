"""Four ranks whose policy keeps the map until a change pays, in vLLM's EplbState, over recorded loads.

A program of its own, as :mod:`eplb_ranks`, whose model and groups it uses. The loads are GLM-5.2's, cut to the model's
size: six windows of books, then six of news. Planning is given a price, so that what is decided does not depend on how
busy the machine is; what is measured is tried apart.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from eplb_ranks import EXPERTS, LAYERS, RANKS, SLOTS, WINDOW, Model, counting_communicator, join, main, stand_in

DOMAINS = ("books", "news")
WINDOWS = 6
"""Windows of each domain."""
TOKENS = 400_000
"""Tokens a window in each layer."""
PLANNING_S = 0.006


def recorded_loads() -> np.ndarray:
    """[window, layer, expert] tokens of two domains in turn, each window from another shard."""
    from coterie.traces.readers import read_trace

    table: Any = read_trace(Path(os.environ["COTERIE_DATA"]) / "activations" / "glm-5.2")
    rows = [[row for row, label in enumerate(table.labels) if label.startswith(f"{name}/")] for name in DOMAINS]
    shards = [row for of_domain in rows for row in of_domain[:WINDOWS]]
    tables = table.counts[shards][:, 10 : 10 + LAYERS, :EXPERTS].astype(np.float64)
    return np.asarray(np.round(tables / tables.sum(axis=2, keepdims=True) * TOKENS))


class Engine:
    """vLLM's EplbState with a model, asked for a round at the end of every window of so many steps."""

    def __init__(self, own: Any, window: int = WINDOW, **settings: Any) -> None:
        import torch
        from vllm.config.parallel import EPLBConfig
        from vllm.distributed.eplb.eplb_state import EplbState
        from vllm.distributed.eplb.policy import EPLB_POLICIES

        from coterie.engines.vllm.eplb import Rounds, make_policy
        from coterie.engines.vllm.settings import EplbSettings

        steps: dict[str, Any] = {"horizon": window, "window": window}
        self.rounds = Rounds(EplbSettings(**(steps | settings)))
        EPLB_POLICIES["default"] = make_policy(own, self.rounds)
        config = EPLBConfig(window_size=window, step_interval=window, use_async=False, communicator="torch_gloo")
        parallel = SimpleNamespace(eplb_config=config, enable_elastic_ep=False, num_ubatches=1)
        self.state, self.model = EplbState(parallel, torch.device("cpu")), Model()
        name = SimpleNamespace(compute_hash=lambda: "model", model="model")
        self.state.add_model(self.model, name)
        self.communicator = counting_communicator()
        self.state.update_communicator(name, self.communicator)
        self.held = self.state.model_states["model"]
        self.state.step(is_profile=True)

    def serve(self, load: np.ndarray, steps: int = WINDOW) -> dict[str, Any]:
        """Steps of a window's load, at the end of which vLLM asks; what it then has."""
        return self.serve_steps(np.broadcast_to(load / WINDOW, (steps, *load.shape)))

    def serve_steps(self, steps: np.ndarray) -> dict[str, Any]:
        """[step, layer, expert] tokens, the rest of a window."""
        import torch

        before, received = self.rounds.counters["rounds"], self.communicator.received
        for step in steps:
            each = torch.from_numpy(np.array(step)) / RANKS / self.held.logical_replica_count
            self.held.expert_load_pass.copy_(torch.gather(each, 1, self.held.physical_to_logical_map))
            self.state.step()
        assert self.rounds.counters["rounds"] == before + 1, "vLLM asks once, after the last step"
        came = torch.tensor([self.communicator.received - received])
        torch.distributed.all_reduce(came)
        self.model.map = self.held.physical_to_logical_map.clone()
        last = self.rounds.last
        assert last is not None
        return {**self.model.check(), "received": int(came), "kind": last.kind, "reason": last.reason}


def _work(rank: int, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    import torch
    from vllm.distributed.eplb.policy import EPLB_POLICIES

    stand_in()
    own = EPLB_POLICIES["default"]
    join(rank, folder / "store")
    found = {
        "paying": paying(own, settings),
        "files": files(own, folder, settings),
        "one_rank_s_file": one_rank_s_file(own, folder, rank, settings),
        "lost": lost_state(own, rank, settings),
        "measured": measured(own, settings),
    }
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return found


def paying(own: Any, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The recorded drift, from vLLM's first map. vLLM first asks after a quarter of the interval."""
    engine, loads = Engine(own, when="pays", planning_s=PLANNING_S, **settings), recorded_loads()
    return [engine.serve(loads[0], WINDOW // 4), *(engine.serve(load) for load in loads)]


def files(own: Any, folder: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Maps that another process writes while vLLM serves: none, one, a newer one, and half of one."""
    import torch

    path, loads = folder / "advice.json", recorded_loads()
    engine = Engine(own, when="never", load_map=str(path), **settings)
    found = [engine.serve(loads[0], WINDOW // 4)]
    for write in (lambda: advise(path, loads[0]), lambda: advise(path, loads[-1]), lambda: path.write_text("{")):
        if engine.model.rank == 0:
            write()
        torch.distributed.barrier()
        for _ in range(2):
            record = engine.serve(loads[1])
            counters = engine.rounds.counters
            found.append({**record, "maps": counters["maps"], "failures": counters["failures"]})
    return found


def advise(path: Path, load: np.ndarray) -> None:
    """Write the map of a plan, as whoever advises does: under another name, then in place of the last."""
    from coterie.placement import DEEPSEEK_V3_PREFILL, Load, planners, write_map
    from coterie.placement.maps.files import PlacementMap
    from coterie.types import Placement, Topology

    linear = Placement.linear(LAYERS, EXPERTS, RANKS, SLOTS)
    planner = planners.make("latency_optimal", {"objective": DEEPSEEK_V3_PREFILL})
    plan = planner.plan(Load(load, WINDOW), Topology(RANKS), linear)
    fresh = path.with_suffix(".new")
    write_map(fresh, PlacementMap(plan.placement), "vllm")
    fresh.replace(path)


def one_rank_s_file(own: Any, folder: Path, rank: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """A file that only one machine has yet costs no round; once all have it, it is used."""
    import torch

    path, loads = folder / f"own-{rank}.json", recorded_loads()
    engine = Engine(own, when="pays", planning_s=PLANNING_S, load_map=str(path), **settings)
    found: list[dict[str, Any]] = []
    for ranks in ((1,), (), (0, 2, 3)):
        if rank in ranks:
            advise(path, loads[-1])
        torch.distributed.barrier()
        record = engine.serve(loads[0], WINDOW if found else WINDOW // 4)
        found.append({**record, "disagreements": engine.rounds.counters["disagreements"]})
    return found


def lost_state(own: Any, rank: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """A rank that comes back without its state costs a round; all begin anew."""
    engine, loads = Engine(own, when="pays", planning_s=PLANNING_S, **settings), recorded_loads()
    found = []
    for number, steps in enumerate((WINDOW // 4, WINDOW, WINDOW, WINDOW, WINDOW, WINDOW)):
        if number == 2 and rank == 2:
            assert engine.rounds._payoff is not None
            engine.rounds._payoff.forget()
        record = engine.serve(loads[0] if number < 3 else loads[-1], steps)
        found.append({**record, "disagreements": engine.rounds.counters["disagreements"]})
    return found


def measured(own: Any, settings: dict[str, Any]) -> list[float]:
    """Planning times that the decisions go by, after vLLM reserved memory and after each of three rounds."""
    engine, loads = Engine(own, when="pays", **settings), recorded_loads()
    payoff = engine.rounds._payoff
    assert payoff is not None
    found = [payoff.planning_s]
    for load, steps in zip(loads, (WINDOW // 4, WINDOW, WINDOW), strict=False):
        engine.serve(load, steps)
        found.append(payoff.planning_s)
    return found


if __name__ == "__main__":
    main(_work)
