"""Calibration requests: activation counts of their prefill and decode, from which routers are fitted."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.footprints import accumulate_load
from coterie.footprints.signatures import Counts
from coterie.traces.activations import ActivationTrace
from coterie.types import PREFILL

Progress = Callable[[str, int, int], None]


class Calibration(NamedTuple):
    """Activation counts [request, layer, expert] before routing (prefill) and after it (decode)."""

    prefill: NDArray[np.uint32]
    decode: NDArray[np.uint32]
    gates: NDArray[np.float32] | None
    """[request, layer, expert] sum of gate weights over prefill tokens; None if the trace has no gate weights."""
    requests: NDArray[np.int64]
    """[request] index of the request in the trace."""
    halved: bool
    """Whether the trace has one phase only; the first half of a request's tokens then stands for its prefill."""
    model: str
    top_k: int

    def take(self, rows: NDArray[np.integer]) -> Calibration:
        return self._replace(
            prefill=self.prefill[rows],
            decode=self.decode[rows],
            gates=None if self.gates is None else self.gates[rows],
            requests=self.requests[rows],
        )

    @property
    def probabilities(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """[request, expert index] activation probabilities in prefill and in decode."""
        return activation_probabilities(self.prefill, self.top_k), activation_probabilities(self.decode, self.top_k)

    @property
    def digests(self) -> NDArray[np.uint64]:
        """[request] 64-bit hash of the request's counts: the same for one recording in any file format or order."""
        counts = zip(self.prefill, self.decode, strict=True)
        made = (blake2b(before.tobytes() + after.tobytes(), digest_size=8).digest() for before, after in counts)
        return np.frombuffer(b"".join(made), "<u8").astype(np.uint64)


def activation_probabilities(counts: Counts, top_k: int) -> NDArray[np.float32]:
    """Return [request, expert index] share of tokens that activate the expert; counts are [request, layer, expert]."""
    flat = np.array(counts.reshape(len(counts), -1), np.float32)
    flat /= np.asarray(counted_tokens(counts, top_k), np.float32)[:, None]
    return flat


def counted_tokens(counts: Counts, top_k: int) -> NDArray[np.float64]:
    """Return [request] the number of tokens behind the counts [request, layer, expert]; at least 1."""
    return np.asarray(np.maximum(counts.sum(axis=(1, 2), dtype=np.float64) / (counts.shape[1] * top_k), 1.0))


def calibration(
    trace: ActivationTrace, requests: NDArray[np.integer] | None = None, progress: Progress | None = None
) -> Calibration:
    """Count the activations of a trace's requests, or of the given indices; requests that lack a phase are left out.

    If the trace has one phase only, the first half of a request's tokens stands for its prefill.
    """
    wanted = np.arange(trace.num_requests) if requests is None else np.asarray(requests, np.int64)
    phases = {int(p) for segment in trace.segments for p in np.unique(segment.tokens.phase)}
    halved, meta = len(phases) < 2, trace.meta
    shape = (len(wanted), meta.num_layers, meta.num_experts)
    prefill, decode = np.zeros(shape, np.uint32), np.zeros(shape, np.uint32)
    has_gates = all(segment.tokens.gate_weights is not None for segment in trace.segments)
    gates = np.zeros(shape, np.float32) if has_gates else None
    kept = []
    for row, request in enumerate(wanted):
        tokens = trace.request(int(request))
        first = np.arange(len(tokens.phase)) < len(tokens.phase) // 2 if halved else tokens.phase == PREFILL
        if first.any() and not first.all():
            accumulate_load(tokens.expert_ids[first], prefill[row])
            accumulate_load(tokens.expert_ids[~first], decode[row])
            if gates is not None and tokens.gate_weights is not None:
                _add_gates(tokens.expert_ids[first], tokens.gate_weights[first].astype(np.float32), gates[row])
            kept.append(row)
        if progress is not None:
            progress("Counting requests", row + 1, len(wanted))
    counted = Calibration(
        prefill=prefill, decode=decode, gates=gates, requests=wanted, halved=halved, model=meta.model, top_k=meta.top_k
    )
    return counted if len(kept) == len(wanted) else counted.take(np.array(kept, np.int64))


@njit()
def _add_gates(expert_ids: NDArray[Any], weights: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    tokens, layers, k = expert_ids.shape
    for token in range(tokens):
        for layer in range(layers):
            for j in range(k):
                out[layer, expert_ids[token, layer, j]] += weights[token, layer, j]
