"""Publish expert events on ZMQ from a separate thread, so that serving never waits for a subscriber.

A message is dropped and counted if the thread's queue is full. The XPUB socket reports subscriptions, so that events
are built only if there is a subscriber. `coterie.wire.framing` explains how full subscribers are detected.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import zmq

from coterie.errors import UnavailableError
from coterie.wire.event_security import secure_publisher
from coterie.wire.expert_events import TOPIC, Event, ExpertEvents, encode_expert_events
from coterie.wire.framing import limit_queues, send_to_all, to_frames

Build = Callable[[], Event]
POLL_MS = 100


class PublisherCounts(NamedTuple):
    published: int
    dropped: int
    """Messages dropped because the thread's queue was full, plus times a subscriber's queue was full."""
    failed: int
    """Events that could not be built."""


class EventPublisher:
    """Publisher of one data-parallel rank; `publish` may be called from any thread."""

    def __init__(self, endpoint: str, rank: int, capacity: int, secret: str | None = None) -> None:
        """Bind the endpoint and start the thread. With the fleet's `secret`, only its holders can subscribe."""
        self.endpoint, self._rank = endpoint, rank
        self._queue: queue.Queue[tuple[int, Build | Event | None]] = queue.Queue(capacity)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
        limit_queues(self._socket, capacity)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.XPUB_VERBOSER, 1)  # report every subscription, not only the first
        if secret is not None:
            secure_publisher(self._socket, secret)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            raise UnavailableError(f"expert events cannot be published on {endpoint}: {error}") from None
        self._seq = 0
        self._numbering = threading.Lock()
        self._published = self._dropped = self._failed = 0
        self.last_error: str | None = None
        """Error of the last event that could not be built."""
        self.greeting: Event | None = None
        """Event that every new subscriber gets first; None for an empty message."""
        self._subscribers = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="coterie-events", daemon=True)
        self._thread.start()

    @property
    def wanted(self) -> bool:
        """Whether there is a subscriber."""
        return self._subscribers > 0

    @property
    def counts(self) -> PublisherCounts:
        return PublisherCounts(self._published, self._dropped, self._failed)

    def publish(self, event: Event | Build | None) -> bool:
        """Queue an event, a function that builds it in the thread, or None, an empty message.

        Return False if it was dropped.
        """
        with self._numbering:
            number = self._seq
            self._seq += 1  # counted before queueing, so that a subscriber sees a gap if the message is dropped
            try:
                self._queue.put_nowait((number, event))
            except queue.Full:
                self._dropped += 1
                return False
        return True

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        while not (self._closing.is_set() and self._queue.empty()):
            if poller.poll(0):
                self._note_subscription(self._socket.recv())
                continue
            try:
                seq, item = self._queue.get(timeout=POLL_MS / 1000)
                event = item() if callable(item) else item
                events = [] if event is None else [event]
                payload = encode_expert_events(ExpertEvents(time.time(), events, self._rank))
            except queue.Empty:
                continue
            except Exception as error:  # a failed event must not end the stream
                self._failed += 1
                self.last_error = repr(error)
                continue
            self._published += 1
            self._dropped += not send_to_all(self._socket, to_frames(TOPIC, seq, payload))
        self._socket.close()

    def _note_subscription(self, message: bytes) -> None:
        if message[:1] == b"\x01":
            self._subscribers += 1
            self.publish(self.greeting)
        elif message[:1] == b"\x00":
            self._subscribers = max(0, self._subscribers - 1)

    def close(self) -> None:
        """Stop the thread; queued messages are sent for at most 2 seconds."""
        self._closing.set()
        self._thread.join(timeout=2)
