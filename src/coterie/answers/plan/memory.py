"""What a placement needs of a rank's memory, and whether the device has it.

Counted are the experts of all MoE layers in every slot, and staging: where arriving experts lie until their layer
switches. The rest of the weights is counted in 16 bits, both as a whole copy on every rank (data-parallel attention)
and split over the ranks. KV cache, activations and workspace are not: they take what is left.
"""

from __future__ import annotations

from dataclasses import dataclass

from coterie.errors import ConfigError
from coterie.models import total_params
from coterie.types import BYTES_PER_WEIGHT, ModelSpec, WeightDtype

STAGED = 2
"""Experts of staging that are always enough to move anything; with fewer some layers must stay as they are."""

NARROWER: tuple[WeightDtype, ...] = ("fp8", "mxfp4")
"""Weight dtypes that a refusal proposes, widest first."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank."""

    spec: ModelSpec
    dtype: WeightDtype
    slots: int
    ranks: int
    device_bytes: float | None
    """Memory of a device; None: not known."""

    @property
    def experts_bytes(self) -> float:
        """One slot of every expert."""
        return self._slot_bytes * self.spec.num_experts / self.ranks

    @property
    def replicas_bytes(self) -> float:
        """Slots beyond one of every expert."""
        return self.slots_bytes - self.experts_bytes

    @property
    def slots_bytes(self) -> float:
        return self._slot_bytes * self.slots / self.ranks

    @property
    def staging_bytes(self) -> float:
        """The least that moves anything."""
        return STAGED * self.spec.expert_bytes(self.dtype)

    @property
    def layer_bytes(self) -> float:
        """The slots of one layer: staging with which every layer switches at once."""
        return self.slots / self.ranks * self.spec.expert_bytes(self.dtype)

    @property
    def rest_bytes(self) -> float:
        """All weights but routed experts, in 16 bits."""
        spec = self.spec
        routed = spec.num_moe_layers * spec.num_experts * spec.expert_params
        return (total_params(spec) - routed) * BYTES_PER_WEIGHT["bf16"]

    @property
    def left_bytes(self) -> float | None:
        """What slots and staging leave for all else."""
        return None if self.device_bytes is None else self.device_bytes - self.slots_bytes - self.staging_bytes

    @property
    def fits(self) -> bool | None:
        """Whether slots, staging and the rest of the weights, split over the ranks, fit; None: not known."""
        return None if self.left_bytes is None else self.left_bytes >= self.rest_bytes / self.ranks

    @property
    def _slot_bytes(self) -> float:
        return self.spec.num_moe_layers * self.spec.expert_bytes(self.dtype)

    def check(self, device: str) -> None:
        """Raise where the experts alone do not fit, naming what would."""
        has = self.device_bytes
        if has is None or self.slots_bytes <= has:
            return
        fit = " or ".join(self._fitting(has)) or "no dtype and no number of ranks up to one rank an expert does"
        raise ConfigError(
            f"{self.spec.name} in {self.dtype} with {self.slots} slots on {self.ranks} ranks needs "
            f"{gigabytes(self.slots_bytes)} a rank for its experts alone; {device} has {device_size(has)}. "
            f"What fits: {fit}"
        )

    def _fitting(self, has: float) -> list[str]:
        """The widest dtype, the fewest ranks and the most slots that fit, as options."""
        wide = BYTES_PER_WEIGHT[self.dtype]
        found = []
        for dtype in NARROWER:
            need = self.slots_bytes * BYTES_PER_WEIGHT[dtype] / wide
            if BYTES_PER_WEIGHT[dtype] < wide and need <= has:
                found.append(f"--dtype {dtype} ({gigabytes(need)})")
                break
        for ranks in range(self.ranks + 1, self.spec.num_experts + 1):
            if self.slots % ranks == 0 and ranks % self.ranks == 0 and self.slots_bytes * self.ranks / ranks <= has:
                found.append(f"--ranks {ranks} ({gigabytes(self.slots_bytes * self.ranks / ranks)})")
                break
        most = int(has // self._slot_bytes) * self.ranks
        if most >= self.spec.num_experts:
            found.append(f"--slots {most} ({gigabytes(self._slot_bytes * most / self.ranks)})")
        return found


def gigabytes(nbytes: float) -> str:
    """In GB, or MB below one."""
    if nbytes < 1e9:
        return f"{nbytes / 1e6:.3g} MB"
    return f"{nbytes / 1e9:,.0f} GB" if nbytes >= 100e9 else f"{nbytes / 1e9:.3g} GB"


def device_size(nbytes: float) -> str:
    """In both units: vendors' names count GiB and call them GB."""
    return f"{gigabytes(nbytes)} ({nbytes / 2**30:,.3g} GiB)"
