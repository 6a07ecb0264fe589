"""The EPLB policy that vLLM calls instead of its own, and vLLM's group of ranks."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from coterie.engines.vllm.eplb.base import Agreement, EplbRound, Slots
from coterie.engines.vllm.eplb.rounds import Rounds
from coterie.engines.vllm.settings import EplbSettings

NANOSECONDS = 1e9

logger = logging.getLogger("vllm.coterie")  # a child of vLLM's logger, so that its handlers print the messages


def install(settings: EplbSettings) -> None:
    """Replace vLLM's default policy in this process.

    The policy keeps vLLM's name "default", since the option accepts no other. Later calls change nothing.
    """
    from vllm.distributed.eplb.policy import EPLB_POLICIES

    own = EPLB_POLICIES["default"]
    if not hasattr(own, "rounds"):
        EPLB_POLICIES["default"] = make_policy(own, Rounds(settings))
        logger.info("coterie: %s rearranges the experts in place of vLLM's own policy", settings.planner)


def make_policy(own: Any, rounds: Rounds) -> Any:
    """Create a policy class, derived from vLLM's `own`, that decides by `rounds`."""
    import torch

    class CoterieEplbPolicy(own):
        @classmethod
        def rebalance_experts(
            cls,
            weight: Any,
            num_replicas: int,
            num_groups: int,
            num_nodes: int,
            num_ranks: int,
            old_global_expert_indices: Any = None,
        ) -> Any:
            def vllms() -> Slots:
                slots = own.rebalance_experts(
                    weight, num_replicas, num_groups, num_nodes, num_ranks, old_global_expert_indices
                )
                return np.asarray(slots.cpu().numpy(), np.int64)

            if not weight.any():
                _compare(rounds.settings, len(weight))
            old = None if old_global_expert_indices is None else old_global_expert_indices.cpu().numpy()
            asked = EplbRound(weight.cpu().numpy().astype(np.float64), num_replicas, num_nodes, num_ranks, old)
            return torch.from_numpy(rounds.run(asked, vllms, EplbGroup()))

    CoterieEplbPolicy.rounds = rounds
    return CoterieEplbPolicy


def _compare(settings: EplbSettings, layers: int) -> None:
    """Warn if the settings differ from vLLM's. vLLM's configuration is available only while it reserves memory."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is not None and settings.when == "pays":
        for problem in differences(settings, config.parallel_config.eplb_config, layers):
            logger.warning("coterie: %s", problem)


def differences(settings: EplbSettings, config: Any, layers: int) -> list[str]:
    """Return messages about values of vLLM's EPLBConfig that make the clock or the load of when=pays wrong."""
    problems = []
    for mine, theirs in (("horizon", "step_interval"), ("window", "window_size")):
        given, wanted = getattr(settings, mine), getattr(config, theirs)
        if given != wanted:
            problems.append(f"{mine}={given:g} must equal {theirs}={wanted} of --eplb-config")
    if config.use_async and config.window_size + layers > config.step_interval:
        problems.append(
            f"with use_async window_size={config.window_size} and {layers} MoE layers must be at most "
            f"step_interval={config.step_interval}: a layer moves in each step, and tokens counted before it did are "
            "taken for those of its new experts"
        )
    return problems


class EplbGroup:
    """vLLM's EPLB group, looked up in each round, since elastic expert parallelism replaces it."""

    def __init__(self) -> None:
        from vllm.distributed import parallel_state

        # Not get_eplb_group(), which raises without a group, as when a policy is called outside vLLM.
        self._group = parallel_state._EPLB
        stages = parallel_state._PP
        self._whole = stages is None or stages.world_size == 1

    @property
    def rank(self) -> int:
        return 0 if self._group is None else int(self._group.rank_in_group)

    @property
    def writes(self) -> bool:
        return self.rank == 0 and self._whole  # a pipeline stage has only some of the layers

    def agree(self, digest: int, planning_s: float = 0.0) -> Agreement:
        if self._group is None:
            return Agreement(True, planning_s)
        import torch

        # The same thread and group as vLLM's transfers that follow, so that collectives have one order on all ranks.
        most = torch.tensor([digest, -digest, round(planning_s * NANOSECONDS)])
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, self._group.cpu_group)
        return Agreement(int(most[0]) == -int(most[1]), int(most[2]) / NANOSECONDS)
