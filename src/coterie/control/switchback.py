"""Whether a router pays on its own fleet: a whole pool takes turns between it and the shortest queue.

A step's time belongs to all requests in it, so single requests routed differently would measure nothing. Blocks of time
come in pairs, one by the router and one by the shortest queue, in an order drawn at random. The first seconds of a
block are left out: the batches of the block before run on. By Little's law the means of a block need no request to
begin and end in it: the time that requests spent decoding, summed over all, divided by the tokens that came is the mean
time per token.

If both sides are alike, the logarithm of a pair's ratio is as likely as its opposite, whatever its distribution. A bet
on its sign is then fair, and no strategy of bets multiplies its stake by 1/p with a probability above p, however often
one looks (Ville's inequality). A router is left when such a strategy has won enough against it; the interval holds the
ratios against which none has.

No clock and no I/O: the driver passes in the time and the pool's totals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.errors import check, check_at_least, check_not_negative, check_positive

BASELINE = "join_shortest_queue"
MEASURES = {"tpot": "TPOT", "ttft": "TTFT", "experts": "experts a step", "tokens": "tokens a second"}
"""Measure of a block → its name in sentences."""
BETS = 2.0 ** np.arange(8)
"""Steepness of the bets: the stake of one is won or lost at ratios around 1 ± 1/bet."""
SUSPECT = 5
"""Pairs in a row, while the router has most of the time, that start the comparison anew if it did worse in all."""
HALVINGS = 40
MOST_PAIRS = 500
"""Pairs after which what was measured is forgotten, and the comparison starts anew: about three days."""
LONGEST_RETRY = 24
"""Most times `retry_s` between two tries of a router that was left."""
WIDEST = 20.0
"""Largest logarithm of a ratio that an interval is searched in."""


class SwitchbackSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings of the turns that the decode pool takes between its router and the shortest queue; times in seconds."""

    enabled: bool = True
    """Whether the turns are taken. They are if the pool has two workers and another router than the shortest queue."""
    block_s: float = 30.0
    """Length of a block."""
    settle_s: float = 10.0
    """Time at the start of a block that is left out. It should be as long as a mean request."""
    pairs: int = 20
    """Pairs of blocks one after the other after a change of the router; fewer if a difference shows before."""
    share: float = 0.05
    """Share of the time that the shortest queue gets after them."""
    measure: Literal["tpot", "ttft"] = "tpot"
    """Measure by which the router is judged."""
    error: float = 0.05
    """Probability, at most, that equal sides are told apart, however often one looks."""
    retry_s: float = 3600.0
    """Time after which a router that was left is tried again; twice as long after each further time."""

    def __post_init__(self) -> None:
        check_positive(block_s=self.block_s, retry_s=self.retry_s)
        check_not_negative(settle_s=self.settle_s)
        check_at_least(1, pairs=self.pairs)
        check(self.settle_s < self.block_s, f"settle_s={self.settle_s:g} must be below block_s={self.block_s:g}")
        for name, value in (("share", self.share), ("error", self.error)):
            check(0 < value <= 0.5, f"{name}={value:g} must be above 0 and at most 0.5")


class Totals(NamedTuple):
    """Sums over a pool since its start."""

    seconds: float = 0.0
    waiting_s: float = 0.0
    """Time that requests waited for the first token."""
    firsts: float = 0.0
    """First tokens."""
    decoding_s: float = 0.0
    tokens: float = 0.0
    """Tokens of streams; of other answers, those that the worker counted."""
    experts: float = 0.0
    """Distinct experts of a layer, summed over `steps`, by workers that tell them."""
    steps: float = 0.0

    def since(self, before: Totals) -> Totals:
        return Totals(*(now - then for now, then in zip(self, before, strict=True)))

    def means(self) -> dict[str, float]:
        """Return the mean of each measure that can be told."""
        parts = {
            "tpot": (self.decoding_s, self.tokens),
            "ttft": (self.waiting_s, self.firsts),
            "experts": (self.experts, self.steps),
            "tokens": (self.tokens, self.seconds),
        }
        return {name: value / count for name, (value, count) in parts.items() if value > 0 and count > 0}


def lowest(ratios: NDArray[np.float64], error: float) -> float:
    """Return the end of a one-sided interval for the centre of differences: they are larger, at a risk of `error`.

    It holds at every number of differences at once. -inf if there are too few.
    """

    def lost(centre: float) -> bool:
        """Whether the bets that differences are above `centre` have not multiplied the stake by 1/error."""
        odds = np.logaddexp(0.0, -2.0 * np.multiply.outer(BETS, ratios - centre)).sum(axis=1)
        stake = np.logaddexp.reduce(len(ratios) * math.log(2) - odds) - math.log(len(BETS))
        return bool(stake < -math.log(error))

    low, high = -WIDEST, WIDEST
    if lost(low):
        return -math.inf
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if lost(middle) else (middle, high)
    return low


class RouterChange(NamedTuple):
    """A measure with the router against the shortest queue."""

    router: float
    """`router` and `shortest_queue` are geometric means over blocks: seconds, experts, or tokens a second."""
    shortest_queue: float
    percent: float
    """Change from the shortest queue to the router."""
    low: float | None
    high: float | None
    """`low` and `high` bound the interval of `percent`; None while there are too few pairs."""


class Comparison(NamedTuple):
    """Routers that served the same requests on this fleet, one after the other, as ``coterie demo`` has them do."""

    at_s: float
    """Time of the last news, in seconds since 1970."""
    sentence: str
    """The verdict; how far the comparison is while it runs."""
    changes: Mapping[str, RouterChange] = {}
    """Measure → its change from the shortest queue to the router; empty while the comparison runs."""


class Switchback:
    """Turns of one pool. Call `tick` about once a second, and route by the shortest queue while `baseline` is set."""

    def __init__(self, settings: SwitchbackSettings, rng: Generator, now_s: float = 0.0) -> None:
        self.settings = settings
        self.changes: Mapping[str, RouterChange] = {}
        """Measure → its change, as of the last pair."""
        self._rng = rng
        self._retries = 0
        self.restart(now_s)

    def restart(self, now_s: float) -> None:
        """Begin anew: the router was fitted anew, or does worse than before. It routes alone for one block first."""
        self.state: Literal["measuring", "watching", "left"] = "measuring"
        """`measuring`: half and half; `watching`: mostly the router; `left`: the shortest queue alone."""
        self.baseline = False
        self.before = self.changes.get(self.settings.measure)
        """Change of the measure that the router is judged by before the last restart; None if none was measured."""
        self.changes = {}
        self._pairs: list[tuple[Mapping[str, float], Mapping[str, float]]] = []
        """Means of the router's block and of the shortest queue's."""
        self._seen: dict[bool, Mapping[str, float]] = {}
        self._ahead: list[bool] = []
        """Sides of the blocks to come of this pair, the last one first; True is the shortest queue."""
        self._in_pair = False
        self._begin(now_s, self.settings.block_s)

    def _begin(self, now_s: float, seconds: float) -> None:
        self._settles_s, self._ends_s = now_s + self.settings.settle_s, now_s + seconds
        self._since: Totals | None = None

    @property
    def pairs(self) -> int:
        """Number of pairs of blocks that count."""
        return len(self._pairs)

    def tick(self, now_s: float, totals: Totals) -> str | None:
        """Take the pool's totals at this time; return what was decided, as a sentence, if anything was."""
        if self._since is None and now_s >= self._settles_s:
            self._since = totals
        if now_s < self._ends_s:
            return None
        if self.state == "left":
            self.restart(now_s)
            return "the router is tried again"
        if self._in_pair and self._since is not None:
            self._seen[self.baseline] = totals.since(self._since).means()
        if self._ahead:
            self.baseline = self._ahead.pop()
            self._begin(now_s, self.settings.block_s)
            return None
        said = self._decide(now_s) if self._in_pair else None
        if not self._in_pair and now_s >= self._ends_s:
            self._new_pair(now_s)
        return said

    def _new_pair(self, now_s: float) -> None:
        first = bool(self._rng.random() < 0.5)
        self._seen, self._ahead, self._in_pair, self.baseline = {}, [not first], True, first
        self._begin(now_s, self.settings.block_s)

    def _decide(self, now_s: float) -> str | None:
        """Count the pair that ended, and choose what comes next."""
        settings, name = self.settings, MEASURES[self.settings.measure]
        router, shortest = self._seen.get(False, {}), self._seen.get(True, {})
        self._in_pair = self.baseline = False
        if settings.measure not in router or settings.measure not in shortest:
            return None  # nothing was served: the pair tells nothing
        if self.pairs == MOST_PAIRS:
            self._pairs.clear()
        self._pairs.append((router, shortest))
        self.changes = self._compared()
        change = self.changes[settings.measure]
        low, high = change.low, change.high
        if low is not None and low > 0:
            wait_s = settings.retry_s * min(2**self._retries, LONGEST_RETRY)
            self._retries += 1
            self.state, self.baseline = "left", True
            self._begin(now_s, wait_s)
            return (
                f"{name} was {change.percent:.1f}% higher than by the shortest queue ({self._interval(change)}, "
                f"{self.pairs} pairs of blocks): the shortest queue routes, and the router is tried again in "
                f"{wait_s / 60:.0f} min"
            )
        recent = np.log([one[settings.measure] / other[settings.measure] for one, other in self._pairs[-SUSPECT:]])
        if self.state == "watching" and lowest(recent, 2.0 ** (1 - SUSPECT)) > 0:
            self.restart(now_s)
            return f"in the last {SUSPECT} pairs of blocks {name} was higher than by the shortest queue: compared anew"
        shown = high is not None and high < 0
        if self.state == "measuring" and not shown and self.pairs < settings.pairs:
            return None
        self._begin(now_s, settings.block_s * (1 / settings.share - 2))
        before, self.state = self.state, "watching"
        return None if before == "watching" else f"{self.verdict()}: it stays, and goes on being compared"

    def _compared(self) -> dict[str, RouterChange]:
        found = {}
        for name in MEASURES:
            both = [(one[name], other[name]) for one, other in self._pairs if name in one and name in other]
            if both:
                logs = np.log(np.array(both))
                ratios, error = logs[:, 0] - logs[:, 1], self.settings.error / 2
                low, high = lowest(ratios, error), -lowest(-ratios, error)
                bounds = [_percent(one) if math.isfinite(one) else None for one in (low, high)]
                means = np.exp(logs.mean(axis=0)).tolist()
                found[name] = RouterChange(means[0], means[1], _percent(float(np.mean(ratios))), bounds[0], bounds[1])
        return found

    def verdict(self) -> str:
        """Return what has been measured by now, as a sentence without its full stop."""
        change, before = self.changes.get(self.settings.measure), self.before
        if change is None and before is not None:
            return f"no pair of blocks has been measured since the change; before it {before.percent:+.1f}%"
        if change is None:
            return "no pair of blocks has been measured yet"
        name, counted = MEASURES[self.settings.measure], f"{self.pairs} pair{'s' if self.pairs > 1 else ''} of blocks"
        if change.low is None or change.high is None:
            return f"{counted}: too few to tell the router from the shortest queue"
        if change.low <= 0 <= change.high:
            return (
                f"{name} differs by no more than chance from the shortest queue's ({self._interval(change)}, {counted})"
            )
        more = "higher" if change.percent > 0 else "lower"
        side = f"{abs(change.percent):.1f}% {more} than by the shortest queue"
        return f"{name} is {side} ({self._interval(change)}, {counted})"

    def _interval(self, change: RouterChange) -> str:
        return f"{100 * (1 - self.settings.error):g}%: {change.low:+.1f} to {change.high:+.1f}%"


def _percent(ratio: float) -> float:
    return 100 * math.expm1(ratio)
