"""Time of a MoE layer against the local activation rate, by regime: where does co-scheduling pay?

A layer on 8 ranks, each with as many tokens, load even over experts and ranks:

    layer = routing + shared experts + experts + dispatch and combine of  tokens x top-k x (1 - rate)  rows

Deduplicated dispatch sends a token once to a rank that holds several of its experts; remote experts are assumed to be
spread by chance over the other ranks. Wrong where the rate rises together with skew: the slowest rank decides, not the
mean. The exchange is DeepEP's as measured on H200s, inside a node (NVLink) or between nodes (InfiniBand). Where whole
steps of an engine were measured, routing and shared experts are in the rest of the step, not in the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from coterie.answers.figures import Theme, write_figure
from coterie.answers.suites import Report, SuiteOptions
from coterie.costs.exchange import ExchangeTraffic, Locality, all_to_all_us, uniform_locality
from coterie.costs.presets import step_model
from coterie.costs.step import Batch, StepModel
from coterie.models import get_model
from coterie.types import INFINIBAND_400G, NVLINK4, Link, ModelSpec, Topology
from coterie_lab.suites.shared import joined_by

PART, SAVING = "layer_time", "layer_saving"
RANKS = 8
MODELS = ("deepseek-v2-lite", "qwen3-30b-a3b", "gpt-oss-20b")
TOKENS = {"decode": (16, 64, 256), "prefill": (1024, 4096, 16384)}
"""Tokens of a rank in a step, by phase."""
LINKS = (NVLINK4, INFINIBAND_400G)
RATES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Local activation rates beside that of chance; the last is the bar without any communication."""
DISPATCHES = ("per activation", "deduplicated")
CONTEXT = 1024
"""Cached tokens of a request that decodes, and length of a prompt."""
PUBLISHED_SHARE = 59.2
"""Communication in percent of MoE layers' latency: DeepSeek-V2-Lite on 8 GPUs."""
RAISED = {"deepseek-v2-lite": (37.0, 41.8), "qwen3-30b-a3b": (43.0, 46.6)}
"""Model → published rise of the local activation rate, in percent or in points, and percent saved of the layer."""

SMALL_PCT = 5.0
"""Percent of a step below which scheduling is not worth it."""

Row = dict[str, Any]


class LayerTime(NamedTuple):
    """Microseconds of one MoE layer."""

    compute_us: float
    """Routing, shared experts and experts."""
    all_to_all_us: float

    @property
    def total_us(self) -> float:
        return self.compute_us + self.all_to_all_us


def locality_at(rate: float, spec: ModelSpec, ranks: int = RANKS) -> Locality:
    """Return the locality of a token at a local activation rate; remote experts are spread over the other ranks."""
    remote = spec.top_k * (1.0 - rate)
    whole = int(remote)
    ends = [_distinct_ranks(spec, count, ranks) for count in (whole, min(whole + 1, spec.top_k))]
    return Locality(spec.top_k * rate, remote, ends[0] + (remote - whole) * (ends[1] - ends[0]), 0.0)


def _distinct_ranks(spec: ModelSpec, remote: int, ranks: int) -> float:
    """Return the expected ranks that hold one of `remote` experts, drawn from all ranks but the token's own."""
    if not remote:
        return 0.0
    others = ranks - 1
    elsewhere = uniform_locality(spec.num_experts * others // ranks, remote, Topology(others))
    return elsewhere.remote_ranks * others / (others - 1)


def layer_time(model: StepModel, tokens: int, rate: float, dispatch: str) -> LayerTime:
    """Time a layer with `tokens` on every rank and even load."""
    locality = locality_at(rate, model.spec, model.topology.num_ranks)
    if dispatch == "deduplicated":
        locality = locality._replace(remote=locality.remote_ranks)
    exchange = all_to_all_us(ExchangeTraffic.of(locality, model.spec, tokens), model.topology)
    return LayerTime(compute_us(model, tokens), exchange)


def compute_us(model: StepModel, tokens: int) -> float:
    spec, ranks = model.spec, model.topology.num_ranks
    rows = np.full(spec.num_experts // ranks, ranks * tokens * spec.top_k / spec.num_experts)
    experts = model.experts_us(rows, tokens)
    bare = replace(model, spec=replace(spec, shared_intermediate_size=0))
    shared = (model.dense_s(tokens) - bare.dense_s(tokens)) / spec.num_moe_layers
    return model.routing_us(tokens) + experts + 1e6 * shared


def rest_us(model: StepModel, phase: str, tokens: int) -> float:
    """Return the time of a step outside its MoE layers, per MoE layer."""
    spec = model.spec
    prompts = max(1, tokens // CONTEXT)
    batch = Batch(tokens, tokens * CONTEXT) if phase == "decode" else Batch(0, 0, tokens, 0, prompts)
    bare = replace(model, spec=replace(spec, shared_intermediate_size=0))
    return 1e6 * (model.attention_s(batch) + bare.dense_s(tokens, batch.outputs)) / spec.num_moe_layers


class Regime(NamedTuple):
    """Everything that a layer's time depends on besides the rate."""

    model: str
    phase: str
    tokens: int
    link: Link
    dispatch: str

    def step_model(self) -> StepModel:
        return joined_by(step_model(get_model(self.model), "h200", "bf16", Topology(RANKS)), self.link)

    @property
    def columns(self) -> Row:
        return {
            "model": self.model,
            "phase": self.phase,
            "tokens_per_rank": self.tokens,
            "link": self.link.name,
            "dispatch": self.dispatch,
        }


def regimes() -> list[Regime]:
    steps = [(phase, tokens) for phase, sizes in TOKENS.items() for tokens in sizes]
    return [
        Regime(model, phase, tokens, link, dispatch)
        for model, (phase, tokens), link, dispatch in product(MODELS, steps, LINKS, DISPATCHES)
    ]


def layer_time_rows(options: SuiteOptions, report: Report) -> list[Row]:
    """Make rows of part `layer_time` (one per rate) and `layer_saving` (one per reading of the published rise)."""
    del options  # no trace, no random draws
    rows: list[Row] = []
    wanted = regimes()
    for done, regime in enumerate(wanted):
        report("Layer time", done, len(wanted))
        model = regime.step_model()
        rows += _rate_rows(regime, model)
        rows += _saving_rows(regime, model)
    return rows


def _rate_rows(regime: Regime, model: StepModel) -> list[Row]:
    chance, rest = 1.0 / RANKS, rest_us(model, regime.phase, regime.tokens)
    vanilla = layer_time(model, regime.tokens, chance, regime.dispatch)
    rows = []
    for rate in (chance, *RATES):
        layer = layer_time(model, regime.tokens, rate, regime.dispatch)
        known = regime.model == "deepseek-v2-lite" and rate == chance
        rows.append(
            {
                "part": PART,
                **regime.columns,
                "local_activation_rate": rate,
                "all_to_all_us": layer.all_to_all_us,
                "layer_us": layer.total_us,
                "communication_pct": 100.0 * layer.all_to_all_us / layer.total_us,
                "communication_of_step_pct": 100.0 * layer.all_to_all_us / (layer.total_us + rest),
                "saving_pct": 100.0 * (1.0 - layer.total_us / vanilla.total_us),
                "published": {"communication_pct": PUBLISHED_SHARE} if known else None,
            }
        )
    return rows


def _saving_rows(regime: Regime, model: StepModel) -> list[Row]:
    if regime.model not in RAISED:
        return []
    rise, published = RAISED[regime.model]
    chance = 1.0 / RANKS
    vanilla = layer_time(model, regime.tokens, chance, regime.dispatch).total_us
    rows = []
    for reading, rate in (("points", chance + rise / 100.0), ("ratio", chance * (1.0 + rise / 100.0))):
        layer_us = layer_time(model, regime.tokens, rate, regime.dispatch).total_us
        row = {"part": SAVING, **regime.columns, "reading": reading, "local_activation_rate": rate}
        row |= {"layer_us": layer_us, "saving_pct": 100.0 * (1.0 - layer_us / vanilla)}
        rows.append(row | {"published": {"saving_pct": published, "rise": rise}})
    return rows


def layer_time_notes(rows: Sequence[Row]) -> list[str]:
    """Say where communication is a large part of a layer, and which published figures can follow from it."""
    vanilla = [row for row in rows if row["part"] == PART and row["local_activation_rate"] == 1.0 / RANKS]
    half, whole = (
        [row for row in rows if row["part"] == PART and row["local_activation_rate"] == rate] for rate in (0.5, 1.0)
    )
    notes = ["Layer time: even load, 8 H200 by the step model, exchange as DeepEP was measured, no overlap."]
    for phase, sizes in TOKENS.items():
        for link in LINKS:
            mine = [row for row in vanilla if (row["phase"], row["link"]) == (phase, link.name)]
            most = [row["saving_pct"] for row in whole if (row["phase"], row["link"]) == (phase, link.name)]
            less = [row for row in half if (row["phase"], row["link"]) == (phase, link.name)]
            of_step = ", ".join(
                f"{_span([row for row in mine if row['tokens_per_rank'] == size], 'communication_of_step_pct')} at "
                f"{size:,} tokens a rank"
                for size in sizes
            )
            notes.append(
                f"{phase} on {link.name}: at the rate of chance, 1/{RANKS}, communication is "
                f"{_span(mine, 'communication_pct')} of a MoE layer; of a step {of_step}. If nothing crossed, a layer "
                f"would take {min(most):.0f} to {max(most):.0f}% less. {_pays(mine, less)}"
            )
    return [*notes, _share_note(vanilla), *_saving_notes(rows)]


def _span(rows: Sequence[Row], key: str) -> str:
    values = [row[key] for row in rows]
    return f"{min(values):.1f} to {max(values):.1f}%"


def _pays(rows: Sequence[Row], half: Sequence[Row]) -> str:
    """Say what half of the activations local would save of the step of the median regime; a latency stays."""
    steps = (row["all_to_all_us"] / row["communication_of_step_pct"] for row in rows)
    saved = [
        (row["all_to_all_us"] - less["all_to_all_us"]) / step for row, less, step in zip(rows, half, steps, strict=True)
    ]
    words = f"with half of the activations local the median step takes {np.median(saved):.1f}% less."
    can = "can" if np.median(saved) >= SMALL_PCT else "cannot"
    return f"Co-scheduling {can} pay {'' if can == 'can' else 'much '}here: {words}"


def _share_note(vanilla: Sequence[Row]) -> str:
    mine = [row for row in vanilla if row["model"] == "deepseek-v2-lite" and row["phase"] == "prefill"]
    near = min(mine, key=lambda row: abs(row["communication_pct"] - PUBLISHED_SHARE))
    model = Regime("deepseek-v2-lite", "prefill", 4096, LINKS[0], DISPATCHES[0]).step_model()
    compute, spec = compute_us(model, 4096), model.spec
    wanted_us = compute * PUBLISHED_SHARE / (100.0 - PUBLISHED_SHARE)
    nbytes = ExchangeTraffic.of(locality_at(1.0 / RANKS, spec), spec, 4096).intra_bytes
    law = model.topology.exchange[0] if model.topology.exchange else model.topology.intra
    rate = nbytes / (wanted_us / 2.0 * 1e-6 - law.latency_s)
    return (
        f"Published: communication is {PUBLISHED_SHARE}% of MoE layers, DeepSeek-V2-Lite on 8 GPUs. Nearest of ours: "
        f"{near['communication_pct']:.1f}% ({near['tokens_per_rank']} tokens a rank, {near['link']}, "
        f"{near['dispatch']}). At 4,096 tokens a rank and one copy per activation that share needs an all-to-all of "
        f"{rate / 1e9:.0f} GB/s a rank, not the measured {law.bytes_per_s / 1e9:.0f}: waiting "
        "for the slowest rank is in a published share, and not in ours."
    )


def _saving_notes(rows: Sequence[Row]) -> list[str]:
    notes = []
    for name, (rise, published) in RAISED.items():
        mine = [row for row in rows if row["part"] == SAVING and row["model"] == name]
        words = [_reading([row for row in mine if row["reading"] == reading]) for reading in ("points", "ratio")]
        removed = 100.0 * (rise / 100.0) / (1.0 - 1.0 / RANKS)
        notes.append(
            f"Published: {name}'s local activation rate up by {rise:g}%, its layer {published}% faster: "
            + "; ".join(words)
            + f". A rise of {rise:g} points removes {removed:.0f}% of what crosses: with {PUBLISHED_SHARE}% of a layer "
            f"in communication that is {PUBLISHED_SHARE * removed / 100:.0f}% of the layer, so {published}% needs more "
            "than fewer bytes (the reduce-scatter in place of the all-reduce, or better balance)."
        )
    return notes


def _reading(rows: Sequence[Row]) -> str:
    spans = [
        f"{_span([row for row in rows if (row['phase'], row['link']) == (phase, link.name)], 'saving_pct')} "
        f"in {phase} on {link.name}"
        for phase in TOKENS
        for link in LINKS
    ]
    rate = rows[0]["local_activation_rate"]
    return f"read as {rows[0]['reading']} ({100 / RANKS:.1f} to {100 * rate:.1f}%) ours saves " + ", ".join(spans)


FIGURE = "sem-moe-layer-time"
DRAWN = {"decode": 64, "prefill": 4096}
"""Tokens a rank of the two panels."""


def draw_layer_time(folder: Path, rows: Sequence[Row], model: str = "deepseek-v2-lite") -> list[Path]:
    """Write PDF and PNG: layer time against the local activation rate, decode and prefill."""
    return write_figure(partial(_fill, rows, model), folder, FIGURE, 3.4)


def _fill(rows: Sequence[Row], model: str, figure: Figure, theme: Theme) -> None:
    panels = figure.subplots(1, len(DRAWN), sharey=True)
    for axes, (phase, tokens) in zip(panels, DRAWN.items(), strict=True):
        series = [(link.name, dispatch) for link in LINKS for dispatch in DISPATCHES]
        for color, (link, dispatch) in zip(theme.series, series, strict=True):
            wanted = (PART, model, tokens, link, dispatch)
            keys = ("part", "model", "tokens_per_rank", "link", "dispatch")
            mine = [row for row in rows if tuple(row[key] for key in keys) == wanted]
            rate = [row["local_activation_rate"] for row in mine]
            left = [100.0 - row["saving_pct"] for row in mine]
            axes.plot(rate, left, color=color, marker="o", ms=3.5, label=f"{link}, {dispatch}")
        rise, saved = RAISED[model]
        axes.plot(1.0 / RANKS + rise / 100.0, 100.0 - saved, color=theme.text, marker="x", ms=7, mew=1.8, ls="none")
        axes.set(xlabel="local activation rate", title=f"{phase}, {tokens:,} tokens a rank", ylim=(0, 105))
        axes.grid(axis="y")
    panels[0].set_ylabel("MoE layer, % of its time at 1/8")
    panels[0].plot([], [], color=theme.text, marker="x", ls="none", label="published, read as points")
    panels[0].legend(fontsize=8, loc="lower left")
