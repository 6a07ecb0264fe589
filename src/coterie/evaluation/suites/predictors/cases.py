"""What the predictors suite asks: cases, each a trace with the questions it can answer, from files.

prefill and decode    prefill from the prompt's tokens; decode from the prompt's tokens, and from its footprint
one of them only      all of a request; and its second half from its first, which stands in for a prefill
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import TraceError
from coterie.evaluation.suites.base import SuiteOptions
from coterie.evaluation.suites.predictors.strings import sidecar_texts, with_token_strings
from coterie.evaluation.suites.predictors.traces import drawn, halved, long_enough, prompt_groups
from coterie.predictors import TokenTable
from coterie.traces.activations import ActivationTrace
from coterie.traces.readers import read_trace
from coterie.traces.writers import kind_of
from coterie.types import DECODE, PREFILL

TRACES = ("gpt-oss-20b", "deepseek-v2-lite")
"""Folders under activations/ of the real data."""


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


TWO_PHASES = (Question("prefill", PREFILL, None), Question("decode", DECODE, PREFILL, "prompt"))
"""Of a trace that has both."""


def trace_paths(options: SuiteOptions, notes: list[str]) -> list[Path]:
    """The user's trace, else those of the real data unless a model is run; notes say what is missing."""
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


def trace_cases(path: Path, options: SuiteOptions, notes: list[str]) -> list[Case]:
    """One where the trace has both phases; else two, of all of a request and of its second half."""
    trace = read_trace(path, options.trace_format)
    if not isinstance(trace, ActivationTrace):
        raise TraceError(path, "kind", f"found {kind_of(trace)!r}, expected 'activations'")
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
