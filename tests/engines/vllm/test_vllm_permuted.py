"""A permuted coterie-tiny on servers that know nothing of it: the tokens are those of the original."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from coterie.engines.tiny import tiny_model_path
from coterie.engines.transformers.permute import permute_checkpoint
from coterie.placement.maps.files import PlacementMap
from coterie.prompts import load_prompts, take_in_turn
from coterie.types import Placement
from vllm_checks import sequence
from vllm_servers import Fleet, needs_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.long, needs_vllm]

LAYERS, EXPERTS = 8, 32
PROMPTS = 40


def logprobs(answer: dict[str, Any]) -> np.ndarray:
    """[token, 5] of the best five, largest first."""
    return np.array([sorted(best.values())[::-1][:5] for best in answer["choices"][0]["logprobs"]["top_logprobs"]])


def test_tokens_are_unchanged_and_logprobs_within_rounding(fleet: Fleet, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    slots = np.stack([rng.permutation(EXPERTS) for _ in range(LAYERS)]).astype(np.int32)
    done = permute_checkpoint(PlacementMap(Placement(slots, 8, EXPERTS)), tiny_model_path(), tmp_path / "permuted")
    assert done.moved > 0.9 * slots.size
    prompts = [prompt.prompt for prompt in take_in_turn(load_prompts(), PROMPTS)]
    found = []
    for name, model in (("plain", None), ("permuted", done.folder)):
        [server] = fleet.start({name: {"model": model}})
        found.append([server.complete(prompt, max_tokens=24, logprobs=5) for prompt in prompts])
        if model is not None:
            fleet.stop(name)
    first, second = found
    assert [sequence(answer) for answer in second] == [sequence(answer) for answer in first]
    largest = max(np.abs(logprobs(a) - logprobs(b)).max() for a, b in zip(first, second, strict=True))
    assert largest < 1e-4, f"log-probabilities differ by {largest}"
