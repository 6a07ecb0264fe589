"""The requests of a what-if run, with their real loads and their predicted loads.

Requests come from an activation trace, from a model that is run on prompts, or are drawn at random. A prediction uses
only tokens that precede the running ones, and a predictor fitted on other requests; the notes report exceptions.

    execution        tokens that run                       known before
    spread, prefill  the prompt's; all, if only answers    the token ids of the prompt
                     were recorded
    decode           the answer's; all, if only prompts    the prompt: its token ids and footprint
                     were recorded

If the predictor needs the beginning of a request and none is known before it runs, the predictor sees the first half
of the request and only the second half runs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.answers.batches.drawn import DRAWN
from coterie.answers.batches.options import DRY_RUN
from coterie.answers.suites import Report
from coterie.batching.base import Loads
from coterie.errors import ConfigError, check
from coterie.footprints import footprint
from coterie.predictors import PredictRequest, predictors
from coterie.predictors.base import FittablePredictor, Predictor, PromptPredictor, StartKind, fit_phase, needs_start
from coterie.predictors.scoring import cosine, split_groups
from coterie.prompts import Prompt, load_prompts, take_in_turn
from coterie.traces import ActivationTrace, RequestTrace, TraceMeta
from coterie.traces.arrivals import ArrivalProcess, PoissonArrivals, ReplayedArrivals
from coterie.types import DECODE, PREFILL

MAX_RECORDED = 2000
"""Most recorded requests to replay, because their loads are held in memory; drawn by seed if a trace has more."""
MODEL_PROMPTS = 96
"""Number of shipped prompts to run a model on by default."""
MODEL_BATCH = 8
RECORDED = "recorded"
EXACT = (RECORDED, DRY_RUN)
"""Sources of loads that need no predictor: the recorded loads, or the dry run of the model's own router."""
PATTERNS = ("poisson", "bursty")


@dataclass(frozen=True, slots=True)
class Requests:
    """Pool of requests to serve. A run longer than the pool repeats them."""

    name: str
    top_k: int
    counts: NDArray[np.int64]
    """[request, layer, expert] tokens that really go to the expert."""
    predicted: Loads
    """[request, layer, expert] predicted tokens, which a strategy sees; per step in decode."""
    predictor: str
    domains: Sequence[str] | None = None
    """[request] name of its domain."""
    order: NDArray[np.int64] | None = None
    """Indices of the requests in recorded order of arrival; None if unknown."""
    times: RequestTrace | None = None
    """Request table of the recording with its arrival times, calibration requests included."""
    context: NDArray[np.int64] | None = None
    """[request] tokens in the KV cache before the first token that runs."""
    first: NDArray[np.int64] | None = None
    """[request] row of its first token in `expert_ids`."""
    expert_ids: NDArray[np.unsignedinteger] | None = None
    """[token, layer, k] expert ids of the tokens that run."""
    calibration: int = 0
    """Number of other requests that the predictor was fitted on."""
    notes: tuple[str, ...] = ()

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Number of tokens that run, [request]."""
        return np.asarray(self.counts[:, 0].sum(axis=1) // self.top_k, np.int64)

    @property
    def cosine(self) -> float:
        """Cosine between predicted and real loads, mean over requests and layers."""
        return float(cosine(self.predicted, self.counts).mean())


class Arrived(NamedTuple):
    """The requests of a run, in order of arrival."""

    arrival_s: NDArray[np.float64]
    """[request] arrival times in seconds: as recorded, or drawn at a mean rate of one request per second."""
    row: NDArray[np.int64]
    """[request] its index in :class:`Requests`."""

    @property
    def rate(self) -> float | None:
        """Requests per second; None if all arrive at once."""
        span = float(self.arrival_s[-1] - self.arrival_s[0])
        return (len(self.arrival_s) - 1) / span if span > 0 else None

    def at(self, rate: float) -> NDArray[np.float64]:
        """Return arrival times [request] in seconds, scaled to start at 0 with that mean rate."""
        if self.rate is None:
            raise ConfigError(f"all {len(self.row)} requests arrive at one time: they cannot be given rate={rate}")
        return np.asarray((self.arrival_s - self.arrival_s[0]) * (self.rate / rate))


# ------------------------------------------------------------------------------------------------------ arrivals


def arrive(requests: Requests, arrivals: str | RequestTrace | None, count: int, rng: Generator) -> Arrived:
    """Draw the arrival times and pool rows of `count` requests.

    `arrivals` is a pattern or a trace whose times are replayed. None keeps the recording's own times and order, if it
    has times.
    """
    rows = len(requests.counts)
    if arrivals is None and requests.times is not None:
        times = ReplayedArrivals(requests.times).draw(count, np.ones(1), rng).arrival_s
        order = np.arange(rows) if requests.order is None else requests.order
        return Arrived(times, order[np.arange(count) % rows])
    if isinstance(arrivals, RequestTrace):
        times = ReplayedArrivals(arrivals).draw(count, np.ones(1), rng).arrival_s
        return Arrived(times, rng.integers(rows, size=count))
    if arrivals != "bursty":
        return Arrived(PoissonArrivals(1.0).draw(count, np.ones(1), rng).arrival_s, rng.integers(rows, size=count))
    check(requests.domains is not None, f"{requests.name} has no domains: bursty arrivals are bursts of one domain")
    names, domain, sizes = np.unique(np.array(requests.domains), return_inverse=True, return_counts=True)
    drawn = DRAWN.arrivals("bursty", 1.0).draw(count, sizes / sizes.sum(), rng)
    row = np.empty(count, np.int64)
    for index in range(len(names)):
        of_domain = drawn.domain == index
        row[of_domain] = rng.choice(np.flatnonzero(domain == index), int(of_domain.sum()))
    return Arrived(drawn.arrival_s, row)


# ------------------------------------------------------------------------------------------------------ drawn


def synthetic(
    experts: int, top_k: int, arrivals: str | RequestTrace | None, count: int, rng: Generator
) -> tuple[Requests, Arrived]:
    """Draw `count` requests of the random workload, in one layer of `experts` experts, without repeats."""
    loads = replace(DRAWN.loads, num_experts=experts, top_k=top_k, hot=top_k)
    process: ArrivalProcess = (
        ReplayedArrivals(arrivals) if isinstance(arrivals, RequestTrace) else DRAWN.arrivals(arrivals or "poisson", 1.0)
    )
    arrived = process.draw(count, loads.mix, rng)
    counts = loads.draw(arrived.domain, rng)
    requests = Requests(
        name="synthetic",
        top_k=top_k,
        counts=counts.astype(np.int64),
        predicted=counts,
        predictor=RECORDED,
        domains=[f"domain {number}" for number in arrived.domain],
    )
    return requests, Arrived(arrived.arrival_s, np.arange(count))


# ------------------------------------------------------------------------------------------------------ recorded


def recorded(
    trace: ActivationTrace, name: str, execution: str, predictor: str, rng: Generator, dry_run: Loads | None = None
) -> Requests:
    """Return the requests of a trace; `dry_run` [request, layer, expert] is the load that a model's router predicts."""
    chosen = np.arange(trace.num_requests)
    notes = []
    if len(chosen) > MAX_RECORDED:
        notes.append(f"{MAX_RECORDED:,} of {len(chosen):,} recorded requests, drawn by seed.")
        chosen = np.sort(rng.permutation(chosen)[:MAX_RECORDED])
    made = None if predictor in EXACT else predictors.make(predictor)
    cut = _cut(trace, chosen, name, execution, predictor, None if made is None else needs_start(made))
    notes += cut.notes
    calibration, run = np.empty(0, np.int64), np.arange(cut.trace.num_requests)
    if made is not None:
        calibration, run = split_groups(_groups(cut), rng)
        notes.append(f"{len(calibration)} requests calibrate {predictor} and are not run; {len(run)} others are.")
    ids = [cut.trace.request(int(r)).only(DECODE) for r in run]
    counts = np.stack([footprint(one, trace.meta.num_experts) for one in ids])
    tokens = counts[:, 0].sum(axis=1) // trace.meta.top_k
    # The length of an answer is not known before it runs: in decode, predict the load of one token.
    seen_tokens = np.ones_like(tokens) if execution == "decode" else tokens
    if made is not None:
        predicted = _predict(cut, made, calibration, run, seen_tokens)
    elif dry_run is not None and predictor == DRY_RUN:
        predicted = dry_run[cut.rows]
    else:
        predicted = counts * (seen_tokens / tokens)[:, None, None]
    table, rows = trace.requests, cut.rows[run]
    return Requests(
        name=name,
        top_k=trace.meta.top_k,
        counts=counts.astype(np.int64),
        predicted=predicted,
        predictor=predictor,
        domains=None if table.domains is None else [table.domains[r] for r in rows],
        order=None if table.arrival_s is None else np.argsort(table.arrival_s[rows], kind="stable"),
        times=None if table.arrival_s is None else table,
        context=cut.context[run],
        first=np.concatenate([[0], np.cumsum(tokens)[:-1]]).astype(np.int64),
        expert_ids=np.concatenate(ids),
        calibration=len(calibration),
        notes=tuple(notes),
    )


class _Cut(NamedTuple):
    """A recording relabelled: tokens known before a request runs have phase prefill, tokens that run phase decode."""

    trace: ActivationTrace
    rows: NDArray[np.int64]
    """[request] its row in the recording."""
    context: NDArray[np.int64]
    prompts: list[NDArray[np.int32] | None]
    """[request] token ids that a predictor may see before the request runs; None if it may see no token."""
    notes: list[str]


def _cut(
    trace: ActivationTrace, rows: NDArray[np.int64], name: str, execution: str, predictor: str, sees: StartKind | None
) -> _Cut:
    """Cut requests into the part known before they run and the part that runs.

    `sees` is the part of a request's beginning that the predictor needs (None: no part).
    """
    parts = [trace.request(int(row)) for row in rows]
    held = {int(phase) for part in parts for phase in np.unique(part.phase)}
    wanted = DECODE if execution == "decode" else PREFILL
    notes = []
    if wanted not in held:
        kind, as_ = ("answers", "prompts") if wanted == PREFILL else ("prompts", "answers")
        notes.append(f"The trace holds {kind} only: their recorded tokens stand for {as_}.")
    before = wanted == DECODE and len(held) == 2  # the prompt was recorded as well
    halves = not before and (sees is StartKind.FOOTPRINT or (sees is StartKind.TOKENS and wanted == DECODE))
    if halves:
        notes.append(f"{predictor} sees the first half of each request; the second half runs.")
    ids, phases, token_ids, kept, context, prompts = [], [], [], [], [], []
    for row, part in zip(rows, parts, strict=True):
        runs = part.phase == wanted if wanted in held else np.ones(len(part.phase), np.bool_)
        if halves:
            runs[np.flatnonzero(runs)[: int(runs.sum()) // 2]] = False
        if not runs.any():
            continue
        start = int(np.flatnonzero(runs)[0])
        use = runs | ((np.arange(len(runs)) < start) & (before or halves))
        ids.append(part.expert_ids[use])
        phases.append(np.where(runs, DECODE, PREFILL).astype(np.uint8)[use])
        if part.token_ids is not None:
            token_ids.append(part.token_ids[use])
        given = use & ~runs if before or halves else runs
        # The token ids of a prompt are known before it runs, those of an answer are not.
        hidden = part.token_ids is None or (wanted == DECODE and not (before or halves))
        prompts.append(None if hidden or part.token_ids is None else part.token_ids[given])
        kept.append(int(row))
        unrecorded = int(trace.requests.prompt_tokens[row]) - int((part.phase == PREFILL).sum())
        context.append(start + max(0, unrecorded))
    check(kept, f"{name}: none of its {len(rows)} requests has a token to run")
    if len(kept) < len(rows):
        notes.append(f"{len(rows) - len(kept)} of {len(rows)} requests have no token to run.")
    made = ActivationTrace.from_arrays(
        trace.meta,
        np.concatenate(ids),
        np.cumsum([0, *map(len, ids)]),
        trace.requests.take(np.array(kept)),
        np.concatenate(phases),
        np.concatenate(token_ids) if len(token_ids) == len(ids) else None,
    )
    return _Cut(made, np.array(kept, np.int64), np.array(context, np.int64), prompts, notes)


def _groups(cut: _Cut) -> list[Hashable]:
    """Return a group key per request, equal for requests with the same prompt, so that a split keeps them together."""
    blocks: Sequence[Sequence[int] | NDArray[np.int64]] = cut.trace.requests.prefix_blocks or [()] * len(cut.prompts)
    alone = [int(of[0]) if len(of) else (index,) for index, of in enumerate(blocks)]
    return [
        prompt.tobytes() if prompt is not None and len(prompt) else group
        for prompt, group in zip(cut.prompts, alone, strict=True)
    ]


def _fitted(cut: _Cut, predictor: FittablePredictor, calibration: NDArray[np.int64]) -> Predictor:
    if isinstance(predictor, PromptPredictor):
        # Prompt tokens that run have phase decode in the cut trace, so the trace cannot tell which tokens are a prompt.
        prompts = [
            None if prompt is None else cut.trace.request(row).token_ids for row, prompt in enumerate(cut.prompts)
        ]
        return predictor.fit_prompts(cut.trace, calibration, DECODE, prompts)
    return predictor.fit(cut.trace, calibration, fit_phase(predictor, DECODE))


def _predict(
    cut: _Cut,
    predictor: FittablePredictor,
    calibration: NDArray[np.int64],
    run: NDArray[np.int64],
    tokens: NDArray[np.int64],
) -> Loads:
    fitted = _fitted(cut, predictor, calibration)
    domains, predicted = cut.trace.requests.domains, []
    for row, count in zip(run, tokens, strict=True):
        before = cut.trace.request(int(row)).only(PREFILL)
        request = PredictRequest(
            token_ids=cut.prompts[row],
            footprint=footprint(before, cut.trace.meta.num_experts) if len(before) else None,
            domain=None if domains is None else domains[row],
            num_tokens=int(count),
        )
        predicted.append(fitted.predict(request))
    return np.stack(predicted)


# ------------------------------------------------------------------------------------------------------ a model


class ModelRouting(NamedTuple):
    """Routing of prompts by the model itself."""

    trace: ActivationTrace
    dry_run: Loads
    """[request, layer, expert] tokens that the model's gates alone predict."""
    notes: list[str]


def route_prompts(
    folder: Path, dtype: str, device: str, prompts: Sequence[Prompt] | None, seed: int, report: Report
) -> ModelRouting:
    """Run the prompts through the whole model to record their experts, and through its gates alone to predict them."""
    from coterie.engines.transformers import ExpertCapture, dry_run, load_model
    from coterie.engines.transformers.recording import generate_batch

    report("Loading the model", 0, 1)
    loaded = load_model(folder, dtype, device)
    if prompts is None:
        shipped = load_prompts()
        # Shuffle: the shipped prompts are sorted by language.
        mixed = [shipped[i] for i in np.random.default_rng(seed).permutation(len(shipped))]
        prompts = take_in_turn(mixed, MODEL_PROMPTS)
    limit = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
    tokenised = [(prompt, _tokens(loaded.tokenizer, prompt)) for prompt in prompts]
    fitting = sorted(((p, ids) for p, ids in tokenised if 1 <= len(ids) <= limit), key=lambda item: len(item[1]))
    notes = []
    if len(fitting) < len(prompts):
        notes.append(f"{len(prompts) - len(fitting)} of {len(prompts)} prompts are empty or past {limit} tokens.")
    check(fitting, f"{folder}: none of {len(prompts)} prompts fits the model's {limit} tokens")
    capture = ExpertCapture(loaded.model)
    ids = []
    with capture:
        for start in range(0, len(fitting), MODEL_BATCH):
            report("Running the prompts", start, len(fitting))
            batch = [tokens for _, tokens in fitting[start : start + MODEL_BATCH]]
            # Generate one token, so that no token is fed back: all recorded rows belong to the prompt.
            ids += [one.expert_ids for one in generate_batch(loaded.model, capture, batch, 1, frozenset())]
    predicted = []
    for start in range(0, len(fitting), MODEL_BATCH):
        report("Asking the router", start, len(fitting))
        predicted += dry_run(loaded.model, [tokens for _, tokens in fitting[start : start + MODEL_BATCH]])
    meta = TraceMeta(loaded.name, capture.num_experts, len(capture.layer_ids), capture.top_k, capture.layer_ids)
    lengths = np.array([len(one) for one in ids], np.int64)
    table = RequestTrace(
        lengths,
        np.zeros(len(ids), np.int64),
        ids=[prompt.id for prompt, _ in fitting],
        domains=[prompt.domain or "unknown" for prompt, _ in fitting],
    )
    trace = ActivationTrace.from_arrays(
        meta,
        np.concatenate(ids),
        np.concatenate([[0], np.cumsum(lengths)]),
        table,
        np.full(int(lengths.sum()), PREFILL, np.uint8),
        np.concatenate([np.array(tokens, np.int32) for _, tokens in fitting]),
    )
    return ModelRouting(trace, np.stack([one.footprint for one in predicted]).astype(np.float64), notes)


def _tokens(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Return the token ids of a prompt, with the model's chat template if it has one."""
    text, chat = prompt.prompt, bool(getattr(tokenizer, "chat_template", None))
    if chat:
        message = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    # The template already has the special tokens. verbose=False: no warning for a long prompt, which is left out later.
    return [int(n) for n in tokenizer(text, add_special_tokens=not chat, verbose=False)["input_ids"]]
