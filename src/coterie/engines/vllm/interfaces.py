"""What each feature needs of vLLM, and a check of it in vLLM's source. A version is judged by this, not by its number.

A need is ``module:name``, with modules relative to vLLM's package, and the name a definition, a field or an attribute
of self. With parentheses it is a function of exactly these parameters, ``*`` and ``**`` left out: vLLM calls what
Coterie overrides, so one more would break the call. ``a | b`` means that either will do.

The source is parsed, not imported, so that an unpacked wheel can be checked as well. A feature is checked where it is
used, in 0.03 to 0.7 s.
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path

logger = logging.getLogger("vllm.coterie")  # a child of vLLM's logger, so that its handlers print the messages
_warn_once = cache(logger.warning)

TESTED = ("0.32",)
"""Minor versions of vLLM that the tests run with; docs/engines/vllm.md has the table."""

_CONNECTOR = "distributed.kv_transfer.kv_connector"

NEEDS: dict[str, tuple[str, ...]] = {
    "connector": (
        f"{_CONNECTOR}.factory:KVConnectorFactory.register_connector(name, module_path, class_name)",
        f"{_CONNECTOR}.factory:KVConnectorFactory._registry",
        f"{_CONNECTOR}.v1.base:KVConnectorRole.SCHEDULER",
        f"{_CONNECTOR}.v1.base:KVConnectorRole.WORKER",
        f"{_CONNECTOR}.v1.base:KVConnectorMetadata",
        f"{_CONNECTOR}.v1.base:KVConnectorWorkerMetadata.aggregate(other)",
        f"{_CONNECTOR}.v1.base:SupportsHMA.request_finished_all_groups(request, block_ids)",
        f"{_CONNECTOR}.v1.base:KVConnectorBase_V1.__init__(vllm_config, role, kv_cache_config)",
        f"{_CONNECTOR}.v1.base:KVConnectorBase_V1._connector_metadata",
        f"{_CONNECTOR}.v1.base:KVConnectorBase_V1._kv_cache_config",
        f"{_CONNECTOR}.v1.base:KVConnectorBase_V1._kv_transfer_config",
        f"{_CONNECTOR}.v1.base:KVConnectorBase_V1._role",
        f"{_CONNECTOR}.v1.base:KVConnectorBase_V1._vllm_config",
        f"{_CONNECTOR}.v1.base:KVConnectorBase_V1.register_kv_caches(kv_caches)",
        f"{_CONNECTOR}.v1.base:KVConnectorBase_V1.start_load_kv(forward_context, kwargs)",
        f"{_CONNECTOR}.v1.base:KVConnectorBase_V1.wait_for_layer_load(layer_name)",
        f"{_CONNECTOR}.v1.base:KVConnectorBase_V1.save_kv_layer(layer_name, kv_layer, attn_metadata, kwargs)",
        f"{_CONNECTOR}.v1.base:KVConnectorBase_V1.wait_for_save()",
        f"{_CONNECTOR}.v1.base:KVConnectorBase_V1.build_connector_worker_meta()",
        f"{_CONNECTOR}.v1.base:KVConnectorBase_V1.get_num_new_matched_tokens(request, num_computed_tokens)",
        f"{_CONNECTOR}.v1.base:KVConnectorBase_V1.update_state_after_alloc(request, blocks, num_external_tokens)",
        f"{_CONNECTOR}.v1.base:KVConnectorBase_V1.build_connector_meta(scheduler_output)",
        f"{_CONNECTOR}.v1.base:KVConnectorBase_V1.update_connector_output(connector_output)",
        f"{_CONNECTOR}.v1.base:KVConnectorBase_V1.request_finished(request, block_ids)",
        f"{_CONNECTOR}.v1.base:KVConnectorBase_V1.shutdown()",
        f"{_CONNECTOR}.v1.base:KVConnectorBase_V1.get_kv_connector_stats()",
        f"{_CONNECTOR}.v1.base:KVConnectorBase_V1.build_kv_connector_stats(data)",
        f"{_CONNECTOR}.v1.base:KVConnectorBase_V1.build_prom_metrics(vllm_config, metric_types, labelnames, "
        "per_engine_labelvalues)",
        f"{_CONNECTOR}.v1.metrics:KVConnectorStats.data",
        f"{_CONNECTOR}.v1.metrics:KVConnectorStats.aggregate(other)",
        f"{_CONNECTOR}.v1.metrics:KVConnectorStats.reduce()",
        f"{_CONNECTOR}.v1.metrics:KVConnectorPromMetrics.__init__(vllm_config, metric_types, labelnames, "
        "per_engine_labelvalues)",
        f"{_CONNECTOR}.v1.metrics:KVConnectorPromMetrics._counter_cls",
        f"{_CONNECTOR}.v1.metrics:KVConnectorPromMetrics._gauge_cls",
        f"{_CONNECTOR}.v1.metrics:KVConnectorPromMetrics.per_engine_labelvalues",
        f"{_CONNECTOR}.v1.metrics:KVConnectorPromMetrics.observe(transfer_stats_data, engine_idx)",
    ),
    "MultiConnector": (
        f"{_CONNECTOR}.v1.multi_connector:MultiConnector.request_finished_all_groups(request, block_ids)",
        f"{_CONNECTOR}.v1.multi_connector:MultiKVConnectorWorkerMetadata.aggregate(other)",
    ),
    "capture": (
        "model_executor.layers.fused_moe.layer:MoERunner",
        "model_executor.layers.fused_moe.runner.moe_runner:MoERunner.layer_id()",
        "model_executor.layers.fused_moe.runner.moe_runner:MoERunner._quant_method()",
        "model_executor.layers.fused_moe.router.base_router:BaseRouter.set_capture_fn(capture_fn)",
        "model_executor.layers.fused_moe.routed_experts_capturer:bind_routed_experts_capturer(model, capturer) | "
        "model_executor.layers.fused_moe.routed_experts_capturer:RoutedExpertsCapturer.capture(layer_id, topk_ids)",
        "config.model:ModelConfig.get_num_experts_per_tok() | config.model:ModelConfig.hf_text_config",
        "config.model:ModelConfig.get_num_experts()",
        "config.model:ModelConfig.get_total_num_hidden_layers()",
        "config.compilation:CompilationConfig.static_forward_context",
        "distributed.parallel_state:GroupCoordinator.all_gather(input_, dim)",
        "distributed.parallel_state:GroupCoordinator.rank_in_group",
        "forward_context:ForwardContext.slot_mapping",
        "forward_context:ForwardContext.dp_metadata",
        "forward_context:DPMetadata.num_tokens_across_dp_cpu",
        "forward_context:get_forward_context()",
        "v1.kv_cache_interface:FullAttentionSpec",
        "v1.kv_cache_interface:KVCacheConfig.num_blocks",
        "v1.kv_cache_interface:KVCacheGroupSpec.is_eagle_group",
        "v1.kv_cache_interface:KVCacheGroupSpec.layer_names",
        "v1.core.sched.output:SchedulerOutput.scheduled_new_reqs",
        "v1.core.sched.output:SchedulerOutput.total_num_scheduled_tokens",
        "v1.core.sched.output:NewRequestData.num_computed_tokens",
        "v1.outputs:KVConnectorOutput.kv_connector_worker_meta",
        "v1.request:Request.all_token_ids",
        "v1.request:Request.get_finished_reason()",
        "v1.request:Request.kv_transfer_params",
        "v1.request:Request.num_computed_tokens",
        "v1.request:Request.num_in_flight_tokens",
    ),
    "capture of logits": (
        "model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase.moe_kernel",
        "model_executor.layers.fused_moe.modular_kernel:FusedMoEKernel.fused_experts()",
        "model_executor.layers.fused_moe.routed_experts:RoutedExperts.forward_monolithic(x, router_logits, input_ids)",
        "model_executor.layers.fused_moe.runner.moe_runner:MoERunner.routed_experts",
        "model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe:OAITritonMxfp4ExpertsMonolithic.renormalize",
    ),
    "scheduler": (
        "v1.core.sched.scheduler:Scheduler.connector",
        "v1.core.sched.scheduler:Scheduler.schedule",
        "v1.core.sched.scheduler:Scheduler.finished_recving_kv_req_ids",
        "v1.core.sched.scheduler:Scheduler.kv_holding_waiting | v1.core.sched.scheduler:Scheduler.skipped_waiting",
        "v1.core.sched.scheduler:Scheduler.max_num_active_reqs | "
        "v1.core.sched.scheduler:Scheduler.max_num_running_reqs",
        "v1.core.sched.scheduler:Scheduler.num_waiting_for_streaming_input",
        "v1.core.sched.scheduler:Scheduler.policy",
        "v1.core.sched.scheduler:Scheduler.running",
        "v1.core.sched.scheduler:Scheduler.waiting",
        "v1.core.sched.request_queue:SchedulingPolicy.PRIORITY",
        "v1.core.sched.request_queue:RequestQueue.add_request(request)",
        "v1.core.sched.request_queue:RequestQueue.peek_request()",
        "v1.core.sched.request_queue:RequestQueue.pop_request()",
        "v1.core.sched.request_queue:RequestQueue.prepend_request(request)",
        "v1.core.sched.request_queue:RequestQueue.prepend_requests(requests)",
        "v1.core.sched.request_queue:RequestQueue.remove_request(request)",
        "v1.core.sched.request_queue:RequestQueue.remove_requests(requests)",
        "v1.request:Request.arrival_time",
        "v1.request:Request.kv_transfer_params",
        "v1.request:Request.num_computed_tokens",
        "v1.request:Request.num_preemptions",
        "v1.request:Request.priority",
        "v1.request:Request.structured_output_request",
        "v1.request:RequestStatus.WAITING_FOR_REMOTE_KVS",
        "v1.request:RequestStatus.WAITING_FOR_STREAMING_REQ",
        "v1.request:RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR",
    ),
    "EPLB policy": (
        "distributed.eplb.policy:EPLB_POLICIES",
        "distributed.eplb.policy.default:DefaultEplbPolicy.rebalance_experts(weight, num_replicas, num_groups, "
        "num_nodes, num_ranks, old_global_expert_indices)",
        "distributed.parallel_state:_EPLB",
        "distributed.parallel_state:_PP",
        "distributed.parallel_state:GroupCoordinator.cpu_group",
        "distributed.parallel_state:GroupCoordinator.rank_in_group",
        "config:get_current_vllm_config_or_none",
        "config.parallel:EPLBConfig.step_interval",
        "config.parallel:EPLBConfig.use_async",
        "config.parallel:EPLBConfig.window_size",
    ),
    "returned experts": (
        "config.aux_output:AuxOutputConfig.enabled() | config.model:ModelConfig.enable_return_routed_experts",
        "entrypoints.openai.completion.protocol:CompletionResponseChoice.routed_experts",
        "entrypoints.openai.chat_completion.protocol:ChatCompletionResponseChoice.routed_experts",
    ),
}
"""Needs of each feature. The last is vLLM's own: the connector must know when it takes the hook of the MoE layers."""


def missing(feature: str, package: Path) -> list[str]:
    """Return the needs of `feature` that the vLLM in the folder `package` does not meet."""
    return [need for need in NEEDS[feature] if not any(_has(package, hook) for hook in need.split(" | "))]


@cache
def fits(feature: str, otherwise: str) -> bool:
    """Return whether the vLLM of this process has what `feature` needs; if not, log that `otherwise` holds.

    An untested version that fits is logged once, whatever the number of features.
    """
    import vllm

    package = Path(vllm.__file__).parent
    lacks = missing(feature, package)
    if lacks:
        others = [other for other in NEEDS if other != feature and not missing(other, package)]
        logger.warning(
            "coterie: vLLM %s lacks %s, which %s needs: %s; what still works: %s",
            vllm.__version__,
            "; ".join(lacks),
            feature,
            otherwise,
            ", ".join(others) or "nothing",
        )
    elif not vllm.__version__.startswith(tuple(f"{minor}." for minor in TESTED)):
        _warn_once(
            "coterie: vLLM %s was not tested with this version of Coterie (tested: %s); it has the interfaces that are "
            "needed, so the plugin runs",
            vllm.__version__,
            ", ".join(TESTED),
        )
    return not lacks


def _has(package: Path, hook: str) -> bool:
    module, _, name = hook.partition(":")
    name, _, parameters = name.partition("(")
    path = package.joinpath(*module.split("."))
    bound = _names(path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).get(name)
    return bound is not None and (not parameters or bound == f"({parameters}")


@lru_cache(maxsize=1)  # needs come module by module; a scheduler's tree is large
def _names(path: Path) -> dict[str, str]:
    """Return the names a source file binds, dotted for those of a class, with "(parameters)" for functions."""
    tree = ast.parse(path.read_text(encoding="utf-8")) if path.exists() else ast.Module([], [])
    names = dict(_bound(tree))
    for scope in tree.body:
        if isinstance(scope, ast.ClassDef):
            names |= {f"{scope.name}.{name}": parameters for name, parameters in _bound(scope)}
    return names


def _bound(scope: ast.Module | ast.ClassDef) -> Iterator[tuple[str, str]]:
    for node in ast.walk(scope):
        if isinstance(node, ast.FunctionDef):
            parameters = (node.arg for node in ast.walk(node.args) if isinstance(node, ast.arg))
            yield node.name, f"({', '.join(name for name in parameters if name not in ('self', 'cls'))})"
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
            if node in scope.body or target.startswith("self."):
                yield target.removeprefix("self."), ""
        elif isinstance(node, ast.ClassDef | ast.alias):
            yield getattr(node, "asname", None) or node.name, ""
