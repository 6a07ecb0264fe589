"""An engine's KV event stream on real sockets: a publisher that may lose messages, and its replay endpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable

import zmq

from coterie.wire.framing import REPLAY_END, to_frames
from coterie.wire.kv_events import KVEvent, KVEvents, encode_kv_events


def payload(*events: KVEvent) -> bytes:
    return encode_kv_events(KVEvents(0.0, list(events), 0))


class Publisher:
    """XPUB instead of PUB, so that a test can wait for the subscription."""

    def __init__(
        self,
        endpoint: str = "tcp://127.0.0.1:*",
        replays: bool = True,
        secure: Callable[[zmq.Socket[bytes]], None] | None = None,
    ) -> None:
        self.log: list[bytes] = []
        self.asked: list[int] = []
        """First numbers of the replays that were answered."""
        self.sent = 0
        self.forged: int | None = None
        """Number of a last message of each replay that the engine never published."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._replay = self._context.socket(zmq.ROUTER)
        for one in (self._socket, self._replay):
            one.setsockopt(zmq.LINGER, 0)
            if secure is not None:
                secure(one)
        self._socket.bind(endpoint)
        self._replay.bind("tcp://127.0.0.1:*")
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay: str | None = self._replay.getsockopt_string(zmq.LAST_ENDPOINT) if replays else None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def wait_for_subscriber(self) -> None:
        """Blocks: call it in a thread."""
        assert self._socket.poll(60_000), "no subscriber within 60 s"
        self._socket.recv()

    def publish(self, message: bytes, lost: bool = False) -> None:
        self.log.append(message)
        if not lost:
            self.send(to_frames(b"kv", len(self.log) - 1, message))

    def send(self, frames: list[bytes]) -> None:
        self._socket.send_multipart(frames)
        self.sent += 1

    def begin_anew(self) -> None:
        """A restart that the connection does not show."""
        self.log = []

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._socket.close()
        self._replay.close()
        self._context.term()

    def _serve(self) -> None:
        while not self._closed.is_set():
            if not self._replay.poll(10):
                continue
            name, _, start = self._replay.recv_multipart()
            first = int.from_bytes(start, "big")
            for seq, message in list(enumerate(self.log))[first:]:
                self._replay.send_multipart([name, b"", *to_frames(b"kv", seq, message)])
            if self.forged is not None:
                self._replay.send_multipart([name, b"", *to_frames(b"kv", self.forged, payload())])
            self.asked.append(first)  # before the end is sent: who has read the end may look
            self._replay.send_multipart([name, b"", b"", REPLAY_END.to_bytes(8, "big"), b""])
