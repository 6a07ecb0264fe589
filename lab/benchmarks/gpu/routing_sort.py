"""Sorting activations by expert and permuting hidden rows: the Triton kernels beside torch and the memory, on a GPU.

DeepSeek-V3's shape unless told otherwise (256 experts, top 8, 7,168 wide, bf16). First every launch is checked against
a stable NumPy sort on random and adversarial batches; then, under CUDA graphs whose calls take turns over enough
batches to leave the cache cold:

- torch: a stable sort, the boundaries by search, and the gather; on int64 and int32 ids, the faster counts
- ours, with several launches, and the launch that `launch_for` chooses (`chosen`)
- memory: the bytes that must move (each row read once and written k times) at the bandwidth of a large copy; and the
  same with each row read k times, as a gather by index does

    python lab/benchmarks/gpu/routing_sort.py [--output FILE.json] [--quick]

The last tables are the verdict. `--quick` leaves out most launches. Without a GPU it checks the torch form and stops.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "support"))  # the cases that the tests check

from coterie.engines.calibration.timing import captured, describe_hardware, describe_software, event_us
from coterie.engines.kernels.routing import Launch, launch_for, permute_by_expert, sort_by_expert
from kernel_cases import cases, check_case, distinct

EXPERTS, TOP_K, WIDTH = 256, 8, 7168
TOKENS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PAIRS_UP_TO = 1024
"""Tokens past which the one-launch sort is not tried: its work grows with the square."""
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


def launches(tokens: int, quick: bool) -> Iterator[Launch]:
    if tokens <= PAIRS_UP_TO:
        blocks = (1024, 2048, 8192) if tokens <= 256 else (2048, 8192)
        for block in blocks[:1] if quick else blocks:
            for warps in (4, 8):
                yield Launch(pairs=True, block=block, warps=warps)
        if tokens >= 256 and not quick:
            yield Launch(pairs=True, turn=2, block=8192, warps=8)
            yield Launch(pairs=True, turn=4, block=8192, warps=8)
    if tokens >= 128:
        for chunk in (256, 512, 1024):
            yield Launch(pairs=False, chunk=chunk, split=2, block=2048, warps=4)
        if not quick:
            for split in (1, 4):
                yield Launch(pairs=False, chunk=512, split=split, block=2048, warps=4)
            for block, warps in ((1024, 4), (1024, 2), (2048, 8), (8192, 8), (8192, 4)):
                yield Launch(pairs=False, chunk=512, split=2, block=block, warps=warps)


def short(launch: Launch) -> str:
    how = f"pairs turn={launch.turn}" if launch.pairs else f"tables chunk={launch.chunk} split={launch.split}"
    return f"{how} block={launch.block} warps={launch.warps}"


def skewed(rng: np.random.Generator, tokens: int) -> Any:
    """Experts drawn with a popularity that falls as rank^-1, distinct within a token."""
    score = np.log(np.arange(1, EXPERTS + 1) ** -1.0) + rng.gumbel(size=(tokens, EXPERTS))
    return np.argpartition(-score, TOP_K, axis=1)[:, :TOP_K].astype(np.int64)


def check_all(device: str) -> dict[str, Any]:
    """Every case with a few launches of each kind; failures are listed, not raised."""
    failed: list[str] = []
    done = 0
    tried = (
        Launch(pairs=True),
        Launch(pairs=True, turn=3, block=8192, warps=8),
        Launch(pairs=False, chunk=256),
        Launch(pairs=False, chunk=1024, split=4, block=8192, warps=8),
        None,
    )
    for case in cases(np.random.default_rng(0), 1000):
        for launch in tried:
            done += 1
            dtype = torch.int64 if done % 2 else torch.int32
            try:
                how: dict[str, Any] = {"launch": launch} if device == "cuda" else {}
                check_case(case, device, dtype, **how)
            except Exception as error:  # a kernel that fails to compile must not hide the others
                failed.append(f"{case.name}, {launch}: {type(error).__name__} {str(error)[:300]}")
    return {"checked": done, "failed": failed}


class Bench:
    def __init__(self, quick: bool) -> None:
        self.device = torch.device("cuda")
        self.quick = quick

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
            "gather_memory_us": tokens * 2 * TOP_K * row_bytes / bandwidth,
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
        times: dict[str, dict[str, float]] = {}
        for launch in launches(tokens, self.quick):
            try:
                times[short(launch)] = self.launch_us(launch, pairs, sort=tokens in (64, 1024, 4096))
            except Exception as error:
                print(f"  {tokens} {short(launch)}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        found["launches"] = times
        chosen = launch_for(tokens * TOP_K)
        found["chosen"] = short(chosen)
        found["sort_us"] = self.us([partial(sort_by_expert, one, EXPERTS) for one in ids])
        found["permute_us"] = self.us([partial(permute_by_expert, x, one, EXPERTS) for x, one in pairs])
        slim = zip(hidden, narrow, strict=True)
        found["permute_int32_us"] = self.us([partial(permute_by_expert, x, one, EXPERTS) for x, one in slim])
        rows, routed = permute_by_expert(*pairs[0], EXPERTS)
        order = torch.sort(ids[0].reshape(-1), stable=True).indices
        found["right"] = bool(torch.equal(routed.order.long(), order) and torch.equal(rows, hidden[0][order // TOP_K]))
        return found

    def launch_us(self, launch: Launch, pairs: list[tuple[Any, Any]], sort: bool) -> dict[str, float]:
        calls = [partial(permute_by_expert, x, one, EXPERTS, launch=launch) for x, one in pairs]
        found = {"permute_us": self.us(calls)}
        if sort:
            found["sort_us"] = self.us([partial(sort_by_expert, one, EXPERTS, launch=launch) for _, one in pairs])
        return found


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        best = sorted(row["launches"].items(), key=lambda item: item[1]["permute_us"])
        print(f"{row['tokens']:6} {row['ids']:8} " + " | ".join(f"{n}: {t['permute_us']:.1f}" for n, t in best[:4]))
        sorts = sorted((t["sort_us"], n) for n, t in row["launches"].items() if "sort_us" in t)
        if sorts:
            print("       sort only: " + " | ".join(f"{name}: {us:.1f}" for us, name in sorts[:4]))
    print(
        "tokens ids      torch sort  ours | torch permute  (+ends)   ours  int32 | x torch | memory  ours/memory  bar"
    )
    for r in rows:
        ours, ratio = r["permute_us"], r["torch_permute_us"] / r["permute_us"]
        over = (ours - 8.0) / r["memory_us"]
        met = ratio >= 2 if r["tokens"] <= 1024 else over <= 1.3
        print(
            f"{r['tokens']:6} {r['ids']:8} {r['torch_sort_us']:9.1f} {r['sort_us']:6.1f} | "
            f"{r['torch_permute_us']:9.1f} {r['torch_permute_ends_us']:9.1f} {ours:8.1f} {r['permute_int32_us']:6.1f} "
            f"{ratio:5.2f}x | {r['memory_us']:7.1f} {over:6.2f} (gather's {(ours - 8.0) / r['gather_memory_us']:.2f})  "
            f"{'met' if met and r['right'] else 'NOT MET'}  {r['chosen']}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result: dict[str, Any] = {"check": check_all(device)}
    print(f"checked {result['check']['checked']}, failed {len(result['check']['failed'])}", flush=True)
    for line in result["check"]["failed"][:12]:
        print("  FAILED", line, flush=True)
    if device == "cuda":
        bench = Bench(options.quick)
        bandwidth = bench.bandwidth()
        print(f"copy {bandwidth / 1e6:.3f} TB/s read and written", flush=True)
        result |= {"bytes_per_us": bandwidth, "hardware": describe_hardware(bench.device)}
        result |= {"software": describe_software(), "experts": EXPERTS, "top_k": TOP_K, "width": WIDTH, "rows": []}
        even = partial(distinct, k=TOP_K, experts=EXPERTS)
        for tokens in TOKENS:
            for name, draw in (("even", even), ("skewed", skewed)):
                if name == "skewed" and tokens not in (64, 1024, 4096):
                    continue
                try:
                    result["rows"].append(bench.row(tokens, bandwidth, name, draw))
                    print(f"{tokens} {name} done", flush=True)
                except Exception:
                    traceback.print_exc()
                torch.cuda.empty_cache()
                if options.output:
                    options.output.write_text(json.dumps(result))
        show(result["rows"])
    if options.output:
        options.output.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
