"""Generate for a batch of prompts with a KV cache, and keep each token's experts.

The library's own ``generate`` hides the steps; here every pass is taken apart. Prompts of a batch are padded on the
left, and the rows of padding, like those of a request that has ended while others go on, are dropped before anything is
kept: a request's tokens and experts are those it would have alone (to the last bit of a float, which can decide a tie).

The last token generated is never fed back, so it has no experts: a request of p prompt and n output tokens has p rows
of prefill and n - 1 of decode, as engines that serve report it too.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.engines.transformers.capture import CapturedStep, ExpertCapture


class Generated(NamedTuple):
    """One generated request."""

    prompt_ids: list[int]
    output_ids: list[int]
    expert_ids: NDArray[np.int32]
    """[prompt + output - 1, layer, k]"""
    gate_weights: NDArray[np.float32] | None
    """[prompt + output - 1, layer, k]"""
    stopped: bool
    """Whether it ended by an end token; else by the limit."""


def generate_batch(
    model: Any,
    capture: ExpertCapture,
    prompts: Sequence[list[int]],
    max_tokens: int,
    end_ids: frozenset[int],
    temperature: float = 0.0,
    rngs: Sequence[np.random.Generator] | None = None,
) -> list[Generated]:
    """Greedy at temperature 0, otherwise sampled with each request's own generator."""
    import torch

    device = model.get_input_embeddings().weight.device
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    options = {"use_cache": True}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1  # type: ignore[assignment]
    outputs: list[list[int]] = [[] for _ in prompts]
    steps: list[tuple[CapturedStep, list[int]]] = []  # of decode, with the requests that were still going
    alive = list(range(len(prompts)))
    capture.clear()
    with torch.no_grad():
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        result = model(input_ids=tokens, attention_mask=mask, position_ids=positions, **options)
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
            _rows(prefill, steps, r, len(prompts), len(prompt), "expert_ids"),
            _rows(prefill, steps, r, len(prompts), len(prompt), "gate_weights") if capture.gate_weights else None,
            outputs[r][-1] in end_ids,
        )
        for r, prompt in enumerate(prompts)
    ]


def _rows(
    prefill: CapturedStep, steps: list[tuple[CapturedStep, list[int]]], request: int, batch: int, length: int, name: str
) -> NDArray[Any]:
    first: NDArray[Any] = getattr(prefill, name)
    whole = first.reshape(batch, -1, *first.shape[1:])[request, -length:]  # what lies before it is padding
    later = [getattr(step, name)[request : request + 1] for step, alive in steps if request in alive]
    return np.concatenate([whole, *later])


def _choose(
    logits: Any, temperature: float, rngs: Sequence[np.random.Generator] | None, alive: list[int]
) -> NDArray[np.int64]:
    """[request] next tokens; of a request that has ended, any."""
    if temperature == 0.0 or rngs is None:
        greedy: NDArray[np.int64] = logits.argmax(dim=-1).cpu().numpy()
        return greedy
    scaled = logits.double().cpu().numpy() / temperature
    chosen = np.zeros(len(scaled), np.int64)
    for request in alive:
        share = np.exp(scaled[request] - scaled[request].max())
        edges = np.cumsum(share)
        chosen[request] = np.searchsorted(edges, rngs[request].random() * edges[-1], side="right")
    return chosen.clip(max=scaled.shape[1] - 1)
