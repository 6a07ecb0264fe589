"""Settings of a worker. Attribute docstrings are the help text."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from coterie.errors import check, check_at_least, check_not_negative, check_one_of, check_positive
from coterie.net.access import KEY_VARIABLE, SECRET_VARIABLE, check_secret, is_loopback, parse_address

Role = Literal["prefill", "decode", "both"]
SCHEMES = ("tcp://", "ipc://")
WILDCARDS = ("0.0.0.0", "::", "")
STREAMS = ("expert_events", "kv_events", "kv_replay")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    model: Path
    """Folder of a checkpoint that transformers loads."""
    role: Role = "both"
    """prefill generates one token and stages the KV; decode continues from staged KV; both can do either."""
    host: str = "127.0.0.1"
    port: int = 8100
    """Port to listen on; 0 picks a free port, which the ready line prints."""
    advertise: str | None = None
    """Host name at which other workers reach this one; None uses `host`, or this machine's name if `host` is a wildcard
    address.
    """
    served_model_name: str | None = None
    """Model name in requests; None uses the folder's name."""
    dtype: str = "float32"
    device: str = "cpu"
    max_batch: int = 16
    """Maximum number of requests per step."""
    max_step_tokens: int = 2048
    """Maximum number of tokens per step; a longer prompt is prefilled in chunks."""
    block_size: int = 16
    """Tokens per KV block."""
    kv_blocks: int = 2048
    kv_ttl_s: float = 60.0
    """Seconds to keep prefilled KV for a decode worker to fetch."""
    fetch_timeout_s: float = 30.0
    """Seconds that a decode worker waits for KV before it computes the prompt itself."""
    drain_s: float = 30.0
    """Seconds to let running requests finish after SIGTERM."""
    fleet_secret: str | None = field(default=None, repr=False)
    """Secret shared by all workers of a fleet: it signs handoffs and encrypts event streams."""
    worker_key: str | None = field(default=None, repr=False)
    """Key for private endpoints, the same in all workers of a fleet."""
    peers: tuple[str, ...] = ()
    """Workers, HOST:PORT, that KV may be fetched from. Without a secret and without peers: any port of this machine."""
    max_waiting: int = 256
    """Maximum number of waiting requests; further requests are answered 429."""
    head_s: float = 10.0
    """Seconds within which a request's head must arrive."""
    body_s: float = 30.0
    """Seconds within which a request's body must arrive after its head."""
    tokenise_s: float = 10.0
    """Seconds for a prompt to wait for the tokenizer and be tokenised; after that the request is answered 429."""
    kv_events: str | None = None
    """ZMQ endpoint to publish KV events on."""
    kv_replay: str | None = None
    """ZMQ endpoint that resends past KV events to subscribers that missed some."""
    expert_events: str | None = None
    """ZMQ endpoint to publish expert events on."""
    event_queue: int = 1000
    """Messages queued for a slow subscriber; further messages are dropped and counted."""
    replay_queue: int = 10_000
    """Past messages kept for replay, as in vLLM."""
    load_interval_s: float = 1.0
    """Seconds between two ExpertLoad events."""

    def __post_init__(self) -> None:
        check_one_of(get_args(Role), role=self.role)
        check(0 <= self.port <= 65535, f"port={self.port} must be in 0 … 65535")
        check_at_least(
            1,
            max_batch=self.max_batch,
            block_size=self.block_size,
            kv_blocks=self.kv_blocks,
            event_queue=self.event_queue,
            replay_queue=self.replay_queue,
        )
        check_not_negative(max_waiting=self.max_waiting)
        check(
            self.max_step_tokens >= self.max_batch,
            f"max_step_tokens={self.max_step_tokens} must be at least max_batch={self.max_batch}",
        )
        check_positive(
            kv_ttl_s=self.kv_ttl_s,
            fetch_timeout_s=self.fetch_timeout_s,
            drain_s=self.drain_s,
            load_interval_s=self.load_interval_s,
            head_s=self.head_s,
            body_s=self.body_s,
            tokenise_s=self.tokenise_s,
        )
        self._check_streams()
        self._check_access()

    def _check_streams(self) -> None:
        streams = {name: getattr(self, name) for name in STREAMS if getattr(self, name) is not None}
        check(
            len(set(streams.values())) >= len(streams),
            f"{', '.join(streams)} are {', '.join(streams.values())}; each needs its own endpoint",
        )
        for name, endpoint in streams.items():
            check(
                endpoint.startswith(SCHEMES),
                f"{name}={endpoint!r} must begin with tcp:// or ipc://, such as tcp://127.0.0.1:5601",
            )
            scheme, _, address = endpoint.partition("://")
            local = scheme != "tcp" or is_loopback(address.rpartition(":")[0])
            check(
                self.fleet_secret is not None or local,
                f"{name}={endpoint!r} can be read from other machines, and holds users' prompts: set "
                f"{SECRET_VARIABLE}, or use tcp://127.0.0.1:PORT",
            )
        check(
            self.kv_replay is None or self.kv_events is not None,
            "kv_replay needs kv_events: there is nothing to send again",
        )

    def _check_access(self) -> None:
        """Raise ConfigError if other machines can reach this worker, or it uses other machines, without secrets."""
        needed = {SECRET_VARIABLE: self.fleet_secret, KEY_VARIABLE: self.worker_key}
        for variable, value in needed.items():
            if value is not None:
                check_secret(value, variable)
        missing = [variable for variable, value in needed.items() if value is None]
        check(
            not missing or is_loopback(self.host),
            f"host={self.host!r} can be reached from other machines: set {' and '.join(missing)}, the same in "
            "all workers of the fleet, or use host 127.0.0.1",
        )
        far = [peer for peer in self.peers if not is_loopback(parse_address(peer, "peer").host)]
        check(
            not far or self.fleet_secret is not None,
            f"peers {', '.join(far)} are other machines: set {SECRET_VARIABLE}, the same there and here",
        )

    @property
    def advertised(self) -> str:
        """Host name in a prefill's answers, at which other workers fetch KV."""
        return self.advertise or (socket.gethostname() if self.host in WILDCARDS else self.host)

    @property
    def max_tokens(self) -> int:
        """Token capacity of all blocks together: no request may be longer."""
        return self.block_size * self.kv_blocks
