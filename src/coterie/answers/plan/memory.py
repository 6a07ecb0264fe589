"""Memory that a placement needs on a rank, and whether it fits the device.

It counts the slots of all MoE layers, and staging: buffers that hold arriving experts until their layer switches to the
new placement. The other weights are counted in 16 bits, both as a full copy per rank (data-parallel attention) and
split over the ranks. KV cache, activations and workspace are not counted: they use the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from coterie.costs.presets import Preset
from coterie.errors import ConfigError
from coterie.models import total_params
from coterie.types import BYTES_PER_WEIGHT, ModelSpec, WeightDtype

STAGED = 2
"""Staging buffers, in experts, that suffice for any move; with fewer, some layers could not change."""

NARROWER: tuple[WeightDtype, ...] = ("fp8", "mxfp4")
"""Weight dtypes proposed in the error if the experts do not fit, widest first."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one rank, in bytes."""

    spec: ModelSpec
    dtype: WeightDtype
    slots: int
    ranks: int
    device_bytes: float | None
    """Memory of a device in bytes; None if unknown."""

    @property
    def experts_bytes(self) -> float:
        """Bytes of this rank's share of the experts, one slot each."""
        return self._slot_bytes * self.spec.num_experts / self.ranks

    @property
    def replicas_bytes(self) -> float:
        """Bytes of the slots beyond one per expert."""
        return self.slots_bytes - self.experts_bytes

    @property
    def slots_bytes(self) -> float:
        return self._slot_bytes * self.slots / self.ranks

    @property
    def staging_bytes(self) -> float:
        """Bytes of the smallest staging that suffices for any move."""
        return STAGED * self.spec.expert_bytes(self.dtype)

    @property
    def rest_bytes(self) -> float:
        """Bytes of all weights except routed experts, in 16 bits."""
        spec = self.spec
        routed = spec.num_moe_layers * spec.num_experts * spec.expert_params
        return (total_params(spec) - routed) * BYTES_PER_WEIGHT["bf16"]

    @property
    def left_bytes(self) -> float | None:
        """Bytes that slots and staging leave for everything else; None if the device's memory is unknown."""
        return None if self.device_bytes is None else self.device_bytes - self.slots_bytes - self.staging_bytes

    @property
    def fits(self) -> bool | None:
        """Whether slots, staging and the other weights, split over the ranks, fit the device; None if unknown."""
        return None if self.left_bytes is None else self.left_bytes >= self.rest_bytes / self.ranks

    @property
    def kv_tokens(self) -> float | None:
        """Tokens whose KV cache fits beside slots, staging and a full copy of the other weights; None if unknown."""
        left = self.left_bytes
        return None if left is None else max(0.0, left - self.rest_bytes) / self.spec.kv_bytes_per_token

    @property
    def replica_kv_tokens(self) -> float:
        """Tokens whose KV cache takes as much as a spare slot."""
        return self.spec.slot_kv_tokens(self.dtype)

    @property
    def _slot_bytes(self) -> float:
        return self.spec.num_moe_layers * self.spec.expert_bytes(self.dtype)

    def check(self, device: str) -> None:
        """Raise if the slots alone do not fit the device; the error lists options that fit."""
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
        """Return command-line options that fit: the widest dtype, the fewest ranks and the most slots."""
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


def device_bytes(preset: Preset) -> float | None:
    """Return the memory of a preset's device; None if it does not say."""
    known = preset.measurement.hardware.get("memory_bytes")
    return float(known) if isinstance(known, int | float) and known > 0 else None


def gigabytes(nbytes: float) -> str:
    """Format bytes in GB, or in MB below 1 GB."""
    if nbytes < 1e9:
        return f"{nbytes / 1e6:.3g} MB"
    return f"{nbytes / 1e9:,.0f} GB" if nbytes >= 100e9 else f"{nbytes / 1e9:.3g} GB"


def device_size(nbytes: float) -> str:
    """Format bytes in GB and GiB: vendors often write GB for GiB."""
    return f"{gigabytes(nbytes)} ({nbytes / 2**30:,.3g} GiB)"
