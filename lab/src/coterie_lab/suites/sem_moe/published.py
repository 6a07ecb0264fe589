"""Published numbers of Sem-MoE's serving experiments, and the two readings of its table of latencies."""

from __future__ import annotations

from typing import NamedTuple

_OVER = ("ttft_over_sglang_pct", "e2e_over_sglang_pct", "ttft_over_moetuner_pct", "e2e_over_moetuner_pct")
THROUGHPUT_GAINS: dict[str, dict[str, float]] = {
    "deepseek-v2-lite": dict(zip(_OVER, (31.0, 221.0, 32.0, 278.0), strict=True)),
    "qwen3-30b-a3b": dict(zip(_OVER, (98.0, 11.0, 35.0, 32.0), strict=True)),
}
"""Gains of throughput under limits, attention data parallel."""


class Latency(NamedTuple):
    """Milliseconds at one request a second, attention tensor parallel."""

    sglang: float
    moetuner: float
    sem_moe: float

    def gain_pct(self, worse: bool) -> float:
        """Return percent saved by Sem-MoE of the time of the better baseline, or of the worse one."""
        baseline = (max if worse else min)(self.sglang, self.moetuner)
        return 100.0 * (1.0 - self.sem_moe / baseline)

    @property
    def ratio_pct(self) -> float:
        """Percent by which the worse baseline is above Sem-MoE's time: mostly what the text prints."""
        return 100.0 * (max(self.sglang, self.moetuner) / self.sem_moe - 1.0)


TTFT_P99 = {
    ("deepseek-v2-lite", 256): Latency(84.87, 80.96, 75.63),
    ("deepseek-v2-lite", 512): Latency(98.10, 92.17, 88.69),
    ("deepseek-v2-lite", 1024): Latency(111.19, 119.76, 100.74),
    ("qwen3-30b-a3b", 256): Latency(85.72, 87.24, 74.46),
    ("qwen3-30b-a3b", 512): Latency(104.76, 101.86, 83.87),
    ("qwen3-30b-a3b", 1024): Latency(107.73, 107.36, 103.69),
}
"""(model, input tokens) → p99 of TTFT."""
E2E_P50 = {
    ("deepseek-v2-lite", 256): Latency(617.87, 604.46, 603.10),
    ("deepseek-v2-lite", 512): Latency(609.81, 602.02, 599.89),
    ("deepseek-v2-lite", 1024): Latency(608.96, 606.54, 604.45),
    ("qwen3-30b-a3b", 256): Latency(758.60, 763.97, 750.26),
    ("qwen3-30b-a3b", 512): Latency(766.80, 759.41, 759.16),
    ("qwen3-30b-a3b", 1024): Latency(769.83, 764.16, 762.30),
}
"""(model, input tokens) → median of E2E."""
TEXT_GAINS = {
    ("deepseek-v2-lite", 256): 12.21,
    ("deepseek-v2-lite", 512): 10.60,
    ("deepseek-v2-lite", 1024): 18.89,
    ("qwen3-30b-a3b", 256): 17.16,
    ("qwen3-30b-a3b", 512): 24.90,
    ("qwen3-30b-a3b", 1024): 3.80,
}
"""Gains of TTFT that the text prints as gains over the best baseline."""
