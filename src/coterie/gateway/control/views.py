"""What the process of the control loop last told, as endpoints and the page show it."""

from __future__ import annotations

from typing import Any

import msgspec


class HeatMap(msgspec.Struct, frozen=True):
    """Tokens of a worker's last window, by layer and expert."""

    layers: int
    experts: int
    values: bytes
    """A list of layers x experts whole numbers, row by row, in JSON: the gateway passes it on as it is."""
    layers_left_out: int = 0


class ControlView(msgspec.Struct):
    """A snapshot of the loop, at most one a second."""

    status: dict[str, Any]
    """State of the loop, as `ControlLoop.status()` gives it, and `streams`: what the workers' event streams brought."""
    events: list[dict[str, Any]] = []
    """Decisions of the loop, newest last: at_s (seconds since the epoch), kind, reason, values."""
    advice: dict[str, Any] | None = None
    """The last placement advice, of which `reason` says why it is to be kept or followed; None before the first."""
    loads: dict[str, HeatMap] = {}
    """By worker id."""
