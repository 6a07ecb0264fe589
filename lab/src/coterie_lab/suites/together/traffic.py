"""Traffic of a run: real arrivals and lengths, recorded experts, and a mix of subjects that stays, drifts or changes.

Requests belong to groups of subjects (:mod:`coterie_lab.suites.drift.traffic`). The last group is the minority tenant,
a tenth of the requests throughout. The other requests come from the other groups:

    steady      from all of them alike
    drifting    from the first of them, and one by one from the others, by weights that move with time
    abrupt      from the first half of them, and after half of the requests from the second half

What was known before the run, to fit routers and to plan the first placement, are requests of the groups that the run
begins with. They are set apart, and never served.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.routing import Calibration
from coterie.sim.fleet.requests import FleetRequests, draw_requests
from coterie.traces import RequestTrace
from coterie_lab.suites.drift.traffic import GLM, GPT_OSS, Turns, read_turns
from coterie_lab.suites.eldr.synthetic import MOONCAKE, load_arrivals

STEADY, DRIFTING, ABRUPT = TRAFFICS = ("steady", "drifting", "abrupt")
MINORITY = 0.1
"""Share of the minority tenant's requests."""
SHIFT = 0.5
"""Share of the requests that arrive before an abrupt change."""
AZURE = "azure-2023/AzureLLMInferenceTrace_code.csv"
ARRIVALS = {GPT_OSS: MOONCAKE, GLM: AZURE}
LONGEST_PROMPT = {GPT_OSS: 16_384, GLM: 8_192}
PIECES = {GPT_OSS: 400, GLM: 200}
"""Most recorded or drawn requests of a group of subjects."""
GLM_TOKENS = (256, 64)
"""Prompt and output tokens of a drawn request of GLM-5.2; a longer prompt repeats them."""


class Traffic(NamedTuple):
    """Requests of one run, in order of arrival, at a mean rate of one a second."""

    turns: Turns
    requests: FleetRequests
    minority: NDArray[np.bool_]
    """[request] whether the request is the minority tenant's."""
    known: Calibration
    """Requests known before the run, in the run's first mix."""

    def at_rate(self, rate: float) -> FleetRequests:
        """Return the requests at another mean rate; infinite: all arrive at once."""
        assert self.requests.arrival_s is not None
        return replace(self.requests, arrival_s=self.requests.arrival_s / rate)


@lru_cache(maxsize=1)
def turns_of(model: str, data: Path, seed: int) -> Turns:
    return read_turns(model, data, seed, PIECES[model], GLM_TOKENS)


@lru_cache(maxsize=2)
def arrivals_of(model: str, data: Path) -> RequestTrace:
    return load_arrivals(data / "requests" / ARRIVALS[model])


def mix_of(traffic: str, groups: int, count: int) -> NDArray[np.float64]:
    """Return [request, group] shares: of the last group always the minority's, of the others by the kind of traffic."""
    majority, time = groups - 1, np.arange(count) / max(1, count - 1)
    mix = np.zeros((count, groups))
    if traffic == STEADY:
        mix[:, :majority] = 1.0 / majority
    elif traffic == DRIFTING:
        mix[:, :majority] = np.maximum(0.0, 1.0 - np.abs(time[:, None] * (majority - 1) - np.arange(majority)))
    else:
        first = (majority + 1) // 2
        mix[: round(SHIFT * count), :first] = 1.0 / first
        mix[round(SHIFT * count) :, first:majority] = 1.0 / (majority - first)
    mix *= 1.0 - MINORITY
    mix[:, majority] = MINORITY
    return mix


def traffic_of(model: str, traffic: str, seed: int, count: int, data: Path) -> Traffic:
    turns = turns_of(model, data, seed)
    rng = np.random.default_rng([seed, 7, TRAFFICS.index(traffic)])
    drawn = draw_requests(turns.requests.recordings, count, rng, arrivals_of(model, data), 1.0, LONGEST_PROMPT[model])
    groups = len(turns.fits)
    mix = mix_of(traffic, groups, count)
    group = (rng.random((count, 1)) > np.cumsum(mix, axis=1)).sum(axis=1)
    recorded = np.zeros(count, np.int64)
    for number in range(groups):
        mine = np.flatnonzero(group == number)
        recorded[mine] = np.resize(rng.permutation(np.flatnonzero(turns.turn == number)), len(mine))
    return Traffic(turns, replace(drawn, recorded=recorded), group == groups - 1, _known(turns, mix[0], rng))


def _known(turns: Turns, mix: NDArray[np.float64], rng: Generator) -> Calibration:
    """Return as many requests of each group that are set apart as the mix asks for."""
    some = [at for at, share in enumerate(mix) if share > 0]
    most = min(len(turns.fits[at].requests) / mix[at] for at in some)
    taken = [turns.fits[at].take(rng.permutation(len(turns.fits[at].requests))[: round(most * mix[at])]) for at in some]
    first = taken[0]
    return first._replace(
        prefill=np.concatenate([part.prefill for part in taken]),
        decode=np.concatenate([part.decode for part in taken]),
        requests=np.arange(sum(len(part.requests) for part in taken)),
    )
