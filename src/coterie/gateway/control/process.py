"""The process of the control loop: ``python -m coterie.gateway.control.process FILE PARENT FOLDER``.

FILE is its end of a socket pair, PARENT the gateway's process, FOLDER what to remove if that is gone. It follows the
workers' streams, asks the loop once a tick, and talks to the gateway. When the gateway closes its end, or is gone, it
ends at once, whatever it is doing. Its priority is low: requests come first.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import sys
import threading
import time

from coterie.errors import CoterieError
from coterie.gateway.control.driver import Driver
from coterie.gateway.control.messages import (
    HEAD_BYTES,
    Fleet,
    FromLoop,
    SetUp,
    ToLoop,
    Unable,
    check_length,
    for_loop,
    pack,
)
from coterie.gateway.control.streams import ExpertStreams
from coterie.net.access import SECRET_VARIABLE, read_secret

NICE = 10
ADOPTED_S = 2.0
"""Time to wait for the system to say that the parent is gone: its files are closed before that."""


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
        self._gateway.sendall(pack(message))

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
        elif isinstance(message, Fleet):
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


def _end_with(gateway: socket.socket, parent: int, folder: str) -> None:
    """Wait until the gateway hangs up, and end this process; if the gateway is gone, remove what it left behind."""
    watch = select.poll()
    watch.register(gateway, getattr(select, "POLLRDHUP", 0))  # a hang-up is told without being asked for
    watch.poll()
    until = time.monotonic() + ADOPTED_S
    while os.getppid() == parent and time.monotonic() < until:  # one that lives ends this process itself
        time.sleep(0.01)
    if os.getppid() != parent and folder:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def main() -> None:
    file, parent, folder = sys.argv[1:]
    gateway = socket.socket(fileno=int(file))
    os.nice(NICE)
    end = threading.Thread(target=_end_with, args=(gateway, int(parent), folder), name="coterie-end", daemon=True)
    end.start()
    with contextlib.suppress(ConnectionError):
        Process(gateway, read_secret(SECRET_VARIABLE)).run()
    end.join()  # which ends the process


if __name__ == "__main__":
    main()
