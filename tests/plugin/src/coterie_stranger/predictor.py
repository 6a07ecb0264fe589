"""A request does what the last one of its domain did."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, require_fitted
from coterie.predictors import PredictRequest
from coterie.traces import ActivationTrace


@dataclass(slots=True, eq=False)
class LastSeen:
    mean_: NDArray[np.float64] | None = field(default=None, init=False, repr=False)
    """[layer, expert] activations of a token."""
    last_: dict[str, NDArray[np.float64]] = field(default_factory=dict, init=False, repr=False)

    def fit(
        self, trace: ActivationTrace, requests: NDArray[np.integer] | None = None, phase: int | None = None
    ) -> LastSeen:
        chosen = np.arange(trace.num_requests) if requests is None else np.unique(requests)
        shape = (trace.meta.num_layers, trace.meta.num_experts)
        domains, rows, last = trace.requests.domains, [], {}
        for index in chosen:
            tokens = trace.request(int(index))
            ids = tokens.expert_ids if phase is None else tokens.only(phase)
            if len(ids):
                counts = np.zeros(shape)
                np.add.at(counts, (np.arange(shape[0])[:, None], ids), 1.0)  # ids [token, layer, k]
                rows.append(counts / len(ids))
                if domains is not None:
                    last[domains[int(index)]] = rows[-1]
        if not rows:
            raise ConfigError("no token to learn from")
        self.mean_, self.last_ = np.mean(rows, axis=0), last
        return self

    @property
    def mean(self) -> NDArray[np.float64]:
        return require_fitted(self.mean_, "predictor 'stranger_last_seen'")

    @property
    def num_layers(self) -> int:
        return len(self.mean)

    @property
    def num_experts(self) -> int:
        return int(self.mean.shape[1])

    def predict(self, request: PredictRequest) -> NDArray[np.float64]:
        per_token = self.last_.get(request.domain or "", self.mean)
        if request.footprint is not None and request.footprint.shape != self.mean.shape:
            raise ConfigError(f"footprint has shape {request.footprint.shape}; expected {self.mean.shape}")
        if request.num_tokens is not None:
            tokens = float(request.num_tokens)
        elif request.token_ids is not None:
            tokens = float(len(request.token_ids))
        else:
            tokens = 1.0 if request.footprint is None else float(request.footprint.sum() / self.mean.sum())
        if tokens < 0:
            raise ConfigError(f"num_tokens={request.num_tokens} must not be negative")
        return per_token * tokens
