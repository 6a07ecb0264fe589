"""Traffic that turns from one group of domains to the next: recorded requests of gpt-oss-20b, loads of GLM-5.2.

gpt-oss-20b: every recorded request is cut into pieces of `PIECE` tokens, each a request of its own: the first half is
the prompt, the second is decoded. A piece is served once. Some recordings of every group of subjects are set apart to
fit on; no piece of them is served.

GLM-5.2: only counts were recorded, ten domains of eight shards. A request belongs to a shard, and its tokens' experts
are drawn from that shard's shares (:mod:`coterie.traces.synthetic`): requests differ less than real ones do. Half of
every domain's shards are set apart to fit on. `LAYERS` of its 75 layers are served, taken evenly: all parts of a step
are shorter by that factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.costs.presets import step_model
from coterie.costs.step import StepModel
from coterie.footprints.counting import footprint
from coterie.models import get_model
from coterie.routing import Calibration
from coterie.sim.fleet.requests import FleetRequests, Recordings
from coterie.traces import ActivationTrace
from coterie.traces.arrivals import RecordedLengths
from coterie.traces.synthetic import SyntheticSettings, generate
from coterie_lab.suites.eldr.fleets import recorded_source
from coterie_lab.suites.latency_optimal.domains import domain_loads
from coterie_lab.suites.migration.traffic import area_of

GPT_OSS, GLM = "gpt-oss-20b", "glm-5.2"
PIECE = 48
"""Tokens of a request: so short that 410 recordings give four groups of subjects some hundred requests each."""
SUBJECTS = (("physics", "maths"), ("society", "law"), ("life", "chemistry"), ("business", "computing", "other"))
"""Areas of subjects, group by group, of about as many tokens each."""
TURNS = (
    ("math", "reasoning", "science", "code_raw"),
    ("books", "news", "chat", "wiki"),
    ("code_instruct", "web", "math", "books"),
)
"""GLM-5.2's domains that are served together, turn by turn."""
APART = 1 / 3
"""Share of the recordings of a group that are set apart to fit on."""
LAYERS = 15
GLM_TOKENS = (32, 64)
"""Prompt and output tokens of a GLM-5.2 request."""


class Turns(NamedTuple):
    """Traffic of one seed."""

    model: StepModel
    requests: FleetRequests
    """In order of service."""
    turn: NDArray[np.int64]
    """[request] turn it belongs to."""
    fits: list[Calibration]
    """[turn] requests set apart, which are never served."""


def read_turns(trace: str, data: Path, seed: int, requests: int, glm_tokens: tuple[int, int] = GLM_TOKENS) -> Turns:
    """`requests` bounds the requests of a turn; `glm_tokens` are the prompt and output tokens of GLM-5.2's requests."""
    return _subjects(data, seed, requests) if trace == GPT_OSS else _domains(data, seed, requests, glm_tokens)


def _subjects(data: Path, seed: int, requests: int) -> Turns:
    source = recorded_source(data, GPT_OSS)
    domains = source.trace.requests.domains or []
    areas = [area_of(label, len(set(domains))) for label in domains]
    rng = np.random.default_rng([seed, 0])
    served, turn, fits = [], [], []
    for number, group in enumerate(SUBJECTS):
        rows = rng.permutation([row for row, area in enumerate(areas) if area in group])
        cut = round(APART * len(rows))
        fits.append(_counted(_pieces(source.trace, rows[:cut]), GPT_OSS, 4, PIECE // 2))
        pieces = _pieces(source.trace, rows[cut:])
        pieces = [pieces[at] for at in rng.permutation(len(pieces))[:requests]]
        served += pieces
        turn += [number] * len(pieces)
    model = step_model(get_model(GPT_OSS), "h200", "bf16")
    return Turns(model, _requests_of(served, model.spec.num_experts), np.array(turn), fits)


def _pieces(trace: ActivationTrace, rows: NDArray[np.int64]) -> list[NDArray[np.integer]]:
    """Cut recordings into pieces: expert ids [token, layer, k] each; the rest at the end of a recording is dropped."""
    requests = (np.asarray(trace.request(int(row)).expert_ids) for row in rows)
    return [ids[at : at + PIECE] for ids in requests for at in range(0, len(ids) - PIECE + 1, PIECE)]


def _domains(data: Path, seed: int, requests: int, tokens: tuple[int, int]) -> Turns:
    loads = _loads(data)
    rng = np.random.default_rng([seed, 0])
    spec = get_model(GLM)
    dense = spec.num_layers - spec.num_moe_layers
    model = step_model(replace(spec, num_layers=dense + LAYERS), "h200")
    served, turn, fits = [], [], []
    for number, group in enumerate(TURNS):
        halves = [np.split(shards, [len(shards) // 2]) for shards in (rng.permutation(loads[name]) for name in group)]
        fitting, serving = (np.concatenate(half) for half in zip(*halves, strict=True))
        fits.append(_counted(_drawn(fitting, requests // 2, rng, tokens), GLM, spec.top_k, tokens[0]))
        pieces = _drawn(serving, requests, rng, tokens)
        served += pieces
        turn += [number] * len(pieces)
    return Turns(model, _requests_of(served, spec.num_experts, tokens[0]), np.array(turn), fits)


@lru_cache(maxsize=1)
def _loads(data: Path) -> dict[str, NDArray[np.float64]]:
    """Return for each domain shares [shard, layer, expert] of some layers."""
    shares = {}
    for name, tokens in domain_loads(data / "activations" / GLM / "expert_counts.npz").items():
        layers = np.linspace(0, tokens.shape[1] - 1, LAYERS).round().astype(int)
        some = tokens[:, layers] + 1e-3
        shares[name] = np.asarray(some / some.sum(axis=2, keepdims=True))
    return shares


def _drawn(
    shards: NDArray[np.float64], count: int, rng: Generator, tokens: tuple[int, int]
) -> list[NDArray[np.integer]]:
    prompt, output = tokens
    settings = SyntheticSettings(
        model=GLM,
        num_experts=shards.shape[2],
        num_layers=shards.shape[1],
        top_k=get_model(GLM).top_k,
        domains=tuple(f"shard {at}" for at in range(len(shards))),
        concentration=np.inf,
        lengths=RecordedLengths(np.array([prompt]), np.array([output])),
        preferences=shards,
    )
    trace = generate(settings, rng, requests=count)
    return [np.asarray(trace.request(row).expert_ids) for row in range(count)]


def _requests_of(pieces: Sequence[NDArray[np.integer]], experts: int, prompt: int = PIECE // 2) -> FleetRequests:
    lengths = np.array([len(ids) for ids in pieces])
    first = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    prompts = np.full(len(pieces), prompt, np.int64)
    recordings = Recordings(
        np.concatenate(pieces),
        experts,
        first,
        prompts,
        first + prompts,
        lengths - prompts,
        np.array([footprint(ids[:prompt], experts) for ids in pieces]),
    )
    return FleetRequests(recordings, np.arange(len(pieces)), prompts, recordings.decode_rows)


def _counted(pieces: Sequence[NDArray[np.integer]], model: str, top_k: int, prompt: int) -> Calibration:
    experts = get_model(model).num_experts
    return Calibration(
        prefill=np.array([footprint(ids[:prompt], experts) for ids in pieces], np.uint32),
        decode=np.array([footprint(ids[prompt:], experts) for ids in pieces], np.uint32),
        gates=None,
        requests=np.arange(len(pieces)),
        halved=True,
        model=model,
        top_k=top_k,
    )
