"""Rates: one token bucket per caller.

A bucket holds up to `burst` tokens and gains `rate` a second; a request takes its cost, or is told how long to wait. In
any T seconds a caller so gets at most burst + rate x T.

The number of buckets is bounded. One that has filled up again says nothing and is dropped first. Where all are in use,
new callers with the same limit share one bucket: forgetting a bucket that is not full would let its caller start over.
"""

from __future__ import annotations

from coterie.errors import check_at_least, check_positive
from coterie.gateway.access.keys import Caller


class _Bucket:
    __slots__ = ("burst", "level", "rate", "seen")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate, self.burst, self.level, self.seen = rate, burst, burst, now

    def fill(self, now: float) -> None:
        """Add what has come since; a clock that steps back adds nothing."""
        if now > self.seen:
            self.level = min(self.burst, self.level + (now - self.seen) * self.rate)
            self.seen = now


class Rates:
    """Token buckets by caller. Takes the time as an argument, from any clock that does not jump."""

    def __init__(self, rate: float | None = None, burst: float | None = None, most_callers: int = 10_000) -> None:
        """`rate` and `burst` are for callers that have none of their own; None: no limit."""
        check_positive(rate=rate)
        check_at_least(1, burst=burst, most_callers=most_callers)
        self.rate, self.burst, self.most_callers = rate, burst, most_callers
        self._buckets: dict[str, _Bucket] = {}  # least recently used first
        self._shared: dict[tuple[float, float], _Bucket] = {}  # as many as the configuration has limits

    def take(self, caller: Caller, cost: float = 1.0, *, now: float) -> float:
        """Take `cost` tokens and return 0; or take nothing and return the seconds until they will be there.

        A cost above the burst passes when the bucket is full and leaves a debt, so that the rate holds.
        """
        rate, burst = (self.rate, self.burst) if caller.rate is None else (caller.rate, caller.burst)
        if rate is None:
            return 0.0
        if burst is None:
            burst = max(1.0, rate)
        bucket = self._buckets.pop(caller.name, None)
        if bucket is None or bucket.rate != rate or bucket.burst != burst:  # a reload may have changed them
            bucket = self._new(caller.name, rate, burst, now, bucket)
        else:
            self._buckets[caller.name] = bucket  # now the most recently used
            bucket.fill(now)
        needed = min(cost, burst)
        if bucket.level >= needed:
            bucket.level -= cost
            return 0.0
        # At least a microsecond: rounding must not answer 0, which means that the tokens were taken.
        return max((needed - bucket.level) / rate, 1e-6)

    def __len__(self) -> int:
        """Callers with a bucket of their own."""
        return len(self._buckets)

    def _new(self, name: str, rate: float, burst: float, now: float, old: _Bucket | None) -> _Bucket:
        bucket = _Bucket(rate, burst, now)
        if old is not None:  # what was used stays used
            old.fill(now)
            bucket.level = min(burst, old.level)
        elif len(self._buckets) >= self.most_callers and not self._drop_full(now):
            bucket = self._shared.setdefault((rate, burst), bucket)
            bucket.fill(now)
            return bucket
        self._buckets[name] = bucket
        return bucket

    def _drop_full(self, now: float) -> bool:
        """Make room by dropping the least recently used bucket if it has filled up again."""
        name = next(iter(self._buckets))
        bucket = self._buckets[name]
        bucket.fill(now)
        if bucket.level < bucket.burst:
            return False
        del self._buckets[name]
        return True
