"""What moving weights costs the steps it runs behind: decode steps under a CUDA graph, with copies beside them.

An engine that stages a move copies the weights on a stream of its own while steps go on. The copy then costs what it
takes from the step: memory bandwidth, and for copies inside the device some multiprocessors. Both are timed alone and
together, at one expert a step and at shares of the path's full speed.

The step holds every kernel of a decode step in order (projections, attention, routing, experts, output head), each on
weights of its own; values are not handed from one to the next, which no kernel's time depends on. Wrong for copies
between devices: with one device, a copy inside it stands for them, which reads and writes the same memory.

Needs torch and NumPy alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from coterie.costs.shapes import dense_shapes
from coterie.engines.calibration.experts import Experts
from coterie.engines.calibration.timing import activation_dtype
from coterie.errors import ConfigError, UnavailableError, check_at_least
from coterie.types import ModelSpec, WeightDtype

try:
    import torch
except ImportError:
    torch = None

PATHS = ("host-to-device", "device")
POOL = 8
"""Buffers that copies take in turn, so that none is found in the cache."""


@dataclass(frozen=True, slots=True)
class ContentionSettings:
    """Settings of a contention run."""

    batch: int = 64
    """Requests that decode in a step."""
    context: int = 1024
    """Tokens that each has cached."""
    steps: int = 12
    """Steps of one timing."""
    rounds: int = 7
    """Timings of steps alone and beside copies, in turn; a cell is the median over them."""
    shares: tuple[float, ...] = (0.125, 0.25, 0.5, 1.0)
    """Shares of the path's full speed to copy at, besides one expert a step."""

    def __post_init__(self) -> None:
        check_at_least(1, batch=self.batch, context=self.context, steps=self.steps, rounds=self.rounds)
        if not self.shares or not all(0 < share <= 1 for share in self.shares):
            raise ConfigError(f"shares={self.shares} must be at least one number in 0 … 1, above 0")


class ContentionTiming(NamedTuple):
    """Steps beside copies of one size; a plain form of :class:`coterie.costs.cells.ContentionCell`."""

    path: str
    nbytes: int
    """Bytes moved per step."""
    copy_us: float
    """Time of these copies with no step beside them."""
    alone_us: float
    """A step with no copies beside it."""
    beside_us: float
    """A step beside them."""
    spread_us: float
    """Half of the range of the middle half of the slowdowns measured."""


class DecodeStep:
    """Every kernel of one decode step, on random weights and tokens."""

    def __init__(self, spec: ModelSpec, dtype: WeightDtype, device: Any, settings: ContentionSettings) -> None:
        if spec.kv_lora_rank:
            raise ConfigError(f"{spec.name} has latent attention; contention is measured with grouped heads only")
        self.spec, kind = spec, activation_dtype(device)

        def random(*shape: int) -> Any:
            return torch.randn(*shape, device=device, dtype=torch.float32).mul_(0.02).to(kind)

        batch = settings.batch
        self.inputs = [[random(batch, k) for _, k in shapes] for shapes, _ in dense_shapes(spec)]
        self.head = random(spec.hidden_size, spec.vocab_size)
        self.hidden = random(batch, spec.hidden_size)
        heads = spec.num_heads, 1, spec.head_dim
        cached = spec.num_kv_heads, settings.context, spec.head_dim
        self.attention = [
            (random(batch, *heads), random(batch, *cached), random(batch, *cached)) for _ in range(spec.num_layers)
        ]
        self.projections = [
            [[random(k, n) for n, k in shapes] for _ in range(times)] for shapes, times in dense_shapes(spec)
        ]
        self.experts = Experts(spec, dtype, device, spec.num_moe_layers)
        self.ids = [
            torch.rand(batch, spec.num_experts, device=device).topk(spec.top_k, dim=1).indices
            for _ in range(spec.num_moe_layers)
        ]
        self.counts = [one.flatten().bincount(minlength=spec.num_experts).tolist() for one in self.ids]

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
                out = self.experts.forward(layer, rows, routed.ends, self.counts[layer])
                out[routed.places.long()].view(len(self.hidden), spec.top_k, -1).mean(dim=1)
        return self.hidden @ self.head


class _Copies:
    """Copies of one expert's weights over one path, on a stream of their own."""

    def __init__(self, path: str, nbytes: int, device: Any) -> None:
        self.path, self.stream = path, torch.cuda.Stream(device)
        self.graphs: dict[int, Any] = {}
        self.targets = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(POOL)]
        if path == "device":
            self.sources = [torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=device) for _ in range(POOL)]
        else:
            self.sources = [torch.randint(0, 255, (nbytes,), dtype=torch.uint8).pin_memory() for _ in range(POOL)]

    def _copy(self, count: int) -> None:
        for at in range(count):
            self.targets[at % POOL].copy_(self.sources[at % POOL], non_blocking=True)

    def prepare(self, count: int) -> None:
        """Copies inside the device are many and short: as a graph, they are one launch, and the host stays ahead."""
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
        """`count` copies with nothing beside them."""
        self.prepare(count)
        start, end = _marks(2)
        torch.cuda.synchronize()
        self.enqueue(count)  # the timed ones queue behind it, so that the launch does not count
        start.record(self.stream)
        self.enqueue(count)
        end.record(self.stream)
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    def check(self) -> None:
        """Raise unless what was copied arrived."""
        torch.cuda.synchronize()
        for target, source in zip(self.targets, self.sources, strict=True):
            if not torch.equal(target.cpu(), source.cpu()):
                raise UnavailableError("a copy beside steps arrived changed; the device is not to be trusted")


def measure_contention(
    spec: ModelSpec,
    device: Any,
    settings: ContentionSettings | None = None,
    dtype: WeightDtype = "bf16",
    report: Callable[[str, int, int], None] | None = None,
) -> list[ContentionTiming]:
    """Time decode steps of a shape alone and beside copies, over both paths; needs CUDA."""
    settings, report = settings or ContentionSettings(), report or (lambda *_: None)
    if device.type != "cuda":
        raise UnavailableError(f"contention is measured on CUDA devices, not on {device.type}")
    report(f"{spec.name} contention", 0, 1)
    with torch.inference_mode():
        step = DecodeStep(spec, dtype, device, settings)
        graph = _captured(step)
        nbytes = round(spec.expert_bytes(dtype))
        alone = statistics.median(_steps(graph, settings.steps).us for _ in range(3))
        cells = []
        for path in PATHS:
            copies = _Copies(path, nbytes, device)
            copies.alone_us(2 * POOL)
            one = statistics.median(copies.alone_us(POOL) for _ in range(5)) / POOL
            full = max(1, int(alone / one))
            counts = sorted({1, *(max(1, round(full * share)) for share in settings.shares)})
            for done, count in enumerate(counts):
                report(f"{spec.name} steps beside {path} copies", done, len(counts))
                cells.append(_cell(graph, copies, path, nbytes, count, settings))
            copies.check()
            del copies
            torch.cuda.empty_cache()
    return cells


def _captured(step: DecodeStep) -> Any:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step.run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    return graph


def _cell(
    graph: Any, copies: _Copies, path: str, nbytes: int, count: int, settings: ContentionSettings
) -> ContentionTiming:
    copy_us = statistics.median(copies.alone_us(count) for _ in range(settings.rounds))
    pairs = [
        (_steps(graph, settings.steps), _steps(graph, settings.steps, copies, count)) for _ in range(settings.rounds)
    ]
    alone = statistics.median(one.us for one, _ in pairs)
    moved = statistics.median(beside.moved for _, beside in pairs)
    slower = sorted(beside.us - one.us for one, beside in pairs)
    quarter = len(slower) // 4
    return ContentionTiming(
        path=path,
        nbytes=round(moved * count * nbytes),
        copy_us=round(moved * copy_us, 3),
        alone_us=round(alone, 3),
        beside_us=round(alone + statistics.median(slower), 3),
        spread_us=round((slower[-1 - quarter] - slower[quarter]) / 2, 3),
    )


class _Timed(NamedTuple):
    us: float
    """Time of a step."""
    moved: float = 0.0
    """Share of the copies that were done when the steps were: those that lag behind slowed nothing down."""


def _steps(graph: Any, steps: int, copies: _Copies | None = None, count: int = 0) -> _Timed:
    """Time of a step over several, each with so many copies started beside it, after one that is not timed."""
    main, marks, done = torch.cuda.current_stream(), _marks(steps + 2), _marks(1)[0]
    torch.cuda.synchronize()
    for at in range(steps + 1):
        marks[at].record(main)
        if copies is not None:
            copies.stream.wait_event(marks[at])
            copies.enqueue(count)
        graph.replay()
    marks[-1].record(main)
    if copies is not None:
        done.record(copies.stream)
    torch.cuda.synchronize()
    window = float(marks[1].elapsed_time(marks[-1]))
    if copies is None:
        return _Timed(window * 1e3 / steps)
    copying = float(marks[1].elapsed_time(done))
    return _Timed(window * 1e3 / steps, min(1.0, window / copying))


def _marks(count: int) -> list[Any]:
    return [torch.cuda.Event(enable_timing=True) for _ in range(count)]
