"""Settings of one what-if run, with checks of their values and of conflicts between them.

They are checked before compiled code is imported, which takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from coterie.costs.cells import check_preset
from coterie.errors import ConfigError, check_at_least, check_known, check_positive, refuse
from coterie.models import get_model

DRY_RUN = "dry_run"

EXECUTIONS = ("spread", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """Options of a run. None takes the default named in the field's docstring or in the config file."""

    trace: Path | None = None
    """Activation trace to replay, or request trace of which only the times are used; None draws CAPS's workload."""
    trace_format: str | None = None
    config: Path | None = None
    """JSON file in CAPS's layout; see :class:`coterie.batching.scheduler.CapsConfig`."""
    strategies: tuple[str, ...] = ()
    """Strategies to compare with fcfs; "all" takes every strategy. Empty takes the config's, else latency_aware."""
    arrivals: str | None = None
    """poisson, bursty, or a trace whose arrival times are replayed; None takes the trace's own times, else poisson."""
    rate: float | None = None
    """Requests per second; None takes the recorded rate, else LOAD times the capacity of fcfs."""
    requests: int | None = None
    seed: int = 0
    execution: str | None = None
    """How batches are timed; None takes decode or prefill if the trace's model is known, else spread."""
    model: str | None = None
    """Model whose steps are timed: a shipped name, or a folder with a config.json; None takes the trace's model."""
    preset: str | None = None
    """Calibrated device, h200 by default."""
    ranks: int | None = None
    """Expert-parallel ranks that hold the experts in order; 1 by default."""
    places: int | None = None
    """Largest number of requests that decode at once."""
    base_ms: float | None = None
    """Milliseconds of a batch with an even load (spread)."""
    sensitivity: float | None = None
    """Relative growth of the batch time per unit of the load's coefficient of variation (spread)."""
    predictor: str | None = None
    """Source of the loads that a strategy sees; None takes the recorded loads, or with a model its dry run."""
    with_model: Path | None = None
    """Checkpoint to run on prompts: its routing gives the real loads, the dry run of its router the predicted ones."""
    prompts: Path | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_known("execution", self.execution, EXECUTIONS)
        if self.model is not None and not Path(self.model).exists():
            get_model(self.model)
        if self.preset is not None:
            check_preset(self.preset)
        check_at_least(1, requests=self.requests, ranks=self.ranks, places=self.places)
        check_positive(rate=self.rate, base_ms=self.base_ms)
        check_at_least(0, seed=self.seed)
        refuse(
            {
                f"prompts={self.prompts} are for a model: name it with --with-model": self.with_model is None
                and self.prompts is not None,
                f"trace={self.trace} and with_model={self.with_model} exclude each other": self.with_model is not None
                and self.trace is not None,
            }
        )

    def only_for(self, execution: str) -> None:
        """Raise for a setting that this execution does not read."""
        for name, kinds in (
            ("base_ms", ("spread",)),
            ("sensitivity", ("spread",)),
            ("places", ("decode",)),
            ("ranks", ("prefill", "decode")),
            ("preset", ("prefill", "decode")),
            ("model", ("prefill", "decode")),
        ):
            if getattr(self, name) is not None and execution not in kinds:
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{option} is for execution {' or '.join(kinds)}; this run's is {execution}")
