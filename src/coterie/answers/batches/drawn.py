"""The random workload used without a trace: requests of several domains, each of which prefers its own experts.

Fitted to the published results of CAPS (60 experts, top 4, batches of 8), at 150 and 300 requests per second;
``coterie evaluate caps`` compares the results with the published ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from coterie.sim.workloads import SemanticLoads
from coterie.traces.arrivals import ArrivalProcess, BurstyArrivals, PoissonArrivals

LOADS = SemanticLoads(domains=20, hot=4, strength=0.97, likeness=100.0, tokens=128.0, tokens_sigma=0.1)


@dataclass(frozen=True, slots=True)
class DrawnWorkload:
    """Requests of a model with one layer. A batch takes ``base x (1 + sensitivity x CV of the load per expert)``."""

    loads: SemanticLoads = LOADS
    """Loads per domain. A domain prefers as many experts as a token activates. The preferred experts are arcs of a
    ring; with 20 domains, neighbouring arcs share one expert. `strength` and `likeness` set the CV of a batch of one
    domain relative to that of a mixed batch."""
    burst_size: int = 48
    """Consecutive requests of one domain. With shorter bursts the waiting window holds many domains, and greedy
    selection gains twice the published amount; with longer bursts it holds one domain, and selection cannot gain."""
    burst_rate: float = 1.6
    """Rate within a burst, relative to the mean rate. At 1.6, bursts overlap a little and the load is nearly even over
    time, as the published p50, p90 and p99 (1.58, 2.60, 3.03 s) imply: they are on a straight line."""
    base_s: float = 0.0375
    """Seconds of a batch with an even load, from the published throughput and imbalance at 150 requests per second."""
    sensitivity: float = 0.262
    """Growth of the batch time per unit of CV; 0.262 gives fcfs with bursty arrivals the published imbalance, 1.80."""

    def arrivals(self, pattern: str, rate: float) -> ArrivalProcess:
        if pattern == "poisson":
            return PoissonArrivals(rate)
        return BurstyArrivals(rate, self.burst_size, rate * self.burst_rate, share=1.0, even_rate=True)


DRAWN = DrawnWorkload()
