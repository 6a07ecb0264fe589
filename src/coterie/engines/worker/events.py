"""Event streams on ZMQ that never block the engine.

A subscriber that reads too slowly loses messages and sees a gap in their sequence numbers. Other subscribers lose
nothing: see `coterie.wire.framing`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque

import numpy as np
import zmq
from numpy.typing import NDArray

from coterie.engines.transformers.capture import ExpertCapture
from coterie.engines.worker.config import WorkerConfig
from coterie.engines.worker.requests import WorkerRequest
from coterie.errors import UnavailableError
from coterie.footprints import accumulate_load
from coterie.wire.event_security import secure_publisher
from coterie.wire.expert_events import TOPIC as EXPERT_TOPIC
from coterie.wire.expert_events import ExpertEvents, ExpertLoad, RequestExperts, encode_expert_events
from coterie.wire.framing import REPLAY_END, limit_queues, send_to_all, to_frames
from coterie.wire.kv_events import KVEvent, KVEvents, encode_kv_events

KV_TOPIC = b"kv"
MAX_ASKED = 4096
"""Maximum bytes of a subscriber's message: subscribers send only topics and sequence numbers."""
LINGER_MS = 500
"""Milliseconds to keep sending queued messages on close."""


class EventStream:
    """A publisher socket. Used by one thread at a time: created and bound in one thread, then passed to the engine's.

    With the fleet's `secret`, only its holders can subscribe. With the endpoint `replay`, subscribers can request the
    last `keep` messages again there.
    """

    def __init__(
        self,
        endpoint: str,
        topic: bytes,
        queue: int,
        secret: str | None = None,
        replay: str | None = None,
        keep: int = 10_000,
    ) -> None:
        self.topic = topic
        self.published = 0
        self.dropped = 0
        """Times a subscriber's queue was found full."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        limit_queues(self._socket, queue)
        self._replay: Replay | None = None
        try:
            self.endpoint = _bind(self._socket, endpoint, secret)
            if replay is not None:
                self._replay = Replay(self._context, replay, secret, keep)
        except BaseException:
            self.close()
            raise

    def publish(self, payload: bytes) -> None:
        frames = to_frames(self.topic, self.published, payload)
        self.published += 1
        if self._replay is not None:  # before sending: a subscriber may request this message at once
            self._replay.keep(frames)
        self.dropped += not send_to_all(self._socket, frames)

    def close(self) -> None:
        self._socket.close()
        self._context.term()  # also ends the replay thread


class Replay:
    """Resend past messages on request, as vLLM does, in a thread that ends with the context.

    A request is eight bytes, the first sequence number wanted, from a REQ or DEALER socket. The answer is every kept
    message from that number on, then an end message with number -1.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, secret: str | None, keep: int) -> None:
        self._kept: deque[list[bytes]] = deque(maxlen=keep)
        self._lock = threading.Lock()
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        # Twice a whole answer: libzmq learns in batches of half this limit how much was read, up to keep + 1 messages
        # late. A subscriber that requests again without reading loses the excess.
        socket.setsockopt(zmq.SNDHWM, 2 * (keep + 1))
        try:
            self.endpoint = _bind(socket, endpoint, secret)
        except BaseException:
            socket.close()
            raise
        threading.Thread(target=self._answer, args=(socket,), name="coterie-replay", daemon=True).start()

    def keep(self, frames: list[bytes]) -> None:
        with self._lock:
            self._kept.append(frames)

    def _answer(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                asked = socket.recv_multipart()
                if len(asked) == 3 and asked[1] == b"" and len(asked[2]) == 8:
                    socket.getsockopt(zmq.EVENTS)  # makes libzmq process pending commands: see coterie.wire.framing
                    for frames in self._since(int.from_bytes(asked[2], "big")):
                        socket.send_multipart([asked[0], b"", *frames])
            except zmq.ContextTerminated:
                socket.close()
                return
            except zmq.ZMQError:  # the requester has disconnected
                continue

    def _since(self, first: int) -> list[list[bytes]]:
        with self._lock:
            wanted = [frames for frames in self._kept if int.from_bytes(frames[1], "big") >= first]
        return [*wanted, to_frames(b"", REPLAY_END, b"")]


def _bind(socket: zmq.Socket[bytes], endpoint: str, secret: str | None) -> str:
    """Bind the socket and return its endpoint, with the actual port if a wildcard port was given."""
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_ASKED)
    if secret is not None:
        secure_publisher(socket, secret)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise UnavailableError(f"{endpoint}: cannot publish there: {error.strerror or error}") from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def open_streams(config: WorkerConfig, stack: contextlib.ExitStack) -> tuple[EventStream | None, EventStream | None]:
    """Bind the streams of KV and expert events, None if not configured; the stack closes them."""
    kv = experts = None
    queue, secret = config.event_queue, config.fleet_secret
    if config.kv_events is not None:
        kv = EventStream(config.kv_events, KV_TOPIC, queue, secret, config.kv_replay, config.replay_queue)
        stack.callback(kv.close)
    if config.expert_events is not None:
        experts = EventStream(config.expert_events, EXPERT_TOPIC, queue, secret)
        stack.callback(experts.close)
    return kv, experts


# Events of the engine: changes of KV blocks, the experts of finished requests, and the load at intervals.


class Reports:
    """Builds and publishes the engine's events; a stream that is None costs nothing."""

    def __init__(
        self,
        model: str,
        capture: ExpertCapture,
        interval_s: float,
        kv_stream: EventStream | None,
        expert_stream: EventStream | None,
    ) -> None:
        self.kv_stream, self.expert_stream = kv_stream, expert_stream
        self._model, self._capture, self._interval_s = model, capture, interval_s
        self._load = np.zeros((len(capture.layer_ids), capture.num_experts), np.uint32)  # [layer, expert] tokens
        self._since, self._steps, self._tokens = time.monotonic(), 0, 0

    @property
    def due(self) -> float | None:
        """Monotonic time of the next load report; None if no step ran since the last."""
        return self._since + self._interval_s if self._steps else None

    def blocks(self, events: list[KVEvent]) -> None:
        if events and self.kv_stream is not None:
            self.kv_stream.publish(encode_kv_events(KVEvents(time.time(), events, 0)))

    def step(self, expert_ids: NDArray[np.unsignedinteger]) -> None:
        """Add a step's expert ids [row, layer, k] to the load."""
        if self.expert_stream is not None:
            accumulate_load(expert_ids, self._load)
            self._steps += 1
            self._tokens += len(expert_ids)

    def request(self, request: WorkerRequest, expert_ids: NDArray[np.unsignedinteger], finish: str) -> None:
        """Publish the expert ids [token, layer, k] of a finished request, for all its computed tokens."""
        if self.expert_stream is None:
            return
        event = RequestExperts.pack(
            expert_ids,
            np.asarray(request.tokens(0, len(expert_ids))),
            np.ones(len(expert_ids), np.bool_),
            self._capture.num_experts,
            request_id=request.name,
            model=self._model,
            layer_ids=list(self._capture.layer_ids),
            prompt_tokens=len(request.prompt),
            cached_tokens=request.cached_tokens,
            output_tokens=len(request.output),
            finish=finish,
        )
        self.expert_stream.publish(encode_expert_events(ExpertEvents(time.time(), [event])))

    def load(self, now: bool = False) -> None:
        """Publish the load if it is due or `now` is set."""
        if self.expert_stream is None or self.due is None or not (now or self.due <= time.monotonic()):
            return
        until = time.monotonic()
        event = ExpertLoad(
            model=self._model,
            layer_ids=list(self._capture.layer_ids),
            num_experts=self._capture.num_experts,
            seconds=until - self._since,
            steps=self._steps,
            tokens=self._tokens,
            counts=self._load.astype("<u4").tobytes(),
        )
        self.expert_stream.publish(encode_expert_events(ExpertEvents(time.time(), [event])))
        self._load[:] = 0
        self._since, self._steps, self._tokens = until, 0, 0
