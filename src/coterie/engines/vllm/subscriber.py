"""Listens to a server's expert events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from urllib.parse import urlsplit

import zmq

from coterie.errors import InputError, UnavailableError
from coterie.wire.expert_events import DEFAULT_PORT, TOPIC, ExpertLoad, RequestExperts, decode_expert_events
from coterie.wire.framing import Gaps, from_frames


def events_endpoint(url: str, events: str | None) -> str:
    """Endpoint of a server's events: as given, or the default port of its host."""
    if events is not None:
        return events.replace("*", urlsplit(url).hostname or "localhost")
    return f"tcp://{urlsplit(url).hostname or 'localhost'}:{DEFAULT_PORT}"


class Subscriber:
    """A connection to one endpoint; iterate with :meth:`events`."""

    def __init__(self, endpoint: str, capacity: int = 100_000) -> None:
        self.endpoint = endpoint
        self.gaps = Gaps()
        self.damaged = 0
        """Messages that could not be read."""
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, capacity)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            raise InputError(f"{endpoint} is not a ZMQ endpoint: {error}") from None
        self._socket.setsockopt(zmq.SUBSCRIBE, TOPIC)

    def wait(self, timeout_s: float) -> None:
        """Wait until the server greets; raises UnavailableError if it does not."""
        if not self._socket.poll(int(timeout_s * 1000)):
            raise UnavailableError(
                f"no expert events from {self.endpoint} within {timeout_s:g} s: is the server started with "
                f"CoterieConnector and the setting 'events'?"
            )

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
        self._socket.close()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()
