"""How a strategy prices a batch before it runs.

* :class:`SpreadCost`: ``1 + sensitivity x CV``, CAPS's model of a straggler, by the load's coefficient of variation.
* :class:`~coterie.costs.lines.StepCost`: the calibrated step time, linearised.
"""

from __future__ import annotations

from dataclasses import dataclass

from coterie.costs.lines import StepCost
from coterie.errors import check_not_negative


@dataclass(frozen=True, slots=True)
class SpreadCost:
    """``1 + sensitivity x CV`` of the load over its columns; each request is one unit of work.

    Right across ranks, where the busiest one is waited for; inside one GPU imbalance is nearly free.
    """

    sensitivity: float = 1.0

    def __post_init__(self) -> None:
        check_not_negative(sensitivity=self.sensitivity)


BatchCost = SpreadCost | StepCost
