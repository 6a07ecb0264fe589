"""A bounded HTTP/1.1 server: limits on what a client may send, hold open and leave unread.

The handler of each request is a task, which is cancelled when its client disconnects. Requests have no timers: each
connection stores its deadlines, and one periodic sweep per server checks all connections.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter

from coterie.net.http1.connection import LINGER_S, CheckHead, Connection, Host
from coterie.net.http1.messages import ServerCounters
from coterie.net.http1.responder import Handler, Responder

FLUSH_S = 0.01
"""Seconds between two checks of whether clients have read what was written."""

RESERVE = 8
"""Divisor of the connection limit that gives the reserve: extra connections for clients with few, when one has most."""

__all__ = ["CheckHead", "Handler", "HttpServer", "Responder", "ServerCounters"]


def most_connections(connections: int) -> int:
    """Return the most connections at a time, the reserve included."""
    return connections + max(1, connections // RESERVE)


@dataclass(eq=False)
class HttpServer(Host):
    """Accepts connections from a listening socket and hands each request to a handler."""

    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """Handlers that still run after their answer ended or their client left."""
    peers: Counter[str] = field(default_factory=Counter)
    """IP address → number of connections from it."""
    _server: asyncio.Server | None = None
    _sweeper: asyncio.TimerHandle | None = None
    _drain: asyncio.Timeout | None = None
    _begun: set[Connection] = field(default_factory=set)
    """Connections whose requests had begun when the drain did."""
    _emptied: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when none of them is left."""

    async def start(self, listener: socket.socket) -> None:
        """Start accepting connections. The server takes over the socket and closes it."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(self, loop), sock=listener, backlog=1024)
        shortest = min(self.limits.head_s, self.limits.body_s, self.limits.idle_s, self.limits.write_s, LINGER_S)
        self._schedule(loop, max(0.01, shortest / 4))

    def _schedule(self, loop: asyncio.AbstractEventLoop, period_s: float) -> None:
        self._sweeper = loop.call_later(period_s, self._schedule, loop, period_s)
        self.sweep()

    def sweep(self) -> None:
        """Time out the connections that have passed a deadline."""
        now = self.clock()
        for connection in (*self.connections, *self.lingering):
            if now >= connection.deadline or now >= connection.write_deadline:
                connection.time_out(now)

    async def close(self, drain_s: float) -> int:
        """Wait at most `drain_s` for the present requests and handlers to end; return how many requests were cut.

        Until then connections are accepted: their requests are the handler's to refuse, which a client understands
        better than a closed port. Each gets one answer.
        """
        self.draining = True
        self._begun = {connection for connection in self.connections if not connection.is_idle}
        for connection in list(self.connections):
            if connection.phase == "idle":  # not one that was just opened: its first request is on the way
                connection.close_if_idle()
        if drain_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(drain_s) as self._drain:
                    await self._ended()
        if self._server is not None:
            self._server.close()
            self._server = None
        cut = [connection for connection in self.connections if connection.current is not None]
        for connection in (*self.connections, *self.lingering):
            if connection not in cut:
                connection.transport.abort()
        count = len(self._begun.intersection(cut))
        running = {*self.tasks, *(connection.task for connection in self.connections if connection.task is not None)}
        for task in running:  # the handler's cancellation sends the client the reason
            task.cancel()
        # The sleep lets tasks that have just ended leave `tasks`: gathering ended ones does not wait since Python 3.12.
        await asyncio.gather(*running, asyncio.sleep(0), return_exceptions=True)
        await self._cut(cut)
        if self._sweeper is not None:
            self._sweeper.cancel()
        return count

    async def _cut(self, cut: list[Connection]) -> None:
        """Close connections when their clients have received what was written, or after `LINGER_S`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while any(waiting.transport.get_write_buffer_size() for waiting in self.connections.intersection(cut)):
                    await asyncio.sleep(FLUSH_S)
        while self.connections or self.lingering:
            for connection in (*self.connections, *self.lingering):
                connection.transport.abort()
            await asyncio.sleep(0)  # transports close their sockets in one of the loop's next iterations

    def end_drain(self) -> None:
        """End the wait of :meth:`close` now, so that it cuts the remaining requests."""
        if self._drain is not None and not self._drain.expired():
            with suppress(RuntimeError):  # the drain has ended
                self._drain.reschedule(-1.0)

    async def _ended(self) -> None:
        """Wait until the connections whose requests had begun are closed, and all handlers have returned."""
        if self._begun:
            self._emptied.clear()
            await self._emptied.wait()
        if self.tasks:
            await asyncio.wait(self.tasks)

    def admit(self, connection: Connection) -> str | None:
        limits = self.limits
        if limits.connections_per_peer and self.peers[connection.peer] >= limits.connections_per_peer:
            return "too many connections from this address"
        if len(self.connections) >= limits.connections and not self._make_room(connection.peer):
            return "too many connections"
        self.connections.add(connection)
        self.peers[connection.peer] += 1
        self.counters.accepted += 1
        return None

    def _make_room(self, peer: str) -> bool:
        """Whether to admit a connection over the limit: only if some client holds at least twice as many as this one.

        That client's longest-idle connection is closed. If none is idle, the new connection is taken from the reserve.
        """
        greediest, most = self.peers.most_common(1)[0]
        if 2 * (self.peers[peer] + 1) > most:
            return False
        idle = [connection for connection in self.connections if connection.peer == greediest and connection.is_idle]
        if idle:
            min(idle, key=attrgetter("deadline")).close_if_idle()
            return True
        return len(self.connections) < most_connections(self.limits.connections)

    def forget(self, connection: Connection) -> None:
        self.lingering.discard(connection)
        if connection not in self.connections:
            return
        self.connections.remove(connection)
        self.peers[connection.peer] -= 1
        if not self.peers[connection.peer]:
            del self.peers[connection.peer]
        self._begun.discard(connection)
        if not self._begun:
            self._emptied.set()

    def outlive(self, task: asyncio.Task[None]) -> None:
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
