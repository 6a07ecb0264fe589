"""The workload that is drawn where there is no trace: requests of several domains, each with experts of its own.

Fitted to the figures of CAPS (60 experts, top 4, batches of 8), at 150 and 300 requests a second:
lab/benchmarks/fit_caps.py finds the numbers again, and ``coterie evaluate caps`` compares them with what was published.
"""

from __future__ import annotations

from dataclasses import dataclass

from coterie.sim.workloads import SemanticLoads
from coterie.traces.arrivals import ArrivalProcess, BurstyArrivals, PoissonArrivals

LOADS = SemanticLoads(domains=20, hot=4, strength=0.97, likeness=100.0, tokens=128.0, tokens_sigma=0.1)


@dataclass(frozen=True, slots=True)
class DrawnWorkload:
    """Requests of one layer, and the time of a batch: ``base x (1 + sensitivity x CV of its load)``."""

    loads: SemanticLoads = LOADS
    """A domain prefers as many experts as a token activates; with 20 domains their arcs of the ring share one expert
    with each neighbour. How strong and how alike sets the CV of one domain's batch against that of a mixed one."""
    burst_size: int = 48
    """Requests of one domain in a row. With short bursts a window holds many domains, and a greedy choice gains twice
    what was published; with long ones it holds one, and there is nothing to choose."""
    burst_rate: float = 1.6
    """Rate within a burst, over the mean rate: bursts overlap a little, and the load over time is nearly even, as the
    published p50, p90 and p99 (1.58, 2.60, 3.03 s) say: they lie on a line."""
    base_s: float = 0.0375
    """Seconds of a batch with an even load: published throughput x imbalance at 150 requests a second."""
    sensitivity: float = 0.262
    """Sets the imbalance of bursty first come, first served: 1.80."""

    def arrivals(self, pattern: str, rate: float) -> ArrivalProcess:
        if pattern == "poisson":
            return PoissonArrivals(rate)
        return BurstyArrivals(rate, self.burst_size, rate * self.burst_rate, share=1.0, even_rate=True)


DRAWN = DrawnWorkload()
