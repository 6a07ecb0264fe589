"""Four ranks whose policy plans for recorded steps, in vLLM's EplbState: from a file, and without one.

A program of its own, as :mod:`eplb_ranks`. The steps are of gpt-oss-20b's recorded requests, a few whole ones each, cut
to the model's size: those of every other request are in the file, others are served.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np

from eplb_paying import Engine
from eplb_ranks import EXPERTS, LAYERS, join, main, stand_in

REQUESTS = 2
"""Requests in a step."""
STEPS = 16
"""Steps of a window, and in the file."""


def recorded_steps(part: int, count: int = STEPS) -> np.ndarray:
    """[step, layer, expert] tokens of steps of the even (0) or odd (1) requests."""
    from coterie.footprints.counting import accumulate_load
    from coterie.placement.scenarios import steps_of_requests
    from coterie.traces import ActivationTrace
    from coterie.traces.readers import read_trace

    trace = read_trace(Path(os.environ["COTERIE_DATA"]) / "activations" / "gpt-oss-20b")
    assert isinstance(trace, ActivationTrace)
    chosen = range(part, trace.num_requests, 2)
    footprints = np.zeros((len(chosen), trace.meta.num_layers, trace.meta.num_experts), np.uint32)
    for footprint, request in zip(footprints, chosen, strict=True):
        accumulate_load(trace.request(request).expert_ids, footprint)
    steps = steps_of_requests(footprints, REQUESTS, count, np.random.default_rng(part))
    return np.ascontiguousarray(100 * steps[:, 10 : 10 + LAYERS, :EXPERTS])


def _work(rank: int, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    import torch
    from vllm.distributed.eplb.policy import EPLB_POLICIES

    stand_in()
    own = EPLB_POLICIES["default"]
    join(rank, folder / "store")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.coterie")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    served = np.load(folder / "served.npy")
    found: dict[str, Any] = {}
    for name, file in (("mean", None), ("steps", "steps.safetensors"), ("broken", "broken.safetensors")):
        said.clear()
        given = {} if file is None else {"scenarios": str(folder / file)}
        engine = Engine(own, STEPS, **given, **settings)
        engine.state.expert_rearrangement_step = 0
        record = engine.serve_steps(served)
        found[name] = {**record, "said": list(said), "failures": engine.rounds.counters["failures"]}
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return found


if __name__ == "__main__":
    main(_work)
