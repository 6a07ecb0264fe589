"""The score of a fit on given requests: the real router routes them, and step prices give the decode time.

The requests are served in a closed loop on a fleet that starts empty: workers x `batch` requests always run, and when
one ends the next one starts. A worker's step takes

    fixed + expert x D + request x n + context

by the prices of a decode step, where n is the number of its requests and D, the expected distinct experts, is the sum
over expert indices of 1 - product over its requests of (1 - p). Here p is what a request *did* activate in decode,
while the router sees only its prompt, as in live serving. All requests are served once to fill the fleet and its
workers' priors, and then `ROUNDS` times for the measurement, each time in another order, so that the chance of which
requests run together averages out.

Two fits serve the same requests in the same order. Their times are compared piece by piece, so that the cost common to
both cancels out; the spread over the pieces gives a confidence bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.control.traffic import Kept, activations_per_token
from coterie.costs.lines import DecodeStepPrices, decode_us
from coterie.errors import check
from coterie.routing import Request, Router, RouterFit
from coterie.routing.fleet import MOST_CERTAIN

Array = NDArray[np.float64]

ROUNDS = 4
"""Number of measured rounds over all requests."""
ROOM = 4
"""Places of a worker (requests that it can run at once), as a multiple of `batch`."""
BY_EXPERTS = DecodeStepPrices(
    fixed_us=0.0, expert_us=1.0, request_us=0.0, context_us=0.0, prefill_us=0.0, transfer_us=0.0, output_tokens=256.0
)
"""Default prices: the time of a step is the number of experts it touches."""


class FitComparison(NamedTuple):
    """Comparison of a candidate with the fit in force."""

    saving: float
    """Mean share of the decode time that the candidate saves; negative if it is slower."""
    bound: float
    """Lower end of the one-sided confidence interval of `saving` over the pieces."""
    in_force_us: float
    """Predicted time per output token with the fit in force."""
    candidate_us: float
    requests: int

    @property
    def words(self) -> str:
        sure = "beyond chance" if self.bound > 0 else "no more than chance gives"
        return f"{100 * self.saving:.2f}% of the predicted decode time of {self.requests} requests new to both, {sure}"

    def values(self) -> dict[str, float | str]:
        return {
            "saving_pct": 100 * self.saving,
            "bound_pct": 100 * self.bound,
            "in_force_us": self.in_force_us,
            "candidate_us": self.candidate_us,
            "requests": float(self.requests),
        }


class Scorer:
    """Scores a fit by serving requests with the router that `make` creates from it."""

    def __init__(self, make: Callable[[RouterFit], Router], batch: int, prices: DecodeStepPrices | None = None) -> None:
        self.make, self.batch = make, batch
        self.line = (prices or BY_EXPERTS).line

    def compare(
        self,
        in_force: RouterFit,
        candidate: RouterFit,
        requests: Sequence[Kept],
        workers: int,
        pieces: int,
        sure: float,
    ) -> FitComparison:
        """Compare two fits on the same requests. `sure` is the one-sided confidence of the bound."""
        from scipy.special import stdtrit  # slow to import

        logs = [_logs(request) for request in requests]
        old, new = (self.token_us(fit, requests, workers, logs) for fit in (in_force, candidate))
        before, after = (np.array([piece.mean() for piece in np.array_split(us, pieces)]) for us in (old, new))
        savings = 1.0 - after / before
        half = float(stdtrit(pieces - 1, sure) * savings.std(ddof=1) / np.sqrt(pieces))
        mean = float(savings.mean())
        return FitComparison(mean, mean - half, float(old.mean()), float(new.mean()), len(requests))

    def token_us(
        self, fit: RouterFit, requests: Sequence[Kept], workers: int, logs: Sequence[NDArray[np.float32]] | None = None
    ) -> Array:
        """Return [request] microseconds per output token, mean over the rounds."""
        check(len(requests) >= 2, f"requests={len(requests)} must be at least 2 to score a fit")
        return _ClosedLoop(self, fit, requests, workers, logs or [_logs(request) for request in requests]).run()

    def sent(self, fit: RouterFit, requests: Sequence[Kept], workers: int) -> Array:
        """Return [worker, layer, expert] activations that the router sends to each worker, mean over the rounds."""
        served = _ClosedLoop(self, fit, requests, workers, [_logs(request) for request in requests])
        served.run()
        counts = np.stack([kept.prefill + kept.decode for kept in requests]).astype(np.float64)
        return np.tensordot(served.placed[:, :workers].T / ROUNDS, counts, 1)


def _logs(request: Kept) -> NDArray[np.float32]:
    """Return [expert index] log(1 - p), where p are the request's activations per decoded token."""
    return np.asarray(np.log1p(-np.minimum(activations_per_token(request), np.float32(MOST_CERTAIN))), np.float32)


class _Running(NamedTuple):
    worker: int
    request: int
    since_us: float
    ends_after: float
    """Value of the worker's `tokens` counter at which this request ends."""


class _ClosedLoop:
    def __init__(
        self,
        scorer: Scorer,
        fit: RouterFit,
        requests: Sequence[Kept],
        workers: int,
        logs: Sequence[NDArray[np.float32]],
    ) -> None:
        self.requests, self.logs, self.line = requests, logs, scorer.line
        self.router = scorer.make(fit)
        self.in_flight = max(1, min(workers * scorer.batch, len(requests) // 2))
        self.fleet = fit.fleet(ROOM * scorer.batch)
        self.fleet.alive[workers:] = False
        rows = len(self.fleet)
        self.sums = np.zeros((rows, len(logs[0])))
        self.counts = np.zeros(rows, np.int64)
        self.context = np.zeros(rows)
        self.step_us = np.full(rows, np.inf)
        self.tokens = np.zeros(rows)
        """[worker] decode steps so far, fractions included; each step decodes one token of every request."""
        self.at_us = np.zeros(rows)
        """[worker] time at which `tokens` was last updated."""
        self.placed = np.zeros((len(requests), rows))
        """[request, worker] measured rounds in which the router chose the worker."""
        self.running: dict[int, _Running] = {}
        self.order = np.arange(len(requests))
        self.prompts = [float(kept.prefill.sum()) / kept.decode.sum() * kept.tokens for kept in requests]

    def run(self) -> Array:
        count = len(self.requests)
        token_us, left, uses, now_us = np.zeros(count), ROUNDS * count, 0, 0.0
        while left:
            while len(self.running) < self.in_flight:
                self._begin(uses, now_us)
                uses += 1
            use = min(self.running, key=self._end_us)
            now_us = self._end_us(use)
            worker, at, since_us, _ = self.running.pop(use)
            self.fleet.finish(str(use))
            self._advance(worker, now_us)
            self._change(worker, at, -1)
            if count <= use < (ROUNDS + 1) * count:
                self.placed[at, worker] += 1
                token_us[at] += (now_us - since_us) / max(1.0, self.requests[at].tokens) / ROUNDS
                left -= 1
        return token_us

    def _begin(self, use: int, now_us: float) -> None:
        at = self._order(use)
        kept, prompt = self.requests[at], int(self.prompts[at])
        decision = self.router.route(Request(str(use), prompt, kept.prefill), self.fleet)
        worker = int(decision.worker)
        self.fleet.admit(str(use), worker, prompt, decision.profile)
        self._advance(worker, now_us)
        self.running[use] = _Running(worker, at, now_us, self.tokens[worker] + max(1.0, kept.tokens))
        self._change(worker, at, 1)

    def _order(self, use: int) -> int:
        """Return the request of the `use`-th start.

        Each half is shuffled by itself, so that two uses of one request are never in flight together.
        """
        count = len(self.requests)
        turn, place = divmod(use, count)
        if not place:
            rng, half = np.random.default_rng([turn, count]), count // 2
            self.order = np.concatenate([rng.permutation(half), half + rng.permutation(count - half)])
        return int(self.order[place])

    def _end_us(self, use: int) -> float:
        worker, _, _, ends_after = self.running[use]
        return float(self.at_us[worker] + (ends_after - self.tokens[worker]) * self.step_us[worker])

    def _advance(self, worker: int, now_us: float) -> None:
        if self.counts[worker]:
            self.tokens[worker] += (now_us - self.at_us[worker]) / self.step_us[worker]
        self.at_us[worker] = now_us

    def _change(self, worker: int, at: int, sign: int) -> None:
        self.counts[worker] += sign
        if not self.counts[worker]:  # reset to 0, so that no rounding error is carried over
            self.sums[worker], self.context[worker], self.step_us[worker] = 0.0, 0.0, np.inf
            return
        self.sums[worker] += sign * self.logs[at]
        self.context[worker] += sign * (self.prompts[at] + self.requests[at].tokens / 2)
        touched = self.sums.shape[1] - float(np.exp(self.sums[worker]).sum())
        count, context = float(self.counts[worker]), float(self.context[worker])
        self.step_us[worker] = max(float(decode_us(self.line, touched, count, context)), 1e-9)
