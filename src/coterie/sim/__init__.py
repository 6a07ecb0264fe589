"""Simulation: an event kernel, batch servers, fleets, and the metrics of a run."""

from coterie.sim.decode import DecodeRequests, run_decode
from coterie.sim.execution import Execution, PrefillExecution, SpreadExecution, StepTimer
from coterie.sim.fleet.batching import Batching
from coterie.sim.fleet.metrics import FleetRun, FleetSummary, summarise_fleet
from coterie.sim.fleet.requests import FleetRequests, Recordings, draw_requests, split_recordings
from coterie.sim.fleet.run import FleetConfig, run_fleet
from coterie.sim.kernel import Simulation
from coterie.sim.metrics import Run, RunSummary, summarise_run
from coterie.sim.server import ExecutionModel, run_batches

__all__ = [
    "Batching",
    "DecodeRequests",
    "Execution",
    "ExecutionModel",
    "FleetConfig",
    "FleetRequests",
    "FleetRun",
    "FleetSummary",
    "PrefillExecution",
    "Recordings",
    "Run",
    "RunSummary",
    "Simulation",
    "SpreadExecution",
    "StepTimer",
    "draw_requests",
    "run_batches",
    "run_decode",
    "run_fleet",
    "split_recordings",
    "summarise_fleet",
    "summarise_run",
]
