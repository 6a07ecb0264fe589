"""Contract check of predictors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.random import Generator, default_rng
from numpy.typing import NDArray

from coterie.errors import ConfigError, NotFittedError
from coterie.predictors.base import FittablePredictor, Load, PredictRequest
from coterie.testing._require import require
from coterie.traces import ActivationTrace, RequestTrace, TraceMeta
from coterie.types import DECODE, PREFILL

LAYERS, EXPERTS, TOP_K = 2, 6, 2
LENGTHS = (4, 8, 2, 6, 8, 10)
"""Number of tokens of each generated request; the first half is its prompt."""
VOCABULARY = 9
FITTED = np.array([0, 1, 2, 4, 5])
"""Requests to fit on; `NEW` is the one left out."""
NEW = 3


class _Asked(NamedTuple):
    name: str
    request: PredictRequest
    tokens: float


def check_predictor(make: Callable[[], FittablePredictor], seed: int = 0) -> None:
    """Raise AssertionError if the predictor that `make()` returns breaks the contract of a predictor.

    Until `fit` is called, `predict`, `num_layers` and `num_experts` raise NotFittedError. `fit` returns the predictor
    itself, counts a request that is listed twice once, and raises ConfigError if there is no request to learn from.
    `predict` returns a new float64 array [layer, expert] of finite numbers of at least 0, in which each layer sums to
    tokens x top_k. The same request gives the same prediction, also from another predictor fitted on the same trace,
    and is not changed. A request with an unknown id and domain is predicted as if only its size were known. A footprint
    of another model and a negative number of tokens raise ConfigError.

    The trace has ids, domains, token ids and both phases; the predictor is fitted on all of it, on some requests, and
    on one phase. A predictor that passes may still predict badly.
    """
    trace = _trace(default_rng(seed))
    predictor = make()
    where = type(predictor).__name__
    for method in ("fit", "predict"):
        require(callable(getattr(predictor, method, None)), f"{where} has no {method}(); a predictor has both")
    _check_not_fitted(predictor, where)
    _check_nothing_to_fit(make(), trace, where)
    for name, requests, phase in (
        ("all requests", None, None),
        ("some requests", FITTED, None),
        ("decode alone", FITTED, DECODE),
        ("prefill alone", FITTED, PREFILL),
    ):
        _check_fitted(make, trace, requests, phase, f"{where}, fitted on {name}")
    once, twice = (make().fit(trace, np.array(which)) for which in ([0, 1], [1, 0, 1]))
    for asked in _requests(trace, default_rng(seed)):
        same = np.array_equal(once.predict(asked.request), twice.predict(asked.request))
        require(same, f"{where}, {asked.name}: a request that fit() is given twice must count once")


def _trace(rng: Generator) -> ActivationTrace:
    lengths = np.array(LENGTHS)
    total = int(lengths.sum())
    ids = np.argsort(rng.random((total, LAYERS, EXPERTS)), axis=-1)[..., :TOP_K]
    phase = np.concatenate([np.repeat([PREFILL, DECODE], n // 2) for n in lengths]).astype(np.uint8)
    table = RequestTrace(
        prompt_tokens=lengths // 2,
        output_tokens=lengths // 2,
        arrival_s=np.arange(len(lengths), dtype=np.float64),
        ids=[f"request-{n}" for n in range(len(lengths))],
        domains=["code" if n % 2 else "law" for n in range(len(lengths))],
    )
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    token_ids = rng.integers(0, VOCABULARY, total).astype(np.int32)
    return ActivationTrace.from_arrays(
        TraceMeta("generated", EXPERTS, LAYERS, TOP_K), ids, offsets, table, phase, token_ids
    )


def _requests(trace: ActivationTrace, rng: Generator) -> Iterator[_Asked]:
    counts = _prefill_counts(trace, NEW)
    tokens = trace.request(NEW).token_ids
    prompt = None if tokens is None else np.array(tokens)
    yield _Asked("nothing known", PredictRequest(), 1)
    yield _Asked("its size alone", PredictRequest(num_tokens=5), 5)
    yield _Asked("no token", PredictRequest(num_tokens=0), 0)
    yield _Asked("a domain", PredictRequest(domain="law", num_tokens=3), 3)
    yield _Asked("an id that was learned from", PredictRequest(id="request-0", num_tokens=4), 4)
    yield _Asked("its tokens", PredictRequest(prompt), LENGTHS[NEW])
    strange = rng.integers(VOCABULARY, 2 * VOCABULARY, 7).astype(np.int32)
    yield _Asked("tokens never seen", PredictRequest(strange), 7)
    yield _Asked("its prefill", PredictRequest(footprint=counts), LENGTHS[NEW] // 2)
    yield _Asked("fractions of its prefill", PredictRequest(footprint=counts / 2, num_tokens=9), 9)
    yield _Asked("an empty footprint", PredictRequest(footprint=np.zeros_like(counts), num_tokens=2), 2)
    yield _Asked("all of it", PredictRequest(prompt, counts, "law", "request-3", 10), 10)


def _prefill_counts(trace: ActivationTrace, request: int) -> NDArray[np.int64]:
    """Return [layer, expert] activation counts of a request's prompt, in plain NumPy."""
    ids = trace.request(request).only(PREFILL)
    return np.array([np.bincount(ids[:, layer].ravel(), minlength=EXPERTS) for layer in range(LAYERS)], np.int64)


def _check_not_fitted(predictor: FittablePredictor, where: str) -> None:
    uses: dict[str, Callable[[], object]] = {
        "predict": lambda: predictor.predict(PredictRequest(num_tokens=1)),
        "num_layers": lambda: predictor.num_layers,
        "num_experts": lambda: predictor.num_experts,
    }
    for name, use in uses.items():
        _raises(NotFittedError, use, f"{where}: {name} before fit() must raise NotFittedError")


def _check_nothing_to_fit(predictor: FittablePredictor, trace: ActivationTrace, where: str) -> None:
    nobody = np.empty(0, np.int64)
    _raises(ConfigError, lambda: predictor.fit(trace, nobody), f"{where}: fit on no request must raise ConfigError")


def _raises(kind: type[Exception], use: Callable[[], object], message: str) -> None:
    try:
        use()
    except kind:
        return
    except Exception as error:
        raise AssertionError(f"{message}; it raised {type(error).__name__}: {error}") from error
    require(False, f"{message}; it raised nothing")


def _check_fitted(
    make: Callable[[], FittablePredictor],
    trace: ActivationTrace,
    requests: NDArray[np.int64] | None,
    phase: int | None,
    where: str,
) -> None:
    predictor, before = make(), _arrays(trace)
    given = None if requests is None else requests.copy()
    try:
        returned = predictor.fit(trace, given, phase)
    except Exception as error:
        raise AssertionError(f"{where}: fit raised {type(error).__name__}: {error}") from error
    require(returned is predictor, f"{where}: fit must return the predictor itself; it returned {returned!r}")
    shape = (predictor.num_layers, predictor.num_experts)
    require(
        shape == (LAYERS, EXPERTS), f"{where}: num_layers, num_experts are {shape}; the trace has {LAYERS, EXPERTS}"
    )
    untouched = all(np.array_equal(was, now) for was, now in zip(before, _arrays(trace), strict=True))
    require(untouched, f"{where}: fit changed the trace, which it may only read")
    if given is not None and requests is not None:
        require(np.array_equal(given, requests), f"{where}: fit changed `requests`, which it may only read")
    other = make().fit(trace, requests, phase)
    for asked in _requests(trace, default_rng(0)):
        _check_prediction(predictor, other, asked, f"{where}, {asked.name}")
    _check_unknown(predictor, where)
    _check_refused(predictor, where)


def _arrays(trace: ActivationTrace) -> list[NDArray[np.generic]]:
    tokens, offsets = trace.arrays()
    return [np.array(array) for array in (tokens.expert_ids, tokens.phase, tokens.token_ids, offsets)]


def _check_prediction(predictor: FittablePredictor, other: FittablePredictor, asked: _Asked, where: str) -> None:
    request = asked.request
    before = [None if array is None else array.copy() for array in (request.token_ids, request.footprint)]
    found = _predict(predictor, request, where)
    for name, was, now in zip(("token_ids", "footprint"), before, (request.token_ids, request.footprint), strict=True):
        same = was is None or (now is not None and np.array_equal(was, now))
        require(same, f"{where}: predict changed {name}, which it may only read")
    require(bool(np.isfinite(found).all()), f"{where}: predicted loads must be finite")
    require(bool((found >= 0).all()), f"{where}: predicted loads must not be negative; found {found.min()}")
    sums, expected = found.sum(axis=1), asked.tokens * TOP_K
    even = np.allclose(sums, expected, rtol=1e-6, atol=1e-9)
    require(
        even, f"{where}: layers sum to {sums.tolist()}; expected tokens={asked.tokens} x top_k={TOP_K} = {expected}"
    )
    kept = found.copy()
    found[:] = -1.0
    require(np.array_equal(_predict(predictor, request, where), kept), f"{where}: a second call gave another load")
    require(np.array_equal(_predict(other, request, where), kept), f"{where}: a new predictor gave another load")


def _predict(predictor: FittablePredictor, request: PredictRequest, where: str) -> Load:
    try:
        found = predictor.predict(request)
    except Exception as error:
        raise AssertionError(f"{where}: predict raised {type(error).__name__}: {error}") from error
    whole = isinstance(found, np.ndarray) and found.dtype == np.float64 and found.shape == (LAYERS, EXPERTS)
    require(whole, f"{where}: predict must return float64 [layer, expert] = {LAYERS, EXPERTS}; found {found!r}")
    return found


def _check_unknown(predictor: FittablePredictor, where: str) -> None:
    size = predictor.predict(PredictRequest(num_tokens=5))
    unknown = predictor.predict(PredictRequest(num_tokens=5, id="nobody", domain="nowhere"))
    same = np.allclose(unknown, size, rtol=1e-9, atol=0.0)
    require(same, f"{where}: an unknown id and domain must be predicted as if they were not given")
    larger = predictor.predict(PredictRequest(num_tokens=10))
    in_step = np.allclose(larger, 2.0 * size, rtol=1e-9, atol=0.0)
    require(in_step, f"{where}: of a request of which only its size is known, the load must grow with its tokens")


def _check_refused(predictor: FittablePredictor, where: str) -> None:
    other = PredictRequest(footprint=np.ones((LAYERS + 1, EXPERTS)))
    _raises(ConfigError, lambda: predictor.predict(other), f"{where}: a footprint of another model must be refused")
    less = PredictRequest(num_tokens=-1)
    _raises(ConfigError, lambda: predictor.predict(less), f"{where}: num_tokens=-1 must be refused")
