"""Generation step by step: against the library's own, batched against alone, and requests that end early."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.torch

import torch  # noqa: E402

import transformers_models as models  # noqa: E402
from coterie.engines.transformers import ExpertCapture  # noqa: E402
from coterie.engines.transformers.recording import generate_batch  # noqa: E402
from transformers_models import same_routes  # noqa: E402

every_family = pytest.mark.parametrize("family", models.FAMILIES)
LENGTHS = (3, 17, 1, 30)


def some_prompts(seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, models.VOCAB, length).tolist() for length in LENGTHS]


@every_family
def test_a_batch_gives_each_request_what_it_gets_alone(family: str) -> None:
    model = models.build(family)
    with ExpertCapture(model, gate_weights=True) as capture:
        together = generate_batch(model, capture, some_prompts(), 6, frozenset([models.END]))
        for one, prompt in zip(together, some_prompts(), strict=True):
            (alone,) = generate_batch(model, capture, [prompt], 6, frozenset([models.END]))
            assert one.output_ids == alone.output_ids
            assert len(one.expert_ids) == len(prompt) + len(one.output_ids) - 1
            assert same_routes(one.expert_ids, alone.expert_ids) == 1.0
            assert one.gate_weights is not None
            assert alone.gate_weights is not None
            np.testing.assert_allclose(
                np.sort(one.gate_weights), np.sort(alone.gate_weights), rtol=1e-3, atol=1e-5
            )  # float32, another shape of matrix product


@every_family
def test_tokens_are_the_librarys_and_experts_those_of_a_pass_without_a_cache(family: str) -> None:
    """Two other ways to the same numbers: ``generate``, and the whole text at once."""
    model = models.build(family)
    for prompt in some_prompts()[:2]:
        with ExpertCapture(model) as capture, torch.no_grad():
            (one,) = generate_batch(model, capture, [prompt], 6, frozenset([models.END]))
            ids = torch.tensor([prompt])
            whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
            assert [*prompt, *one.output_ids] == whole[0].tolist()
            capture.clear()
            model(torch.tensor([[*prompt, *one.output_ids[:-1]]]))
            assert same_routes(one.expert_ids, capture.take().expert_ids) == 1.0


def test_requests_that_end_early_keep_their_own_rows_only() -> None:
    """Make a token that some request generates early its end: the others must not notice."""
    model = models.build("qwen3_moe")
    with ExpertCapture(model) as capture:
        free = generate_batch(model, capture, some_prompts(), 12, frozenset())
        end = free[1].output_ids[4]
        ended = generate_batch(model, capture, some_prompts(), 12, frozenset([end]))
    for before, after in zip(free, ended, strict=True):
        stop = before.output_ids.index(end) + 1 if end in before.output_ids else 12
        assert after.output_ids == before.output_ids[:stop]
        assert after.stopped == (end in before.output_ids)
        rows = len(before.prompt_ids) + stop - 1
        assert same_routes(after.expert_ids, before.expert_ids[:rows]) == 1.0
    assert len({len(one.output_ids) for one in ended}) > 1


def test_one_token_has_no_decode_row() -> None:
    model = models.build("mixtral")
    with ExpertCapture(model) as capture:
        for one in generate_batch(model, capture, some_prompts(), 1, frozenset()):
            assert len(one.output_ids) == 1
            assert len(one.expert_ids) == len(one.prompt_ids)


def test_sampling_follows_the_model_and_each_requests_own_generator() -> None:
    model = models.build("mixtral")
    prompt = some_prompts()[0]
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1].double().numpy() / 0.5
    share = np.exp(logits - logits.max())
    share /= share.sum()
    with ExpertCapture(model) as capture:
        rngs = [np.random.default_rng([1, n]) for n in range(400)]
        drawn = [g.output_ids[0] for g in generate_batch(model, capture, [prompt] * 400, 1, frozenset(), 0.5, rngs)]
        pair = [
            generate_batch(model, capture, batch, 8, frozenset(), 0.7, [np.random.default_rng(5) for _ in batch])[0]
            for batch in ([prompt], [prompt, some_prompts()[1]])
        ]
    counts = np.bincount(drawn, minlength=len(share))
    assert abs(counts / 400 - share).max() < 4 * np.sqrt(0.25 / 400), "four standard errors"
    assert len(set(drawn)) > 3
    assert pair[0].output_ids == pair[1].output_ids
