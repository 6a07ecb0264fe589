"""The gateway: OpenAI's endpoints in front of a fleet, and the admin endpoints.

    POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings      callers
    POST /tokenize, /detokenize, and what `forward` names; GET /v1/models[/ID]     callers
    GET /health, /ready, and the page: GET /, /page/FILE, which hold no data       anyone
    GET /metrics, /decisions, /advice, /workers, /routers, /switchback, /live      administrators
    POST /workers, DELETE /workers/ID, PUT /routers/POOL, POST /reload             administrators
    GET /peers, /requests                                                          administrators

A caller presents an API key; administrators have keys of their own, and so have Prometheus for /metrics and other
gateways for /peers. Without a keys file the gateway listens on a
loopback address only, and serves requests whose Host header is a loopback address only. This stops DNS rebinding: a
web page whose host name was made to resolve to 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Awaitable, Callable
from functools import lru_cache
from urllib.parse import unquote

import msgspec

from coterie.errors import check
from coterie.gateway.access import Entry, Keys, Rates
from coterie.gateway.admin import Admin
from coterie.gateway.config import GatewayConfig
from coterie.gateway.exchange.call import (
    DETOKENISE,
    GENERATING,
    MODELS,
    PASSED,
    SERVED,
    Call,
    Outcome,
    checked_id,
    make_call,
    new_name,
)
from coterie.gateway.exchange.flow import REQUEST_ID, RETRY_AFTER, failed
from coterie.gateway.exchange.knowledge import NOTHING
from coterie.gateway.exchange.observing import Watcher, outcome_of
from coterie.gateway.exchange.peers import KEY_VARIABLE as PEER_KEY
from coterie.gateway.fleet.waiting import Refused
from coterie.gateway.page.serving import Live, is_page, send_file
from coterie.gateway.parts import MODELS_S, GatewayParts
from coterie.gateway.signals.tokens import TOKENISE
from coterie.gateway.watching.recent import CLIENT_GONE
from coterie.gateway.watching.spans import NO_SPAN
from coterie.net.access import is_loopback, read_key
from coterie.net.http1 import Headers, HttpError, HttpRequest, Limits, Responder, UpstreamError

DOMAIN_HEADER = b"x-coterie-domain"
BYTES_PER_TOKEN = 64
"""Most bytes of JSON per token of a prompt: a long word with every character escaped."""
LEAST_BODY = 1 << 20
"""Bytes of a body besides the context's: a prompt too long for a small context is refused by the worker, in its own
words, which name the model's limit."""
DEFAULT_BODY = 4 << 20
"""Limit on request bodies, in bytes, while no worker has reported its context length."""
MOST_BODY = 128 << 20
"""Largest limit on request bodies, in bytes, whatever context workers report: enough for 2M tokens."""
ADMIN_BODY = 1 << 16
REFUSALS = {"full": "queue_full", "late": "queue_deadline", "closed": "draining"}
"""Reason of a refusal by the waiting line → its label in the metrics."""
LOOPBACK_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z.]+)(?::[0-9]{1,5})?")
DRAINING = "the gateway is shutting down"
HEALTH = frozenset(("/health", "/ready"))
"""Endpoints of probes: whether the gateway answers, and whether a worker can serve what it is asked."""
UNCACHED = frozenset((TOKENISE, DETOKENISE))
"""Paths whose requests compute nothing that is cached."""
FAILED = Outcome(500)
OPEN = Entry(name="", sha256="", admin=True)
"""Caller of every request to a gateway without keys, which listens on a loopback address."""


class Gateway:
    """Handler of all HTTP requests; :mod:`coterie.gateway.serve` runs it."""

    def __init__(
        self, parts: GatewayParts, keys: Keys | None, reload: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """`keys` are the config's keys, as :func:`check_access` returns them."""
        self.parts = parts
        self.watcher: Watcher = parts.watcher
        self.draining = False
        self.rates = Rates()
        self.live = Live(parts)
        self._admin = Admin(parts, reload, self.live)
        self.in_flight: set[str] = set()
        """Names of the running requests, as workers get them."""
        self.deadlines: dict[asyncio.Task[None], float] = {}
        """Task of a running request → time at which :meth:`sweep` cancels it."""
        self.late: set[asyncio.Task[None]] = set()
        """Tasks that :meth:`sweep` has cancelled."""
        self.configure(parts.config, keys)

    def configure(self, config: GatewayConfig, keys: Keys | None) -> None:
        """Apply the limits of a config, and its keys as :func:`check_access` returns them."""
        self.config, self.keys = config, keys
        limits = config.limits
        self.http_limits = Limits(
            body_bytes=self.body_limit,
            head_s=limits.head_s,
            body_s=limits.body_s,
            write_s=limits.write_s,
            connections=limits.connections,
            connections_per_peer=limits.connections_per_peer,
        )

    @property
    def body_limit(self) -> int:
        """Largest request body in bytes: as configured, else derived from the workers' context length."""
        if self.config.limits.body_bytes is not None:
            return self.config.limits.body_bytes
        tokens = self.parts.context_tokens
        return min(LEAST_BODY + tokens * BYTES_PER_TOKEN, MOST_BODY) if tokens else DEFAULT_BODY

    # ------------------------------------------------------------------------------------------------- before the body

    def check_head(self, request: HttpRequest) -> int:
        """Check a request's head: raise HttpError to refuse it, else return the limit of its body in bytes."""
        path = request.path
        if path in HEALTH:
            return 0
        if is_page(path):
            if self.keys is None:
                self._check_host(request)
            return 0
        caller = self._caller(request)
        request.context = caller
        opens = f"/{caller.only}" if caller.only else None
        if path == opens:
            return 0
        if opens is not None:
            raise self._rejected("key", HttpError(403, f"the key {caller.name!r} opens {opens} alone"))
        if not _is_callers(path):
            if not caller.admin:
                raise self._rejected("key", HttpError(403, "this endpoint needs an administrator's key"))
            return ADMIN_BODY
        wait_s = self.rates.take(caller, now=time.monotonic())
        if wait_s:
            after: Headers = [(b"retry-after", str(int(wait_s) + 1).encode())]
            message = f"caller {caller.name!r} is over its rate; try again in {wait_s:.1f} s"
            raise self._rejected("rate", HttpError(429, message, "rate_limit_exceeded", headers=after))
        if self.draining:
            raise self._rejected("draining", draining(request.header(REQUEST_ID)))
        return self.body_limit

    def _caller(self, request: HttpRequest) -> Entry:
        if self.keys is not None:
            caller = self.keys.check(request.header(b"authorization"))
            if caller is None:
                message = "a known API key is needed: Authorization: Bearer KEY"
                raise self._rejected("key", HttpError(401, message, headers=[(b"www-authenticate", b"Bearer")]))
            return caller
        self._check_host(request)
        if not _is_callers(request.path) and _is_foreign(request):
            raise self._rejected("key", HttpError(403, "without keys no other page of a browser is served here"))
        return OPEN

    def _check_host(self, request: HttpRequest) -> None:
        """Refuse a Host header that is not a loopback name, as in DNS rebinding by a web page."""
        if not _is_local(request.header(b"host") or b""):
            raise self._rejected("key", HttpError(403, "without keys only requests for this machine are served"))

    def _rejected(self, reason: str, error: HttpError) -> HttpError:
        self.watcher.metrics.rejected.inc(reason)
        return error

    # ------------------------------------------------------------------------------------------------------- requests

    def handle(self, request: HttpRequest, responder: Responder) -> Awaitable[None]:
        """Answer a request; errors are raised as HttpError, by this call or by the awaitable."""
        path, method = request.path, request.method
        if path in SERVED or path in self.config.forward:
            if method != "POST":
                raise HttpError(405, f"{path} takes POST, not {method}", headers=[(b"allow", b"POST")])
            return self._complete(request, responder)
        return self._handle_other(request, responder)

    async def _handle_other(self, request: HttpRequest, responder: Responder) -> None:
        path, method = request.path, request.method
        if path in HEALTH:
            if self.draining:
                raise draining(request.header(REQUEST_ID))
            if path == "/ready" and (why := self.parts.why_unready):
                raise HttpError(503, why, "no_worker", headers=RETRY_AFTER)
            responder.send(200)
        elif is_page(path):
            send_file(request, responder)
        elif (path == MODELS or path.startswith(f"{MODELS}/")) and method in ("GET", "HEAD"):
            await self._models(unquote(path[len(MODELS) + 1 :]), responder)
        else:
            await self._admin.handle(request, responder)

    async def _complete(self, request: HttpRequest, responder: Responder) -> None:
        started, parts, limits = time.monotonic(), self.parts, self.config.limits
        call = self._call(request)
        outcome, placed, waited_s = FAILED, False, 0.0
        task = asyncio.current_task()
        assert task is not None
        self.deadlines[task] = started + limits.total_s
        try:
            if not parts.line.take_at_once():
                waited_s = await parts.line.take(limits.queue_s)
            placed = True
            generates = call.path in GENERATING
            known = await parts.knowledge.describe(call) if generates else NOTHING
            outcome = await (parts.flow if generates else parts.plain).serve(call, responder, known)
        except Refused as refused:
            outcome = Outcome(refused.status, problem=str(refused))
            self.watcher.metrics.rejected.inc(REFUSALS.get(refused.reason, "draining"))
            after: Headers = [(b"retry-after", str(refused.retry_after_s).encode()), (REQUEST_ID, call.id.encode())]
            raise HttpError(refused.status, str(refused), "overloaded", headers=after) from None
        except HttpError as error:
            outcome = Outcome(error.status, problem=str(error))
            error.headers = [*error.headers, (REQUEST_ID, call.id.encode())]
            raise
        except asyncio.CancelledError:
            late, named = task in self.late, (REQUEST_ID, call.id.encode())
            if responder.client_gone and not late:
                outcome = Outcome(CLIENT_GONE)
                raise
            task.uncancel()
            if not late:
                outcome = Outcome(503, cut=responder.started, drained=True, problem=DRAINING)
                raise HttpError(503, DRAINING, "draining", headers=[*RETRY_AFTER, named]) from None
            outcome = Outcome(504, cut=responder.started, problem="timeout")
            message = f"no whole answer within {limits.total_s:g} s"
            raise HttpError(504, message, "timeout", headers=[named]) from None
        finally:
            if placed:
                parts.line.give_back()
            del self.deadlines[task]
            self.late.discard(task)
            self.in_flight.discard(call.name)
            self.watcher.ended(call, outcome, time.monotonic() - started, waited_s if placed else None)

    def sweep(self) -> None:
        """Cancel the requests past their deadline. One timer serves all: a timer per request would cost too much."""
        self.watcher.catch_up()
        now = time.monotonic()
        for task in [task for task, until in self.deadlines.items() if now >= until]:
            self.late.add(task)
            task.cancel()

    def _call(self, request: HttpRequest) -> Call:
        """Check a request and give it a name that no other request in flight has."""
        caller: Entry = request.context
        request_id = domain = None
        passed: Headers = []
        try:
            for pair in request.headers:
                name, value = pair
                if name in PASSED:
                    passed.append(pair)
                elif name == REQUEST_ID and request_id is None:
                    request_id = checked_id(value)
                elif name == DOMAIN_HEADER and domain is None:
                    domain = value.decode("latin-1")
            spans, path = self.parts.spans, request.path
            salted = caller.name and self.config.separate_caches and path not in UNCACHED
            kind = request.header(b"content-type") or b""
            call = make_call(
                path,
                request.body,
                request_id=request_id,
                name=new_name() if request_id in self.in_flight else None,
                headers=passed,
                caller=caller.name,
                domain=domain,
                span=spans.request(f"POST {path}", request.headers) if spans.tracer else NO_SPAN,
                salt=_salt_of(caller.sha256) if salted else None,
                form=path not in SERVED and kind.startswith(b"multipart/form-data"),
            )
        except HttpError as error:
            self.watcher.metrics.requests.inc(request.path, outcome_of(Outcome(error.status)))
            raise
        self.in_flight.add(call.name)
        return call

    async def _models(self, wanted: str, responder: Responder) -> None:
        """Send one worker's list of models, or the `wanted` one of them: all workers serve the same models."""
        problem = HttpError(503, "the fleet has no workers", "no_worker", headers=RETRY_AFTER)
        for member in self.parts.first_open():
            try:
                answer = await member.ask("GET", MODELS, MODELS_S)
            except UpstreamError as error:
                problem = failed(error)
                continue
            listed = wanted and answer.status == 200
            responder.send(answer.status, _card(answer.body, wanted) if listed else answer.body)
            return
        raise problem


class _Models(msgspec.Struct):
    data: list[msgspec.Raw] = []


class _Card(msgspec.Struct):
    id: str


def _card(models: bytes, wanted: str) -> bytes:
    """Return the card of a model from a worker's list. Engines have no endpoint for a single model."""
    try:
        cards = {
            msgspec.json.decode(card, type=_Card).id: card for card in msgspec.json.decode(models, type=_Models).data
        }
    except (msgspec.DecodeError, RecursionError, ValueError):
        raise HttpError(502, "the worker's list of models cannot be read", "worker_failed") from None
    if wanted not in cards:
        known = ", ".join(cards)
        raise HttpError(
            404, f"the model {wanted[:200]!r} is not served here; known: {known}", "model_not_found", "model"
        )
    return bytes(cards[wanted])


def _is_callers(path: str) -> bool:
    """Whether a path is for callers, and not for administrators."""
    return path.startswith("/v1/") or path in SERVED


def draining(given: bytes | None) -> HttpError:
    """Return the refusal of a request during the drain, with the id that the request was `given`, or a new one."""
    try:
        id = new_name() if given is None else checked_id(given)
    except HttpError:
        id = new_name()
    return HttpError(503, DRAINING, "draining", headers=[*RETRY_AFTER, (REQUEST_ID, id.encode())])


@lru_cache(64)
def _is_local(host: bytes) -> bool:
    """Whether a Host header names this machine by a loopback address."""
    name = LOOPBACK_HOST.fullmatch(host)
    return name is not None and is_loopback(name[1].decode())


@lru_cache(1024)
def _salt_of(sha256: str) -> str:
    """Return the salt of a caller's cached prefixes.

    It is derived from the hash of the caller's key, so others cannot guess it and it survives a restart.
    """
    return hashlib.sha256(f"cache {sha256}".encode()).hexdigest()[:32]


def _is_foreign(request: HttpRequest) -> bool:
    """Whether a request comes from a foreign web page. The gateway's own page and programs send no Origin.

    An image or script of a foreign page has none either, but its Sec-Fetch-Site header says where it comes from.
    """
    site = request.header(b"sec-fetch-site")
    return request.header(b"origin") is not None or site not in (None, b"same-origin", b"none")


def check_access(config: GatewayConfig) -> Keys | None:
    """Load the keys of a config. Raises ConfigError if other machines could reach the gateway without a key, or if
    peers would be sent a key that opens more than they need."""
    keys = None if config.keys is None else Keys.load(config.keys)
    check(
        keys is not None or is_loopback(config.address[0]),
        f"listen={config.listen} can be reached from other machines: set keys to a file of API keys "
        "(coterie serve --new-key NAME makes one), or listen on 127.0.0.1",
    )
    shown = read_key(PEER_KEY) if config.peers.urls else None
    caller = None if keys is None or shown is None else keys.check(b"Bearer " + shown.encode())
    check(
        caller is None or caller.only == "peers",
        f"{PEER_KEY} holds the key of {caller and caller.name!r}, which opens more than GET /peers: give peers one of "
        "coterie serve --new-key NAME --only peers",
    )
    return keys
