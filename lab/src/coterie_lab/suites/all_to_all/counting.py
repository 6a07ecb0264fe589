"""Count the all-to-all on a trace: steps cut from it, and the busiest rank of each step.

Steps are made up, not recorded: their tokens come from all over the trace, as those of a decode step come from many
requests. A service that groups like requests, or a prefill of one long prompt, has a busier busiest rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.costs.exchange import ExchangeTraffic, Locality, all_to_all_us, first_rank
from coterie.errors import TraceError, check
from coterie.traces.activations import ActivationTrace
from coterie.types import Placement, Topology


def sampled_steps(trace: ActivationTrace, path: Path, batch: int, max_tokens: int) -> NDArray[np.int64]:
    """Take whole steps of at most `max_tokens` tokens evenly from the trace: expert ids [step, token, layer, k].

    With S steps, step s has the samples s, s + S, s + 2S … `batch` must be at most `max_tokens`.
    """
    if trace.num_tokens < batch:
        raise TraceError(path, "tokens", f"found {trace.num_tokens}, expected at least one step of batch={batch}")
    steps = min(trace.num_tokens, max_tokens) // batch
    wanted = np.arange(steps * batch) * trace.num_tokens // (steps * batch)  # [sample] token, rising
    parts, start = [], 0
    for chunk in trace.chunks():
        stop = start + len(chunk.tokens.phase)
        low, high = np.searchsorted(wanted, [start, stop])
        parts.append(chunk.tokens.expert_ids[wanted[low:high] - start].astype(np.int64))
        start = stop
    ids = np.concatenate(parts)
    if int(ids.max()) >= trace.meta.num_experts:
        raise TraceError(path, "expert_ids", f"found {ids.max()}, expected ids in 0 … {trace.meta.num_experts - 1}")
    return np.ascontiguousarray(ids.reshape(batch, steps, *ids.shape[1:]).swapaxes(0, 1))


def uniform_steps(steps: int, batch: int, experts: int, top_k: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw ids [step, token, 1, k] evenly and without repetition: chance alone decides the busiest rank."""
    order = rng.random((steps, batch, 1, experts)).argpartition(top_k - 1, axis=-1)
    return np.ascontiguousarray(order[..., :top_k])


def counted_locality(expert_ids: NDArray[np.integer], placement: Placement, topology: Topology) -> Locality:
    """Count locality of activations [token, layer, k]; token t is on rank t mod ranks, an expert in its first slot."""
    layers, ranks = placement.num_layers, topology.num_ranks
    check(
        expert_ids.ndim == 3 and expert_ids.shape[1] == layers and len(expert_ids),
        f"expert_ids has shape {expert_ids.shape}; expected at least one token, [token, {layers}, k]",
    )
    check(placement.num_ranks == ranks, f"placement.num_ranks={placement.num_ranks} must be topology.num_ranks={ranks}")
    to = np.stack([first_rank(placement, layer)[expert_ids[:, layer]] for layer in range(layers)], axis=1)
    home = (np.arange(len(to)) % ranks)[:, None, None]
    local, far = to == home, topology.rank_nodes[to] != topology.rank_nodes[home]
    distinct = 1 + np.count_nonzero(np.diff(np.sort(to, axis=2), axis=2), axis=2)
    cells = len(to) * layers
    return Locality(
        local=int(local.sum()) / cells,
        remote=int((~local).sum()) / cells,
        remote_ranks=int((distinct - local.any(axis=2)).sum()) / cells,
        inter_node=int(far.sum()) / cells,
    )


class BusiestRank(NamedTuple):
    """Copies of tokens that the busiest rank sends or receives in one direction, whichever is more."""

    intra: NDArray[np.int64]
    """[step, layer] within its node."""
    inter: NDArray[np.int64]
    """[step, layer] between nodes."""
    ratio: float | None
    """Busiest ÷ mean rank over all links, both averaged over steps and layers; None if nothing is sent."""

    def mean_us(self, row_bytes: float, topology: Topology) -> float:
        """Return the mean over steps and layers. Combine sends back what dispatch brought, so takes as long."""
        times = [
            all_to_all_us(ExchangeTraffic(intra * row_bytes, inter * row_bytes), topology)
            for intra, inter in zip(self.intra.ravel().tolist(), self.inter.ravel().tolist(), strict=True)
        ]
        return float(np.mean(times))


def busiest_rank(ids: NDArray[np.int64], placement: Placement, topology: Topology) -> BusiestRank:
    """Count ids [step, token, layer, k]; token t of a step is on rank t modulo ranks, an expert in its first slot."""
    steps, batch, layers, _ = ids.shape
    ranks, per_node = topology.num_ranks, topology.ranks_per_node
    to = np.stack([first_rank(placement, layer)[ids[:, :, layer]] for layer in range(layers)], axis=2)
    home = np.broadcast_to((np.arange(batch) % ranks)[:, None, None], to.shape)
    first = (np.arange(steps)[:, None] * layers + np.arange(layers))[:, None, :, None] * ranks
    near = to // per_node == home // per_node

    def per_rank(end: NDArray[np.int64], chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
        counts: NDArray[np.int64] = np.bincount((first + end)[chosen], minlength=steps * layers * ranks)
        return counts.reshape(steps, layers, ranks)

    sent_near, got_near = (per_rank(end, near & (to != home)) for end in (home, to))
    sent_far, got_far = (per_rank(end, ~near) for end in (home, to))
    busiest = np.maximum(sent_near + sent_far, got_near + got_far).max(axis=2)
    mean = float((sent_near + sent_far).mean())
    return BusiestRank(
        intra=np.maximum(sent_near, got_near).max(axis=2),
        inter=np.maximum(sent_far, got_far).max(axis=2),
        ratio=float(busiest.mean()) / mean if mean > 0 else None,
    )
