"""Listens to a server's expert events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import recv_monitor_message

from coterie.errors import InputError, UnavailableError
from coterie.net.access import SECRET_VARIABLE
from coterie.net.http_client import Client, completion_path
from coterie.wire.event_security import secure_subscriber
from coterie.wire.expert_events import DEFAULT_PORT, TOPIC, ExpertLoad, RequestExperts, decode_expert_events
from coterie.wire.framing import Gaps, from_frames


def events_endpoint(url: str, events: str | None) -> str:
    """Endpoint of a server's events: as given, or the default port of its host."""
    if events is not None:
        return events.replace("*", urlsplit(url).hostname or "localhost")
    return f"tcp://{urlsplit(url).hostname or 'localhost'}:{DEFAULT_PORT}"


GREETING_S = 1.0
"""Seconds within which a connected server greets, if it does."""
EVENT_S = 0.5
"""Seconds to wait for the event of an answered request before the next is sent."""


class Subscriber:
    """A connection to one endpoint; iterate with :meth:`events`."""

    def __init__(self, endpoint: str, capacity: int = 100_000, secret: str | None = None) -> None:
        """`secret` is that of the fleet, where its streams are protected."""
        self.endpoint = endpoint
        self.gaps = Gaps()
        self.damaged = 0
        """Messages that could not be read."""
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, capacity)
        self._socket.setsockopt(zmq.LINGER, 0)
        if secret is not None:
            secure_subscriber(self._socket, secret)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise InputError(f"{endpoint} is not a ZMQ endpoint: {error}") from None
        self._socket.setsockopt(zmq.SUBSCRIBE, TOPIC)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the server greets (vLLM's plugin), or is connected and does not greet (the reference worker).

        Whether it greeted: if not, events of the next moments may be missed; see :func:`hear`. Raises UnavailableError
        if there is no connection in time.
        """
        poller = zmq.Poller()
        for one in (self._socket, self._monitor):
            poller.register(one, zmq.POLLIN)
        if not poller.poll(int(timeout_s * 1000)):
            raise UnavailableError(
                f"no expert events from {self.endpoint} within {timeout_s:g} s: is the server started with "
                f"CoterieConnector and the setting 'events' (vLLM) or --expert-events (coterie worker), and is "
                f"{SECRET_VARIABLE} the same there and here?"
            )
        if self._monitor.poll(0):
            recv_monitor_message(self._monitor)
        return bool(self._socket.poll(int(min(timeout_s, GREETING_S) * 1000)))

    def events(self, seconds: float) -> Iterator[RequestExperts | ExpertLoad]:
        """What arrives within that time; ends early only when the caller stops."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if not self._socket.poll(max(1, int(left * 1000))):
                return
            try:
                frame = from_frames(self._socket.recv_multipart())
                self.gaps.see(frame.seq)
                batch = decode_expert_events(frame.payload)
            except InputError:
                self.damaged += 1
                continue
            yield from batch.events

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()


async def hear(client: Client, subscriber: Subscriber, body: Mapping[str, Any], timeout_s: float) -> None:
    """Send a request until its event arrives: a PUB socket does not tell when a subscription has reached it."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        answer = await client.post(completion_path(chat=False), body, "hear")
        if answer.problem is not None:
            raise UnavailableError(f"{client.url}: {answer.problem}")
        if await asyncio.to_thread(lambda: any(isinstance(e, RequestExperts) for e in subscriber.events(EVENT_S))):
            return
    raise UnavailableError(f"no expert events from {subscriber.endpoint} within {timeout_s:g} s")
