"""What a control loop told, for tests of the page: views as large or as hostile as a test wants them."""

from __future__ import annotations

from typing import Any

import numpy as np

from coterie.gateway.control.driver import as_map
from coterie.gateway.control.live import LiveControl
from coterie.gateway.control.messages import ControlView


class ShownControl(LiveControl):
    """Shows a view; no loop runs."""

    def __init__(self, view: ControlView | None) -> None:
        self.shown = view
        self.connected = None

    @property
    def view(self) -> ControlView | None:
        return self.shown

    async def close(self) -> None:
        self.shown = None


def full_view(
    text: str = "because", items: int = 4, workers: tuple[str, ...] = ("decode-0", "decode-1")
) -> ControlView:
    """A view in which every text is `text`, and every list has `items` items."""
    event: dict[str, Any] = {"at_s": 1_700_000_000.0, "kind": "refit_taken", "reason": text, "values": {text: text}}
    action = {"kind": "replicate", "reason": text, "layers": [1], "expert": 3, "target": 1}
    return ControlView(
        status={"model": text, "kept_requests": 128, "fit_requests": 64, "drift_ratio": 1.5, "job": False},
        events=[{**event, "kind": kind} for _ in range(-(-items // 2)) for kind in ("drift", "refit_taken")],
        advice={
            "id": 1,
            "at_s": 1_700_000_000.0,
            "reason": text,
            "planned": True,
            "gain_pct": 6.2,
            "gain_next_pct": 5.1,
            "moves": 14,
            "moved_bytes": 3.1e8,
            "movement_s": 0.21,
            "planning_s": 0.034,
            "applied": False,
            "actions": [action] * items,
            "before": {"balance": 0.71, "rank_s": [1.2e-4, 0.8e-4] * items},
            "after": {"balance": 0.96, "rank_s": [1.0e-4, 1.04e-4] * items},
        },
        loads={id: as_map(np.arange(32.0).reshape(4, 8)) for id in workers},
    )
