"""What would a fleet gain: serve a trace's own requests under several routers, with modelled step times."""

from dataclasses import replace

import numpy as np

import coterie
from coterie.traces.arrivals import LognormalLengths
from coterie.traces.synthetic import generate, presets

# Your own traffic: trace = coterie.open_trace("traffic/")
settings = replace(presets["bursty"], model="gpt-oss-20b", lengths=LognormalLengths(32, 0.3, 32, 0.3, 64))
trace = generate(settings, np.random.default_rng(0), requests=96)

report = coterie.simulate(
    trace,
    model=coterie.step_model("gpt-oss-20b", device="h200"),
    decoders=4,
    in_flight=8,
    routers=("join_shortest_queue", "locality_band", "latency_aware"),  # the others are compared with the first
    splits=2,
    requests=160,
)
for row in report.rows:
    print(f"{row.router:20} {row.experts_per_step:5.1f} experts a step, {row.tpot_mean_ms:.2f} ms per output token")
print(report.verdict)
