"""Simulation: an event kernel, servers that run batches, and what is measured of a run."""

from coterie.sim.decode import DecodeRequests, run_decode
from coterie.sim.execution import Execution, PrefillExecution, SpreadExecution, StepTimer
from coterie.sim.kernel import Simulation
from coterie.sim.metrics import Run, Summary, summarise
from coterie.sim.server import ExecutionModel, run_batches

__all__ = [
    "DecodeRequests", "Execution", "ExecutionModel", "PrefillExecution", "Run", "Simulation", "SpreadExecution",
    "StepTimer", "Summary", "run_batches", "run_decode", "summarise",
]  # fmt: skip
