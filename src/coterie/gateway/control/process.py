"""The process of the control loop: ``python -m coterie.gateway.control.process FILE``.

FILE is its end of a socket pair. It follows the workers' streams, asks the loop once a tick, and talks to the gateway.
It ends when the gateway closes its end. Its priority is low: requests come first.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time

from coterie.errors import CoterieError
from coterie.gateway.control.driver import Driver
from coterie.gateway.control.messages import (
    HEAD_BYTES,
    FleetChanged,
    FromLoop,
    SetUp,
    ToLoop,
    Unable,
    check_length,
    for_loop,
    pack_message,
)
from coterie.gateway.control.streams import ExpertStreams
from coterie.net.access import SECRET_VARIABLE, read_secret

NICE = 10


class Process:
    """Sockets and the clock around a :class:`Driver`."""

    def __init__(self, gateway: socket.socket, secret: str | None) -> None:
        self._gateway = gateway
        self._streams = ExpertStreams(secret)
        self._streams.watch(gateway.fileno())
        self._driver: Driver | None = None
        self._tick_s = 1.0

    def run(self) -> None:
        """Until the gateway hangs up."""
        next_s = time.monotonic()
        while True:
            if self._gateway.fileno() in self._streams.wait_for(next_s - time.monotonic()):
                self._obey(self._receive())
            driver, now_s = self._driver, time.monotonic()
            for received in self._streams.read():
                if driver is not None:
                    driver.take(received.worker, received.event, now_s)
            if now_s >= next_s:
                next_s = now_s + self._tick_s
                if driver is not None:
                    driver.tick(now_s, self._streams.counters)

    def send(self, message: FromLoop) -> None:
        self._gateway.sendall(pack_message(message))

    def _obey(self, message: ToLoop) -> None:
        now_s = time.monotonic()
        if isinstance(message, SetUp):
            self._tick_s = message.section.tick_s
            if self._driver is not None:
                self._driver.close()
            try:
                self._driver = Driver(message, self.send, now_s)
                self._driver.tick(time.monotonic(), self._streams.counters)  # it may have compiled for a minute
            except CoterieError as error:
                self._driver = None
                self.send(Unable(message.generation, str(error)))
            self._streams.follow(message.streams)  # not before: what they send meanwhile would be late
        elif self._driver is None or message.generation != self._driver.generation:
            return
        elif isinstance(message, FleetChanged):
            self._streams.follow(message.streams)
            self._driver.resize(message)
        else:
            self._driver.answer(message, now_s)

    def _receive(self) -> ToLoop:
        return for_loop(self._exactly(check_length(int.from_bytes(self._exactly(HEAD_BYTES), "big"))))

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self._gateway.recv(count - len(data))
            if not piece:
                raise ConnectionResetError("the gateway has hung up")
            data += piece
        return data


def main() -> None:
    gateway = socket.socket(fileno=int(sys.argv[1]))
    os.nice(NICE)
    with contextlib.suppress(ConnectionError):
        Process(gateway, read_secret(SECRET_VARIABLE)).run()


if __name__ == "__main__":
    main()
