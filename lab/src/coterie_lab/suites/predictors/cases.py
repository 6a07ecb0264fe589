"""Cases of the predictors suite from files: traces with the questions they can answer.

prefill and decode    prefill from the prompt's tokens; decode from the prompt's tokens, and from its footprint
one phase only        all of a request; and its second half from its first, which stands in for a prefill
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.answers.suites import SuiteOptions
from coterie.errors import ConfigError
from coterie.predictors import TokenTable
from coterie.traces.activations import ActivationTrace
from coterie.traces.readers import read_as, read_unpacked
from coterie.types import DECODE, PREFILL
from coterie_lab.suites.predictors.traces import MIN_TOKENS, drawn, halved, long_enough, prompt_groups, taken
from coterie_lab.suites.shared import existing_paths

TRACES = ("gpt-oss-20b", "deepseek-v2-lite")
"""Folders under activations/ of the real data."""


class Question(NamedTuple):
    """Which part of a request is predicted, and from which part."""

    predicts: str
    truth: int | None
    """Phase of the predicted tokens; None is all."""
    given: int | None
    """Phase of the known tokens, if they differ from the predicted ones."""
    given_name: str = ""


class Case(NamedTuple):
    """A trace, ready to be split."""

    name: str
    trace: ActivationTrace
    questions: tuple[Question, ...]
    groups: list[Hashable]
    """[request] group of requests with the same prompt."""
    prompts: list[NDArray[np.int64]] | None = None
    """[request] token ids of prompts whose routing was not recorded."""
    dry_run: TokenTable | None = None
    parts: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
    """Calibration and test requests, if they are not to be drawn."""


TWO_PHASES = (Question("prefill", PREFILL, None), Question("decode", DECODE, PREFILL, "prompt"))
"""Questions for a trace with both phases."""


def trace_paths(options: SuiteOptions, notes: list[str]) -> list[Path]:
    """Return the user's trace, else those of the real data unless a model is run; notes say what is missing."""
    if options.trace is not None:
        return [options.trace]
    if options.model is not None:
        return []
    if options.data is None:
        notes.append("Nothing scored: give --trace or --model, or set COTERIE_DATA (docs/data.md).")
        return []
    return existing_paths(options.data / "activations", TRACES, notes, "Not scored: {path} does not exist.")


def trace_cases(path: Path, options: SuiteOptions, notes: list[str]) -> list[Case]:
    """Make one case if the trace has both phases; else two, of all of a request and of its second half."""
    trace = read_as(ActivationTrace, path, options.trace_format)
    name = path.resolve().name if path.is_dir() else path.stem
    texts = sidecar_texts(path) if trace.arrays()[0].token_ids is None else None
    prompts = None
    groups: list[Hashable]
    if texts is not None:
        trace, prompts, groups = with_token_strings(trace, texts, options, name, notes)
    else:
        trace = long_enough(trace, drawn(trace, options, name, notes), name, notes)
        groups = prompt_groups(trace)
    phases = np.unique(trace.arrays()[0].phase)
    if len(phases) == 2:
        return [Case(name, trace, TWO_PHASES, groups, prompts)]
    all_of = f"all {'prefill' if phases[0] == PREFILL else 'decode'}"
    return [
        Case(name, trace, (Question(all_of, None, None),), groups, prompts),
        Case(name, halved(trace), (Question("second half", DECODE, PREFILL, "first half"),), groups),
    ]


class Texts(NamedTuple):
    """Texts of one request, from a file beside the trace.

    The number of a string stands for a token id: a table of tokens only needs to tell tokens apart. Prompts are cut
    into the same strings, the longest first; the model's own tokenizer may cut differently.
    """

    prompt: str | None
    tokens: list[str] | None


def sidecar_texts(path: Path) -> list[Texts] | None:
    """Read the token strings beside an archive without token ids; None if there are none."""
    folder = path if path.is_dir() else path.parent
    file = next((folder / n for n in ("requests.jsonl.gz", "requests.jsonl") if (folder / n).is_file()), None)
    if file is None:
        return None
    try:
        rows = [json.loads(line) for line in read_unpacked(file).decode().splitlines()]
    except (ValueError, RecursionError):
        return None  # some other file: if it belonged to the trace, the reader would have refused it
    if not all(isinstance(row, dict) for row in rows) or not any(row.get("generated_tokens") for row in rows):
        return None
    return [Texts(row.get("prompt"), row.get("generated_tokens")) for row in rows]


def with_token_strings(
    trace: ActivationTrace, texts: list[Texts], options: SuiteOptions, name: str, notes: list[str]
) -> tuple[ActivationTrace, list[NDArray[np.int64]], list[Hashable]]:
    """Keep requests whose token strings match their rows, number the strings, and cut prompts into the same strings."""
    if len(texts) != trace.num_requests:
        raise ConfigError(f"{name}: {len(texts)} rows beside the trace, which has {trace.num_requests} requests")
    lengths = trace.lengths
    # One row fewer than tokens: the last generated token was never fed back.
    present = [
        i
        for i, text in enumerate(texts)
        if text.prompt and text.tokens and len(text.tokens) == lengths[i] + 1 and lengths[i] >= MIN_TOKENS
    ]
    if options.requests is not None and options.requests < len(present):
        present = sorted(np.random.default_rng(options.seed).permutation(present)[: options.requests].tolist())
    known = [texts[i] for i in present]
    numbers: dict[str, int] = {}
    ids = [
        np.array([numbers.setdefault(token, len(numbers)) for token in (text.tokens or [])[:-1]], np.int32)
        for text in known
    ]
    part = taken(trace, np.array(present, np.int64))
    tokens, offsets = part.arrays()
    whole = ActivationTrace.from_arrays(
        part.meta, tokens.expert_ids, offsets, part.requests, tokens.phase, np.concatenate(ids)
    )
    cut = [longest_match(text.prompt or "", numbers) for text in known]
    notes.append(
        f"{name}: {len(present)} of {trace.num_requests} requests, those whose token strings are known and match their "
        f"rows; {len(numbers):,} strings stand for token ids. Prompts are cut up by longest match, as the model's "
        "tokenizer is not at hand: near its tokens, not always the same."
    )
    return whole, cut, [text.prompt for text in known]


def longest_match(text: str, numbers: dict[str, int]) -> NDArray[np.int64]:
    """Cut a text into the longest known strings, left to right: [token] numbers, -1 for a letter that starts none."""
    longest = max(map(len, numbers), default=1)
    tokens, at = [], 0
    while at < len(text):
        for length in range(min(longest, len(text) - at), 0, -1):
            number = numbers.get(text[at : at + length])
            if number is not None:
                break
        else:
            number, length = -1, 1
        tokens.append(number)
        at += length
    return np.array(tokens, np.int64)
