"""A whole measurement: make the workload, send it to the server or servers, and keep the outcomes.

Routers of a Coterie gateway are swapped between blocks of a comparison; the original is restored at its end.
Outcomes are stored in the caller's :class:`LoadMeasurement` as they arrive, so that an interrupted run is not lost.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from coterie.answers.load.client import Asking, LoadClient, RequestOutcome, chars_per_token
from coterie.answers.load.run import Contender, Pace, Send, compare
from coterie.answers.load.summary import Targets
from coterie.answers.load.workload import (
    LONGEST,
    TEMPLATE_TOKENS,
    LoadRequest,
    SharedPrefixes,
    TraceText,
    Workload,
    arrival_times,
    mixed_prompts,
    shared_prefixes,
    that_fit,
    traced,
)
from coterie.answers.suites import Report
from coterie.errors import (
    ConfigError,
    CoterieError,
    UnavailableError,
    check,
    check_at_least,
    check_one_of,
    check_positive,
    refuse,
)
from coterie.net.http_client import Client, served_model
from coterie.prompts import Prompt
from coterie.registry import PolicyText
from coterie.traces.requests import RequestTrace

WORKLOADS = ("prompts", "shared-prefix", "trace")
DECODE = "decode"
PROBE_CHARS = 800
"""Characters of the prompt that is sent to measure the server's characters per token."""


@dataclass(frozen=True, slots=True)
class LoadSettings:
    urls: tuple[str, ...]
    """Base URLs of the servers; the others are compared with the first."""
    workload: str = "prompts"
    """Kind of workload. prompts: mixed domains; shared-prefix: conversations; trace: lengths and blocks of `trace`."""
    requests: int = 200
    """Number of measured requests per contender."""
    warmup: int = 8
    """Number of requests before the measured ones, which are left out of the results."""
    max_tokens: int = 64
    rate: float | None = None
    """Requests per second: Poisson arrivals, or the times of `trace` scaled to this mean rate."""
    concurrency: int | None = None
    """Number of clients of a closed loop; None for an open loop."""
    trace: RequestTrace | None = None
    speed_up: float | None = None
    """Factor by which `trace` is replayed faster than recorded."""
    length_scale: float = 1.0
    """Factor on the prompt and output lengths of `trace`."""
    prefixes: SharedPrefixes = SharedPrefixes()  # noqa: RUF009  (frozen)
    duration_s: float | None = None
    asking: Asking = Asking("")  # noqa: RUF009  (frozen)
    """Form of the requests; an empty model name takes the first model that the server lists."""
    routers: tuple[str, ...] = ()
    """Routers of a gateway to compare, as :meth:`~coterie.registry.PolicyText.parse` reads them."""
    pool: str | None = None
    """Pool of the gateway whose router is swapped; None takes decode, or the only pool."""
    blocks: int = 8
    """Number of blocks of a comparison."""
    targets: Targets = Targets()  # noqa: RUF009  (a tuple)
    marker: str = ""
    """Text before every prompt, with the contender's number, so that prefixes cached in earlier runs do not match."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_one_of(WORKLOADS, workload=self.workload)
        check_at_least(1, requests=self.requests, max_tokens=self.max_tokens, blocks=self.blocks)
        check_at_least(0, warmup=self.warmup, seed=self.seed)
        check_positive(
            duration_s=self.duration_s,
            length_scale=self.length_scale,
            ttft_target_s=self.targets.ttft_s,
            tpot_target_s=self.targets.tpot_s,
        )
        open_loop, sent = self.concurrency is None, self.warmup + self.requests
        timed = self.trace is not None and self.trace.arrival_s is not None
        refuse(
            {
                "targets of TTFT and TPOT need streamed answers": not self.asking.stream and any(self.targets),
                "workload='trace' needs a trace of requests": self.workload == "trace" and self.trace is None,
                "concurrency is for a closed loop, rate and speed_up for an open one; give one of them": not open_loop
                and (self.rate is not None or self.speed_up is not None),
                "give rate or trace (open loop) or concurrency (closed loop)": open_loop
                and self.rate is None
                and self.trace is None,
                f"speed_up={self.speed_up} needs a trace whose times are replayed": self.speed_up is not None
                and self.trace is None,
                "a closed loop has no arrival times: leave the trace out, or ask workload='trace'": not open_loop
                and self.trace is not None
                and self.workload != "trace",
                "the trace has no arrival times; give a concurrency, or a trace that has them": open_loop
                and self.trace is not None
                and not timed,
                f"routers of one gateway are compared, or several servers; {len(self.urls)} URLs came": self.routers
                and len(self.urls) > 1,
                "a server or router is given twice; name each once": any(
                    len(names) != len(set(names)) for names in (self.urls, self.routers)
                ),
                f"blocks={self.blocks} must be at most the {sent} requests": len(self.contenders) > 1
                and self.blocks > sent,
            }
        )
        for router in self.routers:
            PolicyText.parse(router)

    @property
    def contenders(self) -> tuple[str, ...]:
        return self.routers or self.urls

    @property
    def paced(self) -> str:
        """Description of how requests are sent, in a few words."""
        if self.concurrency is not None:
            return f"closed loop, {self.concurrency} client{'s' if self.concurrency > 1 else ''}"
        if self.trace is None:
            return f"open loop, Poisson, {self.rate:g} requests a second"
        if self.rate is not None:
            return f"open loop, times of a trace at {self.rate:g} requests a second"
        return "open loop, times of a trace" + (f", {self.speed_up:g} times as fast" if self.speed_up else "")


@dataclass(frozen=True, slots=True)
class BearerKeys:
    """Keys sent as bearer tokens; None sends no key."""

    api: str | None = None
    admin: str | None = None
    """Key for swapping routers; None takes the API key."""


@dataclass(slots=True)
class LoadMeasurement:
    """Outcomes of a measurement so far."""

    model: str = ""
    workload: Workload | None = None
    contenders: list[Contender] = field(default_factory=list)


async def measure(
    settings: LoadSettings,
    prompts: Sequence[Prompt],
    measured: LoadMeasurement,
    keys: BearerKeys = BearerKeys(),
    report: Report = lambda *_: None,
) -> None:
    """Serve the workload under every contender; `measured` is filled as answers arrive."""
    rng = np.random.default_rng(settings.seed)
    async with AsyncExitStack() as stack:
        report(f"Asking {settings.urls[0]}", 0, 1)
        admin = await stack.enter_async_context(Client(settings.urls[0], key=keys.admin or keys.api))
        first = await stack.enter_async_context(Client(settings.urls[0], key=keys.api))
        model, ends = settings.asking.model, settings.asking.ignore_eos or settings.workload == "trace"
        measured.model = model or await served_model(first)
        asking = replace(settings.asking, model=measured.model, ignore_eos=ends)
        askings = [asking]
        for url in settings.urls[1:]:
            other = await stack.enter_async_context(Client(url, key=keys.api))
            askings.append(replace(asking, model=model or await served_model(other)))
        # Replace lone surrogates: JSON can contain them, but UTF-8 cannot encode them.
        prompts = [one._replace(prompt=one.prompt.encode("utf-8", "replace").decode()) for one in prompts]
        clients = [await stack.enter_async_context(LoadClient(url, keys.api)) for url in settings.urls]
        count = settings.warmup + settings.requests
        measured.workload = await _workload(settings, prompts, count, rng, clients[0], first, asking)
        requests = measured.workload.requests
        check(
            len(requests) > settings.warmup,
            f"the trace has {len(requests)} requests: warmup={settings.warmup} leaves none to measure",
        )
        times = (
            arrival_times(len(requests), rng, settings.rate, settings.trace, settings.speed_up)
            if settings.concurrency is None
            else None
        )
        pace = Pace(settings.concurrency, times, settings.duration_s)
        pool = ""
        if settings.routers:
            pool = await stack.enter_async_context(put_back(admin, settings.pool))
            for router in settings.routers:  # a router that the gateway refuses must raise before any request is sent
                await use_router(admin, pool, router, alone=True)
        for number, name in enumerate(settings.contenders):
            server = 0 if settings.routers else number
            marker = f"{settings.marker}{number}" if settings.marker else ""
            swap = partial(use_router, admin, pool, name, alone=True) if settings.routers else None
            measured.contenders.append(Contender(name, _sender(clients[server], askings[server], marker), swap))
        blocks = settings.blocks if len(measured.contenders) > 1 else 1
        await compare(measured.contenders, requests, pace, blocks, rng, report)


def _sender(client: LoadClient, asking: Asking, marker: str) -> Send:
    async def send(request: LoadRequest, planned: float | None) -> RequestOutcome:
        return await client.ask(request, asking, planned, marker, f"load-{marker}-{request.number}")

    return send


async def _workload(
    settings: LoadSettings,
    prompts: Sequence[Prompt],
    count: int,
    rng: np.random.Generator,
    client: LoadClient,
    server: Client,
    asking: Asking,
) -> Workload:
    longest = await context_length(server, asking.model) or LONGEST
    if settings.workload == "prompts":
        fitting = that_fit(prompts, longest - settings.max_tokens - TEMPLATE_TOKENS)
        return mixed_prompts(fitting, count, settings.max_tokens, rng)
    # Lengths are set in characters; English only, since a token of other scripts has a quarter of the characters.
    prompts = [prompt for prompt in prompts if prompt.lang in ("en", "")] or prompts
    if settings.workload == "shared-prefix":
        return shared_prefixes(prompts, count, settings.max_tokens, rng, settings.prefixes)
    assert settings.trace is not None
    ratios = {}
    for domain in dict.fromkeys(prompt.domain for prompt in prompts):
        pool = [prompt.prompt for prompt in prompts if prompt.domain == domain]
        text = "\n".join(pool[int(index)] for index in rng.permutation(len(pool)))[:PROBE_CHARS]
        ratios[domain] = await chars_per_token(client, asking, text)
    return traced(settings.trace, prompts, count, rng, TraceText(ratios, settings.length_scale, longest))


async def context_length(server: Client, model: str) -> int | None:
    """Return the server's limit on prompt and answer tokens of a model; None if the server does not report it."""
    status, text = await server.call("GET", "/v1/models")
    try:
        cards = json.loads(text)["data"]
        length = next(card["max_model_len"] for card in cards if card["id"] == model)
        return int(length) if status == 200 and length is not None else None
    except (ValueError, RecursionError, LookupError, TypeError, StopIteration):
        return None


# ------------------------------------------------------------------------------------------------- routers of a gateway


async def routers_in_use(gateway: Client) -> dict[str, str]:
    """Return pool → router in use; raise if the server is not a Coterie gateway."""
    status, text = await gateway.call("GET", "/routers")
    try:
        answer = json.loads(text)
        in_use = {name: str(spec["router"]) for name, spec in answer.get("pools", answer).items()}
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        in_use = {}
    if status != 200 or not in_use:
        hint = "; an admin key is needed" if status in (401, 403) else ""
        raise UnavailableError(
            f"{gateway.url}/routers answers HTTP {status}, not the routers of a Coterie gateway{hint}"
        )
    return in_use


async def use_router(
    gateway: Client, pool: str, wanted: str, spec: Mapping[str, Any] | None = None, alone: bool = False
) -> None:
    """Swap a pool's router; raise with the gateway's reason if it refuses the name or a setting.

    `spec` holds further configuration of the router, such as the file of its fit. `alone`: it takes no turns with the
    shortest queue, until a router is set without this.
    """
    path = f"/routers/{pool}{'?alone=1' if alone else ''}"
    status, text = await gateway.call("PUT", path, {**(spec or {}), "router": wanted})
    if status == 200:
        return
    try:
        error = json.loads(text)["error"]
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, RecursionError, LookupError, TypeError):
        pass
    wrong = ConfigError if status in (400, 404, 422) else UnavailableError
    raise wrong(f"{gateway.url} does not take router {wanted!r} for pool {pool!r}: HTTP {status}: {text[:300]}")


@asynccontextmanager
async def put_back(gateway: Client, pool: str | None = None) -> AsyncIterator[str]:
    """Yield the pool (None: decode, or the only pool) and restore its router at the end, also after an exception."""
    in_use = await routers_in_use(gateway)
    if pool is None:
        pool = DECODE if DECODE in in_use else next(iter(in_use)) if len(in_use) == 1 else ""
    check(pool in in_use, f"pool={pool!r} must be one of {', '.join(in_use)}")
    try:
        yield pool
    except BaseException:
        with suppress(CoterieError):  # the exception of the block matters more than a failure to restore
            await use_router(gateway, pool, in_use[pool])
        raise
    await use_router(gateway, pool, in_use[pool])
