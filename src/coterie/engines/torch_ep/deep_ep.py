"""DeepEP as the exchange, where it is installed. **Not run**: it needs several GPUs.

Written for ``deep_ep.Buffer``, the public interface of DeepEP 1, which DeepEP 2 keeps as its legacy one.

DeepEP's intranode and internode kernels send a token once to each distinct rank, as the deduplicated exchange does, and
return with each row the indices of its experts on the rank that received it, -1 for those elsewhere. bf16 only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coterie.engines.torch_ep.exchange import Received
from coterie.engines.torch_ep.group import Group
from coterie.errors import ConfigError, UnavailableError

try:
    import torch
    import torch.distributed as dist
except ImportError:
    torch = dist = None


@dataclass(frozen=True, slots=True)
class DeepEpExchange:
    """Buffers of DeepEP over the group; make it with :meth:`of`."""

    buffer: Any
    num_slots: int

    @classmethod
    def of(cls, group: Group, num_slots: int, hidden_size: int) -> DeepEpExchange:
        """Buffers as large as DeepEP's own hints ask for."""
        try:
            import deep_ep
        except ImportError as error:
            raise UnavailableError("deep_ep is not installed: use TorchExchange, which needs torch alone") from error
        if group.device.type != "cuda":
            raise ConfigError(f"device={group.device} must be a CUDA device: DeepEP has no other")
        hidden_bytes = hidden_size * 2
        configs = (deep_ep.Buffer.get_dispatch_config(group.size), deep_ep.Buffer.get_combine_config(group.size))
        nvlink = max(config.get_nvl_buffer_size_hint(hidden_bytes, group.size) for config in configs)
        rdma = max(config.get_rdma_buffer_size_hint(hidden_bytes, group.size) for config in configs)
        return cls(deep_ep.Buffer(dist.group.WORLD, nvlink, rdma), num_slots)

    def dispatch(self, hidden: Any, slots: Any, weights: Any) -> Received:
        if hidden.dtype != torch.bfloat16:
            raise ConfigError(f"hidden has dtype {hidden.dtype}; DeepEP sends torch.bfloat16")
        per_rank, per_node, per_slot, in_rank, _ = self.buffer.get_dispatch_layout(slots, self.num_slots)
        rows, local_slots, local_weights, _, handle, _ = self.buffer.dispatch(
            hidden,
            topk_idx=slots,
            topk_weights=weights.to(torch.float32),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_slot,
        )
        return Received(rows, local_slots, local_weights, handle)

    def combine(self, results: Any, ticket: Any) -> Any:
        summed, _, _ = self.buffer.combine(results, ticket)
        return summed
