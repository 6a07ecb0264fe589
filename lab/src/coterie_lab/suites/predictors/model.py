"""Cases of the predictors suite from a model at hand: shipped prompts recorded, and some asked once more.

For the second turns, first turns calibrate. A second turn begins with its first turn, answer included.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from coterie.answers.suites import Report, SuiteOptions
from coterie.errors import ConfigError
from coterie.prompts import Prompt, load_prompts, take_in_turn
from coterie.traces.activations import ActivationTrace
from coterie.types import DECODE
from coterie_lab.suites.predictors.cases import TWO_PHASES, Case
from coterie_lab.suites.predictors.traces import joined, long_enough, prompt_groups, taken, token_ids_of

if TYPE_CHECKING:
    from coterie.engines.transformers import LoadedModel

MODEL_REQUESTS = 96
MODEL_MAX_TOKENS = 48
MODEL_TURNS = 32
"""Requests of which a model is asked once more, after its answer."""
NEXT_TURN = "Please go on."


class RecordedModel(NamedTuple):
    """A model, and a recording of prompts that fit it."""

    loaded: LoadedModel
    prompts: list[Prompt]
    trace: ActivationTrace


def model_cases(options: SuiteOptions, report: Report, notes: list[str]) -> list[Case]:
    """Record shipped prompts that fit the model, and their second turns."""
    from coterie.engines.transformers.dry_run import dry_run_table

    recorded = record_prompts(options, report, notes)
    loaded, _, trace = recorded
    table = dry_run_table(loaded.model, loaded.name)
    first = Case(loaded.name, trace, TWO_PHASES, prompt_groups(trace), dry_run=table)
    return [first, *_second_turns(options, recorded, report, notes)]


def record_prompts(options: SuiteOptions, report: Report, notes: list[str]) -> RecordedModel:
    """Record shipped prompts that fit the model, with token ids, prefill and decode."""
    from coterie.engines.transformers import RecordingSettings, load_model, record

    assert options.model is not None
    loaded = load_model(options.model)
    room = _room(loaded)
    shipped = load_prompts()
    mixed = [shipped[i] for i in np.random.default_rng(options.seed).permutation(len(shipped))]  # sorted by language
    wanted = take_in_turn(mixed, options.requests or MODEL_REQUESTS)
    prompts = [p for p in wanted if len(loaded.tokenizer(p.prompt, verbose=False)["input_ids"]) <= room]
    if len(prompts) < 2:
        raise ConfigError(f"{loaded.name}: {len(prompts)} of {len(wanted)} prompts fit; at least 2 are needed")
    with TemporaryDirectory() as folder:
        settings = RecordingSettings(max_tokens=MODEL_MAX_TOKENS, seed=options.seed)
        whole = record(options.model, prompts, Path(folder) / "trace", settings, on_progress=report).trace
        trace = taken(whole, np.arange(whole.num_requests))  # into memory: the folder goes
    notes.append(
        f"{loaded.name}: {len(prompts)} shipped prompts, from their domains in turn, up to {MODEL_MAX_TOKENS} tokens "
        f"generated greedily each; {len(wanted) - len(prompts)} more are too long for the model."
    )
    trace = long_enough(trace, np.arange(trace.num_requests), loaded.name, notes)
    return RecordedModel(loaded, prompts, trace)


def _second_turns(options: SuiteOptions, recorded: RecordedModel, report: Report, notes: list[str]) -> list[Case]:
    """Ask the model again after its answer: requests that begin with all of an earlier one."""
    from coterie.engines.transformers import RecordingSettings, record

    loaded, prompts, first = recorded
    assert options.model is not None
    assert first.requests.ids is not None
    asked = {prompt.id: prompt for prompt in prompts}
    room = _room(loaded)
    turns: list[Prompt] = []
    for index in range(min(MODEL_TURNS, first.num_requests)):
        prompt = asked[first.requests.ids[index]]
        output = [*token_ids_of(first, index, DECODE).tolist(), first.requests.extra["last_token_id"][index]]
        text = _next_turn(loaded, prompt.prompt, loaded.tokenizer.decode(output, skip_special_tokens=True))
        if len(loaded.tokenizer(text, verbose=False)["input_ids"]) <= room:
            turns.append(prompt._replace(prompt=text))
    if not turns:
        notes.append(f"{loaded.name}: no second turn fits the model.")
        return []
    with TemporaryDirectory() as folder:
        settings = RecordingSettings(max_tokens=MODEL_MAX_TOKENS, seed=options.seed, chat=False)  # text has it already
        whole = record(options.model, turns, Path(folder) / "trace", settings, on_progress=report).trace
        second = long_enough(whole, np.arange(whole.num_requests), loaded.name, notes)
    name = f"{loaded.name}, second turns"
    notes.append(
        f"{name}: {second.num_requests} of the requests once more, their prompt and answer followed by {NEXT_TURN!r}. "
        "All first turns calibrate, those of the tested conversations too: the case that similar_prefix is made for."
    )
    both = joined(first, second)
    assert both.requests.ids is not None
    parts = np.split(np.arange(both.num_requests), [first.num_requests])
    return [Case(name, both, TWO_PHASES, list(both.requests.ids), parts=(parts[0], parts[1]))]


def _next_turn(loaded: LoadedModel, prompt: str, answer: str) -> str:
    """Return the text of a conversation so far, by the model's chat template if there is one."""
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
    """Return the most tokens of a prompt; a chat template takes some."""
    limit = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
    return int(limit) - MODEL_MAX_TOKENS - 64
