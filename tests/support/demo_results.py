"""A result of the demo, for tests of what is told of it."""

from __future__ import annotations

from coterie.answers.demo.run import CpuStep, DemoResult, DemoRow, _verdict
from coterie.answers.demo.runs import REFERENCE_SHAPE

ROWS = [
    DemoRow("join_shortest_queue", 14.70, 0.0, (-3.0, 3.0), 4.26, 5.4, [24, 26, 24]),
    DemoRow("latency_aware", 13.14, 10.6, (5.2, 14.4), 4.01, 5.3, [19, 23, 32]),
]
CPU = CpuStep(13.0, 0.27, (0.08, 0.43), 20.4)
RESULT = DemoResult(
    rows=ROWS,
    cpu=CPU,
    calibrated=49,
    served=74,
    domains=3,
    output_tokens=1389,
    same_tokens=True,
    model="coterie-tiny",
    shape=REFERENCE_SHAPE,
    hardware="H200",
    figure="out/routing.png",
    trace="out/trace",
    fit="out/router.safetensors",
    verdict=_verdict(ROWS, CPU),
    next="coterie inspect out/trace",
    wall_s=43.0,
)
