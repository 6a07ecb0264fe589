"""The ingress of an app on Ray Serve: a prefill replica computes the prompt, then a decode replica is chosen.

The prefill's answer has the request's footprint, so the decode replica's router knows it
(:mod:`coterie.stacks.ray.router`). Both deployments have a method

    async def answer(self, path: str, body: dict | None, name: str, tried: Sequence[str] = ()) -> AsyncIterator

that yields the head of an answer (status, content type, the replica's id) and then its bytes. `body` is None for a GET;
`name` is the request's ``X-Request-Id``, the same for both; `tried`, the replicas that have failed the request, is for
the router.

A try that breaks before the first byte of its answer is made again on another replica; later, the client gets an error
event. Answers that are not streamed are read whole first. KV is offered to the first decode replica only: it may have
fetched the blocks before it broke, and the prefill worker may have reused them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

from coterie.errors import check_at_least
from coterie.gateway.exchange.call import CHAT, COMPLETIONS, Call, checked_id, make_call, parse_object
from coterie.gateway.exchange.flow import RETRY_AFTER, may_retry
from coterie.gateway.exchange.relay import is_whole
from coterie.gateway.exchange.vllm_pair import check_generation
from coterie.net.http1 import HttpError
from coterie.net.http1.messages import check_http
from coterie.stacks.ray.installed import (
    DeploymentHandle,
    HttpRequest,
    JSONResponse,
    Response,
    StreamingResponse,
    metrics,
)
from coterie.stacks.ray.ledger import PARAMS, states
from coterie.wire.footprints import KEY
from coterie.wire.handoff import REQUEST_ID_HEADER, decode_body, prefill_body

BACKOFF_S = 0.05
"""Seconds before the second try; doubled before every further one."""
Bodies = tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]
"""Body of the first try and of all others."""


class Begun(NamedTuple):
    """An answer of a replica, up to its first bytes, or whole."""

    status: int
    content_type: str
    data: bytes
    rest: AsyncIterator[bytes] | None = None
    """The rest of the answer; None if it is whole."""


class PrefillFirst:
    """Make a deployment of it with ``serve.deployment(PrefillFirst)`` and bind it to the two others."""

    def __init__(
        self, prefill: DeploymentHandle, decode: DeploymentHandle, retries: int = 3, context_tokens: int = 0
    ) -> None:
        """`context_tokens` is the longest context of a decode replica; 0 if unknown."""
        check_at_least(0, retries=retries, context_tokens=context_tokens)
        self._prefill = prefill.options(method_name="answer", stream=True)
        self._decode = decode.options(method_name="answer", stream=True)
        self._retries, self._context_tokens = retries, context_tokens
        self._failures = metrics.Counter(
            "coterie_ingress_failures", "Tries that broke or were refused, by what followed.", ("stage", "followed_by")
        )
        self._decode.remote("/health", None, "health")  # its router is made, and compiled, before the first request

    async def __call__(self, request: HttpRequest) -> Response:
        path = request.url.path.removeprefix(request.scope.get("root_path", ""))  # the app's route prefix
        if path == "/coterie/routers":
            return JSONResponse(states())
        try:
            if path in (COMPLETIONS, CHAT):
                given = request.headers.get(REQUEST_ID_HEADER)
                name = None if given is None else checked_id(given.encode("latin-1"))
                return await self._complete(make_call(path, await request.body(), request_id=name))
            check_http(request.method == "GET", 404, f"{path[:80]}: Not Found; known: {COMPLETIONS}, {CHAT}")
            return whole(await self._ask("decode", path, (None, None), "", False))
        except HttpError as error:
            headers = {name.decode(): value.decode() for name, value in error.headers}
            return Response(error.body(), error.status, headers, "application/json")

    async def _complete(self, call: Call) -> Response:
        check_generation(call.body, self._context_tokens, 1)
        asked = prefill_body(call.body)
        try:
            prefilled = await self._ask("prefill", call.path, (asked, asked), call.name, False)
        except HttpError:  # the decode replica computes the prompt
            prefilled = Begun(502, "", b"")
        if 400 <= prefilled.status < 500 and not may_retry(prefilled.status):
            return whole(prefilled)
        params = params_of(prefilled)
        again = decode_body(call.body, {KEY: params[KEY]} if KEY in params else None)
        bodies = decode_body(call.body, params), again
        answer = await self._ask("decode", call.path, bodies, call.name, call.stream)
        if answer.rest is None:
            return whole(answer)
        return StreamingResponse(self._passed(answer.data, answer.rest), answer.status, media_type=answer.content_type)

    async def _ask(self, stage: str, path: str, bodies: Bodies, name: str, stream: bool) -> Begun:
        """Return the first answer that is no failure, else the last; raise HttpError if there is none."""
        handle = self._prefill if stage == "prefill" else self._decode
        tried: list[str] = []
        refused: Begun | None = None
        replica = ""
        for failures in range(self._retries + 1):
            if failures:
                self._failures.inc(tags={"stage": stage, "followed_by": "retry"})
                await asyncio.sleep(BACKOFF_S * 2 ** (failures - 1))
            try:
                pieces = aiter(handle.remote(path, bodies[failures > 0], name, tried=tried))
                status, content_type, replica = await anext(pieces)
                if stream and status == 200:
                    return Begun(status, content_type, await anext(pieces), pieces)
                answer = Begun(status, content_type, b"".join([piece async for piece in pieces]))
                if not may_retry(status):
                    return answer
                refused = answer
            except Exception:  # Serve raises what the replica raised, or that it died
                refused = None
            tried = [*tried, replica] if replica else tried
        self._failures.inc(tags={"stage": stage, "followed_by": "error"})
        if refused is None:
            raise HttpError(503, f"no {stage} replica answered", code="worker_failed", headers=RETRY_AFTER)
        return refused

    async def _passed(self, first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Pass a stream on. If it breaks, or ends without its last event, the client gets an error event."""
        last = first
        with contextlib.suppress(Exception):  # a replica may die after its last event
            yield first
            async for piece in rest:
                last = (last + piece)[-64:]
                yield piece
        if not is_whole(last):
            self._failures.inc(tags={"stage": "stream", "followed_by": "error"})
            yield HttpError(502, "the answer broke off: its replica ended", code="worker_failed").event()


def whole(answer: Begun) -> Response:
    return Response(answer.data, answer.status, media_type=answer.content_type)


def params_of(prefilled: Begun) -> dict[str, Any]:
    """Return the ``kv_transfer_params`` of a prefill's answer; empty if it has none."""
    try:
        params = parse_object(prefilled.data).get(PARAMS) if prefilled.status == 200 else None
    except HttpError:
        params = None
    return params if isinstance(params, dict) else {}
