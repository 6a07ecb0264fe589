"""Weights of a rank's experts: one block of memory with a row per slot, and spare rows for arriving experts.

A slot maps to a row index, so that a switch of a migration changes indices and copies nothing. A row holds an expert's
three matrices one after the other, in the order they are sent: gate and up [2 x inner, hidden], down [hidden, inner].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from coterie.engines.optional import torch
from coterie.errors import check, check_one_of
from coterie.types import Placement

Activation = Literal["silu", "relu"]
LoadExpert = Callable[[int, int], tuple[Any, Any]]
"""Loads (layer, expert) → gate and up as one [2 x inner, hidden], and down [hidden, inner]."""
Rows = tuple[tuple[int, ...], ...]
"""[layer][slot of this rank] row of the block."""


class SlotWeights:
    """Experts of one rank, for all layers."""

    def __init__(
        self, placement: Placement, rank: int, load: LoadExpert, staging: int = 0, activation: Activation = "silu"
    ) -> None:
        check_one_of(("silu", "relu"), activation=activation)
        self.activation = activation
        self.load = load
        up, down = load(0, int(placement.slot_experts[0, 0]))
        self.inner, self.hidden = int(down.shape[1]), int(down.shape[0])
        check(
            tuple(up.shape) == (2 * self.inner, self.hidden),
            f"gate and up have shape {tuple(up.shape)}; down asks for {(2 * self.inner, self.hidden)}",
        )
        per_rank, layers = placement.slots_per_rank, placement.num_layers
        count = layers * per_rank + staging
        self.block = torch.empty((count, 3 * self.inner * self.hidden), dtype=up.dtype, device=up.device)
        self.rows: Rows = tuple(tuple(range(layer * per_rank, (layer + 1) * per_rank)) for layer in range(layers))
        self.free = list(range(layers * per_rank, count))
        for layer in range(layers):
            own = placement.slot_experts[layer, rank * per_rank : (rank + 1) * per_rank].tolist()
            for row, expert in zip(self.rows[layer], own, strict=True):
                self.fill(row, layer, expert)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert of one layer."""
        return int(self.block.shape[1] * self.block.element_size())

    def fill(self, row: int, layer: int, expert: int) -> None:
        """Load an expert into a row with the `load` function, which can load any expert."""
        up, down = self.load(layer, expert)
        torch.cat([up.flatten(), down.flatten()], out=self.block[row])

    def replace(self, layer: int, arriving: dict[int, int]) -> list[int]:
        """Point slots of a layer to other rows, {slot: row}; return the rows they pointed to before."""
        old = self.rows[layer]
        self.rows = (
            *self.rows[:layer],
            tuple(arriving.get(slot, row) for slot, row in enumerate(old)),
            *self.rows[layer + 1 :],
        )
        return [old[slot] for slot in arriving]

    def run(self, row: int, hidden: Any) -> Any:
        """Run the expert in a row of the block on hidden states [token, hidden]."""
        cut = 2 * self.inner * self.hidden
        gate, up = (hidden @ self.block[row, :cut].view(2 * self.inner, self.hidden).T).chunk(2, dim=1)
        activate = torch.nn.functional.silu if self.activation == "silu" else torch.relu
        return (activate(gate) * up) @ self.block[row, cut:].view(self.hidden, self.inner).T
