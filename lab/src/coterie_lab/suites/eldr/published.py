"""What the paper on expert-locality decode routing (ELDR) reports; per cent unless said otherwise.

Its testbed was a cluster of MI300X with 16 decoders of Qwen3-30B-A3B, GPT-OSS-120B and Gemma-4-26B-A4B and open
arrivals: ours are other models, a modelled H200 and mostly a closed loop. The figures stand beside ours for their size.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Span(NamedTuple):
    """Smallest and largest over models or load levels."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}" if self.low != self.high else f"{self.low:g}"


ACTIVE_EXPERTS = 22.0
"""Distinct experts saved per decode step against round robin."""
MAIN: dict[str, dict[str, Span]] = {
    "locality_band": {"tpot_p50": Span(7.0, 13.9), "tpot_p99": Span(3.4, 6.0)},
    "domain": {"tpot_p50": Span(6.8, 9.7)},
}
"""Router → cut of TPOT over the best load balancer, task workload."""
LANGUAGE_P50 = Span(5.9, 10.0)
TRIAL: dict[tuple[int, int], Span] = {(8, 16): Span(8.1, 9.8), (12, 16): Span(9.3, 10.1)}
"""(decoders, in flight a decoder) → fewer experts a step of the locality band against round robin: not from the paper
but a quick trial on gpt-oss-20b's routing, on which the first row of our bar rests."""
LIMIT_SHARES = {"cosine": 0.83, "union": 0.90}
"""Share of the limit's saving, from the same trial."""
SAME_DOMAIN = Span(17.0, 21.0)
SAME_LANGUAGE = Span(3.0, 10.0)
PHASE_CORRELATION = Span(0.70, 0.92)
RHO = {"count_idf": 0.76, "gate": 0.67, "binary": 0.47}
MASK_GAIN = Span(0.005, 0.032)
VANILLA_P99 = 17.4
"""Largest increase of the tail with plain K-means."""
GATE_P50_POINTS = 3.0
"""Advantage of count_idf over gate probabilities in the cut of the median."""
TOPOLOGY: dict[int, dict[str, float]] = {
    8: {"tpot_p50": 8.0, "tpot_p99": 2.5},
    16: {"tpot_p50": 9.8, "tpot_p99": 0.8},
    24: {"tpot_p50": 10.2, "tpot_p99": 1.1},
}
"""Decoders → cut against round robin, language workload, mean over 20 to 100 requests a second."""
EXPERT_PARALLEL: dict[str, Span] = {"tpot_p50": Span(2.7, 4.3), "tpot_p99": Span(0.6, 2.0)}


def plain(values: Any) -> Any:
    """Return spans as lists, for JSON."""
    if isinstance(values, Span):
        return [values.low, values.high]
    if isinstance(values, dict):
        return {key: plain(value) for key, value in values.items()}
    return values
