"""Record a trace with a transformers model: generate for prompts and store every token's experts.

Prompts are batched with others of similar length. The batches and their order depend only on the prompts and the
settings, and a batch is written whole. An interrupted recording therefore resumes at the first missing batch, and its
files end up the same, byte for byte. Batches run in random order, so that an interrupted recording is a fair sample
and not just the short prompts.
"""

from __future__ import annotations

import hashlib
import inspect
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.engines.transformers.capture import CapturedStep, ExpertCapture
from coterie.engines.transformers.loading import (
    LoadedModel,
    check_model_folder,
    check_torch_dtype,
    load_model,
    model_digest,
)
from coterie.errors import UnavailableError, check, check_at_least
from coterie.prompts import Prompt
from coterie.traces import (
    Activations,
    ActivationTrace,
    ActivationWriter,
    RequestTrace,
    TraceMeta,
    check_new_folder,
    check_unfinished,
)
from coterie.types import DECODE, PREFILL, Report


class Generated(NamedTuple):
    """One generated request."""

    prompt_ids: list[int]
    output_ids: list[int]
    expert_ids: NDArray[np.int32]
    """[prompt + output - 1, layer, k]"""
    gate_weights: NDArray[np.float32] | None
    """[prompt + output - 1, layer, k]"""
    stopped: bool
    """Whether an end token ended the request; False if max_tokens did."""


def generate_batch(
    model: Any,
    capture: ExpertCapture,
    prompts: Sequence[list[int]],
    max_tokens: int,
    end_ids: frozenset[int],
    temperature: float = 0.0,
    rngs: Sequence[np.random.Generator] | None = None,
) -> list[Generated]:
    """Generate for a batch of prompts with a KV cache, and keep each token's experts.

    Greedy at temperature 0, otherwise sampled with each request's own generator. The library's ``generate`` hides the
    steps, so this function runs every pass itself. Prompts of a batch are padded on the left. Rows of padding and of
    requests that have ended are dropped: a request's tokens and experts are those it would have alone, up to rounding,
    which can decide a tie.

    The last generated token is never fed back and has no experts: a request of p prompt and n output tokens has p
    rows of prefill and n - 1 of decode, as serving engines report it too.
    """
    import torch

    device = model.get_input_embeddings().weight.device
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    options = {"use_cache": True}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1  # type: ignore[assignment]
    outputs: list[list[int]] = [[] for _ in prompts]
    steps: list[tuple[CapturedStep, list[int]]] = []  # decode steps and the requests that were still generating
    alive = list(range(len(prompts)))
    capture.clear()
    with torch.no_grad():
        result = model(
            input_ids=tokens, attention_mask=mask, position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0), **options
        )
        prefill = capture.take()
        while True:
            chosen = _choose(result.logits[:, -1], temperature, rngs, alive)
            for request in alive:
                outputs[request].append(int(chosen[request]))
            alive = [r for r in alive if outputs[r][-1] not in end_ids and len(outputs[r]) < max_tokens]
            if not alive:
                break
            mask = torch.cat([mask, mask.new_ones((len(prompts), 1))], dim=1)
            result = model(
                input_ids=torch.from_numpy(chosen[:, None]).to(device),
                attention_mask=mask,
                position_ids=mask.sum(dim=1, keepdim=True) - 1,
                past_key_values=result.past_key_values,
                **options,
            )
            steps.append((capture.take(), alive))
    return [
        Generated(
            list(prompt),
            outputs[r],
            _rows_of(prefill, steps, r, len(prompts), len(prompt), "expert_ids"),
            _rows_of(prefill, steps, r, len(prompts), len(prompt), "gate_weights") if capture.gate_weights else None,
            outputs[r][-1] in end_ids,
        )
        for r, prompt in enumerate(prompts)
    ]


def _rows_of(
    prefill: CapturedStep, steps: list[tuple[CapturedStep, list[int]]], request: int, batch: int, length: int, name: str
) -> NDArray[Any]:
    first: NDArray[Any] = getattr(prefill, name)
    whole = first.reshape(batch, -1, *first.shape[1:])[request, -length:]  # rows before the last `length` are padding
    later = [getattr(step, name)[request : request + 1] for step, alive in steps if request in alive]
    return np.concatenate([whole, *later])


def _choose(
    logits: Any, temperature: float, rngs: Sequence[np.random.Generator] | None, alive: list[int]
) -> NDArray[np.int64]:
    """Return the next token of each request, [request]; arbitrary for requests that have ended."""
    if temperature == 0.0 or rngs is None:
        return np.asarray(logits.argmax(dim=-1).cpu())
    scaled = logits.double().cpu().numpy() / temperature
    chosen = np.zeros(len(scaled), np.int64)
    for request in alive:
        edges = np.cumsum(np.exp(scaled[request] - scaled[request].max()))
        chosen[request] = np.searchsorted(edges, rngs[request].random() * edges[-1], side="right")
    return chosen.clip(max=scaled.shape[1] - 1)


FLUSH_S = 10.0
"""Seconds between two flushes to disk: a crash loses at most this much, an interruption only the current batch."""


@dataclass(frozen=True, slots=True)
class RecordingSettings:
    """Settings of a recording; together with the model and the prompts they determine its content."""

    max_tokens: int = 64
    """Maximum number of tokens to generate per prompt."""
    batch_size: int = 8
    dtype: str = "float32"
    """Precision of the weights: float32, float16, bfloat16 or nf4."""
    device: str = "cpu"
    gate_weights: bool = False
    """Also record the gate weights of the chosen experts."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    seed: int = 0
    chat: bool | None = None
    """Whether to apply the model's chat template; None applies it if there is one."""

    def __post_init__(self) -> None:
        check_at_least(1, max_tokens=self.max_tokens, batch_size=self.batch_size)
        check(
            0 <= self.temperature < float("inf") and self.seed >= 0,
            f"temperature={self.temperature} and seed={self.seed} must not be negative",
        )
        check_torch_dtype(self.dtype)


class Recorded(NamedTuple):
    """A finished recording."""

    trace: ActivationTrace
    kept: int
    """Number of requests kept from an earlier, interrupted run."""


class _Item(NamedTuple):
    prompt: Prompt
    token_ids: list[int]


def record(
    model: str | Path,
    prompts: Sequence[Prompt],
    out: str | Path,
    settings: RecordingSettings = RecordingSettings(),
    *,
    resume: bool = False,
    on_progress: Report | None = None,
) -> Recorded:
    """Generate for every prompt and write the experts of each token to the trace `out`."""
    report = on_progress or (lambda *_: None)
    folder = Path(out)
    if resume:  # check before loading the model, which may take minutes
        ActivationTrace.open(folder)
        check_unfinished(folder)
    else:
        check_new_folder(folder)
    check_model_folder(model)
    report("Loading the model", 0, len(prompts))
    loaded = load_model(model, settings.dtype, settings.device)
    capture = ExpertCapture(loaded.model, settings.gate_weights)
    chat = _chat(loaded, settings.chat)
    batches = _plan([_Item(p, _tokens(loaded, p, chat)) for p in prompts], settings)
    _check_lengths(loaded, batches, settings)
    source = {
        "engine": "transformers",
        "version": version("transformers"),
        "model_digest": model_digest(model),
        "prompts": len(prompts),
        "prompts_digest": hashlib.sha256(b"".join(repr(tuple(p)).encode() for p in prompts)).hexdigest()[:16],
        **asdict(settings),
        "chat": chat,
    }
    meta = TraceMeta(
        model=loaded.name,
        num_experts=capture.num_experts,
        num_layers=len(capture.layer_ids),
        top_k=capture.top_k,
        layer_ids=capture.layer_ids,
        source=source,
    )
    writer = ActivationWriter.resume(folder, meta) if resume else ActivationWriter(folder, meta)
    with writer, capture:
        kept = _recorded(folder, batches) if resume else 0
        _run(loaded, capture, writer, batches, kept, settings, report)
    return Recorded(ActivationTrace.open(folder), kept)


def _run(
    loaded: LoadedModel,
    capture: ExpertCapture,
    writer: ActivationWriter,
    batches: list[list[_Item]],
    kept: int,
    settings: RecordingSettings,
    report: Report,
) -> None:
    total, done = sum(map(len, batches)), kept
    with_domains = any(item.prompt.domain for batch in batches for item in batch)
    ends, flushed = _end_ids(loaded), time.monotonic()
    starts = accumulate(map(len, batches), initial=0)
    for batch in (batch for batch, start in zip(batches, starts, strict=False) if start >= kept):
        report("Recording requests", done, total)
        rngs = [np.random.default_rng([settings.seed, zlib.crc32(item.prompt.id.encode())]) for item in batch]
        try:
            generated = generate_batch(
                loaded.model,
                capture,
                [item.token_ids for item in batch],
                settings.max_tokens,
                ends,
                settings.temperature,
                rngs,
            )
        except RuntimeError as error:
            if "out of memory" not in str(error).lower():
                raise
            raise UnavailableError(
                f"{settings.device} is out of memory with batch_size={settings.batch_size}: record with a smaller one"
            ) from None
        writer.append_many(*_rows(batch, generated, with_domains))
        done += len(batch)
        if time.monotonic() - flushed > FLUSH_S:
            writer.flush()
            flushed = time.monotonic()
    report("Recording requests", total, total)


def _rows(
    batch: list[_Item], generated: list[Generated], with_domains: bool
) -> tuple[Activations, NDArray[np.int64], RequestTrace]:
    lengths = [len(g.expert_ids) for g in generated]
    phase = [np.repeat([PREFILL, DECODE], [len(g.prompt_ids), len(g.output_ids) - 1]) for g in generated]
    token_ids = [np.array([*g.prompt_ids, *g.output_ids[:-1]], np.int32) for g in generated]
    gates = [g.gate_weights for g in generated if g.gate_weights is not None]
    tokens = Activations(
        np.concatenate([g.expert_ids for g in generated]).astype(np.uint32),
        np.concatenate(phase).astype(np.uint8),
        np.concatenate(token_ids),
        np.concatenate(gates).astype(np.float16) if gates else None,
    )
    table = RequestTrace(
        prompt_tokens=np.array([len(g.prompt_ids) for g in generated]),
        output_tokens=np.array([len(g.output_ids) for g in generated]),
        ids=[item.prompt.id for item in batch],
        domains=[item.prompt.domain or "unknown" for item in batch] if with_domains else None,
        # The last token has no row; storing its id makes the whole answer readable.
        extra={
            "last_token_id": [g.output_ids[-1] for g in generated],
            "finish_reason": ["stop" if g.stopped else "length" for g in generated],
        },
    )
    return tokens, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), table


def _plan(items: list[_Item], settings: RecordingSettings) -> list[list[_Item]]:
    check(
        len({item.prompt.id for item in items}) == len(items),
        "prompts must have ids that differ: a recording is resumed by them",
    )
    ordered = sorted(items, key=lambda item: len(item.token_ids))
    batches = [ordered[i : i + settings.batch_size] for i in range(0, len(ordered), settings.batch_size)]
    return [batches[i] for i in np.random.default_rng(settings.seed).permutation(len(batches))]


def _recorded(folder: Path, batches: list[list[_Item]]) -> int:
    """Return the number of requests already recorded; raise unless they are whole first batches of the plan."""
    request_ids = list(ActivationTrace.open(folder).requests.ids or [])
    planned = [item.prompt.id for batch in batches for item in batch]
    check(
        request_ids == planned[: len(request_ids)] and len(request_ids) in np.cumsum([0, *map(len, batches)]),
        f"{folder} holds {len(request_ids)} requests that are not the first of this recording",
    )
    return len(request_ids)


def _check_lengths(loaded: LoadedModel, batches: list[list[_Item]], settings: RecordingSettings) -> None:
    limit = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    for batch in batches:
        for prompt, token_ids in batch:
            check(token_ids, f"prompt {prompt.id!r} has no tokens")
            check(
                limit is None or len(token_ids) + settings.max_tokens <= limit,
                f"prompt {prompt.id!r} has {len(token_ids)} tokens; with max_tokens={settings.max_tokens} "
                f"that must be at most the model's {limit}",
            )


def _chat(loaded: LoadedModel, wanted: bool | None) -> bool:
    has = bool(getattr(loaded.tokenizer, "chat_template", None))
    check(not wanted or has, f"{loaded.name} has no chat template; record with chat=False (--no-chat)")
    return has if wanted is None else wanted


def _tokens(loaded: LoadedModel, prompt: Prompt, chat: bool) -> list[int]:
    if not chat:
        return [int(n) for n in loaded.tokenizer(prompt.prompt)["input_ids"]]
    ids = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt.prompt}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return [int(n) for n in ids]


def _end_ids(loaded: LoadedModel) -> frozenset[int]:
    holders = (getattr(loaded.model, "generation_config", None), loaded.tokenizer)
    values = [getattr(holder, "eos_token_id", None) for holder in holders]
    return frozenset().union(*([value] if isinstance(value, int) else value or [] for value in values))
