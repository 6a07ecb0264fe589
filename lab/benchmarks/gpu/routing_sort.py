"""Sorting activations by expert and permuting hidden rows: the Triton kernels beside torch and the memory, on a GPU.

DeepSeek-V3's shape (256 experts, top 8, 7,168 wide, bf16). First launches of every kind are checked against a stable
NumPy sort, as the tests do; then, under CUDA graphs whose calls take turns over enough batches to leave the cache cold:

- torch: a stable sort, the boundaries by search, and the gather; on int64 and int32 ids, the faster counts
- ours, with the launch that `launch_for` chooses
- memory: the bytes that must move (each row read once and written k times) at the bandwidth of a large copy

    python lab/benchmarks/gpu/routing_sort.py [--output FILE.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "support"))  # the cases that the tests check

import kernel_cases
from coterie.engines.calibration.timing import captured, describe_hardware, describe_software, event_us
from coterie.engines.kernels.routing import permute_by_expert, sort_by_expert

EXPERTS, TOP_K, WIDTH = 256, 8, 7168
TOKENS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CACHE_BYTES = 256e6
"""Bytes that the calls of a graph go through, so that none finds its rows in the cache."""
LARGE_COPY = 4 << 30
CELL_US = 40e3
"""Time to spend on one measurement."""


def torch_sort(ids: Any) -> tuple[Any, Any]:
    """Order by expert, and where each expert's entries end."""
    ordered, order = torch.sort(ids.reshape(-1), stable=True)
    return order, torch.searchsorted(ordered, torch.arange(EXPERTS, device=ids.device, dtype=ids.dtype), right=True)


def torch_sort_alone(ids: Any) -> Any:
    return torch.sort(ids.reshape(-1), stable=True)


def torch_permute(hidden: Any, ids: Any) -> Any:
    order, ends = torch_sort(ids)
    return hidden[order // TOP_K], ends


def torch_permute_alone(hidden: Any, ids: Any) -> Any:
    """Without the boundaries."""
    return hidden[torch.sort(ids.reshape(-1), stable=True).indices // TOP_K]


def skewed(rng: np.random.Generator, tokens: int) -> Any:
    """Experts drawn with a popularity that falls as rank^-1, distinct within a token."""
    score = np.log(np.arange(1, EXPERTS + 1) ** -1.0) + rng.gumbel(size=(tokens, EXPERTS))
    return np.argpartition(-score, TOP_K, axis=1)[:, :TOP_K].astype(np.int64)


class Bench:
    device = torch.device("cuda")

    def us(self, calls: Sequence[Callable[[], Any]]) -> float:
        """Median of three medians of a graph's replays, a call."""
        graph, _ = captured(lambda: [call() for call in calls])
        torch.cuda.synchronize()
        repeats = int(max(5, min(200, CELL_US / max(event_us(graph.replay), 1.0))))
        times = (statistics.median(event_us(graph.replay) for _ in range(repeats)) for _ in range(3))
        return statistics.median(times) / len(calls)

    def bandwidth(self) -> float:
        """Bytes read and written per microsecond by a large copy."""
        source = torch.randint(0, 255, (LARGE_COPY,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2.0 * LARGE_COPY / self.us([lambda: target.copy_(source)])

    def row(self, tokens: int, bandwidth: float, name: str, draw: Callable[..., Any]) -> dict[str, Any]:
        rng = np.random.default_rng(tokens)
        row_bytes = 2 * WIDTH
        sets = int(max(4, min(16, np.ceil(CACHE_BYTES / (tokens * (TOP_K + 1) * row_bytes)))))
        ids = [torch.from_numpy(draw(rng, tokens)).to(self.device) for _ in range(sets)]
        narrow = [one.int() for one in ids]
        hidden = [torch.randn(tokens, WIDTH, device=self.device).to(torch.bfloat16) for _ in range(sets)]
        found: dict[str, Any] = {
            "tokens": tokens,
            "ids": name,
            "sets": sets,
            "memory_us": tokens * (1 + TOP_K) * row_bytes / bandwidth,
        }
        pairs = list(zip(hidden, ids, strict=True))
        found["torch_sort_us"] = min(
            self.us([partial(torch_sort_alone, one) for one in ids]),
            self.us([partial(torch_sort_alone, one) for one in narrow]),
        )
        found["torch_sort_ends_us"] = self.us([partial(torch_sort, one) for one in ids])
        found["torch_permute_us"] = min(
            self.us([partial(torch_permute_alone, x, one) for x, one in pairs]),
            self.us([partial(torch_permute_alone, x, one) for x, one in zip(hidden, narrow, strict=True)]),
        )
        found["torch_permute_ends_us"] = self.us([partial(torch_permute, x, one) for x, one in pairs])
        found["sort_us"] = self.us([partial(sort_by_expert, one, EXPERTS) for one in ids])
        found["permute_us"] = self.us([partial(permute_by_expert, x, one, EXPERTS) for x, one in pairs])
        rows, routed = permute_by_expert(*pairs[0], EXPERTS)
        order = torch.sort(ids[0].reshape(-1), stable=True).indices
        found["right"] = bool(torch.equal(routed.order.long(), order) and torch.equal(rows, hidden[0][order // TOP_K]))
        return found


def show(rows: list[dict[str, Any]]) -> None:
    print(
        "| tokens | ids | torch sort, us | ours | torch sort + gather, us | ours | torch ÷ ours | memory, us | right |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for r in rows:
        times = (f"{r[name]:.1f}" for name in ("torch_sort_us", "sort_us", "torch_permute_us", "permute_us"))
        ratio = r["torch_permute_us"] / r["permute_us"]
        cells = (r["tokens"], r["ids"], *times, f"{ratio:.1f}", f"{r['memory_us']:.1f}", r["right"])
        print(f"| {' | '.join(map(str, cells))} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    kernel_cases.main("cuda", 3000)
    bench = Bench()
    bandwidth = bench.bandwidth()
    print(f"copy {bandwidth / 1e6:.3f} TB/s read and written", flush=True)
    result: dict[str, Any] = {"bytes_per_us": bandwidth, "hardware": describe_hardware(bench.device)}
    result |= {"software": describe_software(), "experts": EXPERTS, "top_k": TOP_K, "width": WIDTH, "rows": []}
    even = partial(kernel_cases.distinct, k=TOP_K, experts=EXPERTS)
    for tokens in TOKENS:
        for name, draw in (("even", even), ("skewed", skewed)):
            if name == "skewed" and tokens not in (64, 1024, 4096):
                continue
            result["rows"].append(bench.row(tokens, bandwidth, name, draw))
            print(f"{tokens} {name} done", flush=True)
            torch.cuda.empty_cache()
            if options.output:
                options.output.write_text(json.dumps(result))
    show(result["rows"])


if __name__ == "__main__":
    main()
