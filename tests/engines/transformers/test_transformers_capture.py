"""Captured experts against each family's formula, worked out anew from the hidden states; nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.torch

import torch  # noqa: E402
import transformers  # noqa: E402

import transformers_models as models  # noqa: E402
from coterie.engines.transformers import ExpertCapture  # noqa: E402
from coterie.engines.transformers.capture import FAMILIES  # noqa: E402
from coterie.errors import ConfigError, UnavailableError  # noqa: E402

TIE = 1e-5
"""Scores nearer than this may be chosen either way."""

every_family = pytest.mark.parametrize("family", models.FAMILIES)


def tokens(rows: int = 3, length: int = 17, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, models.VOCAB, (rows, length), generator=generator)


def router(block: Any) -> Any:
    return block.gate if hasattr(block, "gate") else block.router


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    found: np.ndarray = e / e.sum(axis=-1, keepdims=True)
    return found


def by_formula(family: str, block: Any, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scores [row, expert] by which a family chooses its top-k, and the weight [row, expert] each would get before
    the chosen are normalised; from the definitions, in float64."""
    gate, config = router(block), block.experts.config
    logits = hidden @ gate.weight.detach().double().numpy().T
    if family in ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe"):
        return logits, softmax(logits)
    if family == "gpt_oss":
        logits += gate.bias.detach().double().numpy()
        return logits, np.exp(logits - logits.max(axis=1, keepdims=True))
    groups = config.n_group
    if family == "deepseek_v2":
        weights = softmax(logits)
        scores, of_group = weights, weights.reshape(len(weights), groups, -1).max(axis=2)
    else:
        weights = 1 / (1 + np.exp(-logits))
        scores = weights + gate.e_score_correction_bias.double().numpy()
        of_group = np.sort(scores.reshape(len(scores), groups, -1), axis=2)[:, :, -2:].sum(axis=2)
    taken = np.argsort(-of_group, axis=1)[:, : config.topk_group]
    open_ = np.zeros_like(of_group, bool)
    np.put_along_axis(open_, taken, True, axis=1)
    ordered = np.sort(of_group, axis=1)
    gap = ordered[:, -config.topk_group] - (ordered[:, -config.topk_group - 1] if groups > config.topk_group else -9)
    scores = np.where(np.repeat(open_, models.EXPERTS // groups, axis=1), scores, -np.inf)
    return np.where((gap > TIE)[:, None], scores, np.nan), weights  # rows with tied groups are left out


def final_weights(family: str, block: Any, chosen: np.ndarray) -> np.ndarray:
    """[row, k] what the chosen experts' outputs are multiplied by."""
    config = block.experts.config
    normalised = family in ("mixtral", "gpt_oss", "deepseek_v3", "glm4_moe") or getattr(config, "norm_topk_prob", False)
    if family == "deepseek_v2":
        normalised = False  # the library's port never does
    scale = config.routed_scaling_factor if family.startswith(("deepseek", "glm")) else 1.0
    return scale * (chosen / chosen.sum(axis=1, keepdims=True) if normalised else chosen)


def run(model: Any, ids: Any, gate_weights: bool = True) -> tuple[Any, Any, Any, Any]:
    """Hidden states [row, hidden] at the door of every MoE block, and what was captured."""
    seen, handles = {}, []
    with ExpertCapture(model, gate_weights) as capture:
        for layer in capture.layers:
            block = model.get_submodule(layer.path.removesuffix(".experts"))

            def note(_: Any, args: Any, at: Any = layer.layer_id) -> None:
                seen[at] = args[0].detach().double().reshape(-1, args[0].shape[-1]).numpy()

            handles.append(block.register_forward_pre_hook(note))
        with torch.no_grad():
            out = model(ids)
        step = capture.take()
    for handle in handles:
        handle.remove()
    return capture, step, seen, out


@every_family
def test_ids_and_weights_follow_from_the_hidden_states(family: str) -> None:
    model = models.build(family)
    ids = tokens()
    capture, step, seen, _ = run(model, ids)
    assert (capture.num_experts, capture.top_k) == (models.EXPERTS, models.TOP_K)
    assert step.expert_ids.shape == (ids.numel(), len(capture.layer_ids), models.TOP_K)
    compared = 0
    for at, layer in enumerate(capture.layers):
        block = model.get_submodule(layer.path.removesuffix(".experts"))
        scores, weights = by_formula(family, block, seen[layer.layer_id])
        ordered = np.sort(scores, axis=1)
        clear = ordered[:, -models.TOP_K] - ordered[:, -models.TOP_K - 1] > TIE  # False for NaN too
        expected = np.sort(np.argsort(-scores, axis=1)[:, : models.TOP_K], axis=1)
        found = step.expert_ids[:, at]
        np.testing.assert_array_equal(np.sort(found, axis=1)[clear], expected[clear])
        chosen = np.take_along_axis(weights, found.astype(np.int64), axis=1)
        np.testing.assert_allclose(step.gate_weights[:, at][clear], final_weights(family, block, chosen)[clear], 1e-4)
        compared += int(clear.sum())
        assert len(np.unique(found)) > models.TOP_K, "a model that always chose the same would prove nothing"
    assert compared > 0.98 * ids.numel() * len(capture.layers)


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "gpt_oss"])
def test_ids_are_the_best_of_the_librarys_own_router_logits(family: str) -> None:
    """Rows are batch x sequence flattened, and layers come in order: the library's logits are laid out so too."""
    model, ids = models.build(family), tokens(rows=2)
    with ExpertCapture(model) as capture, torch.no_grad():
        logits = [layer for layer in model(ids, output_router_logits=True).router_logits if layer is not None]
        step = capture.take()
    assert len(logits) == len(capture.layer_ids)
    for at, layer in enumerate(logits):
        values = layer.reshape(-1, models.EXPERTS).double().numpy()
        ordered = np.sort(values, axis=1)
        clear = ordered[:, -2] - ordered[:, -3] > TIE
        best = np.argsort(-values, axis=1)[:, :2]
        np.testing.assert_array_equal(np.sort(step.expert_ids[clear, at], axis=1), np.sort(best[clear], axis=1))


@pytest.mark.parametrize("family", [*models.FAMILIES, *models.ALIKE])
def test_outputs_are_the_same_bits_and_nothing_stays_behind(family: Any) -> None:
    model, ids = models.build(family), tokens()
    with torch.no_grad():
        before = model(ids).logits
        with ExpertCapture(model, gate_weights=True) as capture:
            during = model(ids).logits
            step = capture.take()
        after = model(ids).logits
    assert torch.equal(before, during)
    assert torch.equal(before, after)
    assert step.expert_ids.min() >= 0
    assert step.expert_ids.max() < capture.num_experts
    assert all(len(set(row)) == models.TOP_K for row in step.expert_ids.reshape(-1, models.TOP_K).tolist())
    assert not any(module._forward_pre_hooks for module in model.modules())
    with pytest.raises(ConfigError, match="nothing was captured"):
        capture.take()


@every_family
def test_every_kernel_of_the_library_is_captured_alike(family: str) -> None:
    model, ids = models.build(family), tokens(rows=1)
    found = []
    kept = model.config._experts_implementation
    try:
        for implementation in ("eager", "batched_mm", "grouped_mm"):
            model.set_experts_implementation(implementation)
            found.append(run(model, ids)[1].expert_ids)
    finally:
        model.set_experts_implementation(kept)
    agree = [(np.sort(found[0]) == np.sort(other)).all(axis=2).mean() for other in found[1:]]
    assert min(agree) > 0.97, "kernels round differently, so a tie may fall either way; no more than that"


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("qwen3_moe", (0, 2)),
        ("deepseek_v2", (1, 2)),
        ("deepseek_v3", (1, 2)),
        ("glm4_moe", (1, 2)),
        ("olmoe", (0, 1, 2)),
    ],
)
def test_dense_layers_are_left_out_and_the_others_keep_their_index(family: str, expected: tuple[Any, ...]) -> None:
    assert ExpertCapture(models.build(family)).layer_ids == expected


def test_families_that_are_promised_are_tested() -> None:
    assert set(FAMILIES) == set(models.FAMILIES)


def test_the_experts_named_are_the_ones_that_computed() -> None:
    """The adversary: break every expert but those captured, token by token, and the output must not move."""
    model, ids = models.build("qwen3_moe"), tokens(rows=1, length=1, seed=5)
    capture, step, _, out = run(model, ids)
    saved = [(layer.experts.down_proj, layer.experts.down_proj.detach().clone()) for layer in capture.layers]
    try:
        with torch.no_grad():
            for at, (weights, _) in enumerate(saved):
                others = np.setdiff1d(np.arange(models.EXPERTS), step.expert_ids[0, at])
                weights[others] += 1e3
            assert torch.equal(model(ids).logits, out.logits)
            saved[0][0][int(step.expert_ids[0, 0, 0])] += 1e3
            assert not torch.equal(model(ids).logits, out.logits)
    finally:
        with torch.no_grad():
            for weights, before in saved:
                weights.copy_(before)


def test_passes_not_taken_apart_come_in_order() -> None:
    model = models.build("mixtral")
    first, second = tokens(rows=1, length=4), tokens(rows=2, length=3, seed=1)
    apart = [run(model, ids)[1].expert_ids for ids in (first, second)]
    with ExpertCapture(model) as capture, torch.no_grad():
        model(first)
        model(second)
        np.testing.assert_array_equal(capture.take().expert_ids, np.concatenate(apart))


def test_a_pass_that_failed_half_way_is_not_taken_for_a_whole_one() -> None:
    model = models.build("mixtral")

    def fail(*_: object) -> None:
        raise RuntimeError("a kernel died")

    with ExpertCapture(model) as capture, torch.no_grad():
        handle = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="a kernel died"):
            model(tokens())
        handle.remove()
        with pytest.raises(UnavailableError, match="layer 1 gave 0 rows to its experts and layer 0 gave 51"):
            capture.take()
        model(tokens())
        assert len(capture.take().expert_ids) == 51, "what came before is forgotten"


def test_a_layer_that_goes_around_its_experts_is_noticed() -> None:
    model = models.build("mixtral")
    block = model.model.layers[2].mlp
    block.forward = lambda hidden_states: hidden_states  # what a fused kernel does to a hook
    try:
        with ExpertCapture(model) as capture, torch.no_grad():
            model(tokens())
            with pytest.raises(UnavailableError, match="layer 2 gave 0 rows"):
                capture.take()
    finally:
        del block.forward


def test_two_captures_see_the_same_and_one_cannot_be_attached_twice() -> None:
    model = models.build("olmoe")
    with ExpertCapture(model) as one, ExpertCapture(model) as other, torch.no_grad():
        model(tokens())
        np.testing.assert_array_equal(one.take().expert_ids, other.take().expert_ids)
        with pytest.raises(ConfigError, match="attached already"), one:
            pass


def test_hooks_are_removed_when_the_block_fails() -> None:
    model = models.build("olmoe")
    with pytest.raises(ZeroDivisionError), ExpertCapture(model):
        1 / 0  # noqa: B018
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("kind", ["llama", "llama4_text"])
def test_a_model_without_the_seam_is_named_with_the_families_that_have_it(kind: str) -> None:
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnavailableError, match=f"model type '{kind}' has no layer .* known to work: deepseek_v2, .*"):
        ExpertCapture(model)


def test_layers_of_different_width_are_refused() -> None:
    model = models.build("olmoe")
    experts = model.model.layers[1].mlp.experts
    experts.num_experts = 7
    try:
        with pytest.raises(UnavailableError, match="layer 1 has 7 experts and layer 0 8: a trace has one number"):
            ExpertCapture(model)
    finally:
        experts.num_experts = models.EXPERTS
