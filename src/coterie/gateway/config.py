"""Settings of a gateway, as in its YAML file. The attribute docstrings are the file's reference.

Relative paths are of files in the config file's own folder, wherever the gateway is started.

listen: 127.0.0.1:8000
handshake: vllm
tokenizer: /models/Qwen3-30B-A3B
workers:
  - {id: prefill-0, url: http://10.0.0.2:8000, role: prefill, kv_events: tcp://10.0.0.2:5557}
  - {id: decode-0, url: http://10.0.0.3:8000, role: decode}
  - {id: decode-1, url: http://10.0.0.4:8000, role: decode}
prefill: {router: joint}
decode: {router: latency_aware, fit: router.safetensors}
"""

from __future__ import annotations

import re
import ssl
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import msgspec.inspect
import yaml

from coterie.control import ControlSettings, SwitchbackSettings
from coterie.costs.cells import preset_names
from coterie.costs.movement import Movement
from coterie.errors import (
    ConfigError,
    TraceError,
    check,
    check_at_least,
    check_file,
    check_not_negative,
    check_positive,
    check_within,
    file_errors,
)
from coterie.gateway.fleet.health import HealthSettings
from coterie.gateway.fleet.spec import RouterSpec
from coterie.net.http1.upstream import parse_origin

DEFAULTS = ControlSettings()
FORWARDED = re.compile(r"/v1(/[\w-]+)+", re.ASCII)
MOST_NUMBER = 1 << 63
MOST_PLACES = 1 << 20
MOST_RANKS = 1 << 16
"""Most ranks of an expert-parallel group, and most data-parallel ranks of an engine."""
MOST_BLOCKS = 1 << 31
"""Most KV blocks of a worker."""
MOST_BLOCK_TOKENS = 1 << 16
MOST_DECISIONS = 1 << 20


class AdviseSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The expert-parallel group that placement advice is for."""

    ranks: int
    """Number of ranks in the group."""
    slots_per_rank: int | None = None
    """Expert slots on each rank, replicas included; None for as many as hold every expert once."""
    ranks_per_node: int | None = None
    """Ranks on each machine; None if all are on one machine."""
    device: str = "h200"
    """Preset of the device for which steps are priced."""
    model: str | None = None
    """Model whose expert sizes and steps are priced; None for the model that the router was fitted for."""

    placement: str | None = None
    """File of the placement in force in the group; None for experts in order, as engines start."""
    step_tokens: int = 256
    """Tokens per step, summed over all ranks."""
    horizon: float = 10_000.0
    """Steps that a new placement will serve: it must save more within them than moving experts costs."""
    movement: Movement = "stops"
    """Whether the engine stops for every move of an expert, or moves are `staged` behind its steps."""
    window_s: float = 30.0
    """Length of a window of expert loads, in seconds. A plan made from one window is evaluated on the next."""
    min_steps: int = 64
    """Fewest steps in a window, summed over all workers."""
    cooldown_s: float = 120.0
    """Seconds that a plan stands before another is made."""

    def __post_init__(self) -> None:
        check_at_least(1, ranks=self.ranks, slots_per_rank=self.slots_per_rank, ranks_per_node=self.ranks_per_node)
        check_at_least(1, step_tokens=self.step_tokens, min_steps=self.min_steps)
        check_positive(horizon=self.horizon, window_s=self.window_s)
        check_not_negative(cooldown_s=self.cooldown_s)


class ControlSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings of the control loop: when it runs, and how much data its decisions need. Times are in seconds."""

    enabled: bool | None = None
    """Whether the loop runs; None: if a worker has `expert_events` and the decode router uses a fit, or the worker has
    a `placement_rank`: its map is followed."""
    tick_s: float = 1.0
    """Time between two evaluations of the events received."""
    window: int = DEFAULTS.window
    """Requests in a window: their experts are compared with those of the requests the router was fitted to."""
    min_requests: int = DEFAULTS.min_requests
    """Fewest requests of the present traffic (since its last change) from which the router is re-fitted."""
    fit_requests: int = DEFAULTS.fit_requests
    """Most requests from which the router is re-fitted."""
    score_requests: int = DEFAULTS.score_requests
    """Requests on which a new fit is compared with the fit in force."""
    score: Literal["time", "experts"] = "time"
    """Measure by which fits are compared: `time`, the decode time by the prices of the router's model; or `experts`,
    the distinct experts per step, for a small model that stands in for a larger one."""
    margin: float = DEFAULTS.margin
    """Smallest predicted saving for which the router is swapped, as a share of the present score."""
    cooldown_s: float = DEFAULTS.cooldown_s
    """Shortest time between the starts of two fits."""
    advise: AdviseSection | None = None
    """Expert-parallel group to give placement advice for; None for no advice."""
    apply: bool = False
    """Whether a placement plan that saves time is written to `map`. If false, advice is only shown."""
    map: str | None = None
    """File of the placement map that vLLM's policy loads at its next rearrangement."""
    confirm_s: float = 600.0
    """Seconds that workers have to report a plan that was written, before it counts as not taken. vLLM loads a map at
    its next rearrangement: by default every 3,000 steps, which take less if a step takes less than 0.2 s."""
    folder: str | None = None
    """Folder for the loop's fits; None for a private temporary folder, removed at the end."""

    def __post_init__(self) -> None:
        check_positive(tick_s=self.tick_s, confirm_s=self.confirm_s)
        try:
            self.settings()
        except ConfigError as error:
            raise ConfigError(f"control: {error}") from None
        check(
            not self.apply or self.map is not None, "control: apply=true needs map, the file that plans are written to"
        )
        check(
            not self.apply or self.advise is not None, "control: apply=true needs advise, the group that plans are for"
        )

    def settings(self) -> ControlSettings:
        """Return the settings of the loop. Raises ConfigError if they contradict each other."""
        return ControlSettings(
            window=self.window,
            min_requests=self.min_requests,
            fit_requests=self.fit_requests,
            score_requests=self.score_requests,
            margin=self.margin,
            cooldown_s=self.cooldown_s,
        )


Section = TypeVar("Section", bound=msgspec.Struct)
Role = Literal["prefill", "decode", "both"]
Handshake = Literal["none", "vllm", "sglang"]
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MAX_BYTES = 1 << 20
FILL_IN = "FILL-IN"
"""Host of a worker that is still to be filled in, in configs that `coterie advise` writes."""
PATHS = frozenset(
    ("tokenizer", "placement", "predictor", "keys", "state", "fit", "device", "map", "folder", "certificate", "key")
)
"""Settings that are paths, in any section; `device` unless it names a shipped preset."""
MAX_DEPTH = 16
"""Deepest nesting of a file: PyYAML's C loader overflows the stack on lists nested 200,000 deep."""


class WorkerEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One worker: an engine, or one data-parallel rank of an engine."""

    id: str
    url: str
    role: Role = "both"
    """`prefill`, `decode`, or `both`: a worker that can do either."""
    places: int = 16
    """Requests that the worker runs at once, such as vLLM's `max_num_seqs`. Further ones are priced as waiting, unless
    its metrics show that it runs more."""
    speed: float = 1.0
    """Speed of the worker relative to the others of its pool."""
    data_parallel_rank: int | None = None
    """Rank of a data-parallel engine that this entry stands for; requests name it in vLLM's rank header."""
    placement_rank: int | None = None
    """Rank of the placement file whose experts this worker holds."""
    kv_events: str | None = None
    """ZMQ endpoint of the worker's KV events. Without it the gateway estimates cached prefixes from past routing."""
    kv_replay: str | None = None
    """ZMQ endpoint from which lost KV events are requested again."""
    kv_blocks: int | None = None
    """Blocks in the worker's KV cache: its KV events are not believed to store more. None for 262,144."""
    expert_events: str | None = None
    """ZMQ endpoint of the worker's expert events, from which the control loop learns."""
    secure_events: bool = False
    """Whether the worker encrypts its event streams with the fleet secret. Reference workers do, vLLM cannot."""
    footprints: bool = False
    """Whether the worker gets the footprint of a request's prefill: set it for vLLM with a scheduler of Coterie, which
    orders waiting requests by it. Nothing that a worker publishes tells which scheduler it runs."""
    bootstrap_port: int | None = None
    """Port of an SGLang prefill worker's bootstrap server."""

    def __post_init__(self) -> None:
        check(
            self.id.isascii() and self.id.isprintable() and 0 < len(self.id) <= 128,
            f"id={self.id!r} must be 1 to 128 printable ASCII characters",
        )
        try:
            parts = parse_origin(self.url)
        except ConfigError as error:
            raise ConfigError(f"worker {self.id!r}: {error}") from None
        check(
            not parts.path.strip("/") and not parts.fragment,
            f"worker {self.id!r}: url={self.url!r} must be http://HOST:PORT or https://HOST:PORT",
        )
        for name, least, most in (
            ("places", 1, MOST_PLACES),
            ("bootstrap_port", 1, 65535),
            ("kv_blocks", 1, MOST_BLOCKS),
            ("data_parallel_rank", 0, MOST_RANKS - 1),
            ("placement_rank", 0, MOST_RANKS - 1),
        ):
            value = getattr(self, name)
            check(
                value is None or least <= value <= most,
                f"worker {self.id!r}: {name}={value} must be in {least} … {most}",
            )
        check_positive(speed=self.speed)
        for name in ("kv_events", "kv_replay", "expert_events"):
            endpoint = getattr(self, name)
            check(
                endpoint is None or endpoint.startswith(("tcp://", "ipc://")),
                f"worker {self.id!r}: {name}={endpoint!r} must begin with tcp:// or ipc://",
            )


class LimitSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Limits on every resource that a client or worker can hold. Times are in seconds."""

    body_bytes: int | None = None
    """Largest request body, in bytes. Default: 64 bytes per token of the longest context, plus 1 MiB."""
    connections: int = 1024
    connections_per_peer: int = 0
    """Most connections from one IP address; 0 for no limit but `connections`."""
    head_s: float = 10.0
    """Time in which a client must send a request's head."""
    body_s: float = 30.0
    """Time in which a client must send a request's body."""
    write_s: float = 60.0
    """Time for which a client may leave its answer unread."""
    in_flight: int = 1024
    """Requests served at once; further ones wait."""
    waiting: int = 1024
    """Most requests that wait; further ones are refused with 429."""
    queue_s: float = 30.0
    """Longest time that a request waits before it is refused with 503."""
    connect_s: float = 2.0
    """Time to connect to a worker."""
    prefill_s: float = 120.0
    """Time in which a prefill worker must answer."""
    first_token_s: float = 300.0
    """Time in which the first byte of an answer's body must arrive."""
    idle_s: float = 120.0
    """Longest time between two pieces of an answer."""
    total_s: float = 3600.0
    """Longest time for a whole request."""
    tokenise_s: float = 1.0
    """Longest wait for a prompt's token ids; after it the request is routed without them."""
    answer_bytes: int = 64 << 20
    """Largest answer that is not streamed, in bytes."""

    def __post_init__(self) -> None:
        check_at_least(1, body_bytes=self.body_bytes, connections=self.connections, in_flight=self.in_flight)
        check_at_least(0, waiting=self.waiting, connections_per_peer=self.connections_per_peer)
        check_at_least(1, answer_bytes=self.answer_bytes)
        check_positive(
            **{name: getattr(self, name) for name in self.__struct_fields__ if name.endswith("_s")}  # all times
        )


class PodSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Workers that are the pods of a Kubernetes namespace."""

    selector: str
    """Labels of the pods, as an InferencePool selects them: ``app=vllm,model=qwen``."""
    port: int = 8000
    namespace: str | None = None
    """Namespace of the pods; None for the gateway's own."""
    role_label: str = "llm-d.ai/role"
    """Label whose value, `prefill` or `decode`, is a pod's role; any other is `both`."""
    places: int = 16
    """Requests that each worker runs at once."""
    kv_events_port: int | None = None
    """Port of the workers' KV events; None if they publish none."""
    api: str | None = None
    """URL of the API server; None for that of the cluster the gateway runs in."""
    every_s: float = 2.0
    """Time between two looks."""

    def __post_init__(self) -> None:
        check(self.selector.strip(), "pods: selector must name labels, such as app=vllm; empty is every pod")
        check_within(1, 65535, port=self.port, kv_events_port=self.kv_events_port)
        check_at_least(1, places=self.places)
        check_positive(every_s=self.every_s)
        if self.api is not None:
            parse_origin(self.api)


class PickerSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings of the endpoint picker for Envoy: the Gateway API inference extension, llm-d."""

    listen: str = "127.0.0.1:9002"
    """Address and port of the gRPC server; port 0 for any free port."""
    mode: Literal["profiles", "pick", "prefill"] = "pick"
    """`profiles`: llm-d's Coordinator asks for a prefill worker, then for a decode worker, whose request carries the
    footprint. `pick`: choose by the predicted footprint. `prefill`: prefill, then choose by the footprint."""
    endpoints: int = 3
    """Most workers named to Envoy: if it cannot reach the first, it goes to the next."""
    certificate: str | None = None
    """File of the server's TLS certificate (PEM), with `key`; None for plain text."""
    key: str | None = None
    """File of the certificate's private key (PEM)."""

    def __post_init__(self) -> None:
        check_at_least(1, endpoints=self.endpoints)
        check((self.certificate is None) == (self.key is None), "picker: certificate and key must be given together")
        address_of(self.listen)

    def tls(self) -> ssl.SSLContext | None:
        """Read the certificate and its key. Raises ConfigError if they cannot be used."""
        if self.certificate is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["h2"])
        try:
            context.load_cert_chain(self.certificate, self.key)
        except OSError as error:  # an ssl.SSLError too
            files = f"certificate={self.certificate} and key={self.key}"
            raise ConfigError(f"picker: {files} must be PEM files that belong together: {error}") from None
        return context


class PeerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Other gateways in front of the same workers."""

    urls: list[str] = []
    """Their addresses, http://HOST:PORT each. This gateway's own may be among them, so that all share one file."""
    every_s: float = 0.1
    """Time between two questions to a peer, in seconds."""

    def __post_init__(self) -> None:
        check_positive(every_s=self.every_s)
        check(len(set(self.urls)) == len(self.urls), f"peers: urls={self.urls} must name each peer once")
        for url in self.urls:
            parse_origin(url)


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """All settings of the config file."""

    workers: list[WorkerEntry] = []
    listen: str = "127.0.0.1:8000"
    """Address and port to listen on; port 0 for any free port."""
    handshake: Handshake = "none"
    """How prefill and decode workers share a request: `vllm` (one after the other), `sglang` (both at once), or `none`:
    each worker serves whole requests."""
    prefill: RouterSpec = RouterSpec()
    decode: RouterSpec = RouterSpec()
    """Router of the pool of decode workers, or of all workers if `handshake` is none."""
    tokenizer: str | None = None
    """Folder with the model's tokenizer.json. Without it workers that send KV events are asked for token ids; without
    those, prefixes are compared as text."""
    block_size: int = 16
    """Tokens per KV block of the workers."""
    placement: str | None = None
    """Placement file that lists the experts held by each worker with a `placement_rank`, until it reports its map."""
    predictor: str | None = None
    """Token table (`coterie tokens`) that predicts footprints of requests without a footprint from a prefill."""
    pods: PodSection | None = None
    """Further workers, which are pods; None for none."""
    picker: PickerSection | None = None
    """Endpoint picker that Envoy asks; None for none."""
    keys: str | None = None
    """File of API keys; see ``coterie serve --new-key``. Required unless `listen` is a loopback address."""
    forward: list[str] = []
    """Further paths below `/v1/` that callers may POST to, such as `/v1/rerank`; the decode router routes them."""
    separate_caches: bool = True
    """Whether the cached prefixes of callers with different keys are kept apart (by `cache_salt`)."""
    limits: LimitSettings = LimitSettings()
    health: HealthSettings = HealthSettings()
    control: ControlSection = ControlSection()
    """Settings of the loop that re-fits the decode router and advises on placement."""
    peers: PeerSettings = PeerSettings()
    """Other gateways in front of the same workers, whose requests routers count too."""
    switchback: SwitchbackSettings = SwitchbackSettings()
    """Settings of the turns by which the decode router's gain is measured on this fleet."""
    state: str | None = None
    """File in which workers and routers set at run time are saved across restarts."""
    decisions: int = 1000
    """Number of routing decisions kept for ``GET /decisions``."""
    drain_s: float = 30.0
    """Seconds for running requests to finish after SIGTERM."""
    log_requests: bool = False
    """Whether each request's outcome is logged. Its text is never logged."""

    def __post_init__(self) -> None:
        check_within(1, MOST_BLOCK_TOKENS, block_size=self.block_size)
        check_within(1, MOST_DECISIONS, decisions=self.decisions)
        check_positive(drain_s=self.drain_s)
        for path in self.forward:
            check(FORWARDED.fullmatch(path), f"forward: {path!r} must be a path below /v1/, such as /v1/rerank")
        check_distinct_ids(self.workers)
        for worker in self.workers:
            check_role(self.handshake, worker)
        self.address  # noqa: B018  the property raises if `listen` is malformed
        check(
            self.picker is None or self.picker.mode == "pick" or self.handshake == "vllm",
            "picker: modes profiles and prefill need handshake: vllm",
        )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of `listen`."""
        return address_of(self.listen)


def address_of(listen: str) -> tuple[str, int]:
    """Return host and port of an address to listen on. Raises ConfigError if it is malformed."""
    host, colon, port = listen.rpartition(":")
    check(
        colon and port.isascii() and port.isdigit() and int(port) <= 65535,
        f"listen={listen!r} must be HOST:PORT, with a port in 0 … 65535",
    )
    return host.strip("[]") or "127.0.0.1", int(port)


def check_distinct_ids(workers: Sequence[WorkerEntry]) -> None:
    """Raise ConfigError if two workers have the same id."""
    twice = next((id for id, count in Counter(worker.id for worker in workers).items() if count > 1), None)
    check(twice is None, f"worker id {twice!r} is there twice")


def check_role(handshake: Handshake, worker: WorkerEntry) -> None:
    """Raise ConfigError for a role that the handshake cannot use, or a missing bootstrap port."""
    check(
        handshake != "none" or worker.role != "prefill",
        f"worker {worker.id!r} has role prefill: set handshake to vllm or sglang",
    )
    check(
        handshake != "sglang" or worker.role != "prefill" or worker.bootstrap_port is not None,
        f"worker {worker.id!r} needs bootstrap_port: SGLang's decode workers connect to it",
    )


def read_config(path: Path) -> GatewayConfig:
    """Read a config file. Raises TraceError or ConfigError with a one-line message, whatever the file holds."""
    return _from_folder(parse_config(read_small_text(path), path), path.absolute().parent)


def _from_folder(section: Section, folder: Path) -> Section:
    """Return a section whose relative paths are those of files in a folder."""
    changes: dict[str, Any] = {}
    for name in section.__struct_fields__:
        value = getattr(section, name)
        if isinstance(value, msgspec.Struct):
            changes[name] = _from_folder(value, folder)
        elif name in PATHS and isinstance(value, str) and not (name == "device" and value in preset_names()):
            changes[name] = str(folder / value)
    return msgspec.structs.replace(section, **changes)


def check_filled_in(workers: Sequence[WorkerEntry]) -> None:
    """Raise ConfigError if a worker's host is still to be filled in."""
    for worker in workers:
        for name in ("url", "kv_events", "kv_replay", "expert_events"):
            value = getattr(worker, name)
            check(
                value is None or FILL_IN not in value,
                f"worker {worker.id!r}: {name}={value}: put the worker's host in place of {FILL_IN}",
            )


def read_small_text(path: Path) -> str:
    """Read a file of at most `MAX_BYTES`. Raises TraceError if it is no such text."""
    with file_errors(path):
        check_file(
            path.stat().st_size <= MAX_BYTES,
            path,
            "file",
            f"has {path.stat().st_size} bytes, must have at most {MAX_BYTES}",
        )
        return path.read_text(encoding="utf-8")


def parse_config(text: str, path: Path) -> GatewayConfig:
    try:
        value = _value(text, path)
        config = msgspec.convert({} if value is None else value, GatewayConfig)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        where = "YAML" if mark is None else f"line {mark.line + 1}"
        raise TraceError(path, where, f"cannot be parsed: {' '.join(problem.split())}") from None
    except (msgspec.ValidationError, ValueError) as error:
        raise TraceError(path, "config", " ".join(str(error).split()) + _known(str(error))) from None
    except (IndexError, KeyError, AttributeError, TypeError, OverflowError):  # raised by PyYAML, as for `!!int ""`
        raise TraceError(path, "YAML", "has a value that its tag does not fit") from None
    _check_numbers(value, path, "config")
    return config


def _check_numbers(value: Any, path: Path, name: str) -> None:
    """Refuse whole numbers of more than 64 bits: a setting without a limit of its own is not made for them."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            _check_numbers(item, path, f"{name}.{key}")
    elif isinstance(value, int):
        check_file(value < MOST_NUMBER, path, name, f"{value} must be below {MOST_NUMBER}")
        check_file(value > -MOST_NUMBER, path, name, f"{value} must be above -{MOST_NUMBER}")


def _known(problem: str) -> str:
    """Return what would be right instead of an unknown field or choice; empty if the problem is another."""
    unknown, choice = "unknown field" in problem, "Invalid enum value" in problem
    where = re.search(r" at `\$([^`]*)`", problem)
    kind: Any = msgspec.inspect.type_info(GatewayConfig)
    for name in re.findall(r"\.(\w+)|\[", where[1]) if where and (unknown or choice) else ():
        kind = next(field.type for field in kind.fields if field.encode_name == name) if name else kind.item_type
        if isinstance(kind, msgspec.inspect.UnionType):  # with None
            kind = next(other for other in kind.types if not isinstance(other, msgspec.inspect.NoneType))
    names = [field.encode_name for field in kind.fields] if unknown else kind.values if choice else ()
    return f"; known: {', '.join(names)}" if names else ""


def _value(text: str, path: Path) -> Any:
    """Parse a file. Aliases, repeated keys and deep nesting are refused: a loader would follow or drop them."""
    depth = 0
    for event in yaml.parse(text, Loader=LOADER):
        check_file(not isinstance(event, yaml.AliasEvent), path, _line(event), "has an alias")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        check_file(depth <= MAX_DEPTH, path, _line(event), f"is nested more than {MAX_DEPTH} deep")
    _check_repeated(yaml.compose(text, Loader=LOADER), path)
    return yaml.load(text, Loader=LOADER)


def _check_repeated(node: Any, path: Path) -> None:
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            check_file(isinstance(key, yaml.ScalarNode), path, _line(key), "has a key that is not a name")
            check_file(key.value not in seen, path, f"{_line(key)}: {key.value}", "is there twice")
            seen.add(str(key.value))
            _check_repeated(value, path)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_repeated(item, path)


def _line(place: Any) -> str:
    """Return the line of an event or a node of the file."""
    return f"line {place.start_mark.line + 1}"
