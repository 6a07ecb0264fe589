"""What changed with a placement plan: minutes of a pool before it came into force against minutes after.

A plan touches all requests at once, so no turns can be drawn. Whatever else changed at that time counts too: the tokens
a second before and after, and the drifts since, say how far the two sides are alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from coterie.control.switchback import Totals

MINUTE_S = 60.0
MOST = 30
"""Minutes of a side, at most."""
FEWEST = 5
"""Minutes of a side below which nothing is said."""


class PlanMeasured(NamedTuple):
    """Change of TPOT since a plan came into force, in percent of its geometric mean over minutes before."""

    percent: float
    low: float
    high: float
    """`low` and `high` bound the 95% interval, as if minutes were independent."""
    minutes: tuple[int, int]
    """Before and after."""
    load_percent: float
    """Change of the tokens a second."""
    drifts: int
    """Drifts of the traffic since the plan came into force."""

    @property
    def sentence(self) -> str:
        sides = f"{self.minutes[0]} minutes before against {self.minutes[1]} after"
        drifted = f"; the traffic drifted {self.drifts} times since" if self.drifts else ""
        return (
            f"TPOT {self.percent:+.1f}% ({self.low:+.1f} to {self.high:+.1f}%, {sides}; tokens a second "
            f"{self.load_percent:+.1f}%{drifted})"
        )


class BeforeAfter:
    """Watches a pool around its plans. Call `tick` about once a second with the pool's totals."""

    def __init__(self) -> None:
        self._minutes: deque[tuple[float, float]] = deque(maxlen=MOST)
        """TPOT and tokens a second."""
        self._before: Sequence[tuple[float, float]] = ()
        self._since: tuple[float, Totals] | None = None
        self._plans = 0
        self._drifts = (0, 0)

    def tick(self, now_s: float, totals: Totals, plans: int, drifts: int) -> None:
        """`plans` and `drifts` are how many plans have come into force, and how often the traffic drifted, so far."""
        if plans > self._plans:
            self._before, self._since = tuple(self._minutes), None
            self._drifts = (drifts, drifts)
            self._minutes.clear()
        self._plans, self._drifts = plans, (min(self._drifts[0], drifts), drifts)
        if self._since is None:
            self._since = now_s, totals
        elif now_s >= self._since[0] + MINUTE_S:
            means = totals.since(self._since[1]).means()
            if {"tpot", "tokens"} <= means.keys():
                self._minutes.append((means["tpot"], means["tokens"]))
            self._since = now_s, totals

    def measured(self) -> PlanMeasured | None:
        """Return what changed with the last plan; None without one, or before both sides have some minutes."""
        if min(len(self._before), len(self._minutes)) < FEWEST:
            return None
        before, after = np.log(self._before), np.log(self._minutes)
        change, load = after.mean(axis=0) - before.mean(axis=0)
        errors = [side[:, 0].var(ddof=1) / len(side) for side in (before, after)]
        wide = float(np.sqrt(sum(errors)) * stdtrit(min(len(before), len(after)) - 1, 0.975))
        percent, low, high, load_percent = (100 * np.expm1([change, change - wide, change + wide, load])).tolist()
        minutes, drifts = (len(before), len(after)), self._drifts[1] - self._drifts[0]
        return PlanMeasured(percent, low, high, minutes, load_percent, drifts)
