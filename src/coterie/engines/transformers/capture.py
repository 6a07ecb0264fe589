"""Capture the experts that a transformers model uses, layer by layer, without changing its results.

Since version 5 all MoE families of the library share one interface: the router's choice is passed as two tensors, ids
and weights [row, k], to the module that holds the experts' weights. A hook before that module sees exactly what the
layer is about to use, for any routing formula (groups, score corrections, hash tables) and any kernel. Shared experts
are separate modules and never counted. A layer that computes its experts in another way is detected: its rows are
missing, and :meth:`ExpertCapture.take` raises instead of returning an incomplete result.
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import UnavailableError, check

FAMILIES = ("deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""Model types that are tested. Other types work if their experts module receives the router's choice the same way."""

_IDS = ("top_k_index", "router_indices")
_TOP_K = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")


class CapturedStep(NamedTuple):
    """Experts that one forward pass used, or several passes if `take` was not called between them."""

    expert_ids: NDArray[np.int32]
    """[row, layer, k] with rows = batch x sequence, in the order the model flattens them; includes padding rows."""
    gate_weights: NDArray[np.float32] | None
    """[row, layer, k] weight of each expert's output; None if not captured."""


class ExpertLayer(NamedTuple):
    """One MoE layer of a model."""

    layer_id: int
    """Index of the layer in the model; dense layers are counted too."""
    path: str
    experts: Any
    """Module that holds the experts and receives the router's choice."""


class ExpertCapture:
    """Collect expert ids while a model runs.

    ``with ExpertCapture(model) as capture: model(...); step = capture.take()``. Leaving the block removes the hooks.
    """

    def __init__(self, model: Any, gate_weights: bool = False) -> None:
        self.gate_weights = gate_weights
        self.layers = expert_layers(model)
        self.layer_ids = tuple(layer.layer_id for layer in self.layers)
        self.num_experts = _one([num_experts(layer.experts) for layer in self.layers], "experts", self.layers)
        self.top_k = _top_k(model, self.layers)
        self._handles: list[Any] = []
        self.clear()

    def __enter__(self) -> ExpertCapture:
        check(not self._handles, "this capture is attached already")
        self.clear()
        self._handles = [
            layer.experts.register_forward_pre_hook(self._hook(index), with_kwargs=True)
            for index, layer in enumerate(self.layers)
        ]
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, index: int) -> Any:
        import torch

        def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids, weights = router_choice(args, kwargs)
            # Copied, since a kernel may modify its input in place. Stays on the device, since a copy to the host would
            # synchronise at every layer.
            self._ids[index].append(ids.detach().reshape(-1, ids.shape[-1]).to(torch.int32, copy=True))
            if self.gate_weights:
                self._weights[index].append(
                    weights.detach().reshape(-1, weights.shape[-1]).to(torch.float32, copy=True)
                )

        return note

    def clear(self) -> None:
        """Discard what was collected, for example after a forward pass that failed."""
        self._ids: list[list[Any]] = [[] for _ in self.layers]
        self._weights: list[list[Any]] = [[] for _ in self.layers]

    def take(self) -> CapturedStep:
        """Return what was collected since the last call; raise unless every layer saw the same number of rows."""
        ids, weights = self._ids, self._weights
        self.clear()
        rows = [sum(len(part) for part in parts) for parts in ids]
        check(any(rows), "nothing was captured: run the model inside the capture's block before take()")
        if len(set(rows)) > 1:
            at = next(i for i, count in enumerate(rows) if count != rows[0])
            raise UnavailableError(
                f"layer {self.layer_ids[at]} gave {rows[at]} rows to its experts and layer {self.layer_ids[0]} gave "
                f"{rows[0]}: the pass failed half way, or a fused kernel goes around the experts of one of them"
            )
        expert_ids = _stack(ids)
        check(
            expert_ids.shape[2] == self.top_k,
            f"the layers chose {expert_ids.shape[2]} experts a token; the model says {self.top_k}",
            UnavailableError,
        )
        return CapturedStep(expert_ids, _stack(weights) if self.gate_weights else None)


def expert_layers(model: Any) -> list[ExpertLayer]:
    """Return the MoE layers of a model, in order; raise UnavailableError if one cannot be captured."""
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    layers: list[ExpertLayer] = []
    for path, module in model.named_modules():
        # The class's signature: tools that move weights between devices wrap `forward` on the instance.
        if set(_IDS) & set(inspect.signature(type(module).forward).parameters):
            numbers = [int(part) for part in path.split(".") if part.isdigit()]
            layers.append(ExpertLayer(numbers[0] if numbers else len(layers), path, module))
            check(
                not getattr(module, "_is_expert_parallel", False),
                f"{path} is sharded over ranks and holds part of the experts: load it whole",
                UnavailableError,
            )
    check(
        layers,
        f"model type {kind!r} has no layer whose experts are given the router's choice; known to work: "
        f"{', '.join(FAMILIES)} and their like",
        UnavailableError,
    )
    for first, second in pairwise(layers):
        if first.layer_id >= second.layer_id:
            twice = f"{first.path}, {second.path}"
            raise UnavailableError(
                f"model type {kind!r} routes twice in one layer ({twice}): rows of a token are not one"
            )
    return layers


def num_experts(experts: Any) -> int:
    """Return the number of experts that a router may choose, including experts that compute nothing."""
    for name in ("total_experts", "num_experts"):
        if isinstance(count := getattr(experts, name, None), int):
            return count
    raise UnavailableError(f"{type(experts).__name__} does not say how many experts it holds")


def router_choice(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Extract ids and weights [row, k] from a call of the experts module: (hidden states, ids, weights)."""
    given = [*args[1:], *(value for name, value in kwargs.items() if name != "hidden_states")]
    return given[0], given[1]


def _top_k(model: Any, layers: list[ExpertLayer]) -> int:
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    counts = []
    for layer in layers:
        block = model.get_submodule(layer.path.rpartition(".")[0])
        beside = [getattr(module, "top_k", None) for module in (*block.children(), block)]
        beside += [getattr(config, name, None) for name in _TOP_K]
        whole = [value for value in beside if isinstance(value, int)]
        check(
            whole, f"{layer.path}: neither its router nor the config says how many experts it chooses", UnavailableError
        )
        counts.append(whole[0])
    return _one(counts, "experts a token", layers)


def _one(values: list[int], what: str, layers: list[ExpertLayer]) -> int:
    for value, layer in zip(values, layers, strict=True):
        check(
            value == values[0],
            f"layer {layer.layer_id} has {value} {what} and layer {layers[0].layer_id} {values[0]}: "
            "a trace has one number for all",
            UnavailableError,
        )
    return values[0]


def _stack(parts: list[list[Any]]) -> NDArray[Any]:
    """Stack the layers' tensors to [row, layer, k] with one copy to the host."""
    import torch

    whole = [layer[0] if len(layer) == 1 else torch.cat(layer) for layer in parts]
    return np.asarray(torch.stack([layer.to(whole[0].device) for layer in whole], dim=1).cpu())
