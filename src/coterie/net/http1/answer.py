"""An answer of a server as it comes in, piece by piece, and why one did not come."""

from __future__ import annotations

import asyncio
from typing import Literal, Protocol, Self

from coterie.errors import CoterieError
from coterie.net.http1.messages import Headers

FULL_BYTES = 262_144
"""Bytes of an answer that wait for their consumer before reading pauses."""
Kind = Literal["connect", "reset", "timeout", "protocol", "too_large", "incomplete", "unhealthy"]


class UpstreamError(CoterieError):
    """No answer, or no whole one."""

    def __init__(self, kind: Kind, message: str, answered: bool = False) -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.answered = answered
        """Whether the head of an answer had come."""


class AnswerConnection(Protocol):
    """What an answer needs of its connection."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...
    @property
    def body_bytes(self) -> int: ...
    def resume(self) -> None: ...
    def drop(self) -> None: ...


class Answer:
    """An answer whose head has come. Read it, iterate over it, or close it."""

    __slots__ = ("_buffered", "_connection", "_error", "_pieces", "_waiter", "begun", "complete", "headers", "status")

    def __init__(self, connection: AnswerConnection, status: int, headers: Headers) -> None:
        self._connection = connection
        self._pieces: list[bytes] = []
        self._buffered = 0
        self._waiter: asyncio.Future[None] | None = None
        self._error: UpstreamError | None = None
        self.status = status
        self.headers = headers
        self.complete = False
        self.begun = False  # a piece of the body has come

    async def read(self, limit: int | None = None) -> bytes:
        """Return the rest of the body."""
        most = self._connection.body_bytes if limit is None else limit
        if self.complete and len(self._pieces) == 1 and self._buffered <= most:
            return self._take()
        taken: list[bytes] = []
        size = 0
        async for piece in self:
            size += len(piece)
            if size > most:
                self.close()
                raise UpstreamError("too_large", f"an answer of more than {most} bytes", answered=True)
            taken.append(piece)
        return b"".join(taken)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """Return what has come since the last piece."""
        while not self._pieces:
            if self.complete:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            self._waiter = self._connection.loop.create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.close()
                raise
        return self._take()

    def _take(self) -> bytes:
        pieces = self._pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if self._buffered > FULL_BYTES and not self.complete:
            self._connection.resume()
        self._buffered = 0
        return data

    def close(self) -> None:
        """Leave the answer: an incomplete one takes its connection with it."""
        if not self.complete and self._error is None:
            self._error = UpstreamError("reset", "the answer was closed", answered=True)
            self._connection.drop()

    def add(self, piece: bytes) -> bool:
        """Take a piece of the body; return whether reading must pause."""
        self.begun = True
        self._pieces.append(piece)
        before = self._buffered
        self._buffered += len(piece)
        self._wake()
        return before <= FULL_BYTES < self._buffered

    def finish(self, error: UpstreamError | None = None) -> None:
        if self.complete or self._error is not None:
            return
        self._error = error
        self.complete = error is None
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
