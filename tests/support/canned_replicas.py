"""Replicas for Ray Serve without a model: they do what a request's prompt says. Workers of Ray import this module."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
from ray import serve

from coterie.wire.footprints import WireFootprint, attach_footprint

FOOTPRINT: dict[str, Any] = {}
attach_footprint(FOOTPRINT, WireFootprint(np.ones((2, 4), np.uint8), (0, 1), 2))


class Canned:
    """Hands over a footprint as a prefill, and does as a decoder what the prompt says.

    A prompt is a word for the replica that is asked first, and one for those asked after a failure: `503 ok`.
    """

    def __init__(self) -> None:
        self.replica = serve.get_replica_context().replica_id.unique_id
        self.seen: list[tuple[str, str, bool]] = []
        self.opened = asyncio.Event()

    async def answer(
        self, path: str, body: dict[str, Any] | None, name: str, tried: Sequence[str] = ()
    ) -> AsyncIterator[Any]:
        params = (body or {}).get("kv_transfer_params") or {}
        if body is not None:
            self.seen.append((path, name, bool(params.get("remote_host"))))
        if params.get("do_remote_decode"):
            yield 200, "application/json", self.replica
            assert body is not None
            handed = {"remote_host": "h", **FOOTPRINT} if body["prompt"] != "bare ok" else {}
            yield json.dumps({"choices": [], "kv_transfer_params": handed}).encode()
            return
        first, _, then = str((body or {}).get("prompt", "ok")).partition(" ")
        do = then if tried else first
        if do.isdigit():
            yield int(do), "application/json", self.replica
            yield json.dumps({"error": {"message": do}}).encode()
            return
        if do == "raise":
            raise RuntimeError("on purpose")
        if do == "wait":
            await self.opened.wait()
        yield 200, "text/event-stream", self.replica
        if do == "die":
            os._exit(1)
        yield json.dumps({"replica": self.replica, "tried": list(tried)}).encode()
        if do == "cut":
            raise RuntimeError("on purpose")
        if do == "endless":
            await asyncio.Event().wait()
        yield b"\n\ndata: [DONE]\n\n"

    def take_seen(self) -> list[tuple[str, str, bool]]:
        seen, self.seen = self.seen, []
        return seen

    def open(self) -> None:
        self.opened.set()
        self.opened = asyncio.Event()


class Several:
    """An ingress that calls the decode deployment several times at once: all calls share the id of the request."""

    def __init__(self, decode: Any) -> None:
        self.decode = decode.options(method_name="answer", stream=True)

    async def __call__(self, request: Any) -> int:
        async def call() -> int:
            return len([piece async for piece in self.decode.remote("/", {}, "several")])

        return sum(await asyncio.gather(*(call() for _ in range(int(request.query_params["calls"])))))
