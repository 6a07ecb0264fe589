"""Expert-parallel groups: step times, a closed loop of decode, and a group that serves prompts and outputs."""

from coterie.sim.group.loop import GroupLoop, GroupOutcome, GroupRun, summarise_group
from coterie.sim.group.step import GroupStep, LockstepGroup

__all__ = ["GroupLoop", "GroupOutcome", "GroupRun", "GroupStep", "LockstepGroup", "summarise_group"]
