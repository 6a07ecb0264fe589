"""Settings of a worker. Attribute docstrings are the help text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from coterie.errors import ConfigError, check_at_least, check_one_of, check_positive

Role = Literal["prefill", "decode", "both"]
SCHEMES = ("tcp://", "ipc://")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    model: Path
    """Folder of a checkpoint that transformers loads."""
    role: Role = "both"
    """prefill answers one token and hands over the KV; decode takes such handoffs; both serves alone too."""
    host: str = "127.0.0.1"
    port: int = 8100
    """Port to listen on; 0 takes any free port, which the ready line names."""
    served_model_name: str | None = None
    """Model name in requests; None takes the folder's name."""
    dtype: str = "float32"
    device: str = "cpu"
    max_batch: int = 16
    """Largest number of requests per step."""
    max_step_tokens: int = 2048
    """Largest number of tokens per step; a longer prompt is prefilled in chunks."""
    block_size: int = 16
    """Tokens per KV block."""
    kv_blocks: int = 2048
    kv_ttl_s: float = 60.0
    """Seconds to keep prefilled KV for a decode worker to fetch."""
    fetch_timeout_s: float = 30.0
    """Seconds a decode worker waits for KV before it computes the prompt itself."""
    drain_s: float = 30.0
    """Seconds to let running requests finish after SIGTERM."""
    kv_events: str | None = None
    """ZMQ endpoint to publish KV events on."""
    expert_events: str | None = None
    """ZMQ endpoint to publish expert events on."""
    event_queue: int = 1000
    """Messages kept for a slow subscriber; past that it misses some, and that is counted."""
    load_interval_s: float = 1.0
    """Seconds between two ExpertLoad events."""

    def __post_init__(self) -> None:
        check_one_of(get_args(Role), role=self.role)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port} must be in 0 … 65535")
        check_at_least(
            1,
            max_batch=self.max_batch,
            block_size=self.block_size,
            kv_blocks=self.kv_blocks,
            event_queue=self.event_queue,
        )
        if self.max_step_tokens < self.max_batch:
            raise ConfigError(f"max_step_tokens={self.max_step_tokens} must be at least max_batch={self.max_batch}")
        check_positive(
            kv_ttl_s=self.kv_ttl_s,
            fetch_timeout_s=self.fetch_timeout_s,
            drain_s=self.drain_s,
            load_interval_s=self.load_interval_s,
        )
        for name in ("kv_events", "expert_events"):
            endpoint = getattr(self, name)
            if endpoint is not None and not endpoint.startswith(SCHEMES):
                raise ConfigError(f"{name}={endpoint!r} must begin with tcp:// or ipc://, such as tcp://*:5601")
        if self.kv_events is not None and self.kv_events == self.expert_events:
            raise ConfigError(f"kv_events and expert_events are both {self.kv_events!r}; each needs its own endpoint")

    @property
    def max_tokens(self) -> int:
        """Tokens that all blocks hold together: no request may be longer."""
        return self.block_size * self.kv_blocks
