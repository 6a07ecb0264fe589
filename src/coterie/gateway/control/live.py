"""The gateway's side of the control loop."""

from __future__ import annotations

from coterie.gateway.control.views import ControlView


class LiveControl:
    """Runs the loop's process and carries out what it decides."""

    def __init__(self) -> None:
        self._view: ControlView | None = None

    @property
    def view(self) -> ControlView | None:
        """What the loop last told; None before the first."""
        return self._view
