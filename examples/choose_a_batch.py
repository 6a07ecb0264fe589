"""Choose a batch: which of the waiting requests should decode together, so that few experts are touched?"""

from dataclasses import replace

import numpy as np

import coterie
from coterie.batching import Selection, Window, strategies
from coterie.costs.lines import StepCost
from coterie.footprints import footprint
from coterie.predictors import per_step
from coterie.traces.arrivals import LognormalLengths
from coterie.traces.synthetic import generate, presets

# Your own traffic: trace = coterie.open_trace("traffic/")
settings = replace(presets["bursty"], model="gpt-oss-20b", lengths=LognormalLengths(32, 0.3, 32, 0.3, 64))
trace = generate(settings, np.random.default_rng(0), requests=32)

# [request, layer, expert] probability that a decode step of the request touches the expert.
asked = [trace.request(n).expert_ids for n in range(trace.num_requests)]
loads = np.array([per_step(footprint(ids, trace.meta.num_experts), len(ids)) for ids in asked])
window = Window(loads, skipped=np.zeros(len(loads), np.int64), queued=10 * len(loads))

model = coterie.step_model("gpt-oss-20b", device="h200")
cost = StepCost.for_phase(model, "decode", requests=8, tokens=64)


def choose(name: str) -> Selection:
    strategy = strategies.make(name, {"cost": cost})
    return strategy.select(window, window.no_load(), 8, np.random.default_rng(0))


def experts(batch: Selection) -> float:
    """Distinct experts of a layer that a step is expected to touch."""
    return float((1 - np.prod(1 - loads[batch.order], axis=0)).sum(axis=1).mean())


first, chosen = choose("fcfs"), choose("latency_aware")
fewer = 100 * (1 - experts(chosen) / experts(first))
print(f"latency_aware takes requests {sorted(chosen.order.tolist())}: {chosen.reason}.")
print(f"Its step touches {experts(chosen):.1f} experts a layer, {fewer:.0f}% fewer than first come, first served.")
