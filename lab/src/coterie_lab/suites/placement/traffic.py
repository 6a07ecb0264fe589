"""Steps to plan for and steps to score on, from real routing: recorded requests, and GLM-5.2's counts by domain.

A step holds some recorded requests: in prefill all their recorded tokens, in decode one token of each. Half of the
requests are planned on, steps of the other half are scored. GLM-5.2 has only counts, ten domains of eight chunks: half
of every domain's chunks are planned on, the others are scored (:data:`GLM_TRAFFIC` says how).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.errors import UnavailableError
from coterie.footprints import footprint
from coterie.models import get_model
from coterie.placement import Load
from coterie.placement.scenarios import steps_of_requests, steps_of_trace
from coterie.prompts import load_prompts, take_in_turn
from coterie.traces import ActivationTrace
from coterie.traces.activations import TraceMeta
from coterie.traces.readers import read_as
from coterie.traces.requests import RequestTrace
from coterie.types import ModelSpec
from coterie_lab.suites.eldr.fleets import TRACES
from coterie_lab.suites.latency_optimal.domains import domain_loads
from coterie_lab.suites.migration.traffic import area_of

Array = NDArray[np.float64]

GLM, TINY = "glm-5.2", "coterie-tiny"
RECORDED = (*TRACES, TINY)
PRICED_AS = {TINY: "gpt-oss-20b"}
"""Shapes that lend their prices: coterie-tiny has gpt-oss-20b's 32 experts and top 4, and no prices of its own."""
REQUESTS = (1, 4, 16, 64)
"""Requests a step."""
SAMPLE_STEPS = 150
"""Steps that are planned on, and steps that are scored."""
ONE_DOMAIN, MIX, LEFT_OUT = "one domain", "mix", "domain left out"
GLM_TRAFFIC = (ONE_DOMAIN, MIX, LEFT_OUT)
"""One domain: every step has traffic of one domain; planned on means of a domain's chunks but one, scored on each
domain's mean. Mix: all domains in equal parts; planned on mixtures of such means, scored on the mixture of all chunks.
Domain left out: as one domain, planned without the domain that is scored, four of them in turn."""
TINY_PROMPTS, TINY_TOKENS = 240, 96
"""Shipped prompts that coterie-tiny is given, and most tokens of each: it runs on NumPy here."""
GLM_TOKENS = {"rows": 16_384, "prefill": 16_384, "decode": 1_024}
"""Tokens a step of GLM-5.2, over all ranks."""
EVERY_LAYER = {GLM: 5, "gpt-oss-20b": 2, "deepseek-v2-lite": 3, TINY: 2}
"""Stride of the layers that are planned and scored, from the first: layers differ little in what is compared."""
EVERY_DOMAIN = 3
"""Stride of the domains of GLM-5.2 that are left out in turn."""


class Sample(NamedTuple):
    """Steps to plan on, and steps to score on."""

    fit: Load
    unseen: Load


class Recorded(NamedTuple):
    """Requests with the experts of every token."""

    name: str
    trace: ActivationTrace
    footprints: NDArray[np.uint32]
    """[request, layer, expert] of the layers that are planned."""
    areas: NDArray[np.str_]
    """[request] subject or domain."""

    def halves(self, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the requests to plan on, and to score."""
        order = np.random.default_rng([seed, 0]).permutation(len(self.footprints))
        return order[: len(order) // 2], order[len(order) // 2 :]

    def sample(self, requests: int, phase: str, seed: int) -> Sample:
        """Draw steps of so many requests each."""
        rng = np.random.default_rng([seed, requests, phase == "decode"])
        fit, unseen = (self._steps(half, requests, phase, rng) for half in self.halves(seed))
        return Sample(*(Load.of_scenarios(steps, whole_steps=True) for steps in (fit, unseen)))

    def of_areas(self, areas: Sequence[str], requests: int, steps: int, seed: int) -> tuple[Array, Array]:
        """Draw prefill steps of these areas only, to plan on and to score: tokens [step, layer, expert]."""
        rng = np.random.default_rng([seed, requests, 2])
        wanted = np.isin(self.areas, areas)
        fit, unseen = (
            steps_of_requests(self.footprints[half[wanted[half]]], requests, steps, rng) for half in self.halves(seed)
        )
        return fit, unseen

    def _steps(self, chosen: NDArray[np.int64], requests: int, phase: str, rng: Generator) -> Array:
        if phase == "decode":
            return steps_of_trace(self.trace, requests, SAMPLE_STEPS, rng, chosen=chosen)[:, :: EVERY_LAYER[self.name]]
        return steps_of_requests(self.footprints[chosen], requests, SAMPLE_STEPS, rng)


def spec_of(trace: str) -> ModelSpec:
    """Return the shape by whose prices a trace's steps are timed."""
    return get_model(PRICED_AS.get(trace, trace))


@lru_cache(maxsize=4)
def read_recorded(name: str, data: Path | None) -> Recorded:
    """Read a recorded trace, or run coterie-tiny on the shipped prompts."""
    if name == TINY:
        trace = _tiny_trace()
    elif data is None:
        raise UnavailableError(f"{name} needs recorded routing: set COTERIE_DATA to the folder of real data")
    else:
        trace = _one_phase(read_as(ActivationTrace, data / "activations" / TRACES[name]))
    labels = trace.requests.domains or [""] * trace.num_requests
    counted = [footprint(trace.request(row).expert_ids, trace.meta.num_experts) for row in range(trace.num_requests)]
    areas = np.array([area_of(label, len(set(labels))) for label in labels])
    return Recorded(name, trace, np.array(counted)[:, :: EVERY_LAYER[name]], areas)


def _one_phase(trace: ActivationTrace) -> ActivationTrace:
    """Mark all tokens as decoded: any token of a request may stand for its token of a decode step."""
    tokens, offsets = trace.arrays()
    return ActivationTrace.from_arrays(trace.meta, tokens.expert_ids, offsets, trace.requests)


def _tiny_trace() -> ActivationTrace:
    """Record the experts of some shipped prompts' first tokens in coterie-tiny."""
    from coterie.engines.tiny import tiny_model_path
    from coterie.engines.worker.model import RequestRows
    from coterie.engines.worker.numpy_model import NumpyModel

    prompts = take_in_turn(load_prompts(), TINY_PROMPTS)
    model = NumpyModel(tiny_model_path(), len(prompts), TINY_TOKENS)
    tokens = [model.tokenizer.encode(prompt.prompt)[:TINY_TOKENS] for prompt in prompts]
    ids = model.step([RequestRows(prompt, 0, [block], False) for block, prompt in enumerate(tokens)]).expert_ids
    lengths = np.array([len(prompt) for prompt in tokens], np.int64)
    shape = model.capture
    meta = TraceMeta(model=TINY, num_experts=shape.num_experts, num_layers=len(shape.layer_ids), top_k=shape.top_k)
    domains = [prompt.domain for prompt in prompts]
    requests = RequestTrace(prompt_tokens=np.zeros(len(prompts), np.int64), output_tokens=lengths, domains=domains)
    return ActivationTrace.from_arrays(meta, ids, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), requests)


class Chunks(NamedTuple):
    """Shares of a layer's tokens, by domain."""

    domains: tuple[str, ...]
    shares: Array
    """[domain, chunk, layer, expert]"""

    def halves(self, seed: int) -> tuple[Array, Array]:
        """Return chunks to plan on and to score: even and odd ones for seed 0, else drawn within each domain."""
        count = self.shares.shape[1]
        if not seed:
            return self.shares[:, 0::2], self.shares[:, 1::2]
        rng = np.random.default_rng([seed, 0])
        order = np.array([rng.permutation(count) for _ in self.domains])[:, :, None, None]
        drawn = np.take_along_axis(self.shares, order, axis=1)
        return drawn[:, : count // 2], drawn[:, count // 2 :]


@lru_cache(maxsize=1)
def read_chunks(data: Path) -> Chunks:
    loads = domain_loads(data / "activations" / GLM / "expert_counts.npz")
    tokens = np.stack(list(loads.values()))
    some = tokens[:, :, :: EVERY_LAYER[GLM]]
    return Chunks(tuple(loads), np.asarray(some / some.sum(axis=3, keepdims=True)))


def glm_samples(chunks: Chunks, traffic: str, phase: str, seed: int) -> list[Sample]:
    """Return one sample, or one per domain that is left out."""
    rows = GLM_TOKENS[phase] * get_model(GLM).top_k
    fit, unseen = (rows * half for half in chunks.halves(seed))
    fit = but_one(fit)
    if traffic == ONE_DOMAIN:
        return [Sample(one_domain(fit), Load.of_scenarios(unseen.mean(axis=1)))]
    if traffic == MIX:
        return [Sample(mixed(fit, np.random.default_rng([seed, 1])), Load(unseen.mean(axis=(0, 1))))]
    each = np.arange(len(chunks.domains))
    return [Sample(one_domain(fit[each != out]), Load(unseen[out].mean(axis=0))) for out in each[::EVERY_DOMAIN]]


def but_one(tokens: Array) -> Array:
    """Return means of a domain's chunks without one of them, for each chunk: [domain, chunk, layer, expert].

    These are as many scenarios as chunks, and nearly as smooth as the mean of all, which is scored: a plan for single
    chunks would fit their noise.
    """
    return np.asarray((tokens.sum(axis=1, keepdims=True) - tokens) / (tokens.shape[1] - 1))


def one_domain(tokens: Array) -> Load:
    """Make a scenario of each domain and chunk of tokens [domain, chunk, layer, expert], domain by domain."""
    return Load.of_scenarios(tokens.reshape(-1, *tokens.shape[2:]))


def mixed(tokens: Array, rng: Generator, rounds: int = 16) -> Load:
    """Make scenarios of one chunk per domain, from [domain, chunk, layer, expert]; a round uses every chunk once."""
    domains, chunks = tokens.shape[:2]
    drawn = rng.permuted(np.tile(np.arange(chunks), (rounds, domains, 1)), axis=2)  # [round, domain, scenario]
    rows = np.moveaxis(drawn, 2, 1).reshape(-1, domains)
    return Load.of_scenarios(np.array([tokens[np.arange(domains), row].mean(axis=0) for row in rows]))
