"""What an engine does with a placement file: how replicas share tokens, and when outputs would change.

:data:`ENGINES` is the one table of this, read from the engines' sources: vLLM 0.32, SGLang 0.5.12 to 0.5.23, HYGON's
sglang-das (pull request 386), TensorRT-LLM and vllm-ascend of August 2026. A target is the name of a map format, with
what decides between an engine's ways behind it: ``sglang:version=0.5.17,a2a=deepep``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, check
from coterie.placement.maps.files import PlacementMap
from coterie.registry import PolicyText
from coterie.types import Placement, Topology

Shares = NDArray[np.float64]
Settings = Mapping[str, str]

READ, ROUTED = (0, 5, 12), (0, 5, 23)
"""SGLang: the first version that was read, and the first that routes by the map whatever the backend."""
WITH_A2A = ("deepseek", "glm", "qwen")
"""Models whose code routes by the map in all of these versions if there is an all-to-all backend."""
TRITON_KERNEL = "triton_kernel"


class EngineRules(NamedTuple):
    """How an engine runs a placement."""

    name: str
    splits: tuple[str, ...]
    """Splits that it executes; the first unless another is asked for."""
    how: str
    """How it shares an expert's tokens between replicas, in words."""
    settings: tuple[str, ...] = ()
    """Names of the settings that a target may have."""
    shares: Callable[[Placement, Topology, Shares], Shares] | None = None
    """Function that returns the shares it executes [layer, slot] from those planned; None if they are the same."""
    shares_with: str = ""
    """Setting without which `shares` does not apply."""
    unsafe: Callable[[PlacementMap, Settings], str] | None = None
    """Function that returns why its outputs would change; empty if they would not. None if they never do."""
    note: str = ""
    """What to know when the file is written."""


@dataclass(frozen=True, slots=True)
class Target:
    """An engine to plan and write for."""

    format: str
    engine: EngineRules
    settings: Settings = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read ``NAME`` or ``NAME:key=value,key=value``; NAME is a map format."""
        name, settings = PolicyText.parse(text)
        engine = ENGINES.get(name, EngineRules(f"an engine with maps in {name}", SPLITS, "as the map says"))
        for key in settings:
            known = f"it has {', '.join(engine.settings)}" if engine.settings else "it has none"
            check(key in engine.settings, f"--to {text}: {name} has no setting {key!r}; {known}")
        return cls(name, engine, settings)

    def check_split(self, split: str) -> None:
        """Raise ConfigError unless the engine executes the split."""
        if split not in self.engine.splits:
            engine, others = self.engine, ", ".join(executors(split)) or "nothing"
            raise ConfigError(
                f"split {split!r} must be {' or '.join(engine.splits)}: {engine.name} shares the tokens of replicas "
                f"{engine.how}; {split} is executed by {others}"
            )

    def executed(self, placement: Placement, topology: Topology, shares: Shares) -> Shares:
        """Return the shares [layer, slot] of tokens that the engine gives each slot, of those planned."""
        engine = self.engine
        if engine.shares is None or (engine.shares_with and not _is_set(self.settings, engine.shares_with)):
            return shares
        return engine.shares(placement, topology, shares)

    def check_outputs(self, map: PlacementMap) -> None:
        """Raise ConfigError if the engine would compute other outputs with the map than without it."""
        why = self.engine.unsafe(map, self.settings) if self.engine.unsafe is not None else ""
        check(not why, f"{why}, or --force writes it all the same")


def executors(split: str) -> list[str]:
    """Return the names of the engines that execute a split."""
    return [engine.name for engine in ENGINES.values() if split in engine.splits]


def near_first(placement: Placement, topology: Topology, picked: Shares) -> Shares:
    """Return the shares of slots if a rank sends an expert's tokens to its own replica first, then to its node's first.

    The node counts only if other nodes have replicas too. The other ranks send theirs by `picked` [layer, slot]. Tokens
    are spread over all ranks.
    """
    per_rank, executed = placement.slots_per_rank, picked.copy()
    ranks = np.arange(placement.num_ranks)
    for layer, expert in np.argwhere(placement.replicas > 1).tolist():
        slots = np.flatnonzero(placement.slot_experts[layer] == expert)
        own = ranks[:, None] == slots // per_rank
        near = topology.rank_nodes[:, None] == topology.rank_nodes[slots // per_rank]
        near &= ~near.all(axis=1, keepdims=True)
        chosen = np.where(own.any(axis=1, keepdims=True), own, near)  # [rank, replica]
        first = chosen & (np.cumsum(chosen, axis=1) == 1)
        by_rank = np.where(chosen.any(axis=1, keepdims=True), first, picked[layer, slots])
        executed[layer, slots] = by_rank.mean(axis=0)
    return executed


def far_shares(placement: Placement, shares: Shares) -> Shares:
    """Return the probabilities by which ranks without a replica must pick one for `shares` over all ranks.

    A rank keeps the tokens of experts that it has, so that a replica has at least the share of one rank. Within what
    that leaves, the result is as near to `shares` as can be.
    """
    rest = np.where(np.take_along_axis(placement.replicas, placement.slot_experts, axis=1) > 1, shares, 1.0)
    rest = np.maximum(0.0, rest - 1.0 / placement.num_ranks)
    total = np.zeros((placement.num_layers, placement.num_experts))
    rows = np.arange(placement.num_layers)[:, None]
    np.add.at(total, (rows, placement.slot_experts), rest)
    whole = total[rows, placement.slot_experts]
    return np.where(whole > 0, rest / np.where(whole > 0, whole, 1.0), shares)


def _das_shares(placement: Placement, topology: Topology, shares: Shares) -> Shares:
    return near_first(placement, topology, far_shares(placement, shares))


def by_rank(placement: Placement, _: Topology, shares: Shares) -> Shares:
    """Return the shares if rank r sends to replica r modulo their number, counted by rank."""
    executed, ranks = shares.copy(), np.arange(placement.num_ranks)
    for layer, expert in np.argwhere(placement.replicas > 1).tolist():
        slots = np.flatnonzero(placement.slot_experts[layer] == expert)
        executed[layer, slots] = np.bincount(ranks % len(slots), minlength=len(slots)) / len(ranks)
    return executed


def _is_set(settings: Settings, name: str) -> bool:
    return settings.get(name, "none") != "none"


def _version(settings: Settings) -> tuple[int, ...] | None:
    text = settings.get("version")
    if text is None:
        return None
    found = re.match(r"(\d+)\.(\d+)\.(\d+)(?![\d])", text)
    check(found, f"--to sglang:version={text} must be a version such as 0.5.23")
    assert found is not None
    return tuple(map(int, found.groups()))


def _in_order(map: PlacementMap) -> bool:
    """Return whether the map is the one that engines start with, which changes nothing."""
    placement = map.placement
    plain = np.arange(placement.num_experts)
    return placement.num_slots == len(plain) and bool((placement.slot_experts == plain).all())


def _sglang_unsafe(map: PlacementMap, settings: Settings) -> str:
    """Return why SGLang's outputs would change: a version that moves the weights by a map, but does not route by it."""
    version, runner = _version(settings), settings.get("runner")
    if _in_order(map):
        return ""
    backend = "" if _is_set(settings, "a2a") else " without an all-to-all backend"
    name = f"{map.model} on SGLang {settings.get('version', 'of unknown version')}"
    if version is not None and version >= ROUTED:
        if runner == TRITON_KERNEL or (runner is None and map.model.startswith("gpt-oss")):
            start = f"{name} with the MoE runner {TRITON_KERNEL}{'' if runner else ', its default'}"
            return f"{start}, cannot route by --init-expert-location: name another, as in runner=triton"
        return ""
    with_a2a = map.model.startswith(WITH_A2A)
    if with_a2a and version is not None and version >= READ and _is_set(settings, "a2a"):
        return ""
    own_runner = ",runner=triton" if runner is None and map.model.startswith("gpt-oss") else ""
    safe = f"version=0.5.23{own_runner}" + (", or version=0.5.12,a2a=deepep" if with_a2a else "") + ", or newer"
    return (
        f"{name}{backend}: --init-expert-location may move the weights of experts without routing to them, which "
        f"changes the outputs; say what makes it safe (--to sglang:{safe})"
    )


def _das_unsafe(map: PlacementMap, _: Settings) -> str:
    if map.model.startswith(("deepseek", "glm")):
        return ""
    return f"{map.model} on sglang-das: --ep-dispatch-algorithm lp is refused for models other than DeepSeek and GLM"


SPLITS = ("equal", "weighted", "optimal")

ENGINES: Mapping[str, EngineRules] = {
    "native": EngineRules("Coterie", SPLITS, "as the map says"),
    "vllm": EngineRules("vLLM", ("equal",), "equally, by a hash of the token's row"),
    "sglang": EngineRules(
        "SGLang",
        ("equal",),
        "equally (--ep-dispatch-algorithm dynamic), a rank's own replica and then its node's first where there is an "
        "all-to-all backend; its lp keeps own replicas and solves the rest, which is no split of ours",
        ("version", "a2a", "runner"),
        near_first,
        "a2a",
        _sglang_unsafe,
    ),
    "sglang-das": EngineRules(
        "HYGON's sglang-das",
        ("weighted", "equal"),
        "by the probabilities of a file, a rank's own replica first",
        shares=_das_shares,
        unsafe=_das_unsafe,
        note="the file is for SGLANG_EXPERIMENTAL_LPLB_STATIC_PROBS with --ep-dispatch-algorithm lp; "
        "--init-expert-location needs the same map by --to sglang",
    ),
    "tensorrt-llm": EngineRules(
        "TensorRT-LLM",
        ("equal",),
        "in turn",
        note="TensorRT-LLM ignores load_balancer without a word unless moe_expert_parallel_size is above 1, "
        "enable_attention_dp is true and its moe_model_arch_list has the architecture (DeepSeek-V3, GLM-5, gpt-oss, "
        "Kimi K2.5, Llama 4, Mixtral, Nemotron-H, Qwen MoE)",
    ),
    "ascend": EngineRules(
        "vllm-ascend",
        ("equal",),
        "by the rank that sends them: rank r to replica r modulo their number",
        shares=by_rank,
    ),
}
"""Map format → what its engine does. Formats of plugins are taken to execute every split."""
