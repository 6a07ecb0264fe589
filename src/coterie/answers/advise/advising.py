"""Advise on a recording: simulate every decision of a deployment on it, and say what comes out in one sentence each."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.answers.advise.decisions import NOT_NOW, ON, TOO_LITTLE, TRY, Lever, unknown
from coterie.answers.advise.fleets import TITLES, Fleets
from coterie.answers.advise.groups import Groups
from coterie.answers.advise.tables import TableWindows
from coterie.answers.fleet.bench import Source
from coterie.answers.fleet.simulation import FleetSettings
from coterie.answers.plan.loads import Division, divide_requests
from coterie.answers.plan.memory import RankMemory, device_bytes
from coterie.answers.suites import Report
from coterie.costs.presets import Preset, load_preset, step_model
from coterie.errors import check, check_at_least
from coterie.types import ModelSpec, Topology, WeightDtype

FILLS = 12
"""Least requests of a run, as a multiple of those in flight: the end of a short run counts, where batches shrink."""
NO_REQUESTS = "it takes recorded requests, and a load table has none"


@dataclass(frozen=True, slots=True)
class AdviseSettings:
    """The deployment that the advice is for: a fleet of decoders, a group of ranks that share the experts, or both."""

    decoders: int | None = None
    """Decode workers; None takes 8, or as many as half of the recording keeps busy; with 0 no fleet is asked."""
    in_flight: int = 16
    """Mean requests per decoder, and per rank of a group by itself."""
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
    horizon: float | None = None
    """Steps that a plan serves; None for the default of `coterie plan`."""
    preset: str = "h200"
    dtype: WeightDtype | None = None
    engine: str | None = None
    splits: int = 6
    requests: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(1, ranks=self.ranks, gpus=self.gpus, batch=self.batch, in_flight=self.in_flight)
        check_at_least(2, splits=self.splits)
        check(self.decoders != 0 or self.ranks > 1, "decoders=0 and ranks=1: there is nothing to decide")

    def decoders_for(self, recorded: int) -> int:
        """Return the decoders: as asked, or the largest of 8, 4 and 2 that half of the recording keeps busy."""
        fitting = (size for size in (8, 4, 2) if size * self.in_flight <= recorded // 2)
        return self.decoders or next(fitting, 2)

    @property
    def is_one_group_each(self) -> bool:
        """Whether every decoder is a group whose placement is asked."""
        return self.decoders != 0 and self.gpus == self.ranks

    def apart(self, source: Source | TableWindows, spec: ModelSpec) -> list[AdviseSettings]:
        """Return the deployments to ask for if none is named: decoders of one GPU, and one group.

        Only the group if a load table was recorded, or if the model does not fit one GPU.
        """
        group = replace(self, decoders=0)
        fits = _memory(spec, self, load_preset(self.preset), 1).fits
        return [group] if isinstance(source, TableWindows) or fits is False else [replace(self, ranks=1), group]


@dataclass(frozen=True, slots=True)
class Advised:
    """The advice for one deployment, and what was simulated."""

    model: str
    dtype: str
    recorded: int
    """Requests, or windows of a load table."""
    fleet: FleetSettings | None
    group: Groups | None
    where: str
    """The deployment in words."""
    settings: AdviseSettings
    decisions: list[Lever]
    notes: list[str]
    of_table: bool = False
    """Whether windows of a load table were recorded, not requests."""

    def decision(self, key: str) -> Lever:
        return next(decision for decision in self.decisions if decision.key == key)

    @property
    def answers(self) -> dict[str, str]:
        return {decision.key: decision.advice for decision in self.decisions}

    @property
    def verdict(self) -> str:
        """Return the recommendation: what to turn on in this deployment, and the rest by name."""
        where = f"for {self.model} in {self.dtype} on {self.where}"
        turned = []
        for advice, opening in ((ON, "turn on"), (TRY, "try")):
            chosen = [one for one in self.decisions if one.advice == advice]
            gains = [f"{one.name.lower()} ({one.chosen}, {one.gain.mean:.1f}% of {one.metric})" for one in chosen]
            if gains:
                turned.append(f"{opening} {', '.join(gains)}")
        off = [one.name.lower() for one in self.decisions if one.advice == NOT_NOW]
        left = [f"not now: {', '.join(off)}"] if off else []
        left += self._untold()
        if turned:
            return f"F{where[1:]}: {'; '.join(turned + left)}."
        if off:
            return f"Nothing pays {where}: leave things as they are; {'; '.join(left)}."
        return f"It cannot be told what pays {where}: {'; '.join(left)}."

    def _untold(self) -> list[str]:
        """Return the decisions with too little evidence, those of one reason together."""
        reasons: dict[str, list[str]] = {}
        for one in self.decisions:
            if one.advice == TOO_LITTLE:
                reasons.setdefault("" if one.chosen else one.facts[0], []).append(one.name.lower())
        said = (", ".join(names) + f" ({why})" * bool(why) for why, names in reasons.items())
        return [f"too little evidence: {', '.join(said)}"] if reasons else []

    def to_json(self) -> dict[str, Any]:
        fleet = {} if self.fleet is None else {"decoders": self.fleet.decoders, "prompts": self.fleet.prompts}
        return {
            "deployment": self.where,
            "settings": asdict(self.settings) | fleet,
            "decisions": [decision.to_json() for decision in self.decisions],
            "notes": self.notes,
            "verdict": self.verdict,
        }


def advise(
    source: Source | TableWindows,
    spec: ModelSpec,
    settings: AdviseSettings,
    report: Report = lambda *_: None,
    newest: bool = False,
) -> Advised:
    """Simulate every decision of a deployment on the recording's own requests.

    `newest`: they are the newest of a live gateway, with drawn tokens and without prefixes (:mod:`.live`).
    """
    shape = _shape(source)
    check(
        shape == (spec.num_moe_layers, spec.num_experts),
        f"the trace has {shape[0]} layers of {shape[1]} experts; {spec.name} has {spec.num_moe_layers} MoE layers of "
        f"{spec.num_experts}: name the model it was recorded on",
    )
    left = spec.num_experts % settings.ranks
    check(not left, f"num_experts={spec.num_experts} must be a multiple of ranks={settings.ranks} (remainder {left})")
    device = load_preset(settings.preset)
    _memory(spec, settings, device, max(settings.gpus, settings.ranks)).check(settings.preset)
    model = step_model(spec, device, settings.dtype, Topology(settings.gpus), engine=settings.engine)
    fleet = (
        None if isinstance(source, TableWindows) or settings.decoders == 0 else _fleet(source, spec, settings, device)
    )
    decisions: list[Lever] = []
    where = []
    if isinstance(source, TableWindows):
        of_model = f"for {spec.name} in {model.dtype}"
        decisions += [unknown(key, title, of_model, NO_REQUESTS) for key, title in TITLES.items()]
    elif fleet is not None:
        fleets = Fleets(source, model, fleet, report)
        decisions += fleets.decisions()
        where.append(fleets.deployment)
    group = _group(source, spec, settings, device, fleet, newest, report) if settings.ranks > 1 else None
    if group is not None:
        decisions += group.decisions()
        ranks = "" if settings.is_one_group_each and where else f"one expert-parallel group of {settings.ranks} ranks, "
        where.append(f"{ranks}{settings.batch:,} tokens a step")
    return Advised(
        model=spec.name,
        dtype=model.dtype,
        recorded=len(source.counts) if isinstance(source, TableWindows) else len(source.counts.requests),
        fleet=fleet,
        group=None if group is None else replace(group, report=lambda *_: None),
        where=(", " if settings.is_one_group_each else ", and ").join(where),
        settings=settings,
        decisions=decisions,
        notes=_notes(source, model.caveat, settings, fleet, newest),
        of_table=isinstance(source, TableWindows),
    )


def _shape(source: Source | TableWindows) -> tuple[int, int]:
    """Return the layers and experts of a recording."""
    if isinstance(source, TableWindows):
        return source.counts.shape[1], source.counts.shape[2]
    return source.trace.meta.num_layers, source.trace.meta.num_experts


def _memory(spec: ModelSpec, settings: AdviseSettings, device: Preset, gpus: int) -> RankMemory:
    dtype = settings.dtype or spec.weight_dtype
    return RankMemory(spec, dtype, spec.num_experts, gpus, device_bytes(device))


def _fleet(source: Source, spec: ModelSpec, settings: AdviseSettings, device: Preset) -> FleetSettings:
    recorded = len(source.counts.requests)
    prompts = settings.prompts
    if prompts is None:
        prompts = source.trace.requests.prefix_blocks is not None and not settings.prefill
    kv_tokens = settings.kv_tokens
    if kv_tokens is None and prompts:
        memory = _memory(spec, settings, device, settings.gpus)
        kv_tokens = None if memory.kv_tokens is None else int(settings.gpus * memory.kv_tokens)
    decoders = settings.decoders_for(recorded)
    return FleetSettings(
        decoders=decoders,
        in_flight=settings.in_flight,
        prefill=settings.prefill,
        prompts=prompts,
        kv_tokens=kv_tokens,
        places=settings.places,
        splits=settings.splits,
        requests=max(settings.requests, FILLS * decoders * settings.in_flight),
        seed=settings.seed,
    )


def _group(
    source: Source | TableWindows,
    spec: ModelSpec,
    settings: AdviseSettings,
    device: Preset,
    fleet: FleetSettings | None,
    newest: bool,
    report: Report,
) -> Groups:
    arrival_s = None
    division: Division | None
    if isinstance(source, TableWindows):
        counts, division = source.counts, source.division
    else:
        counts = np.asarray(source.counts.prefill + source.counts.decode, np.float64)
        times = source.trace.requests.arrival_s
        chosen = source.counts.requests
        arrival_s = None if times is None else np.asarray(times)[chosen]
        division = _rows_of(divide_requests(source.trace.num_requests, times), chosen)
    decoding = settings.ranks if fleet is None else 1 if settings.is_one_group_each else fleet.decoders
    return Groups(
        counts=counts,
        division=division,
        arrival_s=arrival_s,
        model=step_model(spec, device, settings.dtype, Topology(settings.ranks), engine=settings.engine),
        batch=settings.batch,
        decode_batch=decoding * settings.in_flight,
        splits=settings.splits,
        seed=settings.seed,
        horizon=settings.horizon,
        newest=newest,
        table=isinstance(source, TableWindows),
        report=report,
    )


def _rows_of(division: Division, chosen: NDArray[np.int64]) -> Division:
    """Return the division of all requests as rows of the chosen ones."""
    planned, scored = (np.flatnonzero(np.isin(chosen, part)) for part in (division.planned, division.scored))
    return Division(planned, scored, division.names)


def _notes(
    source: Source | TableWindows, caveat: str, settings: AdviseSettings, fleet: FleetSettings | None, newest: bool
) -> list[str]:
    of_table = isinstance(source, TableWindows)
    left_out = 0 if isinstance(source, TableWindows) else source.trace.num_requests - len(source.counts.requests)
    halved = not isinstance(source, TableWindows) and source.counts.halved
    notes = {
        "Every gain is against what runs without that decision, all else as it is: gains do not add up.": True,
        f"95% intervals are for other {'windows' if of_table else 'requests'} of this traffic, not other traffic or "
        "errors of predicted times.": True,
        caveat: bool(caveat),
        f"{fleet and fleet.decoders} decoders: half of the recording keeps no more busy; record more, or name "
        "--decoders.": fleet is not None and settings.decoders is None and fleet.decoders < 8,
        "The trace has one phase: the first half of a request stands for its prompt.": (halved and fleet is not None),
        f"{left_out} recorded requests lack a prompt or an answer and are left out; coterie plan counts them.": (
            left_out > 0
        ),
        f"Decoders compute prompts, with room for {(fleet and fleet.kv_tokens) or 0:,} tokens of KV cache each.": (
            fleet is not None and fleet.prompts
        ),
        "Experts of single tokens are drawn from the counts that the gateway keeps of each request.": newest,
        "A request's arrival is when it finished; its prompt is without tokens whose KV was cached.": newest,
        "The gateway keeps no shared prefixes: routers by prefix are not compared.": newest,
    }
    return [note for note, holds in notes.items() if holds]
