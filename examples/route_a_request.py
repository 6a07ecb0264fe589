"""Route a request: learn from a trace which experts requests use, then ask which worker should decode a new one."""

from dataclasses import replace

import numpy as np

import coterie
from coterie.footprints import footprint
from coterie.traces.arrivals import LognormalLengths
from coterie.traces.synthetic import generate, presets
from coterie.types import PREFILL

# Your own traffic: trace = coterie.open_trace("traffic/")
settings = replace(presets["bursty"], model="gpt-oss-20b", lengths=LognormalLengths(32, 0.3, 32, 0.3, 64))
trace = generate(settings, np.random.default_rng(0), requests=96)

model = coterie.step_model("gpt-oss-20b", device="h200")
fitted = coterie.fit_router(trace, workers=4)
router = fitted.router("latency_aware", model)
fleet = fitted.fleet(places=64)  # room for four times as many as run: a full worker cannot be chosen

for number in range(24):
    prefill = trace.request(number).only(PREFILL)  # what the prefill worker reports
    counts = footprint(prefill, trace.meta.num_experts)
    request = coterie.Request(id=f"r{number}", prompt_tokens=len(prefill), footprint=counts)
    choice = router.route(request, fleet)
    fleet.admit(request.id, choice.worker, request.prompt_tokens, choice.profile)

spread = choice.scores.max() / choice.scores.min() - 1
print(f"Worker {choice.worker} should decode the last of 24 requests: {choice.reason}.")
print(f"The worst worker would cost {100 * spread:.0f}% more time a token; in flight: {fleet.running.tolist()}.")
