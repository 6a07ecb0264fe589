"""Plan expert placement: where experts should live on eight ranks, and whether moving them pays."""

from dataclasses import replace

import numpy as np

import coterie
from coterie.footprints import footprint
from coterie.traces.arrivals import LognormalLengths
from coterie.traces.synthetic import generate, presets

# Your own traffic: trace = coterie.open_trace("traffic/")
settings = replace(presets["bursty"], model="gpt-oss-20b", lengths=LognormalLengths(32, 0.3, 32, 0.3, 64))
trace = generate(settings, np.random.default_rng(0), requests=96)
footprints = [footprint(trace.request(n).expert_ids, trace.meta.num_experts) for n in range(trace.num_requests)]
counts = np.array(footprints, np.float64).sum(axis=0)  # [layer, expert] tokens
step_tokens = 256  # of all ranks together, in decode
load = coterie.Load(counts, steps=trace.num_tokens / step_tokens)

topology = coterie.Topology(8)
layers, experts = counts.shape
current = coterie.Placement.linear(layers, experts, topology.num_ranks, num_slots=experts + 8)  # a slot to spare a rank
model = coterie.step_model("gpt-oss-20b", device="h200")

for horizon in (1, 100_000):
    plan = coterie.plan(load, topology, current, model=model, tokens=step_tokens, horizon=horizon)
    if plan.skip_reason is not None:
        print(f"Over {horizon:,} steps nothing should move: {plan.skip_reason}.")
        continue
    gain = 100 * plan.saving_s / plan.before_s
    print(
        f"Over {horizon:,} steps {len(plan.moves)} moves make the MoE layers of a step {gain:.0f}% shorter; "
        f"they have paid for themselves after {plan.break_even_steps:,.1f} steps."
    )
