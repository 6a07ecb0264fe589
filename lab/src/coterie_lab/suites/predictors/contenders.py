"""Contenders of the predictors suite: each predictor with what it knows of a request before it predicts.

Recent popularity is asked in the order of the requests, and knows the calibration requests before each. A contender
that knows the very tokens it predicts is an upper bound for tables of tokens: the output is not known before it runs.
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
"""Predictors that get the input they are made for; any other predictor gets all that is known."""
ALL_KNOWN = "all that is known"
OWN_TOKENS = "the tokens predicted"
"""Known to a contender that has a request's output before it runs."""


class Contender(NamedTuple):
    """A predictor, and the requests it predicts."""

    predictor: Predictor
    name: str
    knows: str
    requests: list[PredictRequest]
    hit_rate: float | None = None
    """Share of the requests for which a similar earlier one was found, for predictors that look for one."""


def contenders(
    case: Case, question: Question, calibration: NDArray[np.int64], test: NDArray[np.int64], seed: int
) -> list[Contender]:
    """Make every contender that can answer the question on this case."""
    trace = case.trace
    bare = [PredictRequest(id=str(r)) for r in test]

    def fitted(name: str) -> Predictor:
        predictor = predictors.make(name)
        return predictor.fit(trace, calibration, fit_phase(predictor, question.truth))

    made = [
        Contender(fitted("popularity"), "popularity", "nothing", bare),
        *_recent(trace, question, calibration, test, seed),
    ]
    if trace.requests.domains is not None:
        labelled = [PredictRequest(domain=trace.requests.domains[r]) for r in test]
        made.append(Contender(fitted("domain"), "domain", "domain", labelled))
    if question.given is not None:
        before = [PredictRequest(footprint=footprint_of(trace, int(r), question.given)) for r in test]
        for name in ("recorded", "prefix"):
            made.append(Contender(fitted(name), name, f"{question.given_name}'s footprint", before))
    plugins = [name for name in predictors if name not in BUILT_IN]
    made += [Contender(fitted(name), name, ALL_KNOWN, _all_known(case, question, test)) for name in plugins]
    if trace.arrays()[0].token_ids is None:
        return made
    made += _similar(case, question, calibration, test)
    tables = [("token_table", fitted("token_table"))]
    if case.dry_run is not None:
        tables.append(("dry_run", case.dry_run))
    for name, table in tables:
        if case.prompts is not None:
            made.append(Contender(table, name, "prompt's text", [PredictRequest(case.prompts[r]) for r in test]))
        if question.given is not None:
            ids = [PredictRequest(token_ids_of(trace, int(r), question.given)) for r in test]
            made.append(Contender(table, name, f"{question.given_name}'s tokens", ids))
        knows = "prompt's tokens" if question.truth == PREFILL else OWN_TOKENS
        own = [PredictRequest(token_ids_of(trace, int(r), question.truth)) for r in test]
        made.append(Contender(table, name, knows, own))
    return made


def _all_known(case: Case, question: Question, test: NDArray[np.int64]) -> list[PredictRequest]:
    """Return all that is known of each request before the predicted part runs."""
    trace, domains, tokens = case.trace, case.trace.requests.domains, case.trace.arrays()[0].token_ids
    known = []
    for r in test:
        ids = None
        if case.prompts is not None:
            ids = case.prompts[r]
        elif question.given is not None and tokens is not None:
            ids = token_ids_of(trace, int(r), question.given)
        footprint = None if question.given is None else footprint_of(trace, int(r), question.given)
        domain = None if domains is None else domains[r]
        known.append(PredictRequest(token_ids=ids, footprint=footprint, domain=domain, id=str(r)))
    return known


@dataclass(frozen=True, slots=True)
class _Made:
    """Predictions made beforehand."""

    loads: dict[str, Load]
    """Loads by request id."""
    num_layers: int
    num_experts: int

    def predict(self, request: PredictRequest) -> Load:
        return self.loads[request.id or ""]


def _recent(
    trace: ActivationTrace, question: Question, calibration: NDArray[np.int64], test: NDArray[np.int64], seed: int
) -> list[Contender]:
    """Predict a test request from the calibration requests before it: as the trace lists them, and shuffled."""
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
    contenders = []
    for name, order in orders.items():
        recent: Any = predictors.make("recent_popularity")
        # Before the first request there is nothing to predict from, so it is seen from the start.
        first = next(request for request in order.tolist() if request in calibrates)
        by_worker: dict[int | None, Any] = {}

        def observe(request: int, recent: Any = recent, by_worker: dict[int | None, Any] = by_worker) -> None:
            own = by_worker.setdefault(workers[request], predictors.make("recent_popularity"))
            for predictor in (recent, own):
                predictor.observe(*calibrates[request])

        observe(first)
        overall: dict[str, Load] = {}
        of_worker: dict[str, Load] = {}
        for request in order.tolist():
            if request in calibrates and request != first:
                observe(request)
            elif request in tests:
                overall[str(request)] = recent.predict(PredictRequest())
                of_worker[str(request)] = by_worker.get(workers[request], recent).predict(PredictRequest())
        made = _Made(overall, recent.num_layers, recent.num_experts)
        contenders.append(Contender(made, "recent_popularity", f"before it, {name}", asked))
    if domains is not None:  # shuffled; as listed, a domain's requests come together, and the worker matters little
        made = _Made(of_worker, recent.num_layers, recent.num_experts)
        contenders.append(Contender(made, "recent_popularity", "before it, of its worker", asked))
    return contenders


def _similar(
    case: Case, question: Question, calibration: NDArray[np.int64], test: NDArray[np.int64]
) -> list[Contender]:
    """Make the contender that looks for similar prompts, if a request's beginning is known beforehand."""
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
