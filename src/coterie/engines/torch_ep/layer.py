"""Expert-parallel MoE layers: route, send, compute, send back.

A token stays on its rank; its experts may be on any rank, in one slot or several. The output is that of the same
layers on one device, up to rounding: a matrix product may round differently with the number of its rows, and where rows
are deduplicated sums are grouped by rank. Where arithmetic is exact it is bit-equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from coterie.dispatch.slots import SlotTable, choose_slots
from coterie.engines.torch_ep.exchange import Exchange, ReceivedRows
from coterie.engines.torch_ep.group import Group
from coterie.engines.torch_ep.weights import Rows, SlotWeights
from coterie.errors import ConfigError
from coterie.types import Placement

try:
    import torch
except ImportError:
    torch = None


class StepMap(NamedTuple):
    """Where experts are, for the length of one step: a switch in the meantime does not touch it."""

    tables: tuple[SlotTable, ...]
    """[layer]"""
    rows: Rows
    """[layer][slot of this rank] row of the weights."""


class ExpertParallelLayers:
    """MoE layers of one rank. All ranks call it together, layer by layer, each with its own tokens."""

    def __init__(self, group: Group, placement: Placement, weights: SlotWeights, exchange: Exchange) -> None:
        if placement.num_ranks != group.size:
            raise ConfigError(f"placement.num_ranks={placement.num_ranks} must equal the group's {group.size} ranks")
        self.group, self.weights, self.exchange = group, weights, exchange
        self.num_experts = placement.num_experts
        self._tables: dict[tuple[int, ...], SlotTable] = {}
        self.map = self.step_map(placement.slot_experts.tolist())

    def step_map(self, rows: Sequence[Sequence[int]]) -> StepMap:
        """Map of a step by [layer][slot] experts, with the weights as they lie now."""
        keys = [tuple(row) for row in rows]
        self._tables = {
            key: self._tables.get(key) or SlotTable.of(key, self.num_experts, self.group.size) for key in keys
        }
        return StepMap(tuple(self._tables[key] for key in keys), self.weights.rows)

    def forward(self, layer: int, hidden: Any, experts: Any, weights: Any) -> Any:
        """[token, hidden] sum of each token's experts [token, k] by its weights [token, k]; tokens may be none."""
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
        """[row, hidden] weighted sum over the slots of each received row, slot by slot."""
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
