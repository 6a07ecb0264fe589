"""Files that turn the advice on: a fitted router, a placement map for vLLM, a gateway's config; and the page."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml

from coterie.answers import figures
from coterie.answers.advise.advising import Advised
from coterie.answers.advise.decisions import ON, TRY, Lever
from coterie.answers.advise.tables import TableWindows
from coterie.answers.fleet.bench import Source
from coterie.answers.page import Part, Section, write_report
from coterie.answers.runs import WORTH_PCT, error_bars, with_ends
from coterie.costs.cells import preset_names
from coterie.gateway.config import FILL_IN, AdviseSection, GatewayConfig, Role, WorkerEntry
from coterie.gateway.fleet.spec import RouterSpec
from coterie.placement.maps.formats import PlacementMap, replace_map
from coterie.routing import RouterFit
from coterie.traces.store import write_json

PAGE, NUMBERS, ROUTER, MAP = "advice.html", "advice.json", "router.safetensors", "placement.json"
FLEET, GROUP = "fleet.yaml", "group.yaml"
"""Gateway's config of a fleet, and of an expert-parallel group by itself."""
EVENTS_PORT = 5602
"""Port of the plugin's expert events in the pages of vLLM."""


def write_advice(
    advice: list[Advised],
    source: Source | TableWindows,
    result: dict[str, Any],
    folder: Path,
    config: GatewayConfig | None,
) -> list[Path]:
    """Write the page, the numbers, and what turns on every decision whose advice is on or try it.

    Configs name the files beside them by their names alone: a gateway reads them from the config's own folder.
    """
    made: dict[str, Callable[[Path], object]] = {}
    for advised in advice:
        wanted = _wanted(advised)
        chosen, live = wanted.get("routing"), "live_loop" in wanted
        if chosen is not None and advised.fleet is not None and isinstance(source, Source):
            router = RouterFit(advised.fleet.decoders, advised.fleet.in_flight)
            made[ROUTER] = router.fit(source.counts, np.random.default_rng(0)).save
        if advised.group is not None and (live or "placement" in wanted):
            placed = PlacementMap(advised.group.plan().placement, advised.model, _layer_ids(source, advised))
            made[MAP] = partial(replace_map, map=placed, format="vllm")
        if name := config_name(advised):
            text = _gateway(advised, chosen, live, config)
            made[name] = partial(Path.write_text, data=text, encoding="utf-8")
    made[NUMBERS] = partial(write_json, value=result)
    title = f"Coterie: advice for {advice[0].model}"
    parts = _page(advice, Path(result["trace"]).name, list(made))
    return write_report(folder, PAGE, title, parts, made)


def _wanted(advised: Advised) -> dict[str, Lever]:
    return {one.key: one for one in advised.decisions if one.advice in (ON, TRY)}


def config_name(advised: Advised) -> str | None:
    """Return the file of the gateway's config; None if nothing in it is advised."""
    if not {"routing", "live_loop"} & {*_wanted(advised)}:
        return None
    return GROUP if advised.fleet is None else FLEET


def _layer_ids(source: Source | TableWindows, advised: Advised) -> tuple[int, ...] | None:
    if isinstance(source, TableWindows):
        return source.layer_ids
    assert advised.group is not None
    return source.trace.meta.layer_ids or advised.group.model.spec.moe_layer_ids


def _gateway(advised: Advised, routing: Lever | None, live: bool, config: GatewayConfig | None) -> str:
    """Return the gateway's config with the advised router and loop; without one, with hosts to fill in."""
    given = config or _to_fill_in(advised, live)
    if routing is not None:
        decode = msgspec.structs.replace(given.decode, router=routing.chosen, fit=ROUTER)
        given = msgspec.structs.replace(given, decode=decode)
    if live:
        group = given.control.advise or AdviseSection(ranks=advised.settings.ranks, model=advised.model)
        group = msgspec.structs.replace(group, step_tokens=advised.settings.batch)
        enabled = given.control.enabled if routing is not None or given.decode.fit is not None else True
        control = msgspec.structs.replace(
            given.control, enabled=enabled, advise=group, apply=True, map=given.control.map or MAP
        )
        given = msgspec.structs.replace(given, control=control)
    text = yaml.safe_dump(msgspec.to_builtins(given), sort_keys=False)
    return text if config is not None else f"# Put the host of every worker in place of {FILL_IN}.\n{text}"


def _to_fill_in(advised: Advised, live: bool) -> GatewayConfig:
    """Return the config of the fleet that was simulated, or of a group by itself, without hosts.

    Footprints come from prefill workers; where decoders compute prompts, each serves whole requests.
    """
    fleet, settings = advised.fleet, advised.settings
    whole = fleet is None or fleet.prompts
    decoders = 1 if fleet is None else fleet.decoders
    requests = 4 * settings.in_flight * (settings.ranks if fleet is None else 1)
    names: list[tuple[str, Role]] = [(f"decode-{number}", "both" if whole else "decode") for number in range(decoders)]
    if not whole:
        names = [(f"prefill-{number}", "prefill") for number in range(max(1, settings.prefill))] + names
    workers = [
        WorkerEntry(
            id=name,
            url=f"http://{FILL_IN}:8000",
            role=role,
            places=settings.places or requests,
            expert_events=f"tcp://{FILL_IN}:{EVENTS_PORT}" if live else None,
        )
        for name, role in names
    ]
    device = settings.preset if settings.preset in preset_names() else str(Path(settings.preset).absolute())
    ranks = settings.ranks if fleet is None else settings.gpus
    decode = RouterSpec(model=advised.model, device=device, dtype=settings.dtype, engine=settings.engine, ranks=ranks)
    return GatewayConfig(workers=workers, handshake="none" if whole else "vllm", decode=decode)


def _page(advice: list[Advised], trace: str, files: list[str]) -> list[Part | Section]:
    """Return the recommendations with all gains, how to turn things on, each decision, and the conditions."""
    first, decisions = advice[0], [one for advised in advice for one in advised.decisions]
    simulated = Part(
        "What was simulated",
        [
            f"{first.recorded:,} recorded {'windows' if first.of_table else 'requests'} of {trace}, {first.model} in "
            f"{first.dtype} on {first.settings.preset}: {'; '.join(advised.where for advised in advice)}.",
            *dict.fromkeys(note for advised in advice for note in advised.notes),
        ],
    )
    turned = [f"{one.name}: {one.do}" for one in decisions if one.advice in (ON, TRY)]
    then = Part("How to turn it on", [*turned, f"Files beside this page: {', '.join(files)}"])
    overview = Section(
        key="gains",
        title="What each decision gains",
        meaning="The best way to take each decision, with its 95% interval; the dashed line is 1%, which is worth it.",
        columns=("decision", "advice", "gain"),
        rows=[(one.name, one.advice, _gain(one)) for one in decisions],
        plot=partial(_draw, [(one.name, one.gain) for one in decisions]),
        alt="Gains of the decisions in percent, with intervals.",
        height_in=0.9 + 0.42 * len(decisions),
    )
    return [
        Part("In short", [advised.verdict for advised in advice]),
        overview,
        then,
        *map(_section, decisions),
        simulated,
    ]


def _gain(decision: Lever) -> str:
    return f"{with_ends(decision.gain, unit='%')} of {decision.metric}" if decision.chosen else "not known"


def _section(decision: Lever) -> Section:
    return Section(
        key=decision.key,
        title=f"{decision.title}: {decision.advice}",
        meaning=decision.sentence,
        columns=("way", f"gain, % of {decision.metric}"),
        rows=[(arm.name, with_ends(arm.gain)) for arm in decision.arms],
        plot=partial(_draw, list(decision.arms)) if len(decision.arms) > 1 else None,
        alt=f"Gains of every way to take the decision, in percent of {decision.metric}, with intervals.",
        height_in=0.9 + 0.42 * len(decision.arms),
    )


def _draw(arms: list[tuple[Any, ...]], axes: Any, theme: figures.Theme) -> None:
    """Draw a bar for every gain, the first at the top."""
    shown = arms[::-1]
    values = [gain for _, gain, *_ in shown]
    at, means = np.arange(len(shown)), [gain.mean for gain in values]
    axes.barh(at, means, 0.55, color=[theme.series[0 if mean >= WORTH_PCT else 1] for mean in means])
    for row, gain in enumerate(values):
        if (bars := error_bars([gain])) is not None:
            axes.errorbar([gain.mean], [row], xerr=bars, color=theme.text, ls="none", lw=1.2, capsize=3)
    axes.axvline(0, color=theme.muted, lw=0.8)
    axes.axvline(WORTH_PCT, color=theme.muted, lw=0.8, ls="--")
    axes.set_yticks(at, [str(name) for name, *_ in shown])
    axes.tick_params(axis="y", colors=theme.text, length=0)
    axes.set_xlabel("% saved (95%)")
    axes.grid(axis="x")
