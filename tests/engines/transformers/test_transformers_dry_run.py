"""The router dry run: by hand for each family, exact where theory says it must be, and its scores."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.torch

import torch  # noqa: E402

import transformers_models as models  # noqa: E402
from coterie.engines.transformers import DryRun, ExpertCapture, dry_run, score_dry_run  # noqa: E402
from coterie.errors import ConfigError  # noqa: E402

REQUESTS = [[5, 9, 200, 31, 7], list(range(10, 40)), [3]]

every_family = pytest.mark.parametrize("family", [*models.FAMILIES, *models.ALIKE])


def used(model: Any, request: Any) -> np.ndarray:
    with ExpertCapture(model) as capture, torch.no_grad():
        model(torch.tensor([request]))
        return capture.take().expert_ids


@pytest.mark.parametrize("family", models.FAMILIES)
def test_it_is_embedding_norm_and_gate(family: str) -> None:
    """What the general mechanism finds, spelled out with the names these families happen to use."""
    model = models.build(family)
    for request, run in zip(REQUESTS, dry_run(model, REQUESTS), strict=True):
        assert run.expert_ids.shape == (len(request), len(run.layer_ids), models.TOP_K)
        with torch.no_grad():
            states = model.get_input_embeddings()(torch.tensor([request]))
            for at, layer_id in enumerate(run.layer_ids):
                layer = model.model.layers[layer_id]
                gate = layer.mlp.router if family == "gpt_oss" else layer.mlp.gate
                chosen = gate(layer.post_attention_layernorm(states).reshape(-1, states.shape[-1]))[2]
                np.testing.assert_array_equal(np.sort(run.expert_ids[:, at]), np.sort(chosen.numpy()))


@every_family
def test_it_is_exact_where_attention_and_experts_add_nothing(family: str) -> None:
    """Theory: with every layer's contribution at zero the gates see the embeddings and nothing else."""
    model = copy.deepcopy(models.build(family))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(part in name for part in ("o_proj", "down_proj", "post_feedforward_layernorm")):
                weight.zero_()
            if family == "flex_olmo" and "post_attention_layernorm" in name:  # it norms what it adds
                weight.zero_()
    for request, run in zip(REQUESTS, dry_run(model, REQUESTS), strict=True):
        truth = used(model, request)
        np.testing.assert_array_equal(np.sort(run.expert_ids), np.sort(truth))
        score = score_dry_run(run, truth)
        np.testing.assert_allclose(score.cosine, 1.0)
        np.testing.assert_array_equal(score.recall, 1.0)


@every_family
def test_neither_experts_nor_attention_run(family: str) -> None:
    """Once one token has shown the way, no expert and no attention is called, and no hook stays behind."""
    model = models.build(family)
    dry_run(model, [[1]])  # the library puts hooks of its own where it first runs
    before = hooks(model)
    calls: Counter[str] = Counter()
    handles = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("experts", "self_attn"):
            handles.append(module.register_forward_hook(lambda *_, name=name: calls.update([name])))
    try:
        dry_run(model, REQUESTS)
    finally:
        for handle in handles:
            handle.remove()
    assert set(calls.values()) == {1}
    assert len(calls) > len(ExpertCapture(model).layer_ids), "both kinds are there"
    assert hooks(model) == before


def hooks(model: Any) -> list[tuple[int, int]]:
    return [(len(module._forward_pre_hooks), len(module._forward_hooks)) for module in model.modules()]


def test_the_same_request_gives_the_same_whatever_stands_beside_it() -> None:
    model = models.build("qwen3_moe")
    together = dry_run(model, REQUESTS)
    for request, run in zip(REQUESTS, together, strict=True):
        np.testing.assert_array_equal(dry_run(model, [request])[0].expert_ids, run.expert_ids)
    backwards = dry_run(model, [REQUESTS[1][::-1]])[0].expert_ids
    np.testing.assert_array_equal(np.sort(backwards[::-1]), np.sort(together[1].expert_ids))  # context plays no part


def test_an_empty_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="without tokens"):
        dry_run(models.build("olmoe"), [[1], []])


# The score, by hand --------------------------------------------------------------------------------------------------


def test_score_by_hand() -> None:
    run = DryRun(np.array([[[0, 1]], [[0, 2]]]), 4, (5,))
    np.testing.assert_array_equal(run.footprint, [[2, 1, 1, 0]])
    score = score_dry_run(run, np.array([[[1, 0]], [[3, 0]]]))  # order within a token means nothing
    np.testing.assert_allclose(score.cosine, [(2 * 2 + 1) / (np.sqrt(6) * np.sqrt(6))])
    assert score.recall is not None
    np.testing.assert_allclose(score.recall, [0.75])


def test_other_tokens_have_footprints_but_no_recall() -> None:
    run = DryRun(np.array([[[0, 1]], [[0, 2]]]), 4, (5,))
    score = score_dry_run(run, np.array([[[3, 2]]]))
    assert score.recall is None
    np.testing.assert_allclose(score.cosine, [1 / (np.sqrt(6) * np.sqrt(2))])
    apart = score_dry_run(DryRun(np.array([[[0, 1]]]), 4, (5,)), np.array([[[3, 2]]]))
    assert apart.recall is not None
    assert (apart.cosine.tolist(), apart.recall.tolist()) == ([0.0], [0.0])


@pytest.mark.parametrize("shape", [(0, 1, 2), (2, 2, 2), (2, 1, 3), (2, 2)])
def test_truth_of_another_shape_is_refused(shape: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match=r"expected \[token, 1, 2\]"):
        score_dry_run(DryRun(np.array([[[0, 1]], [[0, 2]]]), 4, (5,)), np.zeros(shape, int))
