"""How a strategy prices a batch before it runs.

* :class:`SpreadCost`: ``1 + sensitivity x CV``, CAPS's model of a straggler, by the load's coefficient of variation.
* :class:`~coterie.costs.lines.StepCost`: the calibrated step time, linearised.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coterie.costs.lines import StepCost
from coterie.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SpreadCost:
    """``1 + sensitivity x CV`` of the load over its columns; each request is one unit of work.

    Right across ranks, where the busiest one is waited for; inside one GPU imbalance is nearly free.
    """

    sensitivity: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.sensitivity < np.inf:
            raise ConfigError(f"sensitivity={self.sensitivity} must be a finite number of at least 0")


BatchCost = SpreadCost | StepCost
