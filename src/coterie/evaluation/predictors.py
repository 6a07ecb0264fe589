"""Predictors against the truth: how well is a request's load known before it runs?

Requests are split once, by seed: predictors are fitted on one part and scored on the other, and requests with the same
prompt stay on the same side. What is predicted depends on what a trace holds:

    prefill and decode    prefill from the prompt's tokens; decode from the prompt's tokens, and from its footprint
    one of them only      all of a request; and its second half from its first, which stands in for a prefill

Recent popularity is asked in the order of the requests, and knows of the calibration requests those before. With a
model, some requests are asked once more after their answer: there first turns calibrate, and second turns test.

A row says what the predictor was given (`knows`). Rows that know the very tokens they predict bound what a table of
tokens can do: no one has a request's output before it runs. docs/predictors.md has the results in words.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, TraceError
from coterie.evaluation.suites import Column, Report, Suite, SuiteOptions, SuiteResult, SuiteTable, suites
from coterie.footprints import footprint
from coterie.predictors import (
    DomainPredictor,
    PopularityPredictor,
    Predictor,
    PredictRequest,
    Prefix,
    PrefixIndex,
    RecentPopularity,
    Recorded,
    Score,
    SimilarPrefix,
    TokenTable,
    score,
)
from coterie.predictors.base import Load
from coterie.predictors.recent import arrived
from coterie.prompts import Prompt, load_prompts, take_in_turn
from coterie.traces.activations import ActivationTrace, concat_requests
from coterie.traces.readers import read_trace
from coterie.traces.requests import RequestTrace
from coterie.traces.writers import kind_of
from coterie.types import DECODE, PREFILL

if TYPE_CHECKING:
    from coterie.engines.transformers import LoadedModel

NAME = "predictors"
TRACES = ("gpt-oss-20b", "deepseek-v2-lite")
"""Folders under activations/ of the real data."""
SERVICE = Path("requests") / "mooncake" / "conversation_trace.jsonl"
"""Of the real data: requests of a service with the hashes of their prompts' blocks, without routing."""
TEST_SHARE = 0.3
"""Of the groups of requests; the others calibrate."""
MAX_REQUESTS = 2000
"""Of a trace, drawn by seed where there are more: they are held in memory."""
MODEL_REQUESTS = 96
MODEL_MAX_TOKENS = 48
WORKERS = 8
"""That domains are dealt to in turn, for popularity by worker: recorded requests do not say who served them."""
MODEL_TURNS = 32
"""Requests of which a model is asked once more, after its answer."""
NEXT_TURN = "Please go on."
MIN_TOKENS = 4
"""Recorded tokens a request must have: of fewer, halves say nothing."""

_OWN = "the tokens predicted"


class Question(NamedTuple):
    """What of a request is predicted, and from what."""

    predicts: str
    truth: int | None
    """Phase of the tokens predicted; None is all."""
    given: int | None
    """Phase of the tokens known, where they are others than those predicted."""
    given_name: str = ""


class Case(NamedTuple):
    """A trace, ready to be split."""

    name: str
    trace: ActivationTrace
    questions: tuple[Question, ...]
    groups: list[Hashable]
    """[request] equal where requests share their prompt."""
    prompts: list[NDArray[np.int64]] | None = None
    """[request] token ids of prompts whose routing was not recorded."""
    dry_run: TokenTable | None = None
    parts: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
    """Calibration and test requests, where they are not to be drawn."""


class Contender(NamedTuple):
    """A predictor, and what it is asked."""

    predictor: Predictor
    name: str
    knows: str
    requests: list[PredictRequest]
    hit_rate: float | None = None
    """Share of the requests for which an earlier one alike was found, where one is looked for."""


def run(options: SuiteOptions, report: Report) -> SuiteResult:
    notes: list[str] = []
    rows: list[dict[str, Any]] = []
    loads: list[Callable[[], list[Case]]] = []
    if options.model is not None:
        loads.append(lambda: _model_cases(options, report, notes))
    for path in _traces(options, notes):
        loads.append(lambda path=path: _trace_cases(path, options, notes))  # type: ignore[misc]
    for done, load in enumerate(loads):
        report("Reading", done, len(loads))
        for case in load():
            report(f"Scoring on {case.name}", done, len(loads))
            rows += _case_rows(case, options.seed, notes)
    service = None if options.data is None or options.trace or options.model else options.data / SERVICE
    if service is not None and service.exists():
        notes.append(_alike_in_service(service))
    if rows:
        notes.append(
            f"Intervals are 95%, over test requests drawn anew. `knows: {_OWN}` bounds what a table of tokens can do: "
            "before a request runs, no one has its output. `alike` is the share of test requests for which an earlier "
            "one that began alike was found."
        )
    return SuiteResult(NAME, rows, notes)


# --------------------------------------------------------------------------------------------------- where from


def _traces(options: SuiteOptions, notes: list[str]) -> list[Path]:
    if options.trace is not None:
        return [options.trace]
    if options.model is not None:
        return []
    if options.data is None:
        notes.append("Nothing scored: give --trace or --model, or set COTERIE_DATA (docs/data.md).")
        return []
    wanted = [options.data / "activations" / name for name in TRACES]
    notes += [f"Not scored: {path} does not exist." for path in wanted if not path.exists()]
    return [path for path in wanted if path.exists()]


def _trace_cases(path: Path, options: SuiteOptions, notes: list[str]) -> list[Case]:
    trace = read_trace(path, options.trace_format)
    if not isinstance(trace, ActivationTrace):
        raise TraceError(path, "kind", f"found {kind_of(trace)!r}, expected 'activations'")
    name = path.resolve().name if path.is_dir() else path.stem
    texts = _sidecar_texts(path) if trace.arrays()[0].token_ids is None else None
    prompts = None
    groups: list[Hashable]
    if texts is not None:
        trace, prompts, groups = _with_token_strings(trace, texts, options, name, notes)
    else:
        trace = _long_enough(trace, _drawn(trace, options, name, notes), name, notes)
        groups = _groups(trace)
    phases = np.unique(trace.arrays()[0].phase)
    if len(phases) == 2:
        return [Case(name, trace, _TWO_PHASES, groups, prompts)]
    all_of = f"all {'prefill' if phases[0] == PREFILL else 'decode'}"
    return [
        Case(name, trace, (Question(all_of, None, None),), groups, prompts),
        Case(name, _halved(trace), (Question("second half", DECODE, PREFILL, "first half"),), groups),
    ]


_TWO_PHASES = (Question("prefill", PREFILL, None), Question("decode", DECODE, PREFILL, "prompt"))


def _model_cases(options: SuiteOptions, report: Report, notes: list[str]) -> list[Case]:
    from coterie.engines.transformers import RecordingSettings, load_model, record
    from coterie.engines.transformers.predictor import dry_run_table

    assert options.model is not None
    loaded = load_model(options.model)
    room = _room(loaded)
    shipped = load_prompts()
    mixed = [shipped[i] for i in np.random.default_rng(options.seed).permutation(len(shipped))]  # by language they lie
    wanted = take_in_turn(mixed, options.requests or MODEL_REQUESTS)
    prompts = [p for p in wanted if len(loaded.tokenizer(p.prompt, verbose=False)["input_ids"]) <= room]
    if len(prompts) < 2:
        raise ConfigError(f"{loaded.name}: {len(prompts)} of {len(wanted)} prompts fit; at least 2 are needed")
    with TemporaryDirectory() as folder:
        settings = RecordingSettings(max_tokens=MODEL_MAX_TOKENS, seed=options.seed)
        whole = record(options.model, prompts, Path(folder) / "trace", settings, on_progress=report).trace
        trace = _taken(whole, np.arange(whole.num_requests))  # into memory: the folder goes
    notes.append(
        f"{loaded.name}: {len(prompts)} shipped prompts, from their domains in turn, up to {MODEL_MAX_TOKENS} tokens "
        f"generated greedily each; {len(wanted) - len(prompts)} more are too long for the model."
    )
    trace = _long_enough(trace, np.arange(trace.num_requests), loaded.name, notes)
    table = dry_run_table(loaded.model, loaded.name)
    return [
        Case(loaded.name, trace, _TWO_PHASES, _groups(trace), None, table),
        *_second_turns(options, loaded, prompts, trace, report, notes),
    ]


def _second_turns(
    options: SuiteOptions, loaded: LoadedModel, prompts: list[Prompt], first: ActivationTrace, report: Report,
    notes: list[str],
) -> list[Case]:  # fmt: skip
    """The model asked again after its answer: requests that begin as an earlier one did, all of it."""
    from coterie.engines.transformers import RecordingSettings, record

    assert options.model is not None
    assert first.requests.ids is not None
    asked = {prompt.id: prompt for prompt in prompts}
    room = _room(loaded)
    turns: list[Prompt] = []
    for index in range(min(MODEL_TURNS, first.num_requests)):
        prompt = asked[first.requests.ids[index]]
        output = [*_token_ids(first, index, DECODE).tolist(), first.requests.extra["last_token_id"][index]]
        text = _next_turn(loaded, prompt.prompt, loaded.tokenizer.decode(output, skip_special_tokens=True))
        if len(loaded.tokenizer(text, verbose=False)["input_ids"]) <= room:
            turns.append(prompt._replace(prompt=text))
    if not turns:
        notes.append(f"{loaded.name}: no second turn fits the model.")
        return []
    with TemporaryDirectory() as folder:
        settings = RecordingSettings(max_tokens=MODEL_MAX_TOKENS, seed=options.seed, chat=False)  # text has it already
        whole = record(options.model, turns, Path(folder) / "trace", settings, on_progress=report).trace
        second = _long_enough(whole, np.arange(whole.num_requests), loaded.name, notes)
    name = f"{loaded.name}, second turns"
    notes.append(
        f"{name}: {second.num_requests} of the requests once more, their prompt and answer followed by {NEXT_TURN!r}. "
        "All first turns calibrate, those of the tested conversations too: the case that similar_prefix is made for."
    )
    both = _joined(first, second)
    assert both.requests.ids is not None
    parts = np.split(np.arange(both.num_requests), [first.num_requests])
    return [Case(name, both, _TWO_PHASES, list(both.requests.ids), parts=(parts[0], parts[1]))]


def _next_turn(loaded: LoadedModel, prompt: str, answer: str) -> str:
    """The text of a conversation so far, as the model's chat template has it, where there is one."""
    tokenizer = loaded.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        return f"{prompt}{answer}\n{NEXT_TURN}"
    said = zip(("user", "assistant", "user"), (prompt, answer, NEXT_TURN), strict=True)
    messages = [{"role": role, "content": content} for role, content in said]
    text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    start = getattr(tokenizer, "bos_token_id", None)
    doubled = start is not None and tokenizer(text, verbose=False)["input_ids"][:2] == [start, start]
    return text.removeprefix(tokenizer.bos_token) if doubled else text  # the tokenizer adds it too


def _room(loaded: LoadedModel) -> int:
    """Tokens of a prompt at most; a chat template takes some."""
    limit = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
    return int(limit) - MODEL_MAX_TOKENS - 64


def _alike_in_service(file: Path) -> str:
    """How often a service's requests begin as an earlier one, as far as hashes of blocks tell."""
    trace = read_trace(file)
    assert isinstance(trace, RequestTrace)
    assert trace.prefix_blocks is not None
    assert trace.block_tokens is not None
    index, alike, hits = PrefixIndex(), SimilarPrefix().alike, 0
    for blocks, tokens in zip(trace.prefix_blocks, trace.prompt_tokens.tolist(), strict=True):
        found = index.longest(blocks)
        hits += found is not None and min(tokens, found.tokens * trace.block_tokens) >= alike * tokens
        index.add(blocks)
    return (
        f"{file.parent.name}: {hits / len(trace):.0%} of {len(trace):,} requests of a service share {alike:.0%} of "
        f"their prompt with an earlier one, by blocks of {trace.block_tokens} tokens: so often would similar_prefix "
        "find one there. Its routing is not known."
    )


# --------------------------------------------------------------------------------------------------- traces, cut


def _drawn(trace: ActivationTrace, options: SuiteOptions, name: str, notes: list[str]) -> NDArray[np.int64]:
    most = options.requests or MAX_REQUESTS
    if trace.num_requests <= most:
        return np.arange(trace.num_requests, dtype=np.int64)
    notes.append(f"{name}: {most:,} of {trace.num_requests:,} requests, drawn by seed.")
    return np.sort(np.random.default_rng(options.seed).permutation(trace.num_requests)[:most])


def _taken(trace: ActivationTrace, rows: NDArray[np.int64]) -> ActivationTrace:
    """Some requests of a trace, in memory."""
    tokens, offsets = trace.arrays()
    spans = [np.arange(offsets[r], offsets[r + 1]) for r in rows]
    at = np.concatenate(spans) if spans else np.empty(0, np.int64)
    ends = np.cumsum([0, *map(len, spans)])
    ids = None if tokens.token_ids is None else tokens.token_ids[at]
    return ActivationTrace.from_arrays(
        trace.meta, tokens.expert_ids[at], ends, trace.requests.take(rows), tokens.phase[at], ids
    )


def _long_enough(trace: ActivationTrace, rows: NDArray[np.int64], name: str, notes: list[str]) -> ActivationTrace:
    """Without requests too short to ask about: of two phases, at least a token of each."""
    tokens, offsets = trace.arrays()
    both = len(np.unique(tokens.phase)) == 2
    keep = []
    for row in rows:
        phase = tokens.phase[offsets[row] : offsets[row + 1]]
        if len(phase) >= MIN_TOKENS and (not both or len(np.unique(phase)) == 2):
            keep.append(int(row))
    if len(keep) < len(rows):
        notes.append(f"{name}: {len(rows) - len(keep)} of {len(rows)} requests are too short to score.")
    return _taken(trace, np.array(keep, np.int64))


def _joined(one: ActivationTrace, other: ActivationTrace) -> ActivationTrace:
    """The requests of one, then those of the other, of the same model."""
    (first, ends), (second, more) = one.arrays(), other.arrays()
    assert first.token_ids is not None
    assert second.token_ids is not None
    return ActivationTrace.from_arrays(
        one.meta, np.concatenate([first.expert_ids, second.expert_ids]), np.concatenate([ends, ends[-1] + more[1:]]),
        concat_requests([one.requests, other.requests]), np.concatenate([first.phase, second.phase]),
        np.concatenate([first.token_ids, second.token_ids]),
    )  # fmt: skip


def _halved(trace: ActivationTrace) -> ActivationTrace:
    """The same tokens, the first half of each request called its prefill and the second its decode."""
    tokens, offsets = trace.arrays()
    phase = np.concatenate(
        [np.repeat(np.array([PREFILL, DECODE], np.uint8), [n // 2, n - n // 2]) for n in np.diff(offsets)]
    )
    return ActivationTrace.from_arrays(
        trace.meta, tokens.expert_ids, offsets, trace.requests, phase, tokens.token_ids
    )  # fmt: skip


def _groups(trace: ActivationTrace) -> list[Hashable]:
    """Requests with the same prompt tokens, or the same first block of a prompt, are one group."""
    blocks = trace.requests.prefix_blocks
    groups: list[Hashable] = []
    for index in range(trace.num_requests):
        tokens = trace.request(index)
        if tokens.token_ids is not None and (tokens.phase == PREFILL).any():
            groups.append(tokens.token_ids[tokens.phase == PREFILL].tobytes())
        elif blocks is not None and len(blocks[index]):
            groups.append(int(blocks[index][0]))
        else:
            groups.append((index,))
    return groups


class _Texts(NamedTuple):
    """Of one request, from a sidecar."""

    prompt: str | None
    tokens: list[str] | None


def _sidecar_texts(path: Path) -> list[_Texts] | None:
    """Token strings that lie beside an archive which has no token ids; None where there are none."""
    folder = path if path.is_dir() else path.parent
    file = next((folder / n for n in ("requests.jsonl.gz", "requests.jsonl") if (folder / n).is_file()), None)
    if file is None:
        return None
    try:
        data = file.read_bytes()
        lines = (gzip.decompress(data) if file.suffix == ".gz" else data).decode().splitlines()
        rows = [json.loads(line) for line in lines]
    except (OSError, ValueError, EOFError, zlib.error):
        return None  # some other file: where it belongs to the trace, the reader has refused it already
    if not all(isinstance(row, dict) for row in rows) or not any(row.get("generated_tokens") for row in rows):
        return None
    return [_Texts(row.get("prompt"), row.get("generated_tokens")) for row in rows]


def _with_token_strings(
    trace: ActivationTrace, texts: list[_Texts], options: SuiteOptions, name: str, notes: list[str]
) -> tuple[ActivationTrace, list[NDArray[np.int64]], list[Hashable]]:
    """Requests whose token strings match their rows, strings numbered; prompts cut up by the same strings."""
    if len(texts) != trace.num_requests:
        raise ConfigError(f"{name}: {len(texts)} rows beside the trace, which has {trace.num_requests} requests")
    lengths = trace.lengths
    # One row fewer than tokens: the last generated token was never fed back.
    there = [
        i for i, text in enumerate(texts)
        if text.prompt and text.tokens and len(text.tokens) == lengths[i] + 1 and lengths[i] >= MIN_TOKENS
    ]  # fmt: skip
    if options.requests is not None and options.requests < len(there):
        there = sorted(np.random.default_rng(options.seed).permutation(there)[: options.requests].tolist())
    known = [texts[i] for i in there]
    numbers: dict[str, int] = {}
    ids = [
        np.array([numbers.setdefault(token, len(numbers)) for token in (text.tokens or [])[:-1]], np.int32)
        for text in known
    ]
    part = _taken(trace, np.array(there, np.int64))
    tokens, offsets = part.arrays()
    whole = ActivationTrace.from_arrays(
        part.meta, tokens.expert_ids, offsets, part.requests, tokens.phase, np.concatenate(ids)
    )
    cut = [longest_match(text.prompt or "", numbers) for text in known]
    notes.append(
        f"{name}: {len(there)} of {trace.num_requests} requests, those whose token strings are known and match their "
        f"rows; {len(numbers):,} strings stand for token ids. Prompts are cut up by longest match, as the model's "
        "tokenizer is not at hand: near its tokens, not always the same."
    )
    return whole, cut, [text.prompt for text in known]


def longest_match(text: str, numbers: dict[str, int]) -> NDArray[np.int64]:
    """[token] numbers of the longest known strings, left to right; -1 for a letter that starts none."""
    longest = max(map(len, numbers), default=1)
    found, at = [], 0
    while at < len(text):
        for length in range(min(longest, len(text) - at), 0, -1):
            number = numbers.get(text[at : at + length])
            if number is not None:
                break
        else:
            number, length = -1, 1
        found.append(number)
        at += length
    return np.array(found, np.int64)


# --------------------------------------------------------------------------------------------------- scores


def split(groups: Sequence[Hashable], rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Calibration and test requests: whole groups, TEST_SHARE of them to test."""
    names = list(dict.fromkeys(groups))
    if len(names) < 2:
        raise ConfigError(f"{len(groups)} requests share {len(names)} prompt: there is nothing to calibrate on")
    count = min(len(names) - 1, max(1, round(TEST_SHARE * len(names))))
    chosen = {names[i] for i in rng.permutation(len(names))[:count]}
    test = np.array([group in chosen for group in groups])
    return np.flatnonzero(~test), np.flatnonzero(test)


def _case_rows(case: Case, seed: int, notes: list[str]) -> list[dict[str, Any]]:
    # The same split for every case of a trace, and the same draws for every row.
    calibration, test = case.parts or split(case.groups, np.random.default_rng(seed))
    note = f"{case.name}: {len(calibration)} requests calibrate, {len(test)} test."
    if note not in notes:
        notes.append(note)
    rows = []
    for question in case.questions:
        truth = np.stack([_footprint(case.trace, int(r), question.truth) for r in test])
        for contender in _contenders(case, question, calibration, test, seed):
            found = score(
                contender.predictor, contender.requests, truth, case.trace.meta.top_k, np.random.default_rng(seed),
                [case.groups[r] for r in test],
            )  # fmt: skip
            rows.append(_row(case.name, question.predicts, contender, found))
    return rows


def _contenders(
    case: Case, question: Question, calibration: NDArray[np.int64], test: NDArray[np.int64], seed: int
) -> list[Contender]:
    """Every predictor this case can answer the question with."""
    trace = case.trace
    bare = [PredictRequest(id=str(r)) for r in test]
    found = [
        Contender(PopularityPredictor().fit(trace, calibration, question.truth), "popularity", "nothing", bare),
        *_recent(trace, question, calibration, test, seed),
    ]
    if trace.requests.domains is not None:
        domain = DomainPredictor().fit(trace, calibration, question.truth)
        labelled = [PredictRequest(domain=trace.requests.domains[r]) for r in test]
        found.append(Contender(domain, "domain", "domain", labelled))
    if question.given is not None:
        recorded = Recorded().fit(trace, calibration, question.truth)
        before = [PredictRequest(footprint=_footprint(trace, int(r), question.given)) for r in test]
        found.append(Contender(recorded, "recorded", f"{question.given_name}'s footprint", before))
        prefix = Prefix().fit(trace, calibration, question.truth)
        found.append(Contender(prefix, "prefix", f"{question.given_name}'s footprint", before))
    if trace.arrays()[0].token_ids is None:
        return found
    found += _similar(case, question, calibration, test)
    tables = [("token_table", TokenTable().fit(trace, calibration))]
    if case.dry_run is not None:
        tables.append(("dry_run", case.dry_run))
    for name, table in tables:
        if case.prompts is not None:
            found.append(Contender(table, name, "prompt's text", [PredictRequest(case.prompts[r]) for r in test]))
        if question.given is not None:
            ids = [PredictRequest(_token_ids(trace, int(r), question.given)) for r in test]
            found.append(Contender(table, name, f"{question.given_name}'s tokens", ids))
        knows = "prompt's tokens" if question.truth == PREFILL else _OWN
        own = [PredictRequest(_token_ids(trace, int(r), question.truth)) for r in test]
        found.append(Contender(table, name, knows, own))
    return found


@dataclass(frozen=True, slots=True)
class _Made:
    """Predictions made ahead."""

    loads: dict[str, Load]
    """By request id."""
    num_layers: int
    num_experts: int

    def predict(self, request: PredictRequest) -> Load:
        return self.loads[request.id or ""]


def _recent(
    trace: ActivationTrace, question: Question, calibration: NDArray[np.int64], test: NDArray[np.int64], seed: int
) -> list[Contender]:
    """A test request is predicted from the calibration requests before it: as the trace lists them, and shuffled."""
    times, domains = trace.requests.arrival_s, trace.requests.domains
    orders = {
        "as listed" if times is None else "as they arrived": (
            np.arange(trace.num_requests) if times is None else np.argsort(times, kind="stable")
        ),
        # Not the split's own draw, which would put the test requests first.
        "shuffled": np.random.default_rng([seed, 1]).permutation(trace.num_requests),
    }
    calibrates = {request: (counts, tokens) for request, counts, tokens in arrived(trace, calibration, question.truth)}
    tests = set(test.tolist())
    dealt = {name: i % WORKERS for i, name in enumerate(sorted(set(domains or ())))}
    workers = [None] * trace.num_requests if domains is None else [dealt[name] for name in domains]
    asked = [PredictRequest(id=str(r)) for r in test]
    found = []
    for name, order in orders.items():
        recent = RecentPopularity()
        # Before the first there is nothing to predict from: it is seen from the start.
        first = next(request for request in order.tolist() if request in calibrates)
        recent.observe(*calibrates[first], workers[first])
        overall: dict[str, Load] = {}
        of_worker: dict[str, Load] = {}
        for request in order.tolist():
            if request in calibrates and request != first:
                recent.observe(*calibrates[request], workers[request])
            elif request in tests:
                overall[str(request)] = recent.predict(PredictRequest())
                of_worker[str(request)] = recent.of_worker(workers[request]).predict(PredictRequest())
        made = _Made(overall, recent.num_layers, recent.num_experts)
        found.append(Contender(made, "recent_popularity", f"before it, {name}", asked))
    if domains is not None:  # as listed, all of a domain come together, and the worker makes little difference
        made = _Made(of_worker, recent.num_layers, recent.num_experts)
        found.append(Contender(made, "recent_popularity", "before it, of its worker", asked))
    return found


def _similar(
    case: Case, question: Question, calibration: NDArray[np.int64], test: NDArray[np.int64]
) -> list[Contender]:
    """Only where a request's beginning is known before what is predicted."""
    trace, similar = case.trace, SimilarPrefix()
    if case.prompts is not None:
        knows, asked = "prompt's text", [case.prompts[r] for r in test]
        for request, counts, tokens in arrived(trace, calibration, question.truth):
            similar.observe(case.prompts[request], counts, tokens)
    elif question.given is not None or question.truth == PREFILL:
        knows = f"{question.given_name or 'prompt'}'s tokens"
        asked = [_token_ids(trace, int(r), PREFILL) for r in test]
        similar.fit(trace, calibration, question.truth)
    else:
        return []
    hits = np.mean([similar.similar(prompt) is not None for prompt in asked])
    requests = [PredictRequest(prompt) for prompt in asked]
    return [Contender(similar, "similar_prefix", knows, requests, float(hits))]


def _footprint(trace: ActivationTrace, index: int, phase: int | None) -> NDArray[np.uint32]:
    tokens = trace.request(index)
    return footprint(tokens.expert_ids if phase is None else tokens.only(phase), trace.meta.num_experts)


def _token_ids(trace: ActivationTrace, index: int, phase: int | None) -> NDArray[np.int32]:
    tokens = trace.request(index)
    assert tokens.token_ids is not None
    return tokens.token_ids if phase is None else tokens.token_ids[tokens.phase == phase]


def _row(trace: str, predicts: str, contender: Contender, found: Score) -> dict[str, Any]:
    return {
        "trace": trace,
        "predicts": predicts,
        "predictor": contender.name,
        "knows": contender.knows,
        "requests": found.requests,
        "cosine": found.cosine.over_requests.mean,
        "cosine_low": found.cosine.over_requests.low,
        "cosine_high": found.cosine.over_requests.high,
        "recall_top_k": found.recall_top_k.over_requests.mean,
        "recall_top_k_low": found.recall_top_k.over_requests.low,
        "recall_top_k_high": found.recall_top_k.over_requests.high,
        "recall_top_2k": found.recall_top_2k.over_requests.mean,
        "recall_top_2k_low": found.recall_top_2k.over_requests.low,
        "recall_top_2k_high": found.recall_top_2k.over_requests.high,
        "recall_16": found.recall_16.over_requests.mean,
        "recall_16_low": found.recall_16.over_requests.low,
        "recall_16_high": found.recall_16.over_requests.high,
        "hit_rate": contender.hit_rate,
        "cosine_by_layer": found.cosine.by_layer.tolist(),
        "recall_top_k_by_layer": found.recall_top_k.by_layer.tolist(),
        "published": None,
    }


_WHAT = (
    Column("trace", lambda row: row["trace"]), Column("predicts", lambda row: row["predicts"]),
    Column("predictor", lambda row: row["predictor"]), Column("knows", lambda row: row["knows"]),
)  # fmt: skip

suites.add(
    NAME,
    Suite(
        help="How near each predictor comes to the experts that requests then used: cosine and top-k recall.",
        run=run,
        tables=(
            SuiteTable(
                "Predictors against the truth",
                (
                    *_WHAT,
                    Column("cosine", lambda row: f"{row['cosine']:.3f}"),
                    Column("95%", lambda row: f"{row['cosine_low']:.3f}–{row['cosine_high']:.3f}"),
                    Column("top-k", lambda row: f"{row['recall_top_k']:.3f}"),
                    Column("top-2k", lambda row: f"{row['recall_top_2k']:.3f}"),
                ),
                lambda _: True,
            ),
            SuiteTable(
                "Of the 16 experts used most, those among the 16 predicted most",
                (
                    *_WHAT,
                    Column("top-16", lambda row: f"{row['recall_16']:.3f}"),
                    Column("95%", lambda row: f"{row['recall_16_low']:.3f}–{row['recall_16_high']:.3f}"),
                    Column("alike", lambda row: "" if row["hit_rate"] is None else f"{row['hit_rate']:.0%}"),
                ),
                lambda _: True,
            ),
        ),
    ),
)
