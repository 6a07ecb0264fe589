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
from coterie.answers.fleet.bench import Source
from coterie.answers.page import Part, Section, write_report
from coterie.answers.runs import WORTH_PCT, error_bars, with_ends
from coterie.gateway.config import AdviseSection, GatewayConfig, WorkerEntry
from coterie.gateway.fleet.spec import RouterSpec
from coterie.placement.maps.formats import PlacementMap, replace_map
from coterie.routing import RouterFit
from coterie.traces.store import write_json

PAGE, NUMBERS, ROUTER, MAP, GATEWAY = "advice.html", "advice.json", "router.safetensors", "placement.json", "fleet.yaml"


def write_advice(
    advised: Advised, source: Source, result: dict[str, Any], folder: Path, config: GatewayConfig | None
) -> list[Path]:
    """Write the page, the numbers, and what turns on every decision whose advice is on or try it."""
    wanted = {one.key: one for one in advised.decisions if one.advice in (ON, TRY)}
    chosen, live = wanted.get("routing"), "live_loop" in wanted
    made: dict[str, Callable[[Path], object]] = {}
    if chosen is not None:
        fitted = RouterFit(advised.fleet.decoders, advised.fleet.in_flight).fit(source.counts, np.random.default_rng(0))
        made[ROUTER] = fitted.save
    if live or "placement" in wanted:
        ids = source.trace.meta.layer_ids or advised.group.model.spec.moe_layer_ids
        placed = PlacementMap(advised.group.plan().placement, advised.model, ids)
        made[MAP] = partial(replace_map, map=placed, format="vllm")
    if chosen is not None or live:
        text = _gateway(advised, chosen, live, config, folder)
        made[GATEWAY] = lambda path: path.write_text(text, encoding="utf-8")
    made[NUMBERS] = partial(write_json, value=result)
    title = f"Coterie: advice for {advised.model}"
    parts = _page(advised, Path(result["trace"]).name, list(made))
    return write_report(folder, PAGE, title, parts, made)


def _gateway(advised: Advised, routing: Lever | None, live: bool, config: GatewayConfig | None, folder: Path) -> str:
    """Return the gateway's config with the advised router and loop; without one, with workers to fill in."""
    if config is None:
        workers = [
            WorkerEntry(id=f"decode-{number}", url=f"http://decode-{number}:8000", places=4 * advised.fleet.in_flight)
            for number in range(advised.fleet.decoders)
        ]
        config = GatewayConfig(workers=workers, decode=RouterSpec(model=advised.model, ranks=advised.settings.gpus))
    if routing is not None:
        decode = msgspec.structs.replace(config.decode, router=routing.chosen, fit=str(folder / ROUTER))
        config = msgspec.structs.replace(config, decode=decode)
    if live:
        group = config.control.advise or AdviseSection(ranks=advised.settings.ranks, model=advised.model)
        group = msgspec.structs.replace(group, step_tokens=advised.settings.batch)
        control = msgspec.structs.replace(
            config.control, advise=group, apply=True, map=config.control.map or str(folder / MAP)
        )
        config = msgspec.structs.replace(config, control=control)
    return yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False)


def _page(advised: Advised, trace: str, files: list[str]) -> list[Part | Section]:
    """Return the first line with all gains, how to turn things on, a section for each decision, and the conditions."""
    fleet = advised.fleet
    prompts = ", which compute prompts as well" if fleet.prompts else ""
    simulated = Part(
        "What was simulated",
        [
            f"{advised.recorded:,} recorded requests of {trace}, {advised.model} in {advised.dtype} on "
            f"{advised.settings.preset}.",
            f"Routing, batching and graph sizes: {fleet.decoders} decoders with {fleet.in_flight} requests on each"
            f"{prompts}. Placement: {advised.settings.ranks} ranks, {advised.settings.batch:,} tokens a step.",
            *advised.notes,
        ],
    )
    turned = [f"{one.name}: {one.do}" for one in advised.decisions if one.advice in (ON, TRY)]
    then = Part("How to turn it on", [*turned, f"Files beside this page: {', '.join(files)}"])
    overview = Section(
        key="gains",
        title="What each decision gains",
        meaning="The best way to take each decision, with its 95% interval; the dashed line is 1%, which is worth it.",
        columns=("decision", "advice", "gain"),
        rows=[(one.name, one.advice, _gain(one)) for one in advised.decisions],
        plot=partial(_draw, [(one.name, one.gain) for one in advised.decisions]),
        alt="Gains of the decisions in percent, with intervals.",
        height_in=0.9 + 0.42 * len(advised.decisions),
    )
    return [Part("In short", [advised.verdict]), overview, then, *map(_section, advised.decisions), simulated]


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
