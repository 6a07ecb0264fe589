"""Measure how much decode steps slow down while weights are copied in the background.

An engine that stages a move copies the weights on a separate stream while steps go on. The copy takes memory
bandwidth from the step, and copies inside the device also take some multiprocessors. Steps and copies are timed alone
and together, at one expert per step and at shares of the path's full speed.

The step is a CUDA graph of every kernel of a decode step in order (projections, attention, routing, experts, output
head), each on separate weights. Outputs are not passed from kernel to kernel, since no kernel's time depends on
values. Copies between devices are not measured: a copy inside the device, which reads and writes the same memory,
stands in for them.

Needs only torch and NumPy.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from coterie.costs.cells import ContentionCell
from coterie.costs.shapes import dense_shapes
from coterie.engines.calibration.timing import captured, marks
from coterie.engines.optional import torch
from coterie.errors import UnavailableError, check, check_at_least
from coterie.types import ModelSpec, Report

PATHS: tuple[Literal["host-to-device", "device"], ...] = ("host-to-device", "device")
POOL = 8
"""Number of buffers that copies rotate over, so that no copy finds its source in the cache."""


@dataclass(frozen=True, slots=True)
class ContentionSettings:
    """Settings of a contention run."""

    batch: int = 64
    """Requests that decode in a step."""
    context: int = 1024
    """Cached tokens per request."""
    steps: int = 12
    """Steps per timing."""
    rounds: int = 7
    """Timings of steps alone and beside copies, alternating; a cell is the median over rounds."""
    shares: tuple[float, ...] = (0.125, 0.25, 0.5, 1.0)
    """Shares of the path's full speed to copy at, in addition to one expert per step."""

    def __post_init__(self) -> None:
        check_at_least(1, batch=self.batch, context=self.context, steps=self.steps, rounds=self.rounds)
        check(
            self.shares and all(0 < share <= 1 for share in self.shares),
            f"shares={self.shares} must be at least one number in 0 … 1, above 0",
        )


class DecodeStep:
    """Every kernel of one decode step in bf16, on random weights and tokens."""

    def __init__(self, spec: ModelSpec, device: Any, settings: ContentionSettings) -> None:
        check(
            not spec.kv_lora_rank, f"{spec.name} has latent attention; contention is measured with grouped heads only"
        )
        self.spec, batch, small = spec, settings.batch, partial(_random, device)
        self.inputs = [[small(batch, k) for _, k in shapes] for shapes, _ in dense_shapes(spec)]
        self.head = small(spec.hidden_size, spec.vocab_size)
        self.hidden = small(batch, spec.hidden_size)
        heads = spec.num_heads, 1, spec.head_dim
        cached = spec.num_kv_heads, settings.context, spec.head_dim
        self.attention = [
            (small(batch, *heads), small(batch, *cached), small(batch, *cached)) for _ in range(spec.num_layers)
        ]
        self.projections = [
            [[small(k, n) for n, k in shapes] for _ in range(times)] for shapes, times in dense_shapes(spec)
        ]
        width, experts = spec.expert_intermediate_size, spec.num_experts
        # [expert, out, in], viewed as [expert, in, out]: the layout that the grouped GEMM needs.
        shapes = (2 * width, spec.hidden_size), (spec.hidden_size, width)
        self.experts = [
            [torch.stack([small(*shape) for _ in range(experts)]).transpose(1, 2) for shape in shapes]
            for _ in range(spec.num_moe_layers)
        ]
        self.ids = [
            torch.rand(batch, spec.num_experts, device=device).topk(spec.top_k, dim=1).indices
            for _ in range(spec.num_moe_layers)
        ]

    def run(self) -> Any:
        from coterie.engines.kernels.routing import permute_by_expert

        spec, attend = self.spec, torch.nn.functional.scaled_dot_product_attention
        for layer in range(spec.num_layers):
            for inputs, weights in zip(self.inputs, self.projections, strict=True):
                if layer < len(weights):
                    for x, weight in zip(inputs, weights[layer], strict=True):
                        x @ weight
            q, k, v = self.attention[layer]
            attend(q, k, v, enable_gqa=spec.num_heads != spec.num_kv_heads)
            if layer < spec.num_moe_layers:
                rows, routed = permute_by_expert(self.hidden, self.ids[layer], spec.num_experts)
                up, down = self.experts[layer]
                gate, value = torch._grouped_mm(rows, up, offs=routed.ends).chunk(2, dim=-1)
                out = torch._grouped_mm(torch.nn.functional.silu(gate) * value, down, offs=routed.ends)
                out[routed.places.long()].view(len(self.hidden), spec.top_k, -1).mean(dim=1)
        return self.hidden @ self.head


def _random(device: Any, *shape: int) -> Any:
    return torch.randn(*shape, device=device, dtype=torch.float32).mul_(0.02).to(torch.bfloat16)


class _Copies:
    """Copies of one expert's weights over one path, on a separate stream."""

    def __init__(self, path: str, nbytes: int, device: Any) -> None:
        self.path, self.stream = path, torch.cuda.Stream(device)
        self.graphs: dict[int, Any] = {}
        self.targets = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(POOL)]
        at = device if path == "device" else "cpu"
        filled = [torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=at) for _ in range(POOL)]
        self.sources = filled if path == "device" else [source.pin_memory() for source in filled]

    def _copy(self, count: int) -> None:
        for at in range(count):
            self.targets[at % POOL].copy_(self.sources[at % POOL], non_blocking=True)

    def prepare(self, count: int) -> None:
        """Capture copies inside the device as a graph: they are many and short, and one launch keeps the host ahead."""
        if self.path == "device" and count not in self.graphs:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                self._copy(count)
            self.graphs = {count: graph}

    def enqueue(self, count: int) -> None:
        with torch.cuda.stream(self.stream):
            if count in self.graphs:
                self.graphs[count].replay()
            else:
                self._copy(count)

    def alone_us(self, count: int) -> float:
        """Return the time of `count` copies in microseconds with nothing else running."""
        self.prepare(count)
        start, end = marks(2)
        torch.cuda.synchronize()
        self.enqueue(count)  # untimed: the timed copies queue behind these, which hides the launch overhead
        start.record(self.stream)
        self.enqueue(count)
        end.record(self.stream)
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    def check(self) -> None:
        """Raise UnavailableError if a target differs from its source."""
        torch.cuda.synchronize()
        for target, source in zip(self.targets, self.sources, strict=True):
            check(
                torch.equal(target.cpu(), source.cpu()),
                "a copy beside steps arrived changed; the device is not to be trusted",
                UnavailableError,
            )


def measure_contention(
    spec: ModelSpec, device: Any, settings: ContentionSettings | None = None, report: Report | None = None
) -> list[ContentionCell]:
    """Time decode steps of a model shape alone and beside copies, over both paths; needs CUDA."""
    settings, report = settings or ContentionSettings(), report or (lambda *_: None)
    check(device.type == "cuda", f"contention is measured on CUDA devices, not on {device.type}", UnavailableError)
    report(f"{spec.name} contention", 0, 1)
    with torch.inference_mode():
        graph, _ = captured(DecodeStep(spec, device, settings).run, warm_ups=2)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        nbytes = round(spec.expert_bytes("bf16"))
        alone = statistics.median(_steps(graph, settings.steps)[0] for _ in range(3))
        cells = []
        for path in PATHS:
            copies = _Copies(path, nbytes, device)
            copies.alone_us(2 * POOL)
            copy_us = statistics.median(copies.alone_us(POOL) for _ in range(5)) / POOL
            full = max(1, int(alone / copy_us))
            counts = sorted({1, *(max(1, round(full * share)) for share in settings.shares)})
            for done, count in enumerate(counts):
                report(f"{spec.name} steps beside {path} copies", done, len(counts))
                cells.append(_cell(graph, copies, path, nbytes, count, settings))
            copies.check()
            del copies
            torch.cuda.empty_cache()
    return cells


def _cell(
    graph: Any,
    copies: _Copies,
    path: Literal["host-to-device", "device"],
    nbytes: int,
    count: int,
    settings: ContentionSettings,
) -> ContentionCell:
    copy_us = statistics.median(copies.alone_us(count) for _ in range(settings.rounds))
    pairs = [
        (_steps(graph, settings.steps), _steps(graph, settings.steps, copies, count)) for _ in range(settings.rounds)
    ]
    alone_us = statistics.median(us for (us, _), _ in pairs)
    moved = statistics.median(moved for _, (_, moved) in pairs)
    slower = sorted(beside_us - us for (us, _), (beside_us, _) in pairs)
    quarter = len(slower) // 4
    return ContentionCell(
        path=path,
        nbytes=round(moved * count * nbytes),
        copy_us=round(moved * copy_us, 3),
        alone_us=round(alone_us, 3),
        beside_us=round(alone_us + statistics.median(slower), 3),
        spread_us=round((slower[-1 - quarter] - slower[quarter]) / 2, 3),
    )


def _steps(graph: Any, steps: int, copies: _Copies | None = None, count: int = 0) -> tuple[float, float]:
    """Time `steps` steps after one untimed step; with `copies`, start `count` copies beside each step.

    Return the microseconds per step, and the share of the copies that finished before the steps did: later copies did
    not slow any step down.
    """
    main, (*starts, end, done) = torch.cuda.current_stream(), marks(steps + 3)
    torch.cuda.synchronize()
    for start in starts:
        start.record(main)
        if copies is not None:
            copies.stream.wait_event(start)
            copies.enqueue(count)
        graph.replay()
    end.record(main)
    if copies is not None:
        done.record(copies.stream)
    torch.cuda.synchronize()
    window = float(starts[1].elapsed_time(end))
    moved = 0.0 if copies is None else min(1.0, window / float(starts[1].elapsed_time(done)))
    return window * 1e3 / steps, moved
