"""A decision to take, what it gains, and the rule that turns an interval into advice."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from coterie.answers.runs import WORTH_PCT
from coterie.answers.verdicts import HARDLY, NOT, PAYS, UNTOLD, change, is_outweighed, is_worse, verdict_of
from coterie.types import Interval

Advice = Literal["on", "try it", "not now", "too little evidence"]
ON: Advice = "on"
TRY: Advice = "try it"
NOT_NOW: Advice = "not now"
TOO_LITTLE: Advice = "too little evidence"
ADVICE = (ON, TRY, NOT_NOW, TOO_LITTLE)
OPENINGS: dict[Advice, str] = {ON: PAYS, TRY: "It may pay", NOT_NOW: NOT, TOO_LITTLE: UNTOLD}
WIDE_PCT = 5.0
"""High end of an interval, in percent, above which a small mean gain is no reason to say no: it may be a large one."""


def advice_of(gain: Interval, tail: Interval | None = None) -> Advice:
    """Return the advice on a gain in percent, of which `tail` is that of the p99.

    On: a gain worth having whose interval is above 0. Try it: the mean is worth having, but the interval has 0 in it,
    or the tail surely gets worse by no more than that. Not now: less, or the tail gets worse by more than the mean
    gains. Too little evidence: no interval, or one so wide that a large gain is as likely as none.
    """
    mean, low, high = gain
    if low is None or high is None:
        return TOO_LITTLE
    if is_outweighed(gain, tail):
        return NOT_NOW
    if round(mean, 1) < WORTH_PCT:
        return TOO_LITTLE if high > WIDE_PCT else NOT_NOW
    if low <= 0.0:
        return TOO_LITTLE if -low > mean else TRY
    return TRY if is_worse(tail) else ON


class Arm(NamedTuple):
    """A way to take the decision, and its gain."""

    name: str
    gain: Interval
    tail: Interval | None = None
    """Gain of the p99; None if it is not looked at."""

    @property
    def rank(self) -> tuple[int, bool, float]:
        """Key to choose the best arm by: the advice, whether the tail outweighs the gain, then the gain."""
        return -ADVICE.index(advice_of(self.gain, self.tail)), not is_outweighed(self.gain, self.tail), self.gain.mean


@dataclass(frozen=True, slots=True)
class Lever:
    """Advice on one decision."""

    key: str
    title: str
    advice: Advice
    chosen: str
    """What to turn on, in words; the best of the arms."""
    against: str
    """What runs without it."""
    metric: str
    """What the gain is of."""
    gain: Interval
    where: str
    """Model, and fleet or group, that was simulated, in words that begin with "for"."""
    facts: tuple[str, ...] = ()
    """More that was found out, for the sentence: reasons, and what it depends on."""
    opening: str = ""
    """First words of the sentence; those of the advice if empty."""
    do: str = ""
    """How to turn it on."""
    tail: Interval | None = None
    """Gain of the p99; None if it is not looked at."""
    arms: tuple[Arm, ...] = ()
    """Gains of all ways that were compared."""
    data: dict[str, Any] = field(default_factory=dict)
    """Numbers for `--json` that the sentence rests on."""

    @property
    def name(self) -> str:
        return self.title.partition(":")[0]

    @property
    def sentence(self) -> str:
        opening = self.opening or OPENINGS[self.advice]
        if not self.chosen:
            return f"{opening} {self.where}: {'; '.join(self.facts)}."
        if opening == NOT and round(self.gain.mean, 1) > 0 and not is_outweighed(self.gain, self.tail):
            opening = HARDLY
        what = f"{self.chosen} {change(self.gain.mean, self.metric)}"
        return verdict_of(self.where, self.gain, what, self.against, "no interval", *self.facts, opening=opening)

    def to_json(self) -> dict[str, Any]:
        arms = [{"name": arm.name, "gain_pct": arm.gain._asdict()} for arm in self.arms]
        tail = None if self.tail is None else self.tail._asdict()
        said = {"gain_pct": self.gain._asdict(), "p99_pct": tail, "arms": arms, "sentence": self.sentence}
        return {key: value for key, value in asdict(self).items() if key not in ("gain", "tail")} | said


def unknown(key: str, title: str, where: str, why: str) -> Lever:
    """Return a decision on which this recording cannot tell anything."""
    return Lever(key, title, TOO_LITTLE, "", "", "", Interval(0.0, None, None), where, (why,))
