"""Contenders of the predictors suite: each predictor with what it knows of a request before it predicts.

Recent popularity is asked in the order of the requests, and knows of the calibration requests those before. A contender
that knows the very tokens it predicts bounds what a table of tokens can do: no one has a request's output before it
runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.predictors import Predictor, PredictRequest, predictors
from coterie.predictors.base import Load, fit_phase
from coterie.predictors.recent import arrived
from coterie.traces.activations import ActivationTrace
from coterie.types import PREFILL
from coterie_lab.suites.predictors.cases import Case, Question
from coterie_lab.suites.predictors.traces import footprint_of, token_ids_of

WORKERS = 8
"""Workers for popularity by worker, with domains dealt in turn: recordings do not say who served a request."""
BUILT_IN = ("popularity", "recent_popularity", "domain", "recorded", "prefix", "similar_prefix", "token_table")
"""Each is told what it is made for; any other predictor is told all that is known."""
ALL_KNOWN = "all that is known"
OWN_TOKENS = "the tokens predicted"
"""Known to a contender that has a request's output before it runs."""


class Contender(NamedTuple):
    """A predictor, and what it is asked."""

    predictor: Predictor
    name: str
    knows: str
    requests: list[PredictRequest]
    hit_rate: float | None = None
    """Share of the requests for which an earlier one alike was found, where one is looked for."""


def contenders(
    case: Case, question: Question, calibration: NDArray[np.int64], test: NDArray[np.int64], seed: int
) -> list[Contender]:
    """Every predictor this case can answer the question with."""
    trace = case.trace
    bare = [PredictRequest(id=str(r)) for r in test]

    def fitted(name: str) -> Predictor:
        made = predictors.make(name)
        return made.fit(trace, calibration, fit_phase(made, question.truth))

    found = [
        Contender(fitted("popularity"), "popularity", "nothing", bare),
        *_recent(trace, question, calibration, test, seed),
    ]
    if trace.requests.domains is not None:
        labelled = [PredictRequest(domain=trace.requests.domains[r]) for r in test]
        found.append(Contender(fitted("domain"), "domain", "domain", labelled))
    if question.given is not None:
        before = [PredictRequest(footprint=footprint_of(trace, int(r), question.given)) for r in test]
        for name in ("recorded", "prefix"):
            found.append(Contender(fitted(name), name, f"{question.given_name}'s footprint", before))
    found += [Contender(fitted(name), name, ALL_KNOWN, _all_known(case, question, test)) for name in _plugins()]
    if trace.arrays()[0].token_ids is None:
        return found
    found += _similar(case, question, calibration, test)
    tables = [("token_table", fitted("token_table"))]
    if case.dry_run is not None:
        tables.append(("dry_run", case.dry_run))
    for name, table in tables:
        if case.prompts is not None:
            found.append(Contender(table, name, "prompt's text", [PredictRequest(case.prompts[r]) for r in test]))
        if question.given is not None:
            ids = [PredictRequest(token_ids_of(trace, int(r), question.given)) for r in test]
            found.append(Contender(table, name, f"{question.given_name}'s tokens", ids))
        knows = "prompt's tokens" if question.truth == PREFILL else OWN_TOKENS
        own = [PredictRequest(token_ids_of(trace, int(r), question.truth)) for r in test]
        found.append(Contender(table, name, knows, own))
    return found


def _plugins() -> list[str]:
    """Registered predictors that this suite does not know: a user's own."""
    return [name for name in predictors if name not in BUILT_IN]


def _all_known(case: Case, question: Question, test: NDArray[np.int64]) -> list[PredictRequest]:
    """All that is known of each request before what is predicted runs."""
    trace, domains, tokens = case.trace, case.trace.requests.domains, case.trace.arrays()[0].token_ids
    found = []
    for r in test:
        ids = None
        if case.prompts is not None:
            ids = case.prompts[r]
        elif question.given is not None and tokens is not None:
            ids = token_ids_of(trace, int(r), question.given)
        found.append(
            PredictRequest(
                token_ids=ids,
                footprint=None if question.given is None else footprint_of(trace, int(r), question.given),
                domain=None if domains is None else domains[r],
                id=str(r),
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class _Made:
    """Predictions made ahead."""

    loads: dict[str, Load]
    """Loads by request id."""
    num_layers: int
    num_experts: int

    def predict(self, request: PredictRequest) -> Load:
        return self.loads[request.id or ""]


def _recent(
    trace: ActivationTrace, question: Question, calibration: NDArray[np.int64], test: NDArray[np.int64], seed: int
) -> list[Contender]:
    """A test request is predicted from the calibration requests before it: as the trace lists them, and shuffled."""
    times, domains = trace.requests.arrival_s, trace.requests.domains
    orders = {
        "as listed" if times is None else "as they arrived": (
            np.arange(trace.num_requests) if times is None else np.argsort(times, kind="stable")
        ),
        # Not the split's own draw, which would put the test requests first.
        "shuffled": np.random.default_rng([seed, 1]).permutation(trace.num_requests),
    }
    calibrates = {request: (counts, tokens) for request, counts, tokens in arrived(trace, calibration, question.truth)}
    tests = set(test.tolist())
    dealt = {name: i % WORKERS for i, name in enumerate(sorted(set(domains or ())))}
    workers = [None] * trace.num_requests if domains is None else [dealt[name] for name in domains]
    asked = [PredictRequest(id=str(r)) for r in test]
    found = []
    for name, order in orders.items():
        recent: Any = predictors.make("recent_popularity")
        # Before the first there is nothing to predict from: it is seen from the start.
        first = next(request for request in order.tolist() if request in calibrates)
        recent.observe(*calibrates[first], workers[first])
        overall: dict[str, Load] = {}
        of_worker: dict[str, Load] = {}
        for request in order.tolist():
            if request in calibrates and request != first:
                recent.observe(*calibrates[request], workers[request])
            elif request in tests:
                overall[str(request)] = recent.predict(PredictRequest())
                of_worker[str(request)] = recent.of_worker(workers[request]).predict(PredictRequest())
        made = _Made(overall, recent.num_layers, recent.num_experts)
        found.append(Contender(made, "recent_popularity", f"before it, {name}", asked))
    if domains is not None:  # as listed, all of a domain come together, and the worker makes little difference
        made = _Made(of_worker, recent.num_layers, recent.num_experts)
        found.append(Contender(made, "recent_popularity", "before it, of its worker", asked))
    return found


def _similar(
    case: Case, question: Question, calibration: NDArray[np.int64], test: NDArray[np.int64]
) -> list[Contender]:
    """Only where a request's beginning is known before what is predicted."""
    trace = case.trace
    similar: Any = predictors.make("similar_prefix")
    if case.prompts is not None:
        knows, asked = "prompt's text", [case.prompts[r] for r in test]
        similar.fit_prompts(trace, calibration, question.truth, case.prompts)
    elif question.given is not None or question.truth == PREFILL:
        knows = f"{question.given_name or 'prompt'}'s tokens"
        asked = [token_ids_of(trace, int(r), PREFILL) for r in test]
        similar.fit(trace, calibration, question.truth)
    else:
        return []
    hits = np.mean([similar.similar(prompt) is not None for prompt in asked])
    requests = [PredictRequest(prompt) for prompt in asked]
    return [Contender(similar, "similar_prefix", knows, requests, float(hits))]
