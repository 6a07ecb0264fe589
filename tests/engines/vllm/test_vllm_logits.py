"""A MoE layer whose kernel routes internally, of vLLM's own classes: the hook sees the router's logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]  # vLLM's imports warn

from coterie.engines.vllm import engine  # noqa: E402
from coterie.engines.vllm.capture import StepCapture  # noqa: E402
from coterie.errors import UnavailableError  # noqa: E402

EXPERTS, TOP_K, WIDTH = 8, 2, 16


class Kernel:
    """In place of vLLM's kernel for GPUs: notes what it is given."""

    def __init__(self, experts: object) -> None:
        self.fused_experts = experts
        self.given: list[Any] = []


def experts_of(name: str, **fields: Any) -> object:
    return type(name, (), fields)()


class QuantMethod:
    """In place of gpt-oss's method in mxfp4; the layer around it is vLLM's."""

    is_monolithic = True

    def __init__(self, experts: object) -> None:
        self.moe_kernel = Kernel(experts)

    def apply_monolithic(self, x: Any, router_logits: Any, **_: Any) -> Any:
        self.moe_kernel.given.append(router_logits)
        return 2 * x


def layer_of(experts: object, number: int) -> Any:
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    runner, routed = MoERunner.__new__(MoERunner), RoutedExperts.__new__(RoutedExperts)
    for module in (runner, routed):
        torch.nn.Module.__init__(module)
    routed.quant_method = QuantMethod(experts)
    runner.routed_experts, runner._shared_experts = routed, None
    runner.layer_name = f"model.layers.{number}.mlp.experts"
    return runner


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> StepCapture:
    pytest.importorskip("vllm")
    context = SimpleNamespace(dp_metadata=None, slot_mapping=torch.arange(4))
    monkeypatch.setattr("vllm.forward_context.get_forward_context", lambda: context)
    return StepCapture([0, 1], TOP_K, EXPERTS, 4, torch.device("cpu"), lambda context: context.slot_mapping)


def test_the_hook_sees_the_logits_and_changes_nothing(capture: StepCapture) -> None:
    failures: list[Exception] = []
    layers = [layer_of(experts_of("OAITritonMxfp4ExpertsMonolithic", renormalize=True), number) for number in (0, 1)]
    modules = torch.nn.ModuleList(layers)
    for _ in range(2):  # bound again, as after a reload: each step is still captured once
        engine.bind_capture(modules, capture, failures.append)
    hidden, logits = torch.randn(4, WIDTH), torch.randn(2, 4, EXPERTS)
    for number, layer in enumerate(layers):
        _, out = layer._apply_quant_method(
            hidden_states=hidden, router_logits=logits[number], shared_experts_input=None, input_ids=None
        )
        assert torch.equal(out, 2 * hidden)
        (given,) = layer.routed_experts.quant_method.moe_kernel.given
        assert torch.equal(given, logits[number])
    assert failures == []
    assert torch.equal(capture.ids.long(), logits.topk(TOP_K).indices.transpose(0, 1))
    assert capture.positions.tolist() == [0, 1, 2, 3]


def test_a_hook_that_fails_is_reported_and_the_layer_still_runs(capture: StepCapture) -> None:
    failures: list[Exception] = []
    layer = layer_of(experts_of("OAITritonMxfp4ExpertsMonolithic", renormalize=True), 0)
    engine.bind_capture(torch.nn.ModuleList([layer]), capture, failures.append)
    hidden = torch.randn(4, WIDTH)
    _, out = layer._apply_quant_method(
        hidden_states=hidden, router_logits=torch.randn(4, 1), shared_experts_input=None, input_ids=None
    )
    assert torch.equal(out, 2 * hidden)
    assert len(failures) == 1
    assert (capture.positions == -1).all(), "the step's rows are discarded"


@pytest.mark.parametrize(
    "experts",
    [
        experts_of("OAITritonMxfp4ExpertsMonolithic", renormalize=False),
        experts_of("TrtLlmMxfp4ExpertsMonolithic", supports_routing_replay_capture=lambda: False),
    ],
    ids=["softmax first", "another kernel"],
)
def test_other_kernels_that_route_internally_are_refused(experts: object, capture: StepCapture) -> None:
    with pytest.raises(UnavailableError, match=r"monolithic MoE kernel|routes internally"):
        engine.bind_capture(torch.nn.ModuleList([layer_of(experts, 0)]), capture, list[Exception]().append)
