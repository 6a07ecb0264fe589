"""What engines do with a placement: promised shares are executed, and maps that change outputs are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dispatchers
from coterie.answers.plan.plans import PlanOptions, make_plan
from coterie.answers.plan.pricing import Placed
from coterie.answers.plan.report import plan_verdict, summary
from coterie.errors import ConfigError
from coterie.models import get_model
from coterie.placement.maps.formats import PlacementMap, map_formats, replace_map, write_map
from coterie.placement.maps.targets import ENGINES, Target, far_shares
from coterie.traces import LoadTable
from coterie.types import Placement, Topology

DISPATCHES: dict[str, dispatchers.Dispatch] = {
    "vllm": dispatchers.vllm,
    "sglang": dispatchers.sglang_without_a2a,
    "sglang:version=0.5.17,a2a=deepep": dispatchers.sglang_with_a2a,
    "sglang-das": dispatchers.sglang_das,
    "tensorrt-llm": dispatchers.tensorrt_llm,
    "ascend": dispatchers.ascend,
}


def test_the_table_has_every_format_that_is_written() -> None:
    written = {name for name in map_formats if map_formats[name].write is not None}
    assert written == set(ENGINES)
    assert {name.partition(":")[0] for name in DISPATCHES} == written - {"native"}


def some_placement() -> Placement:
    """Eight ranks of five slots; experts 0 to 3 in two to five replicas, none twice on a rank."""
    slots = np.zeros((2, 8, 5), np.int64)
    rng = np.random.default_rng(2)
    for layer in slots:
        left = np.full(8, 5)
        for expert in range(30):
            free = rng.permutation(np.flatnonzero(left))
            for rank in free[: {0: 5, 1: 4, 2: 3, 3: 2}.get(expert, 1)]:
                layer[rank, 5 - left[rank]] = expert
                left[rank] -= 1
        assert not left.any()
    return Placement(slots.reshape(2, 40).astype(np.int32), 8, 30)


@pytest.mark.parametrize("ranks_per_node", [8, 4])
@pytest.mark.parametrize("to", DISPATCHES)
def test_shares_are_those_of_the_dispatch(to: str, ranks_per_node: int) -> None:
    placement, topology = some_placement(), Topology(8, ranks_per_node)
    weights = np.random.default_rng(1).random(placement.slot_experts.shape)
    totals = np.zeros((2, 30))
    rows = np.arange(2)[:, None]
    np.add.at(totals, (rows, placement.slot_experts), weights)
    planned = weights / totals[rows, placement.slot_experts]
    if "weighted" not in Target.parse(to).engine.splits:
        planned = 1.0 / placement.replicas[rows, placement.slot_experts]
    executed = Target.parse(to).executed(placement, topology, planned)
    counted = dispatchers.counted_shares(placement, topology, DISPATCHES[to], far_shares(placement, planned))
    assert np.abs(executed - counted).max() < 0.01
    if to == "vllm":
        assert np.array_equal(executed, planned)


def table(tmp_path: Path) -> Path:
    """A load of gpt-oss-20b whose hottest experts are worth replicas."""
    spec = get_model("gpt-oss-20b")
    rng = np.random.default_rng(0)
    skew = rng.permuted(np.tile(1.0 / np.arange(1, spec.num_experts + 1), (spec.num_moe_layers, 1)), axis=1)
    path = tmp_path / "load"
    LoadTable(np.round(1e6 * skew)[None].astype(np.int64), model=spec.name).save(path)
    return path


def check_cell(to: str, **options: Any) -> None:
    """Check that the gain of a plan for an engine is the one that its dispatch has, within 0.1 points."""
    planned = make_plan(PlanOptions(to=to, **options))
    pricing, batch, plan = planned.pricing, planned.options.batch, planned.plan
    mass = far_shares(plan.placement, plan.shares)
    counted = dispatchers.counted_shares(plan.placement, pricing.topology, DISPATCHES[to], mass)
    executed = pricing.gain_pct(batch, planned.now, Placed(plan.placement, counted))
    assert summary(planned)["gain_pct"] == pytest.approx(executed, abs=0.1)


@pytest.mark.parametrize("to", ["vllm", "sglang-das", "ascend"])
def test_a_plan_promises_what_the_engine_executes(tmp_path: Path, to: str) -> None:
    check_cell(to, load=table(tmp_path), slots=40)


CELLS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss-20b, 40 slots": ("gpt-oss-20b", {"slots": 40}),
    "glm-5.2, 8 ranks": ("glm-5.2/expert_counts.npz", {"slots": 288, "dtype": "fp8"}),
    "glm-5.2, 32 ranks": ("glm-5.2/expert_counts.npz", {"slots": 288, "dtype": "fp8", "ranks": 32, "nodes": 4}),
}


@pytest.mark.long
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("to", DISPATCHES)
def test_real_loads_gain_what_was_promised(data_dir: Path, to: str, cell: str) -> None:
    load, options = CELLS[cell]
    check_cell(to, load=data_dir / "activations" / load, **options)


def test_a_split_that_the_engine_does_not_execute_is_refused(tmp_path: Path) -> None:
    load = table(tmp_path)
    for to, split in (("vllm", "optimal"), ("sglang", "weighted"), ("sglang", "optimal"), ("tensorrt-llm", "weighted")):
        with pytest.raises(ConfigError, match=f"split {split!r} must be equal: .*{split} is executed by Coterie"):
            make_plan(PlanOptions(load=load, slots=40, to=to, split=split))
    with pytest.raises(ConfigError, match="split 'optimal' must be equal: vLLM"):
        make_plan(PlanOptions(load=load, slots=40, to="vllm", planner="latency_optimal:split=optimal"))
    planned = make_plan(PlanOptions(load=load, slots=40, split="weighted"))
    assert "replicas sharing tokens by weights (Coterie, HYGON's sglang-das)" in plan_verdict(planned, summary(planned))
    planned = make_plan(PlanOptions(load=load, slots=40, to="vllm"))
    assert "replicas sharing tokens as in vLLM" in plan_verdict(planned, summary(planned))


PERMUTED = np.tile(np.arange(64)[::-1], (26, 1)).astype(np.int32)


def map_of(model: str, slots: np.ndarray = PERMUTED) -> PlacementMap:
    return PlacementMap(Placement(slots, 4, 64), model)


@pytest.mark.parametrize(
    ("model", "to", "problem"),
    [
        ("deepseek-v2-lite", "sglang", "of unknown version without an all-to-all backend"),
        ("olmoe", "sglang", r"say what makes it safe \(--to sglang:version=0.5.23, or newer\), or --force"),
        ("gpt-oss-20b", "sglang:version=0.5.20", r"\(--to sglang:version=0.5.23,runner=triton, or newer\)"),
        ("deepseek-v2-lite", "sglang:version=0.5.17", "0.5.17 without an all-to-all backend"),
        ("qwen3-30b-a3b", "sglang:version=0.5.22", "or version=0.5.12,a2a=deepep, or newer"),
        ("deepseek-v2-lite", "sglang:version=0.5.11,a2a=deepep", "0.5.11"),
        ("gpt-oss-20b", "sglang:version=0.5.22,a2a=deepep", "gpt-oss-20b on SGLang 0.5.22"),
        ("gpt-oss-20b", "sglang:version=0.5.23", "triton_kernel, its default"),
        ("deepseek-v2-lite", "sglang:version=0.5.24,runner=triton_kernel", "triton_kernel"),
        ("qwen3-30b-a3b", "sglang-das", "refused for models other than DeepSeek and GLM"),
    ],
)
def test_a_map_that_would_change_outputs_is_refused(tmp_path: Path, model: str, to: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Target.parse(to).check_outputs(map_of(model))
    if to == "sglang":
        for write in (write_map, replace_map):
            with pytest.raises(ConfigError, match="changes the outputs"):
                write(tmp_path / "map", map_of(model), to)
        assert not list(tmp_path.iterdir())
        write_map(tmp_path / "map", map_of("deepseek-v2-lite"), to, force=True)


@pytest.mark.parametrize(
    ("model", "to"),
    [
        ("deepseek-v2-lite", "sglang:version=0.5.23"),
        ("deepseek-v2-lite", "sglang:version=0.6.0"),
        ("qwen3-30b-a3b", "sglang:version=0.5.13.post1,a2a=deepep"),
        ("gpt-oss-20b", "sglang:version=0.5.23,runner=triton"),
        ("deepseek-v2-lite", "sglang-das"),
        ("qwen3-30b-a3b", "vllm"),
    ],
)
def test_a_map_that_changes_no_output_is_written(model: str, to: str) -> None:
    Target.parse(to).check_outputs(map_of(model))


def test_experts_in_order_change_nothing() -> None:
    in_order = np.tile(np.arange(64), (26, 1)).astype(np.int32)
    Target.parse("sglang").check_outputs(map_of("olmoe", in_order))


@pytest.mark.parametrize(
    ("to", "problem"),
    [
        ("sglang:vresion=1", "sglang has no setting 'vresion'; it has version, a2a, runner"),
        ("vllm:version=1", "vllm has no setting 'version'; it has none"),
        ("sglang:version=new", "must be a version such as 0.5.23"),
    ],
)
def test_a_target_with_a_wrong_setting(to: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Target.parse(to).check_outputs(map_of("olmoe"))


def test_what_tensorrt_needs_is_said() -> None:
    assert "ignores load_balancer without a word unless" in ENGINES["tensorrt-llm"].note
