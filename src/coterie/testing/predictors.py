"""Contract check of predictors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np
from numpy.random import Generator, default_rng
from numpy.typing import NDArray

from coterie.errors import ConfigError, NotFittedError
from coterie.predictors.base import FittablePredictor, Load, PredictRequest
from coterie.testing._require import no_error, require, unchanged
from coterie.traces import ActivationTrace, RequestTrace, TraceMeta
from coterie.types import DECODE, PREFILL

LAYERS, EXPERTS, TOP_K = 2, 6, 2
LENGTHS = (4, 8, 2, 6, 8, 10)
"""Number of tokens of each generated request; the first half is its prompt."""
VOCABULARY = 9
FITTED = np.array([0, 1, 2, 4, 5])
"""Requests to fit on; `NEW` is the one left out."""
NEW = 3


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
    unfitted: dict[str, Callable[[], object]] = {
        "predict": lambda: predictor.predict(PredictRequest(num_tokens=1)),
        "num_layers": lambda: predictor.num_layers,
        "num_experts": lambda: predictor.num_experts,
    }
    for name, use in unfitted.items():
        _raises(NotFittedError, use, f"{where}: {name} before fit() must raise NotFittedError")
    nobody = np.empty(0, np.int64)
    _raises(ConfigError, lambda: make().fit(trace, nobody), f"{where}: fit on no request must raise ConfigError")
    for name, requests, phase in (
        ("all requests", None, None),
        ("some requests", FITTED, None),
        ("decode alone", FITTED, DECODE),
        ("prefill alone", FITTED, PREFILL),
    ):
        _check_fitted(make, trace, requests, phase, f"{where}, fitted on {name}")
    once, twice = (make().fit(trace, np.array(which)) for which in ([0, 1], [1, 0, 1]))
    for name, request, _ in _requests(trace, default_rng(seed)):
        require(
            np.array_equal(once.predict(request), twice.predict(request)),
            f"{where}, {name}: a request that fit() is given twice must count once",
        )


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


def _requests(trace: ActivationTrace, rng: Generator) -> list[tuple[str, PredictRequest, int]]:
    """Return requests to predict, each with a name and its number of tokens."""
    ids = trace.request(NEW).only(PREFILL)
    counts = np.array([np.bincount(ids[:, layer].ravel(), minlength=EXPERTS) for layer in range(LAYERS)], np.int64)
    tokens = trace.request(NEW).token_ids
    prompt = None if tokens is None else np.array(tokens)
    strange = rng.integers(VOCABULARY, 2 * VOCABULARY, 7).astype(np.int32)
    return [
        ("nothing known", PredictRequest(), 1),
        ("its size alone", PredictRequest(num_tokens=5), 5),
        ("no token", PredictRequest(num_tokens=0), 0),
        ("a domain", PredictRequest(domain="law", num_tokens=3), 3),
        ("an id that was learned from", PredictRequest(id="request-0", num_tokens=4), 4),
        ("its tokens", PredictRequest(prompt), LENGTHS[NEW]),
        ("tokens never seen", PredictRequest(strange), 7),
        ("its prefill", PredictRequest(footprint=counts), LENGTHS[NEW] // 2),
        ("fractions of its prefill", PredictRequest(footprint=counts / 2, num_tokens=9), 9),
        ("an empty footprint", PredictRequest(footprint=np.zeros_like(counts), num_tokens=2), 2),
        ("all of it", PredictRequest(prompt, counts, "law", "request-3", 10), 10),
    ]


def _raises(kind: type[Exception], use: Callable[[], object], message: str) -> None:
    with no_error(f"{message}; it"), suppress(kind):
        use()
        raise AssertionError(f"{message}; it raised nothing")


def _check_fitted(
    make: Callable[[], FittablePredictor],
    trace: ActivationTrace,
    requests: NDArray[np.int64] | None,
    phase: int | None,
    where: str,
) -> None:
    predictor, (tokens, offsets) = make(), trace.arrays()
    learned_from = {"expert_ids": tokens.expert_ids, "phase": tokens.phase, "token_ids": tokens.token_ids}
    with unchanged(f"{where}: fit", requests=requests, offsets=offsets, **learned_from), no_error(f"{where}: fit"):
        returned = predictor.fit(trace, requests, phase)
    require(returned is predictor, f"{where}: fit must return the predictor itself; it returned {returned!r}")
    shape = (predictor.num_layers, predictor.num_experts)
    require(
        shape == (LAYERS, EXPERTS), f"{where}: num_layers, num_experts are {shape}; the trace has {LAYERS, EXPERTS}"
    )
    other = make().fit(trace, requests, phase)
    for name, request, count in _requests(trace, default_rng(0)):
        _check_prediction(predictor, other, request, count, f"{where}, {name}")
    _check_unknown(predictor, where)


def _check_prediction(
    predictor: FittablePredictor, other: FittablePredictor, request: PredictRequest, tokens: int, where: str
) -> None:
    with unchanged(f"{where}: predict", token_ids=request.token_ids, footprint=request.footprint):
        load = _predict(predictor, request, where)
    require(np.isfinite(load).all(), f"{where}: predicted loads must be finite")
    require((load >= 0).all(), f"{where}: predicted loads must not be negative; found {load.min()}")
    sums, expected = load.sum(axis=1), tokens * TOP_K
    require(
        np.allclose(sums, expected, rtol=1e-6, atol=1e-9),
        f"{where}: layers sum to {sums.tolist()}; expected tokens={tokens} x top_k={TOP_K} = {expected}",
    )
    kept = load.copy()
    load[:] = -1.0
    require(np.array_equal(_predict(predictor, request, where), kept), f"{where}: a second call gave another load")
    require(np.array_equal(_predict(other, request, where), kept), f"{where}: a new predictor gave another load")


def _predict(predictor: FittablePredictor, request: PredictRequest, where: str) -> Load:
    with no_error(f"{where}: predict"):
        load = predictor.predict(request)
    require(
        isinstance(load, np.ndarray) and load.dtype == np.float64 and load.shape == (LAYERS, EXPERTS),
        f"{where}: predict must return float64 [layer, expert] = {LAYERS, EXPERTS}; found {load!r}",
    )
    return load


def _check_unknown(predictor: FittablePredictor, where: str) -> None:
    size = predictor.predict(PredictRequest(num_tokens=5))
    unknown = predictor.predict(PredictRequest(num_tokens=5, id="nobody", domain="nowhere"))
    require(
        np.allclose(unknown, size, rtol=1e-9, atol=0.0),
        f"{where}: an unknown id and domain must be predicted as if they were not given",
    )
    larger = predictor.predict(PredictRequest(num_tokens=10))
    require(
        np.allclose(larger, 2.0 * size, rtol=1e-9, atol=0.0),
        f"{where}: of a request of which only its size is known, the load must grow with its tokens",
    )
    other = PredictRequest(footprint=np.ones((LAYERS + 1, EXPERTS)))
    _raises(ConfigError, lambda: predictor.predict(other), f"{where}: a footprint of another model must be refused")
    less = PredictRequest(num_tokens=-1)
    _raises(ConfigError, lambda: predictor.predict(less), f"{where}: num_tokens=-1 must be refused")
