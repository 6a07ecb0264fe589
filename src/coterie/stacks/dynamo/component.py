"""The decode component that Dynamo's frontend sends requests to, after their prefill.

Instances of the decode workers are listed by Dynamo; their number of places is in their model cards; how much of a
prompt each holds is told by Dynamo's own index of KV events. A request goes to the chosen instance by its id.

If an instance cannot be reached, the request goes to another: the prefill worker still has its KV. If an answer breaks
off, the frontend is told so (`Disconnected`): with ``--migration-limit`` it prefills again and continues the answer.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any, NamedTuple

import msgspec
from dynamo.llm import (
    FpmEventSubscriber,
    KvRouter,
    KvRouterConfig,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    register_model,
)
from dynamo.llm.exceptions import Disconnected, WorkerUnavailable
from dynamo.runtime import Client, Context, DistributedRuntime, Endpoint

from coterie.errors import UnavailableError
from coterie.gateway.config import GatewayConfig
from coterie.gateway.signals import predicted
from coterie.gateway.watching.metrics import Metrics
from coterie.stacks.dynamo.decoders import PLACES, Decoders

LOG = logging.getLogger("coterie.dynamo")
LISTED_S = 0.5
"""Seconds between two looks at the list of instances; requests look too."""
METRICS_S = 5.0
"""Seconds for which the event loop may keep Dynamo's metrics endpoint waiting."""
PREFIXES = {
    "router_track_active_blocks": False,
    "router_track_prefill_tokens": False,
    "conditional_disagg_enabled": True,
}
"""Settings of Dynamo's index, which chooses no worker here. Without the last it reads no decode worker's KV events."""
GONE, REFUSED = "Unavailable", "InvalidRequest"
"""Beginning of Dynamo's errors of an instance that is gone, or that refuses a request. They have no own classes."""


class Settings(NamedTuple):
    """Names in Dynamo, each ``namespace.component.endpoint``."""

    decoders: str
    """Endpoint of the decode workers. The frontend must not watch its namespace."""
    endpoint: str
    """Endpoint of this component, in the namespace that the frontend watches."""
    model_path: str | None = None
    """Folder or name of the model; None for that of the decode workers."""


class _RuntimeConfig(msgspec.Struct):
    max_num_seqs: int | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    exclude_tools_when_tool_choice_none: bool = True


class Card(msgspec.Struct):
    """Fields of a decode worker's model card that are read."""

    display_name: str
    source_path: str
    kv_cache_block_size: int
    runtime_config: _RuntimeConfig
    context_length: int | None = None


def read_card(text: str) -> Card | None:
    """Read a model card; None if it lacks what the component needs."""
    try:
        return msgspec.json.decode(text, type=Card)
    except msgspec.MsgspecError as error:
        LOG.warning("the model card of a decode worker is not used: %s", error)
        return None


class Component:
    """Forwards requests to decode workers. Construct it in a running event loop; `start` waits for a worker."""

    def __init__(self, runtime: DistributedRuntime, settings: Settings, config: GatewayConfig) -> None:
        self.settings, self.runtime = settings, runtime
        self.metrics = Metrics(version("coterie"))
        self.decoders = Decoders(config, self.metrics)
        self._numbers = itertools.count()
        self._listed: list[int] | None = None
        self._cards: dict[str, Card | None] = {}

    async def start(self) -> Endpoint:
        """Wait for a decode worker, and register with the frontend as it has registered; return the endpoint."""
        await asyncio.to_thread(predicted.warm_up)
        decoders = self.runtime.endpoint(self.settings.decoders)
        self.client: Client = await decoders.client()
        self._subscriber = FpmEventSubscriber(decoders)  # the binding that reads model cards
        self._subscriber.start_tracking()
        while (card := next(filter(None, self._cards.values()), None)) is None:
            await asyncio.sleep(LISTED_S)
            self.refresh()
        self._prefixes = KvRouter(decoders, card.kv_cache_block_size, KvRouterConfig(**PREFIXES))
        endpoint = self.runtime.endpoint(self.settings.endpoint)
        self._loop = asyncio.get_running_loop()
        endpoint.metrics.register_prometheus_expfmt_callback(self._rendered)
        self._watching = asyncio.create_task(self._watch(), name="list of decode workers")
        await self._register(endpoint, card)
        return endpoint

    async def _register(self, endpoint: Endpoint, card: Card) -> None:
        theirs, ours = card.runtime_config, ModelRuntimeConfig()
        for name in ("tool_call_parser", "reasoning_parser", "exclude_tools_when_tool_choice_none"):
            setattr(ours, name, getattr(theirs, name))
        ours.context_length = card.context_length
        await register_model(
            ModelInput.Tokens,
            ModelType.Chat | ModelType.Completions,
            endpoint,
            self.settings.model_path or card.source_path,
            card.display_name,
            worker_type=WorkerType.Decode,
            needs=[[WorkerType.Prefill]],
            kv_cache_block_size=card.kv_cache_block_size,
            runtime_config=ours,
            ignore_weights=True,
        )

    # -------------------------------------------------------------------------------------------------------- workers

    def refresh(self) -> None:
        """Take Dynamo's list of instances, and their model cards."""
        texts, known = self._subscriber.get_model_cards(), self._cards
        self._cards = {name: known[name] if name in known else read_card(text) for name, text in texts.items()}
        places = {name: card.runtime_config.max_num_seqs for name, card in self._cards.items() if card is not None}
        self._listed = self.client.instance_ids()
        self.decoders.listed({name: places.get(name) or PLACES for name in map(str, self._listed)})

    async def _watch(self) -> None:
        while True:
            try:
                self.refresh()
            except Exception:
                LOG.exception("the list of decode workers cannot be read")
            await asyncio.sleep(LISTED_S)

    def _rendered(self) -> str:
        """Return the metrics. Dynamo calls this from a thread of its own."""

        async def render() -> str:
            return self.metrics.render().decode()

        return asyncio.run_coroutine_threadsafe(render(), self._loop).result(METRICS_S)

    # ------------------------------------------------------------------------------------------------------- requests

    async def generate(self, request: dict[str, Any], context: Context) -> AsyncIterator[Any]:
        """Answer a request of the frontend. Dynamo ends the generator if the client leaves."""
        key = f"{next(self._numbers):x}"
        outcome = "failed"
        try:
            if self.client.instance_ids() != self._listed:
                self.refresh()
            async for chunk in self._answer(key, request, context):
                yield chunk
            outcome = "cancelled" if context.is_stopped() else "ok"
        except (GeneratorExit, asyncio.CancelledError):
            outcome = "cancelled"
            raise
        except Exception as error:
            if str(error).startswith(REFUSED):
                outcome = "invalid"
            raise
        finally:
            self.decoders.keeper.finish(key)
            self.metrics.requests.inc("other", outcome)

    async def _answer(self, key: str, request: dict[str, Any], context: Context) -> AsyncIterator[Any]:
        decoders, known = self.decoders, self.decoders.read(request)
        cached, tried = await self._cached(known.ids), set[str]()
        while True:
            try:
                choice = decoders.choose(key, known, cached, tried)
            except UnavailableError as error:
                raise WorkerUnavailable(str(error)) from None
            name = choice.worker_id
            LOG.debug("%s: %s: %s", context.id(), name, choice.decision.reason)
            try:
                answer = await self.client.direct(known.passed, int(name), annotated=False, context=context)
                break
            except Exception as error:
                if name in tried or not str(error).startswith(GONE):
                    raise
                decoders.lost(name, "connect")
                self.metrics.retries.inc("decode")
                tried.add(name)
        try:
            async for chunk in answer:
                decoders.keeper.computed(key)
                yield chunk
            decoders.answered(name)
        except Exception as error:
            if context.is_stopped() or str(error).startswith(REFUSED):
                raise
            if not str(error).startswith(GONE):
                decoders.failed(name)
                raise
            decoders.lost(name, "incomplete")
            raise Disconnected(f"decode worker {name}: {error}") from None

    async def _cached(self, ids: list[int]) -> dict[str, int] | None:
        """Return the leading tokens of a prompt that each instance holds, by Dynamo's index of KV events."""
        try:
            scores = await self._prefixes.get_overlap_scores(ids, include_shared=False)
        except Exception:
            LOG.exception("the index of cached blocks cannot be asked")
            return None
        cached: dict[str, int] = {}
        for row in scores["workers"]:  # a row for each data-parallel rank
            name, tokens = str(row["worker_id"]), row["device_blocks"] * scores["block_size"]
            cached[name] = max(cached.get(name, 0), tokens)
        return cached


async def serve_component(settings: Settings, config: GatewayConfig, planes: dict[str, str]) -> None:
    """Serve until SIGTERM or SIGINT; running requests finish first."""
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, planes["discovery"], planes["request"])
    component = Component(runtime, settings, config)
    starting = asyncio.create_task(component.start())

    def stop() -> None:
        starting.cancel()
        runtime.shutdown()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    LOG.info("waiting for a decode worker at %s", settings.decoders)
    await asyncio.wait([starting])
    if starting.cancelled():
        return
    endpoint = starting.result()
    runtime.set_health_status(True)
    LOG.info("%s routes to %s by %s", settings.endpoint, settings.decoders, config.decode.router)
    await endpoint.serve_endpoint(component.generate, graceful_shutdown=True)
