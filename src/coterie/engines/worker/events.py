"""An event stream on ZMQ that never makes the engine wait.

A PUB socket drops silently for a subscriber whose queue is full. Here it is first asked to refuse instead, so that this
is noticed, and then to send to all the others: one stuck reader costs nobody else a message. Until that reader has made
room ZMQ leaves it out without a word, so what is counted are the times a queue was found full; how many messages its
reader then missed, the reader sees in their numbers.
"""

from __future__ import annotations

import zmq

from coterie.errors import UnavailableError
from coterie.wire.framing import to_frames

LINGER_MS = 500
"""Milliseconds to send queued messages at the end."""


class EventStream:
    """Owned by one thread at a time: made and bound in one, then handed to the engine's."""

    def __init__(self, endpoint: str, topic: bytes, queue: int) -> None:
        self.topic = topic
        self.published = 0
        self.dropped = 0
        """Times a subscriber's queue was found full."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, queue)
        self._socket.setsockopt(zmq.XPUB_NODROP, 1)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise UnavailableError(f"{endpoint}: cannot publish there: {error.strerror or error}") from None
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def publish(self, payload: bytes) -> None:
        frames = to_frames(self.topic, self.published, payload)
        self.published += 1
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self.dropped += 1
            self._socket.setsockopt(zmq.XPUB_NODROP, 0)
            self._socket.send_multipart(frames, zmq.NOBLOCK)
            self._socket.setsockopt(zmq.XPUB_NODROP, 1)

    def close(self) -> None:
        self._socket.close()
        self._context.term()
