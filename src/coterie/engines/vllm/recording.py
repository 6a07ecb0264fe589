"""Record a trace from a running server that publishes expert events, without interrupting it.

The server is vLLM with CoterieConnector, or the reference worker.

With prompts, these are sent and recorded, and other requests of the server are ignored. Without prompts, every request
that the server finishes is recorded, for a given time or until interrupted. Requests are written as they finish.

A token whose experts the server never saw (its KV came from another worker, or from before capture was turned on) has
no row; the column ``missing_tokens`` counts these. Lost messages are counted, never reconstructed.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from coterie.engines.recording import FLUSH_S, Sending, check_listening
from coterie.errors import CoterieError, InputError, UnavailableError, check
from coterie.net.access import SECRET_VARIABLE, read_secret
from coterie.net.http_client import Client, Tally, completion_body, completion_path, served_model, server_url
from coterie.prompts import Prompt
from coterie.traces import Activations, ActivationTrace, ActivationWriter, RequestTrace, TraceMeta, check_new_folder
from coterie.types import DECODE, PREFILL, Report
from coterie.wire.event_security import secure_subscriber
from coterie.wire.expert_events import DEFAULT_PORT, TOPIC, Event, RequestExperts, decode_expert_events
from coterie.wire.framing import Gaps, from_frames


def events_endpoint(url: str, events: str | None) -> str:
    """Return the endpoint of a server's events: as given, or the default port of the server's host."""
    return (events or f"tcp://*:{DEFAULT_PORT}").replace("*", urlsplit(url).hostname or "localhost")


GREETING_S = 1.0
"""Seconds to wait for a connected server's greeting."""
EVENT_S = 0.5
"""Seconds to wait for a probe request's event before the next probe is sent."""


class Subscriber(AbstractContextManager["Subscriber"]):
    """A subscription to one endpoint; iterate over its events with :meth:`events`."""

    def __init__(self, endpoint: str, capacity: int = 100_000, secret: str | None = None) -> None:
        """Connect to the endpoint; `secret` is the fleet's, if its streams are protected."""
        self.endpoint = endpoint
        self.gaps = Gaps()
        self.damaged = 0
        """Number of messages that could not be decoded."""
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
        """Wait until the server greets (vLLM's plugin), or is connected but does not greet (the reference worker).

        Return whether the server greeted. If it did not, the next events may be missed; see :func:`hear`. Raises
        UnavailableError if there is no connection within `timeout_s`.
        """
        poller = zmq.Poller()
        for socket in (self._socket, self._monitor):
            poller.register(socket, zmq.POLLIN)
        check(
            poller.poll(int(timeout_s * 1000)),
            f"no expert events from {self.endpoint} within {timeout_s:g} s: is the server started with "
            f"CoterieConnector and the setting 'events' (vLLM) or --expert-events (coterie worker), and is "
            f"{SECRET_VARIABLE} the same there and here?",
            UnavailableError,
        )
        if self._monitor.poll(0):
            recv_monitor_message(self._monitor)
        return bool(self._socket.poll(int(min(timeout_s, GREETING_S) * 1000)))

    def events(self, seconds: float) -> Iterator[Event]:
        """Yield the events that arrive within `seconds`."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if not self._socket.poll(max(1, int(left * 1000))):
                return
            try:
                frame = from_frames(self._socket.recv_multipart())
                self.gaps.see(frame.seq)
                events = decode_expert_events(frame.payload).events
            except InputError:
                self.damaged += 1
                continue
            yield from events

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    def __exit__(self, *_: object) -> None:
        self.close()


async def hear(client: Client, subscriber: Subscriber, body: Mapping[str, Any], timeout_s: float) -> None:
    """Send probe requests until an event arrives: a PUB socket does not report when a subscription is active."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        answer = await client.post(completion_path(chat=False), body, "hear")
        check(answer.problem is None, f"{client.url}: {answer.problem}", UnavailableError)
        if await asyncio.to_thread(lambda: any(isinstance(e, RequestExperts) for e in subscriber.events(EVENT_S))):
            return
    raise UnavailableError(f"no expert events from {subscriber.endpoint} within {timeout_s:g} s")


CONNECTED_S = 10.0
HEARD_S = 60.0
START = (
    "start vLLM with CoterieConnector and its setting events, or coterie worker --expert-events tcp://127.0.0.1:5602"
)
LAST_EVENT_S = 5.0
"""Seconds to wait for the events of the last answered requests."""


class VllmRecording(NamedTuple):
    """A finished recording."""

    trace: ActivationTrace
    tally: Tally
    """Outcomes of the requests that were sent."""
    lost: int
    """Number of messages from the server that never arrived."""
    unknown: int
    """Number of requests left out because no token's experts were known."""


def record_vllm(
    url: str,
    out: str | Path,
    sending: Sending = Sending(),  # noqa: B008
    *,
    events: str | None = None,
) -> VllmRecording:
    """Write the trace `out` (a new folder). `events` is the ZMQ endpoint; None takes the default port of url's host.

    If the server protects its events, the environment must have the fleet's secret, as on the server.
    """
    folder, prompts, report = check_new_folder(out), sending.prompts, sending.report
    endpoint = events_endpoint(server_url(url), events)
    check_listening(server_url(url), START)
    check_listening(endpoint, f"{START}, or name the endpoint of its expert events with --events")
    with Subscriber(endpoint, secret=read_secret(SECRET_VARIABLE)) as subscriber:
        report("Waiting for the server's events", 0, 1)
        if not subscriber.wait(CONNECTED_S) and prompts:
            asyncio.run(_hear(url, subscriber))
        wanted = {_marker(number): prompt for number, prompt in enumerate(prompts)} if prompts else None
        sink, tally = EventSink(folder, wanted), Tally()
        listener = _Listener(subscriber, sink)
        listener.start()
        try:
            if prompts:
                asyncio.run(_send(url, sending, sink, tally))
                listener.wait_for(tally.done)
            else:
                _listen(listener, sending.duration_s, report)
        finally:
            listener.stop()
            sink.close()
    if sink.problem is not None:
        raise sink.problem
    check(
        sink.writer is not None, f"{url}: nothing was recorded: {_why_nothing(prompts, tally, sink)}", UnavailableError
    )
    missed = max(0, tally.done - sink.written - sink.unknown) if prompts else 0
    if missed:
        tally.problems["answered, but its expert event never came"] += missed
        tally.done -= missed
    return VllmRecording(ActivationTrace.open(folder), tally, subscriber.gaps.lost, sink.unknown)


def _why_nothing(prompts: Sequence[Prompt], tally: Tally, sink: EventSink) -> str:
    if sink.unknown:
        return f"of {sink.unknown} requests no token's experts were known to the server"
    if not prompts:
        return "no request finished meanwhile"
    return tally.summary if tally.problems else "requests were answered, but no expert event came"


_RUN = uuid.uuid4().hex[:8]


def _marker(number: int) -> str:
    """Return a request name by which its event is found: vLLM adds a prefix and a suffix to the given id."""
    return f"coterie{_RUN}x{number}x"


async def _hear(url: str, subscriber: Subscriber) -> None:
    """Wait until events arrive, before any prompt is sent."""
    async with Client(url) as client:
        probe = completion_body(Prompt("hear", "", "", "a b"), await served_model(client), 2, chat=False)
        await hear(client, subscriber, probe, HEARD_S)


async def _send(url: str, sending: Sending, sink: EventSink, tally: Tally) -> None:
    async with Client(url) as client:
        model = await served_model(client)
        bodies = (
            completion_body(prompt, model, sending.max_tokens, sending.chat, request_id=_marker(number))
            for number, prompt in enumerate(sending.prompts)
        )
        async with aclosing(sending.send(client, completion_path(sending.chat), bodies)) as answers:
            async for answer in answers:
                tally.note(answer)
                if sink.problem is not None:
                    return


def _listen(listener: _Listener, duration_s: float | None, report: Report) -> None:
    begun = time.monotonic()
    while listener.sink.problem is None and (passed := time.monotonic() - begun) < (duration_s or math.inf):
        report(f"Listening, {listener.sink.written} requests, seconds", int(passed), int(duration_s or 0))
        time.sleep(0.2)


class _Listener(threading.Thread):
    """Thread that reads events while requests are sent, so that none is dropped."""

    def __init__(self, subscriber: Subscriber, sink: EventSink) -> None:
        super().__init__(name="coterie-recorder", daemon=True)
        self.subscriber, self.sink = subscriber, sink
        self._stopping = threading.Event()

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                for event in self.subscriber.events(0.2):
                    if isinstance(event, RequestExperts):
                        self.sink.take(event)
                self.sink.flush_now_and_then()
        except Exception as error:  # for example a full disk: the main thread raises it
            self.sink.problem = self.sink.problem or error

    def wait_for(self, requests: int) -> None:
        until = time.monotonic() + LAST_EVENT_S
        while self.sink.written + self.sink.unknown < requests and time.monotonic() < until:
            time.sleep(0.02)

    def stop(self) -> None:
        self._stopping.set()
        self.join()


class EventSink:
    """Writes events to the trace. The trace is created with the first event: a failed run leaves no folder behind."""

    def __init__(self, out: Path, wanted: dict[str, Prompt] | None, engine: str = "vllm") -> None:
        """Set the output; `wanted` are the prompts to record, by request name; None records all requests."""
        self.out, self.engine = out, engine
        self.writer: ActivationWriter | None = None
        self.written = self.unknown = 0
        self.problem: Exception | None = None
        self._wanted = wanted
        self._with_domains = wanted is not None and any(prompt.domain for prompt in wanted.values())
        self._begun = self._flushed = time.monotonic()

    def take(self, event: RequestExperts) -> None:
        prompt = None
        if self._wanted is not None:  # the part of the id between vLLM's prefix and suffix is a name of :func:`_marker`
            prompt = next(filter(None, (self._wanted.pop(m, None) for m in event.request_id.split("-"))), None)
            if prompt is None:
                return
        try:
            self._write(event, prompt)
        except CoterieError as error:
            self.problem = self.problem or error

    def _write(self, event: RequestExperts, prompt: Prompt | None) -> None:
        known = event.seen()
        if not known.any():
            self.unknown += 1
            return
        if self.writer is None:
            meta = TraceMeta(
                model=event.model,
                num_experts=event.num_experts,
                num_layers=len(event.layer_ids),
                top_k=event.top_k,
                layer_ids=tuple(event.layer_ids),
                source={"engine": self.engine, "prompts": self._wanted is not None},
            )
            self.writer = ActivationWriter(self.out, meta)
        meta = self.writer.meta
        check(
            (event.num_experts, event.top_k, len(event.layer_ids)) == (meta.num_experts, meta.top_k, meta.num_layers),
            f"{event.model} has another shape than {meta.model}: record one at a time",
            InputError,
        )
        phase = np.where(np.arange(len(known)) < event.prompt_tokens, PREFILL, DECODE).astype(np.uint8)
        row = RequestTrace(
            prompt_tokens=np.array([event.prompt_tokens]),
            output_tokens=np.array([event.output_tokens]),
            arrival_s=np.array([time.monotonic() - self._begun]),
            ids=[prompt.id if prompt is not None else event.request_id],
            domains=[prompt.domain or "unknown"] if prompt is not None and self._with_domains else None,
            extra={
                "missing_tokens": [int((~known).sum())],
                "cached_tokens": [event.cached_tokens],
                "finish": [event.finish],
            },
        )
        self.writer.append_many(
            Activations(event.ids()[known], phase[known], event.tokens()[known]), np.array([0, int(known.sum())]), row
        )
        self.written += 1

    def flush_now_and_then(self) -> None:
        if self.writer is not None and time.monotonic() - self._flushed > FLUSH_S:
            self.writer.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
