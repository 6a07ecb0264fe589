"""The sum of a step's terms. Prices, simulators and expert-parallel groups all add the terms up here.

    layer = max over ranks of experts(rank) + all_to_all          :func:`layers_us`
    step  = sum over layers of layer + attention + dense          :func:`step_us`, :class:`~coterie.costs.step.StepTime`

The terms are computed, or looked up in :class:`StepTables` when thousands of steps are simulated. A table suffices
because an expert's time in a layer depends only on its rows once the tile size is chosen.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.costs.attention import attention_us
from coterie.costs.exchange import exchange_us
from coterie.costs.experts import TILES, rank_us, tile_size
from coterie.costs.roofline import gemm_work, roofline_us

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NO_CROSSING = np.empty((0, 0, 0), np.int64)
"""Argument `crossing` of :func:`layers_us` if a rank exchanges exactly the rows that it computes."""
COMPUTED = np.empty((3, TILES, 0)), np.empty(0)
"""Arguments `experts` and `blend` of :func:`layers_us` if times are computed, not looked up."""


@njit()
def layers_us(
    p: Floats,
    experts: Floats,
    blend: Floats,
    links: Floats,
    rows: Ints,
    crossing: Ints,
    tokens: Ints,
    touched: float,
    even: bool,
    out: Floats,
) -> None:
    """Fill out [2, layer] microseconds: experts of the slowest rank, and exposed exchange of the busiest rank.

    rows [layer, slot] are tokens per slot, tokens [rank] is the batch size of each rank, crossing [2, layer, rank] are
    the rows that a rank sends and receives, or :data:`NO_CROSSING`. With `even`, every rank gets an equal part of all
    slots' work. `p`, `experts`, `blend` and `touched` are those of :func:`~coterie.costs.experts.rank_us`, `links`
    those of :func:`~coterie.costs.exchange.exchange_us`.
    """
    layers, ranks = rows.shape[0], len(tokens)
    per_rank = rows.shape[1] // ranks
    for layer in range(layers):
        slowest, busiest, total = 0.0, 0, 0
        for count in rows[layer]:
            total += count
        # Engines choose the tiles by the tokens of the whole step, so that a rank with many rows has no larger ones.
        size = tile_size(p, total / rows.shape[1])
        for rank in range(ranks):
            mine = rows[layer, rank * per_rank : (rank + 1) * per_rank]
            if not even:
                slowest = max(slowest, rank_us(p, experts, blend, mine, float(tokens[rank]), size, touched))
            if len(crossing) > 0:
                busiest = max(busiest, crossing[0, layer, rank], crossing[1, layer, rank])
            else:
                arrived = 0
                for count in mine:
                    arrived += count
                busiest = max(busiest, arrived)
        if even:
            slowest = rank_us(p, experts, blend, rows[layer], float(tokens.min()), size, touched, 1.0 / ranks)
        out[0, layer], out[1, layer] = slowest, 0.0
        if ranks > 1:  # the exchange hides behind a share (links[4]) of the experts' time
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
    """Return the microseconds of a rank's step: its MoE `layers`, attention, projections, routing and output head."""
    total = layers + attention_us(
        attention[:7], attention[7:12], attention[12:17], decoding, context, prefill, prefill_context, prompts
    )
    total += dense[0, tokens] + dense[1, decoding + (prompts if prefill > 0 else 0)]
    return float(total)


class StepTables(NamedTuple):
    """Lookup tables of step times, from :meth:`~coterie.costs.step.StepModel.tables`; times in microseconds."""

    p: Floats
    """Prices of the experts: :meth:`~coterie.costs.step.StepModel.expert_prices`."""
    experts: Floats
    """[3, tile size, rows] one expert's whole time, the time to stream its weights, and its compute time."""
    blend: Floats
    """[part + 1] smooth maximum of streaming and compute ÷ the larger of them, by the ratio smaller ÷ larger."""
    dense: Floats
    """[2, tokens] projections and routing of all layers, by tokens; the output head, by output tokens."""
    padded: Floats
    """[2, tokens] size to which a decode-only batch is padded for its CUDA graph, and the chance that its padding rows
    leave an expert alone."""
    attention: Floats
    """[17] arguments of `attention_us`: the model's shape [7], the decode law [5], the prefill law [5]."""


@njit()
def add_projections(law: Floats, shapes: Floats, out: Floats) -> None:
    """Add the microseconds of projections to out [tokens]; shapes [projection, 3] are n, k and the number of layers."""
    for tokens in range(len(out)):
        for at in range(len(shapes)):
            nbytes, flops = gemm_work(tokens, shapes[at, 0], shapes[at, 1])
            out[tokens] += shapes[at, 2] * roofline_us(law, nbytes, flops)
