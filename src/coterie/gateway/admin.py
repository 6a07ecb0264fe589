"""Admin endpoints of the gateway: metrics, decisions, placement advice, workers, routers, reload."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import parse_qs, unquote

import msgspec

from coterie.errors import ConfigError, InputError, UnknownNameError, check_given, check_known
from coterie.gateway.config import WorkerEntry
from coterie.gateway.control.live import LiveControl
from coterie.gateway.exchange.call import MODELS, SERVED
from coterie.gateway.fleet.spec import RouterSpec, check_spec
from coterie.gateway.page.serving import Live
from coterie.gateway.parts import GatewayParts
from coterie.gateway.saved import SavedState
from coterie.gateway.watching.metrics import CONTENT_TYPE
from coterie.net.http1.messages import HttpError, HttpRequest, check_http
from coterie.net.http1.responder import Responder

KNOWN = ", ".join(sorted({*SERVED, MODELS, "/health", "/ready"}))
"""Paths that a 404 names: those of callers, who may not learn the others."""
MOST_DECISIONS = 10_000


Endpoint = Callable[[HttpRequest, Responder, str], Awaitable[None] | None]
T = TypeVar("T")


class Admin:
    """Handler of admin requests. The gateway has already checked that the caller is an administrator."""

    def __init__(self, parts: GatewayParts, reload: Callable[[], Awaitable[None]] | None, live: Live) -> None:
        self.parts, self._reload, self._live = parts, reload, live

    async def handle(self, request: HttpRequest, responder: Responder) -> None:
        path, method = request.path, request.method
        head, _, name = path[1:].partition("/")
        every: dict[str, dict[str, Endpoint]] = {
            "metrics": {"GET": lambda _, to, __: to.send(200, self.parts.metrics.render(), CONTENT_TYPE)},
            "decisions": {"GET": self._decisions},
            "advice": {"GET": self._advice},
            "requests": {"GET": self._requests},
            "workers": {"DELETE": self._remove} if name else {"GET": self._workers, "POST": self._add},
            "routers": {"PUT": self._set_router} if name else {"GET": self._routers},
            "reload": {"POST": self._reloaded},
            "switchback": {"GET": self._switchback},
            "peers": {"GET": lambda _, to, __: to.send(200, self.parts.peers.own(), b"application/msgpack")},
            "live": {"GET": lambda request, to, _: self._live.stream(request, to)},
        }
        ways = every.get(head)
        if ways is None or (name and head not in ("workers", "routers")):
            raise HttpError(404, f"{path[:200]} is not served here; known: {KNOWN}")
        way = ways.get("GET" if method == "HEAD" else method)
        if way is None:
            allowed = ", ".join(ways)
            raise HttpError(405, f"{path[:200]} takes {allowed}, not {method}", headers=[(b"allow", allowed.encode())])
        if method not in ("GET", "HEAD", "DELETE") and head != "reload":
            kind = (request.header(b"content-type") or b"").partition(b";")[0].strip()
            # CSRF: a foreign web page cannot send JSON without preflight.
            check_http(kind == b"application/json", 415, "Content-Type must be application/json")
        try:
            working = way(request, responder, unquote(name))
            if working is not None:
                await working
        except HttpError:
            raise
        except UnknownNameError as error:
            raise HttpError(404, str(error)) from None
        except InputError as error:
            raise HttpError(400, str(error)) from None

    def _decisions(self, request: HttpRequest, responder: Responder, _: str) -> None:
        """Send the last routing decisions and control-loop events; ``?last=N``, ``?pool=NAME``, ``?worker=ID``."""
        asked = {name: values[-1] for name, values in parse_qs(request.query).items()}
        last = asked.get("last", "100")
        check_http(
            last.isascii() and last.isdigit() and len(last) < 9,
            400,
            f"last={last[:20]!r} must be a number of decisions",
            "last",
        )
        most, loop = min(int(last), MOST_DECISIONS), self.parts.control
        events = [] if loop is None or not most else list(loop.events)[-most:]
        decisions = self.parts.decisions.last(most, pool=asked.get("pool"), worker=asked.get("worker"))
        recorded, kept = self.parts.decisions.recorded, len(self.parts.decisions)
        _send(responder, {"recorded": recorded, "kept": kept, "decisions": decisions, "control": events})

    def _advice(self, _: HttpRequest, responder: Responder, __: str) -> None:
        """Send the last placement advice, or the reason why there is none."""
        loop = self.parts.control
        advice = None if loop is None or loop.view is None else loop.view.advice
        if advice is None:
            _send(responder, {"advice": None, "reason": _no_advice(loop)})
        else:
            _send(responder, {"advice": advice, "measured": self.parts.plan_measured()})

    def _switchback(self, _: HttpRequest, responder: Responder, __: str) -> None:
        """Send what the turns have measured, or the reason for taking none and the last comparison in their place."""
        parts = self.parts
        turns = {"switchback": parts.described_switchback(), "reason": parts.no_turns()}
        _send(responder, {**turns, "comparison": parts.described_comparison()})

    async def _requests(self, _: HttpRequest, responder: Responder, __: str) -> None:
        """Send the config, the workers, and the requests that the control loop keeps, or the reason for none."""
        loop, config = self.parts.control, self.parts.changes.over(self.parts.config)
        kept = b"" if loop is None else await loop.kept()
        why = "the control loop is off" if loop is None else loop.problem or "no request with its experts was seen"
        known = {"config": config, "workers": self.parts.entries(), "reason": "" if kept else why}
        _send(responder, {**known, "kept": msgspec.Raw(kept or b"null")})

    def _workers(self, _: HttpRequest, responder: Responder, __: str) -> None:
        workers: list[dict[str, Any]] = [
            {
                **msgspec.to_builtins(member.entry),
                "pool": pool.name,
                "open": pool.keeper.members[id].open,
                "healthy": member.health.healthy,
                "breaker": member.breaker.state(pool.clock()),
                "running": pool.keeper.running(id),
                "others": pool.others(member),
                "reported": pool.described_report(member),
                "map_version": getattr(self.parts.knowledge.maps.get(id), "version", None),
                "streams": self.parts.streams_of(pool, member),
                "health_error": member.health_error or None,
            }
            for pool in self.parts.pools.values()
            for id, member in pool.members.items()
        ]
        unread = {f"metrics of {one['id']}": one["reported"]["error"] for one in workers if one["reported"]["error"]}
        known = {"workers": workers, "peers": self.parts.peers.described()}
        _send(responder, {**known, "last_errors": self.parts.knowledge.last_errors() | unread})

    def _add(self, request: HttpRequest, responder: Responder, _: str) -> None:
        entry = _read(request, WorkerEntry)
        self.parts.add_worker(entry)
        self._keep(self.parts.changes.with_worker(entry))
        _send(responder, {"added": entry.id})

    def _remove(self, _: HttpRequest, responder: Responder, name: str) -> None:
        self.parts.remove_worker(name)
        listed = any(worker.id == name for worker in self.parts.config.workers)
        self._keep(self.parts.changes.without_worker(name, listed))
        _send(responder, {"removed": name})

    def _routers(self, _: HttpRequest, responder: Responder, __: str) -> None:
        """Send the spec of each pool's router: its name, and the settings that differ from their defaults."""
        specs = {name: pool.spec for name, pool in self.parts.pools.items()}
        _send(responder, {name: {"router": spec.router, **msgspec.to_builtins(spec)} for name, spec in specs.items()})

    async def _set_router(self, request: HttpRequest, responder: Responder, name: str) -> None:
        """Swap a pool's router; settings that the body leaves out (the fit, the model) stay as they are.

        With ``?alone=1`` it takes no turns with the shortest queue, until a router is set without.
        """
        check_known("pool", name, self.parts.pools)
        before = msgspec.to_builtins(self.parts.pools[name].spec)
        given = _read(request, dict[str, Any])
        try:
            spec = msgspec.convert({**before, **given}, RouterSpec)
        except msgspec.ValidationError as error:
            raise HttpError(400, f"the body cannot be read: {error}") from None
        # In a thread first: reading a fit and compiling may take seconds, which would block the event loop.
        await asyncio.to_thread(check_spec, spec, workers=max(1, len(self.parts.pools[name].members)))
        self.parts.set_router(name, spec)
        self.parts.alone = "alone" in parse_qs(request.query)
        changes = self.parts.changes
        self._keep(msgspec.structs.replace(changes, routers={**changes.routers, name: self.parts.as_configured(spec)}))
        _send(responder, {"pool": name, "router": spec.router})

    def _keep(self, changes: SavedState) -> None:
        try:
            self.parts.change(changes)
        except ConfigError as error:
            self.parts.log.warning(str(error))
            raise HttpError(500, f"done, but a restart will undo it: {error}", "not_saved") from None

    async def _reloaded(self, _: HttpRequest, responder: Responder, __: str) -> None:
        reload = check_given(self._reload, "this gateway was started without a config file")
        await reload()
        _send(responder, {"reloaded": True})


def _no_advice(loop: LiveControl | None) -> str:
    if loop is None:
        return "the control loop is off"
    if loop.section.advise is None:
        return "control.advise names no expert-parallel group"
    reason = None if loop.view is None else loop.view.status.get("no_advice")
    return reason or loop.problem or "too little was seen of the fleet's load"


def _read(request: HttpRequest, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(request.body, type=kind)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise HttpError(400, f"the body cannot be read: {error}") from None


def _send(responder: Responder, value: object) -> None:
    responder.send(200, msgspec.json.encode(value))
