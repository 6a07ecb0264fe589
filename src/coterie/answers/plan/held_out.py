"""Score plans on a part of the load that they were not made on: gain, balancedness, and results per domain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from coterie.answers.plan.loads import Parts
from coterie.answers.plan.pricing import Placed, Pricing
from coterie.placement import Plan


class HeldOutReport(NamedTuple):
    """Scores of plans on load that they were not made on."""

    what: str
    gain_pct: float
    no_spare_gain_pct: float | None
    balancedness_before: float
    """Balancedness of the current placement."""
    balancedness_mean: float | None
    """Balancedness of a plan for the mean step; None if the plan itself is for the mean step."""
    balancedness_after: float
    """Balancedness of the plan that was made on the other part."""


class DomainRow(NamedTuple):
    """Balancedness of a placement on load of each domain that it was not planned on."""

    placement: str
    """Name of the placement, in words."""
    mix: float
    """Balancedness on the recorded mix of domains."""
    worst: float
    """Lowest balancedness on a single domain, `worst_domain`."""
    worst_domain: str


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """The two parts of a load, and the function that makes plans."""

    parts: Parts
    pricing: Pricing
    """Pricing of the whole load."""
    batch: int
    now: Placed
    """Current placement."""
    plan: Callable[[Pricing, Placed], Plan]
    """Function that plans for a load, starting from a placement."""

    def of_part(self, whole: Plan, begin: Placed) -> Placed:
        """Plan on the part to plan on; `whole` itself if it is scored on windows outside of its load."""
        if self.parts.planned is None:
            return Placed.of(whole)
        part = replace(self.pricing, tokens=self.parts.planned, steps=self.parts.planned_steps)
        return Placed.of(self.plan(part, begin))

    def for_the_mean(self, begin: Placed) -> Placed | None:
        """Plan for the mean step of the part to plan on; None if plans are not for single steps."""
        if self.parts.planned is None or self.parts.planned_steps is None:
            return None
        return Placed.of(self.plan(replace(self.pricing, tokens=self.parts.planned, steps=None), begin))

    def held_out(self, made: Placed, mean: Placed | None, no_spare: Placed | None) -> HeldOutReport:
        unseen = replace(self.pricing, tokens=self.parts.scored, steps=self.parts.scored_steps)
        return HeldOutReport(
            what=self.parts.what,
            gain_pct=unseen.gain_pct(self.batch, self.now, made),
            no_spare_gain_pct=None if no_spare is None else unseen.gain_pct(self.batch, self.now, no_spare),
            balancedness_before=unseen.balance(self.batch, self.now),
            balancedness_mean=None if mean is None else unseen.balance(self.batch, mean),
            balancedness_after=unseen.balance(self.batch, made),
        )

    def domains(self, made: Placed, mean: Placed | None) -> list[DomainRow]:
        """Score the placements on the mix and on every domain; empty unless the plan is over domains or mixtures."""
        found = self.parts.domains
        if found is None or mean is None:
            return []
        pricing = replace(self.pricing, tokens=found.load.tokens, steps=found)
        today = replace(pricing, steps=None)
        rows = []
        for name, placed in (("now", self.now), ("a plan for the mean", mean), ("this plan", made)):
            each = pricing.step_balance(self.batch, placed)
            least = int(each.argmin())
            rows.append(DomainRow(name, today.balance(self.batch, placed), float(each[least]), found.names[least]))
        return rows
