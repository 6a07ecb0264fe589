"""Plans made on one part of a load, scored on the other: gain, balancedness, and the trade between domains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from coterie.answers.plan.loads import Parts
from coterie.answers.plan.pricing import Placed, Pricing
from coterie.placement import Plan


class HeldOutReport(NamedTuple):
    """What plans do on a load that was not planned on."""

    what: str
    gain_pct: float
    no_spare_gain_pct: float | None
    balancedness_before: float
    """Of what runs now."""
    balancedness_mean: float | None
    """Of a plan for the mean step of the other part; None where the plan is for that too."""
    balancedness_after: float
    """Of the plan, made on the other part."""


class DomainRow(NamedTuple):
    """A placement on domains that it was not planned on."""

    placement: str
    """Which one, in words."""
    mix: float
    """Balancedness on the mix of today."""
    worst: float
    """On the domain that suits it least."""
    worst_domain: str


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """The two parts of a load, and the way plans are made."""

    parts: Parts
    pricing: Pricing
    """Of the whole load."""
    batch: int
    now: Placed
    """What runs now."""
    plan: Callable[[Pricing, Placed], Plan]
    """Plan for a load, from a placement."""

    def of_part(self, whole: Plan, begin: Placed) -> Placed:
        """The plan of the part to plan on; `whole` where other windows than those asked for are scored on."""
        if self.parts.planned is None:
            return Placed.of(whole)
        part = replace(self.pricing, tokens=self.parts.planned, steps=self.parts.planned_steps)
        return Placed.of(self.plan(part, begin))

    def for_the_mean(self, begin: Placed) -> Placed | None:
        """The plan for the mean step of that part, where the plan is for single steps."""
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
        """Empty unless the plan is over domains or mixtures of them."""
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
