"""Access to vLLM's internal objects; no other connector module depends on their structure.

Imports of vLLM are in functions: the connector must load although a hook of the capture is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from coterie.engines.vllm.capture import StepCapture
from coterie.engines.vllm.interfaces import fits
from coterie.errors import UnavailableError, check


def check_supported(config: Any) -> None:
    """Raise UnavailableError for configurations in which experts would be captured wrongly."""
    parallel = config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name, 1)) > 1:
            raise UnavailableError(f"{name}={size} must be 1: a position's experts would lie in parts")
    check(
        not getattr(parallel, "use_ubatching", False),
        "a step that is split in two (ubatching, DBO) runs the hook twice: turn that off",
        UnavailableError,
    )
    owners = config.model_config, getattr(config, "aux_output_config", None)  # of vLLM 0.26; of 0.32 and 0.33
    check(
        not any(getattr(owner, "enable_return_routed_experts", False) for owner in owners),
        "--enable-return-routed-experts takes the same hook: turn that off",
        UnavailableError,
    )
    check(
        config.device_config.device_type != "cpu" or config.model_config.enforce_eager,
        "on a CPU the compiled model leaves the hooks out: start vLLM with --enforce-eager",
        UnavailableError,
    )
    check(config.model_config.get_num_experts(), f"{config.model_config.model} has no experts", UnavailableError)


def attention_group(kv_cache_config: Any) -> tuple[int, int]:
    """Return index and block size of the KV cache group that keeps every token: no sliding window, no draft model."""
    check(
        fits("capture", "experts are not captured"),
        "this vLLM lacks an interface that the capture needs",
        UnavailableError,
    )
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    groups = kv_cache_config.kv_cache_groups
    for index, group in enumerate(groups):
        spec = group.kv_cache_spec
        specs = list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]
        other = group.is_eagle_group or getattr(group, "host_resident", False)  # numbers its blocks otherwise
        if not other and all(isinstance(s, FullAttentionSpec) for s in specs):
            return index, int(spec.block_size)
    names = ", ".join(type(group.kv_cache_spec).__name__ for group in groups) or "none"
    raise UnavailableError(f"no KV cache group keeps every token (found: {names})")


def moe_modules(config: Any) -> torch.nn.ModuleList:
    """Return the model's layers that vLLM registers by name in its static forward context."""
    layers = config.compilation_config.static_forward_context.values()
    return torch.nn.ModuleList([layer for layer in layers if isinstance(layer, torch.nn.Module)])


def captured_layers(modules: torch.nn.ModuleList, config: Any) -> list[int]:
    """Return the target model's MoE layers, in order; a draft model's layers have higher ids."""
    last = config.model_config.get_total_num_hidden_layers()
    layers = sorted({layer for module in _routing_modules(modules) if (layer := int(module.layer_id)) < last})
    check(layers, f"{config.model_config.model} has no MoE layer that vLLM lets be watched", UnavailableError)
    return layers


def _routing_modules(modules: torch.nn.ModuleList) -> list[Any]:
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    return [
        module
        for module in modules.modules()
        if isinstance(module, MoERunner) or (hasattr(module, "capture_fn") and hasattr(module, "layer_id"))
    ]


class MapReader:
    """Reads the expert map in force from the views of vLLM's EplbState that the MoE layers hold."""

    def __init__(self, views: Sequence[Any]) -> None:
        """`views` are [expert, replica] slots of each layer, -1 if unused: parts of one tensor of the state."""
        self._views = views
        self._version = self._reported = -1

    @classmethod
    def of(cls, modules: torch.nn.ModuleList, layer_ids: Sequence[int]) -> MapReader | None:
        """Return a reader for these layers; None without EPLB."""
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        states = {int(one.layer_id): one.eplb_state for one in modules.modules() if isinstance(one, MoERunner)}
        views = [getattr(states[layer], "logical_to_physical_map", None) for layer in layer_ids]
        return None if any(view is None for view in views) else cls(views)

    def changed(self) -> list[bytes] | None:
        """Return the slots of each layer, as ExpertMap holds them, if the map has changed and is whole; else None.

        vLLM moves layers one by one in its asynchronous mode, so a map is read only when a call found it unchanged.
        The tensor's version tells without waiting for the device; reading does wait, once a rearrangement.
        """
        before, self._version = self._version, self._views[0]._version
        if before != self._version or self._version == self._reported:
            return None
        self._reported = self._version
        slots = torch.stack(list(self._views)).cpu().numpy()
        layer, expert, replica = np.nonzero(slots >= 0)
        rows = np.full((len(slots), slots.max() + 1), -1)
        rows[layer, slots[layer, expert, replica]] = expert
        return None if (rows < 0).any() else [row.astype("<u2").tobytes() for row in rows]


class _Capturer:
    """Capturer interface of vLLM's binding. It is called inside the model, so it must not raise."""

    def __init__(self, capture: StepCapture, failed: Callable[[Exception], None]) -> None:
        from vllm.forward_context import get_forward_context

        self._capture, self._failed, self._context = capture, failed, get_forward_context

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        self._guarded(self._capture.capture, layer_id, topk_ids)

    def capture_logits(self, layer_id: int, logits: torch.Tensor) -> None:
        self._guarded(self._capture.capture_logits, layer_id, logits)

    def _guarded(self, hook: Callable[[int, torch.Tensor, Any], None], layer_id: int, routed: torch.Tensor) -> None:
        try:
            hook(layer_id, routed, self._context())
        except Exception as error:
            self._capture.positions.fill_(-1)  # discard this step's rows
            self._failed(error)


TOP_K_KERNELS = ("OAITritonMxfp4ExpertsMonolithic",)
"""vLLM's experts that route internally by the k largest logits, as :mod:`coterie.engines.kernels.top_k` does.

By default gpt-oss in mxfp4 on Hopper. Other kernels that route internally choose by biases or groups, or in an order
that is not known where logits are equal: vLLM's own binding takes those that report their ids.
"""


def bind_capture(modules: torch.nn.ModuleList, capture: StepCapture, failed: Callable[[Exception], None]) -> None:
    """Set the hook of every MoE layer: by vLLM's own binding, or on the logits of a kernel that routes internally."""
    from vllm.model_executor.layers.fused_moe import routed_experts_capturer

    capturer = _Capturer(capture, failed)
    inside = [module for module in modules if _routes_by_top_k(module)]
    others = torch.nn.ModuleList([module for module in modules if module not in inside])
    for runner in inside:
        _bind_logits(runner, capturer)
    if inside and not _routing_modules(others):  # vLLM's binding refuses a model without layers
        return
    try:
        getattr(routed_experts_capturer, "bind_routed_experts_capturer", _bind)(others, capturer)
    except ValueError as error:
        raise UnavailableError(str(error)) from None


def _routes_by_top_k(module: torch.nn.Module) -> bool:
    """Whether a layer's kernel routes internally, by the k largest logits."""
    kernel = getattr(getattr(module, "_quant_method", None), "moe_kernel", None)
    experts: Any = getattr(kernel, "fused_experts", None)
    return (
        type(experts).__name__ in TOP_K_KERNELS
        and fits("capture of logits", "experts of a kernel that routes internally are not captured")
        and bool(experts.renormalize)  # else the kernel takes the top k of a softmax, which has other ties
    )


def _bind_logits(runner: Any, capturer: _Capturer) -> None:
    """Give the router's logits to the hook, in the operator that CUDA graphs already contain."""
    experts, layer_id = runner.routed_experts, runner.layer_id

    def forward_monolithic(x: Any, router_logits: Any = None, input_ids: Any = None) -> Any:
        capturer.capture_logits(layer_id, router_logits)
        return type(experts).forward_monolithic(experts, x=x, router_logits=router_logits, input_ids=input_ids)

    experts.forward_monolithic = forward_monolithic


def _bind(modules: torch.nn.ModuleList, capturer: _Capturer) -> None:
    """Bind as the model runner of vLLM 0.26 does, which has no function for it; none of these may route internally."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    for module in modules.modules():
        if isinstance(module, MoERunner):
            check(
                not module._quant_method.is_monolithic,
                f"the MoE kernel of {type(module._quant_method).__name__} routes internally",
                ValueError,
            )
            module.router.set_capture_fn(partial(capturer.capture, module.layer_id))


def experts_per_token(model: Any) -> int:
    """Return the number of experts of a token, top k, from vLLM's ModelConfig."""
    if hasattr(model, "get_num_experts_per_tok"):
        return int(model.get_num_experts_per_tok())
    text = model.hf_text_config  # vLLM 0.26
    return int(getattr(text, "num_experts_per_tok", None) or text.top_k_experts)


def positions_of(layer_name: str, context: Any) -> torch.Tensor | None:
    """Return the KV position of each row, [row], from a forward context; None in a warm-up step."""
    mapping = context.slot_mapping
    return mapping.get(layer_name) if isinstance(mapping, dict) else None


def block_copies(scheduler_output: Any) -> list[tuple[int, int]]:
    copies = getattr(scheduler_output, "kv_cache_block_copies", None) or ()
    return [(int(copy.src_block_id), int(copy.dst_block_id)) for copy in copies]


def finish_reason(request: Any) -> str:
    reason = request.get_finished_reason()
    return "" if reason is None else str(reason)  # the reason "stop" is 0


def computed_tokens(request: Any) -> int:
    """Return the number of tokens whose experts are in the store; the last sampled token was never fed back."""
    processed = int(request.num_computed_tokens) - int(getattr(request, "num_in_flight_tokens", 0))
    return max(0, min(processed, int(request.num_tokens) - 1))
