"""Print how often the intervals of `coterie advise` hold the gain on the whole recording, by decision.

    python lab/benchmarks/advice_coverage.py TRACE [--resamples 100] [--share 0.5] [--decoders 4] [--in-flight 12]

Every resampled trace is a random share of the recorded requests, without replacement: a request that is there twice
would be served twice at a time, which flatters routers by experts. Advice on it names a way to take each decision and
its interval; the gain of the same way on the whole recording, of all requests and twice as many splits, is the truth,
to the 0.05 points that are printed. Lines are printed as they come, so that a run can be stopped. Samples of a share of
the recording vary by √(1 - share) of what new recordings of that size would, so that the intervals are wider than this
test needs; routers that are fitted on the share know less than those of the whole, which counts against them.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binomtest

from coterie.answers.advise.advising import AdviseSettings, advise
from coterie.answers.fleet.bench import Source
from coterie.models import get_model
from coterie.routing import calibration
from coterie.traces import ActivationTrace
from coterie.traces.readers import read_as

ROUNDING = 0.05
"""Points by which a printed gain may be off."""


def main() -> None:
    options = _options()
    trace = read_as(ActivationTrace, Path(options.trace))
    source, spec = Source(trace, calibration(trace)), get_model(trace.meta.model)
    settings = AdviseSettings(decoders=options.decoders, in_flight=options.in_flight, requests=options.requests)
    whole = advise(source, spec, replace(settings, splits=2 * settings.splits))
    truth = {one.key: {arm.name: arm.gain.mean for arm in one.arms} for one in whole.decisions}
    print(whole.verdict)
    held: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    same: Counter[str] = Counter()
    count = len(source.counts.requests)
    for number in range(options.resamples):
        rng = np.random.default_rng([options.seed, number])
        rows = np.sort(rng.permutation(count)[: round(options.share * count)])
        found = advise(Source(trace, source.counts.take(rows)), spec, replace(settings, seed=number))
        for one in found.decisions:
            best = max(one.arms, key=lambda arm: arm.rank, default=None)
            if best is None or best.gain.low is None or best.gain.high is None:
                continue
            true = truth[one.key][best.name]
            asked[one.key] += 1
            held[one.key] += best.gain.low - ROUNDING <= true <= best.gain.high + ROUNDING
            same[one.key] += one.advice == whole.answers[one.key]
        print(number + 1, *(f"{key} {held[key]}/{asked[key]}" for key in asked), sep="; ", flush=True)
    print("\n| decision | truth, % | covered | 95% | same advice |\n|---|---|---|---|---|")
    for key in asked:
        ends = binomtest(held[key], asked[key]).proportion_ci(method="wilson")
        print(
            f"| {key} | {max(truth[key].values()):.1f} | {held[key]} of {asked[key]} | {100 * ends.low:.0f} to "
            f"{100 * ends.high:.0f}% | {same[key]} of {asked[key]} |"
        )


def _options() -> Any:
    parser = argparse.ArgumentParser(description="Coverage of the intervals of coterie advise.")
    parser.add_argument("trace")
    parser.add_argument("--resamples", type=int, default=100)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--decoders", type=int, default=4)
    parser.add_argument("--in-flight", type=int, default=12)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
