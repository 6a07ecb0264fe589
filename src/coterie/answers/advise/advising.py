"""Advise on a recording: simulate every decision on it, and say what comes out in one sentence each."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from coterie.answers.advise.decisions import NOT_NOW, ON, TOO_LITTLE, TRY, Lever
from coterie.answers.advise.fleets import Fleets
from coterie.answers.advise.groups import Groups
from coterie.answers.fleet.bench import Source
from coterie.answers.fleet.simulation import FleetSettings
from coterie.answers.plan.memory import RankMemory, device_bytes
from coterie.answers.suites import Report
from coterie.costs.presets import load_preset, step_model
from coterie.errors import check, check_at_least
from coterie.types import ModelSpec, Topology, WeightDtype

FILLS = 12
"""Least requests of a run, as a multiple of those in flight: the end of a short run counts, where batches shrink."""


@dataclass(frozen=True, slots=True)
class AdviseSettings:
    """The fleet and the group that the advice is for."""

    decoders: int | None = None
    """Decode workers; None takes 8, or as many as half of the recording keeps busy."""
    in_flight: int = 16
    """Mean requests per decoder."""
    places: int | None = None
    """Most requests that a decoder runs at once; None for four times the mean."""
    prefill: int = 0
    """Prefill workers; with 0, requests come to decoders with their prompts done, unless `prompts`."""
    prompts: bool | None = None
    """Whether decoders compute prompts; None: if the recording has prefixes and there are no prefill workers."""
    kv_tokens: int | None = None
    """KV memory of a decoder in tokens; None for what the device has beside the weights."""
    gpus: int = 1
    """GPUs of a decoder."""
    ranks: int = 8
    """Ranks of the expert-parallel group; with 1 placement is not asked."""
    batch: int = 8192
    """Tokens of a step of the group, over all ranks."""
    horizon: float = 10_000.0
    """Steps that a plan serves."""
    preset: str = "h200"
    dtype: WeightDtype | None = None
    engine: str | None = None
    splits: int = 6
    requests: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(1, ranks=self.ranks, gpus=self.gpus, batch=self.batch, in_flight=self.in_flight)
        check_at_least(2, splits=self.splits)

    def decoders_for(self, recorded: int) -> int:
        """Return the decoders: as asked, or the largest of 8, 4 and 2 that half of the recording keeps busy."""
        fitting = (size for size in (8, 4, 2) if size * self.in_flight <= recorded // 2)
        return self.decoders or next(fitting, 2)


@dataclass(frozen=True, slots=True)
class Advised:
    """The advice, and what was simulated."""

    model: str
    dtype: str
    recorded: int
    fleet: FleetSettings
    group: Groups
    settings: AdviseSettings
    decisions: list[Lever]
    notes: list[str]

    def decision(self, key: str) -> Lever:
        return next(decision for decision in self.decisions if decision.key == key)

    @property
    def answers(self) -> dict[str, str]:
        return {decision.key: decision.advice for decision in self.decisions}

    @property
    def verdict(self) -> str:
        """Return the first line: what to turn on, and the rest by name."""
        said = []
        for advice, opening in ((ON, "turn on"), (TRY, "try")):
            chosen = [one for one in self.decisions if one.advice == advice]
            gains = [f"{one.name.lower()} ({one.chosen}, {one.gain.mean:.1f}% of {one.metric})" for one in chosen]
            if gains:
                said.append(f"{opening} {', '.join(gains)}")
        for advice in (NOT_NOW, TOO_LITTLE):
            if names := [one.name.lower() for one in self.decisions if one.advice == advice]:
                said.append(f"{advice}: {', '.join(names)}")
        if not {ON, TRY} & {one.advice for one in self.decisions}:
            return f"Nothing pays for {self.model} on this traffic: leave things as they are; {'; '.join(said)}."
        return f"For {self.model} on this traffic {'; '.join(said)}."

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "dtype": self.dtype,
            "recorded": self.recorded,
            "settings": asdict(self.settings) | {"decoders": self.fleet.decoders, "prompts": self.fleet.prompts},
            "decisions": [decision.to_json() for decision in self.decisions],
            "notes": self.notes,
            "verdict": self.verdict,
        }


def advise(
    source: Source, spec: ModelSpec, settings: AdviseSettings, report: Report = lambda *_: None, newest: bool = False
) -> Advised:
    """Simulate every decision on the recording's own requests.

    `newest`: they are the newest of a live gateway, with drawn tokens and without prefixes (:mod:`.live`).
    """
    trace = source.trace
    shape = trace.meta.num_layers, trace.meta.num_experts
    check(
        shape == (spec.num_moe_layers, spec.num_experts),
        f"the trace has {shape[0]} layers of {shape[1]} experts; {spec.name} has {spec.num_moe_layers} MoE layers of "
        f"{spec.num_experts}: name the model it was recorded on",
    )
    left = spec.num_experts % settings.ranks
    check(not left, f"num_experts={spec.num_experts} must be a multiple of ranks={settings.ranks} (remainder {left})")
    recorded = len(source.counts.requests)
    device = load_preset(settings.preset)
    model = step_model(spec, device, settings.dtype, Topology(settings.gpus), engine=settings.engine)
    prompts = settings.prompts
    if prompts is None:
        prompts = trace.requests.prefix_blocks is not None and not settings.prefill
    kv_tokens = settings.kv_tokens
    if kv_tokens is None and prompts:
        memory = RankMemory(spec, model.dtype, spec.num_experts, settings.gpus, device_bytes(device))
        kv_tokens = None if memory.kv_tokens is None else int(settings.gpus * memory.kv_tokens)
    fleet = FleetSettings(
        decoders=settings.decoders_for(recorded),
        in_flight=settings.in_flight,
        prefill=settings.prefill,
        prompts=prompts,
        kv_tokens=kv_tokens,
        places=settings.places,
        splits=settings.splits,
        requests=max(settings.requests, FILLS * settings.decoders_for(recorded) * settings.in_flight),
        seed=settings.seed,
    )
    arrival_s = trace.requests.arrival_s
    group = Groups(
        counts=np.asarray(source.counts.prefill + source.counts.decode, np.float64),
        arrival_s=None if arrival_s is None else np.asarray(arrival_s)[source.counts.requests],
        model=step_model(spec, device, settings.dtype, Topology(settings.ranks), engine=settings.engine),
        batch=settings.batch,
        decode_batch=fleet.decoders * fleet.in_flight,
        splits=settings.splits,
        seed=settings.seed,
        horizon=settings.horizon,
        newest=newest,
        report=report,
    )
    decisions = list(Fleets(source, model, fleet, report).decisions())
    if settings.ranks > 1:
        decisions += group.decisions()
    return Advised(
        model=spec.name,
        dtype=model.dtype,
        recorded=recorded,
        fleet=fleet,
        group=replace(group, report=lambda *_: None),
        settings=settings,
        decisions=decisions,
        notes=_notes(source, model.caveat, settings, fleet, newest),
    )


def _notes(source: Source, caveat: str, settings: AdviseSettings, fleet: FleetSettings, newest: bool) -> list[str]:
    notes = {
        "Every gain is against what runs without that decision, all else as it is: gains do not add up.": True,
        "95% intervals are for other requests of this traffic, not other traffic or errors of predicted times.": True,
        caveat: bool(caveat),
        f"{fleet.decoders} decoders: half of the recording keeps no more busy; record more, or name --decoders.": (
            settings.decoders is None and fleet.decoders < 8
        ),
        "The trace has one phase: the first half of a request stands for its prompt.": source.counts.halved,
        f"Decoders compute prompts, with room for {fleet.kv_tokens or 0:,} tokens of KV cache each.": fleet.prompts,
        "Experts of single tokens are drawn from the counts that the gateway keeps of each request.": newest,
        "A request's arrival is when it finished; its prompt is without tokens whose KV was cached.": newest,
        "The gateway keeps no shared prefixes: routers by prefix are not compared.": newest,
    }
    return [note for note, holds in notes.items() if holds]
