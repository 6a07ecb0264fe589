"""Timing on one device, and the device's description; needs only torch.

On CUDA every timing is a graph replay between events: launch gaps of eager Python would dominate short kernels.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from typing import Any

from coterie.engines.optional import torch
from coterie.errors import UnavailableError, check


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


def find_device(device: str, purpose: str) -> Any:
    """Return the named device, made current if it has an index; `auto` is a GPU if there is one."""
    check(torch is not None, f"{purpose} needs torch: pip install 'coterie[torch]'", UnavailableError)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    check(re.fullmatch(r"cpu|cuda(:\d+)?", device), f"device={device!r} must be auto, cpu, cuda or cuda:N")
    check(
        not device.startswith("cuda") or torch.cuda.is_available(),
        f"device {device!r} was asked for, but torch sees no CUDA device",
        UnavailableError,
    )
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
