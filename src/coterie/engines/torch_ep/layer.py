"""Expert-parallel MoE layers: choose slots, dispatch, compute, combine.

A token stays on its rank; its experts may be on any rank, in one slot or several. The output equals that of the same
layers on one device, up to rounding: a matrix product may round differently with the number of its rows, and with
deduplicated rows sums are grouped by rank. If the arithmetic is exact, the output is bit-equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from coterie.dispatch.slots import SlotTable, choose_slots
from coterie.engines.optional import torch
from coterie.engines.torch_ep.exchange import ReceivedRows, TorchExchange
from coterie.engines.torch_ep.group import Group
from coterie.engines.torch_ep.weights import Rows, SlotWeights
from coterie.errors import ConfigError, check
from coterie.types import Placement


class StepMap(NamedTuple):
    """Locations of the experts during one step; a switch during the step does not change them."""

    tables: tuple[SlotTable, ...]
    """[layer] table of each expert's slots."""
    rows: Rows
    """[layer][slot of this rank] row of the weights."""


class ExpertParallelLayers:
    """MoE layers of one rank. All ranks call `forward` together, layer by layer, each with its own tokens."""

    def __init__(self, group: Group, placement: Placement, weights: SlotWeights, exchange: TorchExchange) -> None:
        check(
            placement.num_ranks == group.size,
            f"placement.num_ranks={placement.num_ranks} must equal the group's {group.size} ranks",
        )
        self.group, self.weights, self.exchange = group, weights, exchange
        self.num_experts = placement.num_experts
        self._tables: dict[tuple[int, ...], SlotTable] = {}
        self.map = self.step_map(placement.slot_experts.tolist())

    def step_map(self, rows: Sequence[Sequence[int]]) -> StepMap:
        """Build a step's map from [layer][slot] experts and the current rows of the weights."""
        keys = [tuple(row) for row in rows]
        self._tables = {
            key: self._tables.get(key) or SlotTable.of(key, self.num_experts, self.group.size) for key in keys
        }
        return StepMap(tuple(self._tables[key] for key in keys), self.weights.rows)

    def forward(self, layer: int, hidden: Any, experts: Any, weights: Any) -> Any:
        """Return each token's weighted sum over its experts, [token, hidden]; experts and weights [token, k].

        A rank may have no tokens.
        """
        step = self.map
        with self.group.guard(f"layer {layer}"):
            if experts.shape != weights.shape or len(experts) != len(hidden):
                raise ConfigError(
                    f"experts has shape {tuple(experts.shape)}, weights {tuple(weights.shape)}; "
                    f"both must be [{len(hidden)} tokens, k]"
                )
            chosen = choose_slots(experts.cpu().numpy(), self.group.rank, step.tables[layer])
            slots = torch.from_numpy(chosen).to(hidden.device)
            received = self.exchange.dispatch(hidden, slots, weights.to(hidden.dtype))
            return self.exchange.combine(self._compute(received, step.rows[layer]), received.ticket)

    def _compute(self, received: ReceivedRows, rows: Sequence[int]) -> Any:
        """Return the weighted sum over the slots of each received row, [row, hidden], computed slot by slot."""
        results = torch.zeros_like(received.rows)
        at, place = (received.slots >= 0).nonzero(as_tuple=True)
        order = received.slots[at, place].argsort(stable=True)
        at, place = at[order], place[order]
        counts = torch.bincount(received.slots[at, place], minlength=len(rows)).tolist()
        for slot, (ats, places) in enumerate(zip(at.split(counts), place.split(counts), strict=True)):
            if len(ats):
                given = self.weights.run(rows[slot], received.rows[ats])
                results[ats] += given * received.weights[ats, places].to(given.dtype)[:, None]
        return results
