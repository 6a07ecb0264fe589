"""Token ids as a worker makes them: for chats that only the engine's own code renders, or without a tokenizer.

Chats go to vLLM's render endpoint (``--enable-scale-out``), which runs the code of its chat endpoint; texts to
``/tokenize`` of vLLM or SGLang. SGLang and the reference worker have no endpoint for the ids of chats.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from coterie.errors import InputError, check
from coterie.gateway.exchange.pool import Member, Pool, WholeAnswer
from coterie.gateway.signals.messages import NoTokensError
from coterie.gateway.signals.model_tokenizers import Ids
from coterie.gateway.signals.tokens import ID_BYTES, RENDER, NoAnswerError, Question, read_ids
from coterie.net.http1.upstream import UpstreamError

REFUSALS = (400, 413, 422)
"""Statuses by which a worker refuses a prompt. An unknown model is 404 with an error, a missing endpoint without."""
ABSENT = (403, 404)
"""Statuses of an endpoint that a worker lacks; vLLM answers 403 for its render endpoint."""
REST_BYTES = 1 << 16
"""Most bytes of an answer besides its ids."""


class _Rendered(msgspec.Struct):
    token_ids: msgspec.Raw = msgspec.Raw(b"[]")
    tokens: msgspec.Raw = msgspec.Raw(b"[]")
    features: object = None
    """Images of the prompt; None for a prompt of text only."""


class WorkerIds:
    """Asks one open worker for each prompt, in turn, of the first pool that has any. A worker that fails rests."""

    def __init__(self, pools: Sequence[Pool], deadline_s: float) -> None:
        self._pools, self._deadline_s = pools, deadline_s
        self._turn = 0

    async def ids(self, question: Question) -> Ids:
        """Return the ids. Raises NoTokensError if the worker refuses the prompt or none can be asked now, NoAnswerError
        if it fails."""
        member = self._next(question.path)
        breaker = member.endpoints[question.path]
        attempt = breaker.sent(time.monotonic())
        try:
            body, most_bytes = msgspec.json.encode(question.body), REST_BYTES + ID_BYTES * question.most_ids
            ids = _read(await member.ask("POST", question.path, self._deadline_s, body, most_bytes), question)
        except NoTokensError:
            breaker.succeeded(attempt, time.monotonic())
            raise
        except (UpstreamError, InputError) as error:
            breaker.failed(attempt, time.monotonic())
            raise NoAnswerError(f"worker {member.entry.id!r}, {question.path}: {error}") from None
        breaker.succeeded(attempt, time.monotonic())
        return ids

    def _next(self, path: str) -> Member:
        now = time.monotonic()
        for pool in self._pools:
            members = ((pool.keeper.members[id].open, member) for id, member in pool.members.items())
            able = [member for is_open, member in members if is_open and member.endpoints[path].may_send(now)]
            if able:
                self._turn += 1
                return able[self._turn % len(able)]
        raise NoTokensError("no worker that makes token ids is open")


def _read(answer: WholeAnswer, question: Question) -> Ids:
    """Raise NoTokensError if the worker refuses the prompt, InputError if it has not answered the question."""
    status, body = answer
    check(
        status not in REFUSALS and (status != 404 or b'"error"' not in body),
        f"a worker refuses the prompt with HTTP {status}",
        NoTokensError,
    )
    check(status == 200, f"HTTP {status}{' (vLLM needs --enable-scale-out)' if status in ABSENT else ''}", InputError)
    try:
        rendered = msgspec.json.decode(body, type=_Rendered)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise InputError(f"the answer cannot be read: {error}") from None
    check(rendered.features is None, "the prompt holds what is not text", NoTokensError)
    return read_ids(bytes(rendered.token_ids if question.path == RENDER else rendered.tokens), question.most_ids)
