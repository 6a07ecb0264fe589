"""Try the workers of a config, before a gateway serves it: their health, their models, their event streams.

A problem is one line that says what is wrong and what would be right.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import zmq
import zmq.asyncio
from numpy.random import default_rng
from zmq.utils.monitor import recv_monitor_message

from coterie.errors import ConfigError, CoterieError, check_given
from coterie.gateway.config import GatewayConfig, WorkerEntry
from coterie.gateway.exchange.pool import Member
from coterie.net.access import KEY_VARIABLE, SECRET_VARIABLE, FleetAccess
from coterie.net.http1 import UpstreamError
from coterie.wire.event_security import secure_subscriber

TRY_S = 5.0
"""Seconds that a worker, or an endpoint of its events, has to answer."""
STREAMS = {
    "kv_events": (zmq.SUB, 'vLLM: --kv-events-config \'{"enable_kv_cache_events": true, "endpoint": "tcp://*:PORT"}\''),
    "kv_replay": (zmq.DEALER, 'vLLM: "replay_endpoint": "tcp://*:PORT" in --kv-events-config'),
    "expert_events": (zmq.SUB, 'the plugin: "events": "tcp://*:PORT" in kv_connector_extra_config'),
}
"""Field of an entry → kind of the socket that connects there, and what makes an engine listen."""
_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)


class Tried(msgspec.Struct, frozen=True):
    """What a worker answered."""

    id: str
    url: str
    models: list[str]
    context_tokens: int | None
    """Longest context of its models; None if it does not say."""
    problems: list[str]


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Card]


async def try_workers(config: GatewayConfig, access: FleetAccess, try_s: float = TRY_S) -> list[Tried]:
    """Try all workers of a config at once; return what each answered, in the config's order."""
    tried = await asyncio.gather(*(_tried(config, entry, access, try_s) for entry in config.workers))
    first = next((one for one in tried if one.models), None)
    return [
        one
        if first is None or not one.models or one.models == first.models
        else msgspec.structs.replace(
            one,
            problems=[
                *one.problems,
                f"serves {', '.join(one.models)}, and {first.id} serves {', '.join(first.models)}: all workers of a "
                "gateway serve the same models",
            ],
        )
        for one in tried
    ]


async def _tried(config: GatewayConfig, entry: WorkerEntry, access: FleetAccess, try_s: float) -> Tried:
    member, cards = Member(entry, config, access.key, default_rng(0), 0.0), list[_Card]()
    problems: list[str] = []
    try:
        if await member.check_health(try_s):
            cards = await _models(member, try_s)
        else:
            problems.append(f"url={entry.url}: GET /health: {member.health_error}; {_hint(member.health_error)}")
    except CoterieError as error:
        problems.append(str(error))
    finally:
        await member.upstream.close()
    problems += [problem async for problem in _stream_problems(entry, access, try_s)]
    lengths = [card.max_model_len for card in cards if card.max_model_len is not None]
    return Tried(entry.id, entry.url, [card.id for card in cards], max(lengths, default=None), problems)


def _hint(problem: str) -> str:
    """Return what makes a health check pass that failed like this."""
    if problem.startswith("HTTP 503"):
        return "wait until it has loaded its weights"
    if problem.startswith(("HTTP 401", "HTTP 403")):
        return f"set {KEY_VARIABLE} to its key"
    if problem.startswith(("HTTP", "protocol")):
        return "url must be that of an engine's OpenAI server"
    return "start its engine, or write the host and port that it listens on"


async def _models(member: Member, try_s: float) -> list[_Card]:
    """Return the worker's models. Raises ConfigError if it does not list them."""
    what = f"url={member.entry.url}: GET /v1/models"
    try:
        answer = await member.ask("GET", "/v1/models", try_s)
        if answer.status != 200:
            raise ConfigError(f"{what}: HTTP {answer.status}; {_hint(f'HTTP {answer.status}')}")
        cards = msgspec.json.decode(answer.body, type=_Models).data
    except UpstreamError as error:
        raise ConfigError(f"{what}: {error.kind}: {error}") from None
    except (msgspec.DecodeError, RecursionError, ValueError):
        raise ConfigError(f"{what} is no list of models; {_hint('HTTP')}") from None
    return cards


async def _stream_problems(entry: WorkerEntry, access: FleetAccess, try_s: float) -> AsyncIterator[str]:
    with zmq.asyncio.Context() as context:
        for name, (kind, engine) in STREAMS.items():
            endpoint = getattr(entry, name)
            if endpoint is None:
                continue
            socket = context.socket(kind)
            try:
                if entry.secure_events:
                    secure_subscriber(
                        socket, check_given(access.secret, f"set {SECRET_VARIABLE} for secure_events=true")
                    )
                greeted = await _handshake(socket, endpoint, try_s)
            except ConfigError as error:
                yield f"{name}={endpoint}: {error}"
            except zmq.ZMQError as error:
                yield f"{name}={endpoint}: {error}; write tcp://HOST:PORT with the worker's host, or ipc://PATH"
            except TimeoutError:
                yield f"{name}={endpoint}: nothing accepted a connection within {try_s:g} s; {engine}"
            else:
                right = f"start the worker with this {SECRET_VARIABLE}" if entry.secure_events else "set secure_events"
                if not greeted:
                    yield f"{name}={endpoint}: what listens there refuses this reader; {right}, or name the right port"
            finally:
                socket.close(linger=0)


async def _handshake(socket: zmq.asyncio.Socket, endpoint: str, try_s: float) -> bool:
    """Connect; return whether the publisher takes this reader. Raises ZMQError, and TimeoutError if nothing answers."""
    monitor = socket.get_monitor_socket(_EVENTS)
    try:
        socket.connect(endpoint)
        async with asyncio.timeout(try_s):
            return (await recv_monitor_message(monitor))["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
    finally:
        socket.disable_monitor()
        monitor.close(linger=0)
