"""The process of the control loop: ``python -m coterie.gateway.control.process FILE``.

FILE is the file descriptor of its end of a socket pair. The process reads the workers' streams, runs the loop once per
tick, and exchanges messages with the gateway. It ends when the gateway closes the socket. Its priority is low, so that
it does not delay requests.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time

from coterie.errors import CoterieError, InputError
from coterie.gateway.control.driver import Driver, RequestKeeper, packed
from coterie.gateway.control.matching import SentRequests
from coterie.gateway.control.messages import (
    HEAD_BYTES,
    AskKept,
    Connected,
    FromLoop,
    KeptAnswer,
    MapSeen,
    SentNames,
    Swapped,
    ToLoop,
    Unable,
    check_length,
    pack_message,
    to_loop,
    unpack_message,
)
from coterie.gateway.control.streams import MOST_MESSAGE, ExpertStreams, Received
from coterie.net.access import SECRET_VARIABLE, read_secret
from coterie.types import Placement
from coterie.wire.expert_events import ExpertMap

NICE = 10


class Process:
    """Event loop that connects a :class:`Driver` to its sockets and the clock."""

    def __init__(self, gateway: socket.socket, secret: str | None) -> None:
        self._gateway = gateway
        self._streams = ExpertStreams(secret)
        self._streams.watch(gateway.fileno())
        self._driver: Driver | None = None
        self._keeper: RequestKeeper | None = None
        """Keeps requests while there is no driver."""
        self._sent = SentRequests()
        self._maps: dict[str, tuple[ExpertMap, Placement]] = {}
        """Worker → the newest map that it has reported."""
        self._connected: set[str] | None = None
        """Workers with a connection, as the gateway knows them; None if it does not."""
        self._tick_s, self._generation = 1.0, 0

    def run(self) -> None:
        """Run until the gateway closes the socket, which raises ConnectionResetError."""
        next_s = time.monotonic()
        while True:
            self._streams.wait_for(next_s - time.monotonic())
            self._listen()
            now_s = time.monotonic()
            for received in self._streams.read():
                self._listen()  # SentNames precede the request itself, so they are readable before its event
                self._take(received, now_s)
            if self._streams.connected != self._connected:
                self._connected = self._streams.connected
                self.send(Connected(self._generation, sorted(self._connected)))
            if now_s >= next_s:
                next_s = now_s + self._tick_s
                if self._driver is not None:
                    self._driver.tick(now_s, self._streams)

    def _take(self, received: Received, now_s: float) -> None:
        event = received.event
        try:
            if isinstance(event, ExpertMap):
                self._maps[received.worker] = event, event.placement()
                self._tell_map(received.worker)
            elif self._driver is not None:
                self._driver.take(received.worker, event, now_s)
            elif self._keeper is not None:
                self._keeper.take(received.worker, event, now_s)
        except InputError as error:
            self._streams.refuse(received.worker, error)

    def _tell_map(self, worker: str) -> None:
        event, placement = self._maps[worker]
        self.send(MapSeen(self._generation, worker, event))
        if self._driver is not None:
            self._driver.loop.follow(worker, event.version, placement)

    def send(self, message: FromLoop) -> None:
        self._gateway.sendall(pack_message(message))

    def _listen(self) -> None:
        """Handle all messages of the gateway that have arrived."""
        while select.select([self._gateway], [], [], 0.0)[0]:
            length = check_length(int.from_bytes(self._exactly(HEAD_BYTES), "big"))
            self._obey(unpack_message(to_loop, self._exactly(length)))

    def _obey(self, message: ToLoop) -> None:
        now_s = time.monotonic()
        if isinstance(message, SentNames):
            for name, worker in message.requests:
                self._sent.add(name, worker)
        elif isinstance(message, AskKept):
            keeper = self._keeper if self._driver is None else self._driver.loop
            traffic = None if keeper is None else keeper.traffic
            self.send(KeptAnswer(b"" if traffic is None else packed(traffic, time.time() - now_s)))
        elif isinstance(message, Swapped):
            if self._driver is not None and message.generation == self._driver.generation:
                self._driver.answer(message, now_s)
        elif self._driver is not None and message.generation == self._driver.generation:
            self._streams.follow(message.streams, self._driver.most_bytes)
            self._driver.resize(message)
        else:
            self._tick_s, self._generation = message.section.tick_s, message.generation
            try:
                self._driver = Driver(message, self.send, now_s, self._sent)
                self._driver.tick(time.monotonic(), self._streams)  # with a new time: compiling may have taken a minute
            except CoterieError as error:
                self._driver, self._keeper = None, RequestKeeper(message, self._sent)
                self.send(Unable(message.generation, str(error)))
            workers = {entry.worker for entry in message.streams}
            self._maps = {worker: seen for worker, seen in self._maps.items() if worker in workers}
            for worker in self._maps:  # reported once; the gateway drops what it got with an older generation
                self._tell_map(worker)
            self._connected = None
            # Last: events would pile up meanwhile. Without a loop too, for the maps that workers report.
            self._streams.follow(message.streams, MOST_MESSAGE if self._driver is None else self._driver.most_bytes)

    def _exactly(self, count: int) -> bytes:
        data = self._gateway.recv(count, socket.MSG_WAITALL)
        if len(data) < count:
            raise ConnectionResetError("the gateway has hung up")
        return data


def main() -> None:
    gateway = socket.socket(fileno=int(sys.argv[1]))
    os.nice(NICE)
    with contextlib.suppress(ConnectionError):
        Process(gateway, read_secret(SECRET_VARIABLE)).run()


if __name__ == "__main__":
    main()
