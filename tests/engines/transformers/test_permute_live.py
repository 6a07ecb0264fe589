"""Models permuted in memory compute what they did, to the last bit where the library adds in top-k order."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

import transformers_models as models
from coterie.engines.transformers.capture import ExpertCapture, expert_layers
from coterie.engines.transformers.permute import permute_model
from coterie.errors import ConfigError, UnavailableError
from coterie.types import Placement
from permuted_models import EXPERTS, FAMILIES, TOP_K, distance, logits, placement, tokens

pytestmark = pytest.mark.torch
every_family = pytest.mark.parametrize("family", FAMILIES)


def fresh(family: str, dtype: torch.dtype = torch.float32) -> Any:
    return copy.deepcopy(models.build(family, top_k=TOP_K)).to(dtype)


def router(model: Any, layer: int) -> Any:
    block = model.get_submodule(expert_layers(model)[layer].path.rpartition(".")[0])
    return block.gate if hasattr(block, "gate") else block.router


@every_family
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_outputs_are_the_same_bits_where_experts_are_added_in_top_k_order(family: str, dtype: torch.dtype) -> None:
    kernels = ["batched_mm"] if dtype == torch.float64 else ["batched_mm", "grouped_mm"]  # the latter has no float64
    model = fresh(family, dtype)
    before = [logits(model, kernel) for kernel in kernels]
    permute_model(model, placement(model))
    for kernel, expected in zip(kernels, before, strict=True):
        assert torch.equal(logits(model, kernel), expected), kernel


@every_family
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
def test_outputs_are_equal_within_rounding_where_they_are_added_by_index(
    family: str, dtype: torch.dtype, rounding: float
) -> None:
    model = fresh(family, dtype)
    before = logits(model, "eager")
    permute_model(model, placement(model))
    assert distance(before, logits(model, "eager")) < rounding


@every_family
def test_slots_hold_their_experts_and_ids_are_slots(family: str) -> None:
    model, first = fresh(family), fresh(family)
    chosen = placement(model)
    permute_model(model, chosen)
    for row, new, old in zip(chosen.slot_experts, expert_layers(model), expert_layers(first), strict=True):
        for name, tensor in new.experts.named_parameters():
            assert torch.equal(tensor, old.experts.get_parameter(name)[row]), name
    for layer, row in enumerate(chosen.slot_experts):
        ours, theirs = router(model, layer), router(first, layer)
        assert torch.equal(ours.weight, theirs.weight[row])
        state = theirs.state_dict()
        assert all(torch.equal(tensor, state[name][row]) for name, tensor in ours.state_dict().items())
    found = []
    for one in (first, model):
        with torch.inference_mode(), ExpertCapture(one) as capture:
            one(tokens(), use_cache=False)
            found.append(capture.take().expert_ids)
    layers = np.arange(chosen.num_layers)[None, :, None]
    np.testing.assert_array_equal(chosen.slot_experts[layers, found[1]], found[0])


@every_family
@pytest.mark.parametrize("tie", ["zero logits", "equal rows", "equal pairs"])
def test_ties_are_settled_as_before(family: str, tie: str) -> None:
    """torch.topk settles ties by position: with permuted rows it would take other experts."""
    model = fresh(family)
    with torch.no_grad():
        for layer in range(len(expert_layers(model))):
            for tensor in (*router(model, layer).parameters(), *router(model, layer).buffers()):
                if tie == "zero logits":
                    tensor.zero_()
                elif tie == "equal rows":
                    tensor[:] = tensor[0].clone()
                else:
                    tensor[1::2] = tensor[::2].clone()
    before = logits(model)
    with torch.no_grad():  # what a permutation without the former order would do
        naive = copy.deepcopy(model)
        chosen = placement(model, seed=3)
        permute_model(naive, chosen)
        for layer in range(chosen.num_layers):
            del router(naive, layer).forward
    permute_model(model, chosen)
    assert torch.equal(logits(model), before)
    assert not torch.equal(logits(naive), before), "the case must tell"


def test_a_permuted_model_may_be_permuted_again_copied_and_saved() -> None:
    model, first = fresh("qwen3_moe"), fresh("qwen3_moe")
    before = logits(model)
    one, other = placement(model, 1), placement(model, 2)
    permute_model(model, one)
    permute_model(model, other)
    assert torch.equal(logits(model), before)
    assert torch.equal(router(model, 0).weight, router(first, 0).weight[other.slot_experts[0]])
    copied = copy.deepcopy(model)
    permute_model(copied, one)
    assert torch.equal(logits(copied), before)
    assert torch.equal(router(model, 0).weight, router(first, 0).weight[other.slot_experts[0]]), "the copy's is its own"
    permute_model(model, Placement.linear(one.num_layers, EXPERTS, 2))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), first.state_dict().values(), strict=True))


def test_some_layers_alone() -> None:
    model = fresh("qwen3_moe")
    before, whole = logits(model), placement(model)
    permute_model(model, Placement(whole.slot_experts[1:], 2, EXPERTS), layer_ids=[2])
    assert torch.equal(logits(model), before)
    assert torch.equal(router(model, 0).weight, router(models.build("qwen3_moe", top_k=TOP_K), 0).weight)


def test_gradients_reach_the_permuted_rows() -> None:
    model, first = fresh("qwen3_moe"), fresh("qwen3_moe")
    chosen = placement(model)
    permute_model(model, chosen)
    for one in (model, first):
        one.set_experts_implementation("batched_mm")
        one(tokens(), use_cache=False).logits.square().sum().backward()
    row = chosen.slot_experts[0]
    assert torch.equal(router(model, 0).weight.grad, router(first, 0).weight.grad[row])


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("ernie4_5_moe", "e_score_correction_bias of shape"),
        ("granitemoe", "does not give logits, weights and ids"),
        ("minimax_m2", "shares the tensor e_score_correction_bias"),
    ],
)
def test_layers_built_otherwise_are_refused_untouched(family: str, message: str) -> None:
    model = copy.deepcopy(models.build(family))
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(UnavailableError, match=message):
        permute_model(model, placement(model))
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_placements_that_no_permutation_gives_are_refused() -> None:
    model = fresh("deepseek_v3")
    slots = np.tile(np.arange(EXPERTS, dtype=np.int32), (2, 1))
    slots[1, [1, 2]] = [2, 1]
    with pytest.raises(ConfigError, match="layer 2: slots 0 to 1 hold experts of groups 0 and 1"):
        permute_model(model, Placement(slots, 2, EXPERTS))
    with pytest.raises(ConfigError, match="10 slots for 8 experts: a permutation has no replicas"):
        permute_model(model, Placement.linear(2, EXPERTS, 2, 10))
    with pytest.raises(ConfigError, match="16 experts a layer; the model has 8"):
        permute_model(model, Placement.linear(2, 16, 2))
    with pytest.raises(ConfigError, match="3 layers; the model has 2"):
        permute_model(model, Placement.linear(3, EXPERTS, 2))
    with pytest.raises(ConfigError, match="layer 0, which is not a MoE layer"):
        permute_model(model, Placement.linear(1, EXPERTS, 2), layer_ids=[0])
