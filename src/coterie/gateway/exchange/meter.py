"""Requests of a pool by what they wait for, integrated over time: the totals that a switchback compares."""

from __future__ import annotations

from collections.abc import Callable

from coterie.control.switchback import Totals


class Meter:
    """Counts of one pool. Every request is `sent` once and has `ended` once, by its key."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started_s = self._at_s = clock()
        self._waiting: set[str] = set()
        self._decoding: set[str] = set()
        self._waiting_s = self._decoding_s = 0.0
        self._firsts = 0
        self._tokens = 0
        self.experts = self.steps = 0.0
        """`experts` is the sum of the distinct experts of a layer over `steps`, by workers that tell them."""

    def sent(self, key: str) -> None:
        self._advance()
        self._waiting.add(key)

    def came(self, key: str, tokens: int) -> bool:
        """Note that tokens of an answer came; return whether they are its first."""
        self._tokens += tokens
        if key not in self._waiting:
            return False
        self._advance()
        self._waiting.remove(key)
        self._decoding.add(key)
        self._firsts += 1
        return True

    def ended(self, key: str) -> None:
        self._advance()
        self._waiting.discard(key)
        self._decoding.discard(key)

    def totals(self) -> Totals:
        self._advance()
        return Totals(
            self._at_s - self._started_s,
            self._waiting_s,
            self._firsts,
            self._decoding_s,
            self._tokens,
            self.experts,
            self.steps,
        )

    def _advance(self) -> None:
        now_s = self._clock()
        passed_s, self._at_s = now_s - self._at_s, now_s
        self._waiting_s += passed_s * len(self._waiting)
        self._decoding_s += passed_s * len(self._decoding)
