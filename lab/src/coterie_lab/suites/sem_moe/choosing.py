"""Choose the contender to deploy by requests that it was not fitted to: what `coterie` serves.

The requests for fitting are halved. Contenders are made from one half and serve the other, and the reverse; the one
with the best predicted latency is deployed, made from both halves. A placement that suits a few dozen requests by
chance loses here, as it would in service: co-scheduling is taken only if it wins by MARGIN. E2E of a short trial is
noisy, so for its limit the winner of capacity is kept unless another has an E2E better by E2E_MARGIN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.sim.fleet.requests import Recordings
from coterie.sim.group.serving import GroupPrices, ServingGroup
from coterie_lab.suites.sem_moe.contenders import Contender, ServingBench, serving_of
from coterie_lab.suites.sem_moe.summaries import summarise_served

CHOSEN = "coterie"
MARGIN = 0.01
"""Share by which co-scheduling must be better than the best baseline on requests it was not fitted to."""
E2E_MARGIN = 0.05
"""Share by which E2E must be better than that of the contender of highest capacity."""
REQUESTS = 240
"""Requests of a trial run."""
HALF_LOAD = 0.5
"""Share of vanilla's capacity at which E2E is compared."""


class Trial(NamedTuple):
    """Contenders made from one part of the requests for fitting, which serve the rest."""

    bench: ServingBench
    contenders: list[Contender]


def halves(bench: ServingBench) -> list[ServingBench]:
    """Make benches that fit on one half of the requests for fitting and serve the other."""
    order = np.random.default_rng([bench.seed, 3]).permutation(len(bench.fit))
    parts = [take(bench.fit, np.sort(part)) for part in np.array_split(order, 2)]
    return [replace(bench, fit=fit, test=test) for fit, test in (parts, parts[::-1])]


def take(recordings: Recordings, which: NDArray[np.int64]) -> Recordings:
    """Return some recordings, with only their own rows."""
    ends = recordings.decode_row + recordings.decode_rows
    spans = [np.arange(recordings.prompt_row[number], ends[number]) for number in which.tolist()]
    first = np.cumsum([0, *(len(span) for span in spans[:-1])])
    return Recordings(
        expert_ids=recordings.expert_ids[np.concatenate(spans)],
        num_experts=recordings.num_experts,
        prompt_row=first,
        prompt_rows=recordings.prompt_rows[which],
        decode_row=first + recordings.prompt_rows[which],
        decode_rows=recordings.decode_rows[which],
        footprint=None if recordings.footprint is None else recordings.footprint[which],
    )


def choose(trials: Sequence[Trial], prices: GroupPrices, prompt_tokens: int, output_tokens: int) -> dict[str, str]:
    """Choose for each limit the contender of the best mean score: the logarithm of vanilla's time over its own."""
    baselines = {contender.name: contender.baseline for contender in trials[0].contenders}
    runs, vanilla = (
        [_times(trial, prices, prompt_tokens, output_tokens) for trial in trials],
        trials[0].contenders[0].name,
    )
    means = {
        limit: {
            name: float(np.mean([np.log(run[limit][vanilla] / run[limit][name]) for run in runs]))
            for name in runs[0][limit]
        }
        for limit in ("ttft", "e2e")
    }
    first = _winner(means["ttft"], baselines)
    best = max(means["e2e"], key=means["e2e"].__getitem__)
    return {"ttft": first, "e2e": best if means["e2e"][best] > means["e2e"][first] + E2E_MARGIN else first}


def _times(trial: Trial, prices: GroupPrices, prompt_tokens: int, output_tokens: int) -> dict[str, dict[str, float]]:
    """Time each contender: seconds to serve all at once (capacity, which bounds TTFT), and E2E at half load."""
    bench, times = trial.bench, dict[str, dict[str, float]](ttft={}, e2e={})
    requests = bench.requests(bench.test, REQUESTS, prompt_tokens, output_tokens)
    unit_s, rate = bench.arrivals(REQUESTS), 0.0
    for contender in trial.contenders:
        group = ServingGroup(prices, contender.placement, requests)
        ranks, router = serving_of(contender, requests)
        drained = group.serve(np.zeros(REQUESTS), ranks=ranks, router=router).end_s
        times["ttft"][contender.name] = drained
        rate = rate or HALF_LOAD * REQUESTS / drained
        half = group.serve(unit_s / rate, ranks=ranks, router=router)
        times["e2e"][contender.name] = summarise_served(half).e2e_p50_ms
    return times


def _winner(means: dict[str, float], baselines: dict[str, bool]) -> str:
    baseline = max((name for name in means if baselines[name]), key=means.__getitem__)
    best = max(means, key=means.__getitem__)
    return best if means[best] > means[baseline] + MARGIN else baseline
