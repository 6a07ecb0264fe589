"""The prices of the objective, and the arrays of a planning round made from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie._numba import side_by_side
from coterie.costs.exchange import BYTES_PER_VALUE, row_trips_s
from coterie.costs.lines import ExpertLine, slot_s
from coterie.costs.movement import load_s
from coterie.costs.step import StepModel
from coterie.errors import ConfigError
from coterie.placement.base import Load
from coterie.placement.objective._arrays import even_share, fill
from coterie.placement.objective.problem import Problem
from coterie.placement.objective.settling import living_shares
from coterie.types import Placement, Topology

Array = NDArray[np.float64]

PRICES_HINT = "the prices to plan by; make them with Objective.of(step_model, tokens)"


@dataclass(frozen=True, slots=True)
class Objective:
    """The prices. The defaults are about DeepSeek-V3's in prefill: 88 Mflop a row, 44 MB an expert."""

    row_s: float = 1.5e-7
    """Seconds one token of one expert takes on a rank of speed 1."""
    touch_s: float = 0.0
    """Seconds to stream an expert's weights in a step that touches it, at every replica. 0: compute decides."""
    row_bytes: float = 0.0
    """Bytes of a token's hidden state, sent to its expert's rank and back. 0 leaves the exchange out."""
    expert_bytes: float = 44e6
    """Weights of one expert of one layer."""
    horizon: float = 1000.0
    """Steps that the new placement will serve."""
    exposed: float = 1.0
    """Share of the movement that is not hidden behind steps."""
    planning_s: float = 0.0
    """Seconds that planning holds up serving."""
    enough: float = 1.0
    """Balance (even ÷ slowest) at which a layer is good enough; 1 asks for all there is."""
    move_price: float = 0.0
    """Share of its link time that each move costs besides what the slowest rank waits."""

    def __post_init__(self) -> None:
        for name in ("row_s", "touch_s", "row_bytes", "expert_bytes", "horizon", "planning_s", "move_price"):
            if not 0 <= getattr(self, name) < np.inf:
                raise ConfigError(f"{name}={getattr(self, name)} must be a finite number of at least 0")
        if not 0 <= self.exposed <= 1:
            raise ConfigError(f"exposed={self.exposed} must be in 0 … 1")
        if not 0 < self.enough <= 1:
            raise ConfigError(f"enough={self.enough} must be above 0 and at most 1")

    @classmethod
    def of(cls, model: StepModel, tokens: int, **settings: float) -> Objective:
        """Prices of a calibrated model for steps of about `tokens` tokens over all ranks.

        An expert's time is a straight line in its tokens, :class:`~coterie.costs.lines.ExpertLine`; what a step costs
        whatever the experts' loads are is left out.
        """
        spec, line = model.spec, ExpertLine.of(model, tokens)
        physics: dict[str, float] = {
            "row_s": line.row_s,
            "touch_s": line.touch_s,
            "row_bytes": BYTES_PER_VALUE * spec.hidden_size if model.topology.num_ranks > 1 else 0.0,
            "expert_bytes": spec.expert_bytes(model.dtype),
        }
        return cls(**(physics | settings))

    def problem(
        self, load: Load, topology: Topology, current: Placement, shares: NDArray[np.floating] | None = None
    ) -> Problem:
        """The arrays that planning works on. `shares` [layer, slot] are those in force; None is equal ones."""
        load.check_fits(topology, current)
        layers, experts, ranks = *load.tokens.shape, topology.num_ranks
        speeds = topology.rank_speeds
        alive = speeds > 0
        living = int(alive.sum())
        per_step = load.tokens / load.steps  # [layer, expert]
        spare = living * current.slots_per_rank - experts
        shape = layers, min(living, spare + 1), experts
        share = np.empty(shape) if self.touch_s else even_share(*shape)
        # One block: past 4 MB NumPy asks for huge pages, and touching fresh small ones takes longer than all else here.
        unit, load_in = np.empty((2, layers, ranks, experts))
        source = np.empty((layers, ranks, experts), np.int16)
        even, reach = np.empty(layers), np.empty(layers)
        exchange, each = self._exchange_s(load, topology)
        arguments = (
            per_step,
            self._slot_s(per_step),
            self.touch_s,
            self.row_s,
            exchange,
            each,
            speeds,
            current.slot_experts,
            topology.rank_nodes,
            load_s(topology, self.expert_bytes),
            unit,
            share,
            load_in,
            source,
            even,
            reach,
        )
        side_by_side(fill, layers, *arguments)
        return Problem(
            objective=self,
            topology=topology,
            current=current,
            alive=alive,
            unit=unit,
            share=share,
            load_in=load_in,
            source=source,
            even=even,
            reach=reach,
            shares=None if shares is None else living_shares(shares, current, alive),
        )

    def link_s(self, topology: Topology) -> float:
        """Seconds to load an expert over the fastest link between devices."""
        return float(load_s(topology, self.expert_bytes).min())

    def _slot_s(self, tokens: Array) -> Array:
        """Seconds of a slot that gets this many tokens a step on average; by chance some steps do not touch it."""
        return np.asarray(slot_s(self.row_s, self.touch_s, tokens))

    def _exchange_s(self, load: Load, topology: Topology) -> tuple[Array, Array]:
        """Seconds to bring all of an expert's tokens to a rank, and back.

        [rank, layer, expert] where their sources are known (else empty), and [rank] for one token from anywhere.
        """
        per_row = row_trips_s(topology, self.row_bytes)  # [source, rank]
        alive = topology.rank_speeds > 0
        if load.sources is None or not self.row_bytes:
            return np.empty((0, 1, 0)), per_row[alive].sum(axis=0) / alive.sum()
        known = np.tensordot(per_row.T, load.sources / load.steps, (1, 0))
        return np.ascontiguousarray(known), np.zeros(topology.num_ranks)
