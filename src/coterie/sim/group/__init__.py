"""Expert-parallel groups: the time of a step, a closed loop of decode, and a group that serves prompts and answers."""

from coterie.sim.group.loop import GroupLoop, GroupOutcome, GroupRun, outcome
from coterie.sim.group.step import Group, GroupStep

__all__ = ["Group", "GroupLoop", "GroupOutcome", "GroupRun", "GroupStep", "outcome"]
