"""Expert-parallel groups: step times, and a group that serves prompts and outputs."""

from coterie.sim.group.step import GroupStep, LockstepGroup

__all__ = ["GroupStep", "LockstepGroup"]
