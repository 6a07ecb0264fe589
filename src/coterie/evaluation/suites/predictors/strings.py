"""Token strings that lie beside a trace without token ids, and what they stand for.

A string gets a number, which does for a token id: a table of tokens needs no more than to tell tokens apart. Prompts
are cut up by the same strings, the longest first; the model's own tokenizer may cut otherwise.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Hashable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.evaluation.suites.base import SuiteOptions
from coterie.evaluation.suites.predictors.traces import MIN_TOKENS, taken
from coterie.traces.activations import ActivationTrace


class Texts(NamedTuple):
    """Of one request, from a sidecar."""

    prompt: str | None
    tokens: list[str] | None


def sidecar_texts(path: Path) -> list[Texts] | None:
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
    return [Texts(row.get("prompt"), row.get("generated_tokens")) for row in rows]


def with_token_strings(
    trace: ActivationTrace, texts: list[Texts], options: SuiteOptions, name: str, notes: list[str]
) -> tuple[ActivationTrace, list[NDArray[np.int64]], list[Hashable]]:
    """Requests whose token strings match their rows, strings numbered; prompts cut up by the same strings."""
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
