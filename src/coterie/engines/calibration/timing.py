"""Timing on one device, and the device's description; needs only torch and NumPy.

On CUDA every timing is a graph replay between events: launch gaps of eager Python would dominate short kernels.
"""

from __future__ import annotations

import platform
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.engines.optional import torch
from coterie.errors import ConfigError, UnavailableError, check, check_at_least
from coterie.types import WeightDtype

DTYPES: dict[str, tuple[WeightDtype, ...]] = {"cuda": ("bf16", "fp8"), "cpu": ("fp32", "bf16")}
"""Weight dtypes that can be measured, by type of device; the first is the default."""
MAX_COPIES = 64
"""Maximum number of layer copies to rotate over: tiny shapes would need thousands to fill a cache."""


def copies_to_flush(device: Any, nbytes: float) -> int:
    """Return the copies to rotate over so that none stays cached: four times the L2 cache, 64 MB on a CPU."""
    cache = 4.0 * torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 64e6
    return max(2, min(MAX_COPIES, int(np.ceil(cache / nbytes))))


@dataclass(frozen=True, slots=True)
class CalibrationSettings:
    """Settings of a calibration."""

    dtypes: tuple[WeightDtype, ...] = ()
    """Weight dtypes of the experts. CUDA: bf16, fp8. CPU: fp32, bf16. If empty: bf16 and fp8 on CUDA, fp32 on a CPU."""
    tokens: tuple[int, ...] = (
        1,
        2,
        4,
        8,
        16,
        24,
        32,
        48,
        64,
        96,
        128,
        192,
        256,
        384,
        512,
        768,
        1024,
        1536,
        2048,
        3072,
        4096,
        6144,
        8192,
    )
    """Batch sizes of the MoE cells, in tokens. Powers of two alone would hide the cost of a partly filled tile."""
    skews: tuple[float, ...] = (0.5, 1.0, 1.5)
    """Zipf exponents measured in addition to the even spread."""
    contexts: tuple[int, ...] = (128, 512, 2048, 8192)
    """Context lengths of the attention cells."""
    cell_ms: float = 20.0
    """Milliseconds to spend on one cell in one pass."""
    passes: int = 3
    """Passes over all MoE cells, each in a different order; a cell's time is the median of its passes."""
    min_repeats: int = 5

    def __post_init__(self) -> None:
        if not self.tokens or min(self.tokens) < 1:
            raise ConfigError(f"tokens={self.tokens} must be at least one batch size of at least 1")
        check_at_least(1, passes=self.passes, min_repeats=self.min_repeats)


@dataclass(frozen=True, slots=True)
class Timer:
    """Median time of a callable on one device."""

    device: Any
    settings: CalibrationSettings

    def median_us(self, calls: Sequence[Callable[[], Any]]) -> float:
        """Return the median over `passes` timings, for kernels that are not measured in shuffled passes."""
        return round(statistics.median(self.us(calls) for _ in range(self.settings.passes)), 3)

    def us(self, calls: Sequence[Callable[[], Any]]) -> float:
        """Return the median microseconds per call.

        Calls run in rotation, so that each finds the cache as the others left it.
        """
        if self.device.type == "cuda":
            return self._graph_us(calls)
        for call in calls:
            call()
        samples: list[float] = []
        stop = time.perf_counter() + self.settings.cell_ms / 1e3
        while len(samples) < self.settings.min_repeats or time.perf_counter() < stop:
            for call in calls:  # timed one by one: a tiny shape has 64 copies, and one round over them is enough
                start = time.perf_counter()
                call()
                samples.append((time.perf_counter() - start) * 1e6)
        return statistics.median(samples)

    def _graph_us(self, calls: Sequence[Callable[[], Any]]) -> float:
        graph, _ = captured(lambda: [call() for call in calls])
        graph.replay()
        torch.cuda.synchronize()
        first = event_us(graph.replay)
        repeats = int(max(self.settings.min_repeats, min(200, self.settings.cell_ms * 1e3 / max(first, 1.0))))
        return statistics.median(event_us(graph.replay) for _ in range(repeats)) / len(calls)


def captured(run: Callable[[], Any], pool: Any = None, warm_ups: int = 1) -> tuple[Any, Any]:
    """Capture the kernels of a call as a CUDA graph, after untimed calls on a side stream.

    Return the graph, and the result of the call, which a replay overwrites.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_ups):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        return graph, run()


def marks(count: int) -> list[Any]:
    """Return CUDA events that take the time."""
    return [torch.cuda.Event(enable_timing=True) for _ in range(count)]


def event_us(call: Callable[[], Any]) -> float:
    """Return the microseconds between two CUDA events around a call."""
    start, end = marks(2)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def allowed_dtype(dtype: WeightDtype | None, device: Any, verb: str) -> WeightDtype:
    """Return the dtype, or the device's default for None; raise ConfigError if the device has no kernel for it."""
    allowed = DTYPES[device.type]
    if dtype not in (None, *allowed):
        raise ConfigError(f"dtype {dtype!r} cannot be {verb} on {device.type}; it must be {' or '.join(allowed)}")
    return dtype or allowed[0]


def random(device: Any, *shape: int, scale: float = 1.0) -> Any:
    """Return normally distributed activations or weights."""
    return torch.randn(*shape, device=device, dtype=torch.float32).mul_(scale).to(activation_dtype(device))


def activation_dtype(device: Any) -> Any:
    # Many CPUs have no bf16 products and emulate them a hundred times slower than fp32.
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def find_device(device: str, purpose: str) -> Any:
    """Return the named device, made current if it has an index; `auto` is a GPU if there is one."""
    if torch is None:
        raise UnavailableError(f"{purpose} needs torch: pip install 'coterie[torch]'")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    check(re.fullmatch(r"cpu|cuda(:\d+)?", device), f"device={device!r} must be auto, cpu, cuda or cuda:N")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UnavailableError(f"device {device!r} was asked for, but torch sees no CUDA device")
    if ":" in device:
        torch.cuda.set_device(device)  # streams and events are created on the current device
    return torch.device(device)


def describe_hardware(device: Any) -> dict[str, str | int | float]:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "device": properties.name,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "cache_bytes": properties.L2_cache_size,
        }
    return {"device": f"CPU {platform.machine()}", "threads": torch.get_num_threads()}


def describe_software() -> dict[str, str]:
    cuda = {"cuda": str(torch.version.cuda)} if torch.version.cuda else {}
    return {"python": platform.python_version(), "torch": str(torch.__version__), **cuda}
