"""Permute the experts of a model in memory without changing its results, including ties in top-k.

Experts, router rows, router biases and score corrections are permuted in place, so that the model's state equals the
permuted checkpoint and can be saved as one. A permuted router would resolve ties differently (``torch.topk`` goes by
position, and not even by the lowest one), sum its softmax in another order, and return the chosen experts in another
order. A live router therefore computes in the original order and then renumbers the chosen experts: its choice and its
weights are bit-equal. That costs a copy of the router's rows in each pass.

With the library's ``grouped_mm`` and ``batched_mm`` experts, which sum a token's experts in the order of its top-k, the
whole layer is then bit-equal. ``eager`` sums them in the order of their indices: equal within rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coterie.engines.transformers.capture import ExpertLayer, expert_layers, num_experts
from coterie.engines.transformers.permute.tensors import Slots, routing_groups, rows_by_layer
from coterie.errors import UnavailableError
from coterie.types import Placement

_ROUTERS = ("gate", "router")


@dataclass(slots=True, eq=False)
class _Permuted:
    """Forward pass of a permuted router: computes in the original order, then renumbers ids and logits."""

    router: Any
    row: Slots
    _orders: dict[Any, tuple[Any, Any]] = field(default_factory=dict)

    def _order(self, device: Any) -> tuple[Any, Any]:
        """Return [slot] expert and [expert] slot on a device, cached: a copy in each pass would synchronise."""
        import torch

        if device not in self._orders:
            row = torch.as_tensor(self.row, device=device)
            self._orders[device] = row, torch.argsort(row)
        return self._orders[device]

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        row, slot_of = self._order(self.router.weight.device)
        former = copy.copy(self.router)  # one copy per pass, so that threads may share the model
        former._parameters = {name: _rows(tensor, slot_of) for name, tensor in former._parameters.items()}
        former._buffers = {name: _rows(tensor, slot_of) for name, tensor in former._buffers.items()}
        logits, weights, ids = type(former).forward(former, *args, **kwargs)
        return logits[..., row], weights, slot_of[ids]


def _rows(tensor: Any, order: Any) -> Any:
    return None if tensor is None else tensor[order]


class _Layer:
    """One MoE layer: its experts, its router and its current placement."""

    def __init__(self, model: Any, layer: ExpertLayer) -> None:
        self.layer_id, self.path = layer.layer_id, layer.path
        self.experts, self.num_experts = layer.experts, num_experts(layer.experts)
        block = model.get_submodule(layer.path.rpartition(".")[0])
        routers = [child for name, child in block.named_children() if name in _ROUTERS]
        if len(routers) != 1 or not hasattr(routers[0], "weight"):
            self._refuse(f"has {len(routers)} modules beside it named {' or '.join(_ROUTERS)}; one router is expected")
        self.router: Any = routers[0]
        self._check(block)
        forward = self.router.__dict__.get("forward")
        self.row: Slots = forward.row if isinstance(forward, _Permuted) else np.arange(self.num_experts)

    def _check(self, block: Any) -> None:
        import torch

        for module in (self.experts, self.router):
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if tensor.is_meta or not tensor.ndim or len(tensor) != self.num_experts:
                    self._refuse(f"has a tensor {name} of shape {tuple(tensor.shape)}, offloaded or without a row each")
        for name, tensor in (*block.named_parameters(recurse=False), *block.named_buffers(recurse=False)):
            if self.num_experts in tensor.shape:
                self._refuse(f"shares the tensor {name} {tuple(tensor.shape)} with its block; its use is not known")
        forward = self.router.__dict__.get("forward")
        if forward is not None and not isinstance(forward, _Permuted):
            self._refuse("has a router that another tool has wrapped")
        weight = self.router.weight
        with torch.no_grad():
            out = self.router(torch.zeros((1, weight.shape[1]), dtype=weight.dtype, device=weight.device))
        if not isinstance(out, tuple) or len(out) != 3 or out[2].is_floating_point() or len(out[0][0]) != len(weight):
            self._refuse(f"has a router, {type(self.router).__name__}, that does not give logits, weights and ids")

    def _refuse(self, problem: str) -> None:
        raise UnavailableError(f"{self.path} cannot be permuted: it {problem}; permute its checkpoint instead")

    def permute(self, row: Slots) -> None:
        """Put expert row[s] into slot s; experts have their original indices, also after earlier permutations."""
        import torch

        order = np.argsort(self.row)[row]  # current slot of each expert
        with torch.no_grad():
            for module in (self.experts, self.router):
                for tensor in (*module.parameters(), *module.buffers()):
                    tensor.copy_(tensor[torch.as_tensor(order, device=tensor.device)])
        self.router.forward = _Permuted(self.router, row.copy())


def permute_model(model: Any, placement: Placement, layer_ids: Sequence[int] | None = None) -> None:
    """Put the experts of a transformers model into the slots of a placement, in place.

    `layer_ids` are the model's layers that the placement's rows are for; None means all MoE layers. A model may be
    permuted again: placements always name experts by their original indices. If the placement is refused, nothing
    changes.
    """
    layers = [_Layer(model, layer) for layer in expert_layers(model)]
    for layer in layers:
        if layer.num_experts != layers[0].num_experts:
            layer._refuse(f"has {layer.num_experts} experts and layer {layers[0].layer_id} {layers[0].num_experts}")
    groups, ids = routing_groups(model.config.to_dict()), [layer.layer_id for layer in layers]
    rows = rows_by_layer(placement, layer_ids, ids, layers[0].num_experts, groups)
    for layer in layers:
        if layer.layer_id in rows:
            layer.permute(rows[layer.layer_id])
