"""One request inside the worker: its settings, its progress, and the decoding of its tokens to text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.engines.worker.model import RequestRows
from coterie.engines.worker.transfer import Prefilled

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy (argmax): dividing by them would overflow."""
MAX_HELD = 16
"""Maximum number of tokens held back until they complete a character."""
BROKEN = "\ufffd"

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False


class Output(NamedTuple):
    """Tokens and text that a step added to a request; the last output has the finish reason."""

    token_ids: tuple[int, ...]
    text: str
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    """Stop string or stop token id that ended the request; None for the model's own end token."""
    kv_transfer_params: dict[str, Any] | None = None
    cached_tokens: int = 0
    error: str | None = None


class Text:
    """Incremental decoding of tokens to text, with stop strings.

    A token may end inside a character, and a stop string may span two pieces. Both are held back until they are
    complete, so that the joined pieces equal the whole text and no part of a stop string is ever sent.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, tuple(stop)
        self._hold = max((len(word) for word in self._stop), default=1) - 1
        self._ids: list[int] = []
        self._from = self._read = 0  # ids[_from:_read] are already decoded; they are context for later tokens
        self._text = ""
        self._sent = 0
        self.stopped: str | None = None

    def add(self, token: int) -> str:
        """Add a token and return the text that can no longer change."""
        self._ids.append(token)
        return self._grow(final=len(self._ids) - self._read > MAX_HELD, last=False)

    def end(self) -> str:
        """Return the text that was held back."""
        return self._grow(final=True, last=True)

    def _grow(self, final: bool, last: bool) -> str:
        if self.stopped is not None:
            return ""
        known, now = self._decode(self._ids[self._from : self._read]), self._decode(self._ids[self._from :])
        if final or (len(now) > len(known) and not now.endswith(BROKEN)):
            self._from, self._read = self._read, len(self._ids)
            self._extend(now[len(known) :])
        until = len(self._text) if last or self.stopped is not None else max(len(self._text) - self._hold, self._sent)
        piece, self._sent = self._text[self._sent : until], until
        return piece

    def _extend(self, piece: str) -> None:
        since = max(0, len(self._text) - self._hold)
        self._text += piece
        stops = [(at, word) for word in self._stop if (at := self._text.find(word, since)) >= 0]
        if stops:
            at, self.stopped = min(stops)
            self._text = self._text[:at]


@dataclass(slots=True, eq=False)
class WorkerRequest:
    """State of a request; only the engine's thread may use it once submitted."""

    key: str
    """Key, unique in this worker."""
    name: str
    """Request id that the client sees."""
    prompt: list[int]
    sampling: SamplingSettings
    text: Text
    emit: Callable[[Output], None]
    """Callback for each output, called in the engine's thread."""
    hand_over: bool = False
    """Prefill only: keep the KV until another worker fetches it."""
    prefilled: Prefilled | None = None
    """KV fetched from another worker."""
    address: tuple[str, int] = ("127.0.0.1", 0)
    """Host and port at which other workers reach this one."""
    salt: str | None = None
    """Cache salt: only requests with the same salt find this request's blocks."""
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    stored: int = 0
    """Number of full blocks entered in the block table."""
    computed: int = 0
    """Number of tokens whose KV is in the blocks."""
    cached_tokens: int = 0
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        seed = self.sampling.seed
        self.rng = np.random.default_rng(None if seed is None else seed & ((1 << 64) - 1))

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    def tokens(self, start: int, end: int) -> list[int]:
        """Return tokens `start` … `end - 1` of prompt and output together."""
        split = len(self.prompt)
        if start >= split:
            return self.output[start - split : end - split]
        return self.prompt[start:end] + self.output[: max(0, end - split)]

    def rows(self, count: int) -> RequestRows:
        """Return the next `count` tokens to compute; the last token's row gives the next token."""
        end = self.computed + count
        return RequestRows(self.tokens(self.computed, end), self.computed, self.blocks, end == self.length)

    def append(self, token: int, eos: frozenset[int]) -> Output:
        """Append a token; the returned output has a finish reason if the token ends the request."""
        self.output.append(token)
        output = Output((token,), self.text.add(token))
        listed = token in self.sampling.stop_token_ids
        stops = self.text.stopped is not None or listed or (token in eos and not self.sampling.ignore_eos)
        if not stops and len(self.output) < self.sampling.max_tokens:
            return output
        piece = output.text + self.text.end()
        reason = self.text.stopped or (token if listed else None)  # the held-back text may complete a stop string
        finish: FinishReason = "stop" if stops or self.text.stopped is not None else "length"
        return Output((token,), piece, finish, reason, cached_tokens=self.cached_tokens)


def draw_token(logits: NDArray[np.float32], sampling: SamplingSettings, rng: np.random.Generator) -> int:
    """Sample the next token from logits [vocabulary].

    Uses one number of `rng` per token, so that a seed gives the same tokens in any batch.
    """
    if sampling.temperature < GREEDY_BELOW:
        return int(logits.argmax())
    scaled = logits.astype(np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    order = np.argsort(-weights, kind="stable")
    cumulative = np.cumsum(weights[order])
    # The smallest set whose share reaches top_p, including the token that crosses it.
    kept = min(int(np.searchsorted(cumulative, sampling.top_p * cumulative[-1])) + 1, len(order))
    at = np.searchsorted(cumulative[:kept], rng.random() * cumulative[kept - 1], side="right")
    return int(order[min(int(at), kept - 1)])
