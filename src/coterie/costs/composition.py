"""How a step is made of its parts: the only place where they are added up, for prices, simulators and groups alike.

    layer = max over ranks of experts(rank) + all_to_all          :func:`layers_us`
    step  = sum over layers of layer + attention + dense          :func:`step_us`, :class:`~coterie.costs.step.StepTime`

The terms are computed, or looked up in :class:`StepTables` where thousands of steps are simulated: an expert's share of
a layer depends on its rows alone once the tile is chosen, so that its time is a table entry.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.costs.attention import attention_us
from coterie.costs.exchange import exchange_us
from coterie.costs.experts import rank_us
from coterie.costs.roofline import gemm_work, roofline_us

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NO_CROSSING = np.empty((0, 0, 0), np.int64)
"""Argument of :func:`layers_us` where the rows that a rank computes are those it exchanges."""
COMPUTED = np.empty((3, 2, 0)), np.empty(0)
"""Tables of :func:`layers_us` where times are computed, not looked up."""


@njit()
def layers_us(
    p: Floats, experts: Floats, blend: Floats, links: Floats, rows: Ints, crossing: Ints, tokens: Ints, out: Floats
) -> None:
    """Fill out [2, layer]: experts of the slowest rank, and the exposed part of the busiest rank's exchange.

    rows [layer, slot] of whole tokens, tokens [rank] of its batch, crossing [2, layer, rank] rows that it sends and
    receives, or :data:`NO_CROSSING`; `p`, `experts` and `blend` as :func:`~coterie.costs.experts.rank_us` takes them.
    """
    layers, ranks = rows.shape[0], len(tokens)
    per_rank = rows.shape[1] // ranks
    for layer in range(layers):
        slowest, busiest = 0.0, 0
        for rank in range(ranks):
            mine = rows[layer, rank * per_rank : (rank + 1) * per_rank]
            slowest = max(slowest, rank_us(p, experts, blend, mine, float(tokens[rank])))
            if len(crossing) > 0:
                busiest = max(busiest, crossing[0, layer, rank], crossing[1, layer, rank])
            else:
                arrived = 0
                for count in mine:
                    arrived += count
                busiest = max(busiest, arrived)
        out[0, layer], out[1, layer] = slowest, 0.0
        if ranks > 1:  # a share of the experts' time hides the exchange
            out[1, layer] = max(0.0, exchange_us(links, float(busiest)) - links[4] * slowest)


@helper()
def step_us(
    dense: Floats,
    attention: Floats,
    layers: float,
    tokens: int,
    decoding: int,
    context: int,
    prefill: int,
    prefill_context: int,
    prompts: int,
) -> float:
    """A rank's step: the time of its MoE layers, plus attention, projections of `tokens`, routing and output head."""
    total = layers + attention_us(
        attention[:7], attention[7:11], attention[11:15], decoding, context, prefill, prefill_context, prompts
    )
    return float(total + dense[0, tokens] + dense[1, decoding + (prompts if prefill > 0 else 0)])


class StepTables(NamedTuple):
    """:meth:`~coterie.costs.step.StepModel.tables` of steps of up to a number of tokens; times in microseconds."""

    p: Floats
    """Prices of the experts: :meth:`~coterie.costs.step.StepModel.expert_prices`."""
    experts: Floats
    """[3, tile, rows] one expert's time by itself, the streaming of its weights, its compute."""
    blend: Floats
    """[part + 1] by how much the larger of streaming and compute grows by the other, over their ratio."""
    dense: Floats
    """[2, tokens] projections and routing of all layers; the output head by outputs."""
    padded: Ints
    """[tokens] padded size of a batch that only decodes."""
    attention: Floats
    """The model's shape, then the laws of decode and of prefill, as `attention_us` takes them."""


@njit()
def add_projections(law: Floats, shapes: Floats, out: Floats) -> None:
    """Add to out [tokens] the time of projections; shapes [projection, 3] are n, k and the layers that have it."""
    for tokens in range(len(out)):
        for at in range(len(shapes)):
            nbytes, flops = gemm_work(tokens, shapes[at, 0], shapes[at, 1])
            out[tokens] += shapes[at, 2] * roofline_us(law, nbytes, flops)
