"""Requests to send: mixed domains, conversations with shared prefixes, or the lengths and shared blocks of a trace.

A workload is the same for every server and router: the answers in a conversation's history are generated in advance, so
that requests never depend on the server's answers. The hit rate of a workload is that of one unlimited cache, counted
in characters; real workers with several caches, blocks of tokens and limited memory reach less.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.errors import check, check_at_least, check_positive, check_share, refuse
from coterie.prompts import Prompt
from coterie.traces.arrivals import PoissonArrivals, ReplayedArrivals
from coterie.traces.requests import RequestTrace

LONGEST = 1 << 20
"""Most tokens of prompt and answer together, assumed if a server does not report its limit."""
ROOM = 0.8
"""Share of the context that a trace's prompt may fill: characters per token differ between texts, so leave a margin."""
TEMPLATE_TOKENS = 32
"""Approximate number of tokens that a chat template and a marker add to a prompt."""


def that_fit(prompts: Sequence[Prompt], tokens: int) -> list[Prompt]:
    """Return the prompts of at most `tokens` bytes: no common tokenizer makes more tokens than a text has bytes."""
    kept = [prompt for prompt in prompts if len(prompt.prompt.encode()) <= tokens]
    check(kept, f"no prompt is sure to fit {tokens} tokens, which the model's context leaves for it")
    return kept


class Message(NamedTuple):
    role: str
    content: str


class LoadRequest(NamedTuple):
    number: int
    """Index of the request in the workload."""
    conversation: int
    """Number of the conversation; a closed loop sends the requests of one conversation one after another."""
    domain: str
    messages: tuple[Message, ...]
    max_tokens: int

    @property
    def text(self) -> str:
        """All messages as one text: the prompt of the completions endpoint, without a chat template."""
        return "\n".join(message.content for message in self.messages)


class Workload(NamedTuple):
    name: str
    """Description of the workload, in a few words."""
    requests: list[LoadRequest]
    """Requests in the order of sending."""
    sizes: NDArray[np.int64]
    """[request] characters of the prompt."""
    shared: NDArray[np.int64]
    """[request] characters of the prompt that one unlimited prefix cache would already hold."""

    def hit_rate(self, skip: int = 0) -> float:
        """Return the hit rate of one unlimited prefix cache over all requests but the first `skip`."""
        return float(self.shared[skip:].sum() / max(int(self.sizes[skip:].sum()), 1))


# ------------------------------------------------------------------------------------------------------- mixed domains


def mixed_prompts(prompts: Sequence[Prompt], count: int, max_tokens: int, rng: Generator) -> Workload:
    """Draw prompts in random order. A repeated prompt is prefixed with a number, so that no cached prefix matches."""
    check_at_least(1, count=count, max_tokens=max_tokens)
    order = np.concatenate([rng.permutation(len(prompts)) for _ in range(-(-count // len(prompts)))])[:count]
    requests = []
    for number, index in enumerate(order):
        lap, prompt = number // len(prompts), prompts[int(index)]
        content = prompt.prompt if lap == 0 else f"{lap + 1}. {prompt.prompt}"
        requests.append(LoadRequest(number, number, prompt.domain, (Message("user", content),), max_tokens))
    domains = len({prompt.domain for prompt in prompts})
    return _workload(f"prompts of {domains} domain{'s' if domains > 1 else ''}", requests)


# ------------------------------------------------------------------------------------------------------ shared prefixes


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Conversations of several turns that begin with one of a few system prompts, as in Mooncake's conversation trace.

    Turn t sends the system prompt, t earlier questions with their answers, and a new question.
    """

    hit_rate: float = 0.75
    """Share of the prompts' characters that an unlimited cache would hold; sets the length of the system prompts."""
    systems: int = 8
    """Number of system prompts, each of one domain; conversations use them in rotation."""
    turns: int = 4
    """Number of questions per conversation."""
    active: int = 16
    """Number of concurrent conversations; the next request is from a random one."""
    question_chars: int = 160
    answer_chars: int = 160

    def __post_init__(self) -> None:
        check_share(hit_rate=self.hit_rate)
        check_at_least(1, systems=self.systems, turns=self.turns, active=self.active, answer_chars=self.answer_chars)
        check_at_least(24, question_chars=self.question_chars)  # room for the number that begins a question
        least = self._shared / self._total
        check(
            least <= self.hit_rate <= 0.99,
            f"hit_rate={self.hit_rate} must be in {least:.2f} … 0.99 with {self.turns} turns: fewer turns allow less",
        )

    @property
    def system_chars(self) -> int:
        """Characters of a system prompt that give the hit rate."""
        # With system prompts of S characters, turns * S is added to both: solve shared = hit_rate * total.
        lacking = self.hit_rate * self._total - self._shared
        return round(lacking / (self.turns * (1 - self.hit_rate)))

    @property
    def _total(self) -> int:
        """Characters that a conversation sends, without system prompts."""
        past = self.question_chars + self.answer_chars
        return self.turns * self.question_chars + past * (self.turns * (self.turns - 1) // 2)

    @property
    def _shared(self) -> int:
        """Characters of `_total` that were sent before."""
        past, later = self.question_chars + self.answer_chars, self.turns - 1
        return later * self.question_chars + past * (later * (later - 1) // 2)


def shared_prefixes(
    prompts: Sequence[Prompt], count: int, max_tokens: int, rng: Generator, settings: SharedPrefixes
) -> Workload:
    check_at_least(1, count=count, max_tokens=max_tokens)
    texts = _Texts(prompts)
    domains = [texts.domains[index % len(texts.domains)] for index in range(settings.systems)]
    systems = [
        texts.of(rng, domain, settings.system_chars, f"({number + 1}) ") for number, domain in enumerate(domains)
    ]
    begun = 0
    active: list[tuple[int, int, list[Message]]] = []  # conversation, its system, messages so far
    requests = []
    for number in range(count):
        while len(active) < settings.active:
            system = begun % settings.systems
            active.append((begun, system, [Message("system", systems[system])] if systems[system] else []))
            begun += 1
        at = int(rng.integers(len(active)))
        conversation, system, messages = active[at]
        turn = 1 + sum(message.role == "user" for message in messages)
        question = texts.of(rng, domains[system], settings.question_chars, f"({conversation + 1}.{turn}) ")
        messages.append(Message("user", question))
        requests.append(LoadRequest(number, conversation, domains[system], tuple(messages), max_tokens))
        messages.append(Message("assistant", texts.of(rng, domains[system], settings.answer_chars)))
        if turn == settings.turns:
            del active[at]
    return _workload(f"conversations of {settings.turns} turns with {settings.systems} system prompts", requests)


# ------------------------------------------------------------------------------------------------------------- traces


@dataclass(frozen=True, slots=True)
class TraceText:
    """Settings for making text of a trace's token counts."""

    chars_per_token: Mapping[str, float]
    """Domain → characters per token of its text, from :func:`coterie.answers.load.client.chars_per_token`."""
    length_scale: float = 1.0
    """Factor on prompt, block and output lengths, for a model with a shorter context."""
    longest: int = LONGEST
    """The server's limit on tokens of prompt and answer together; longer prompts are cut."""

    def __post_init__(self) -> None:
        check_positive(length_scale=self.length_scale, **self.chars_per_token)
        check_at_least(16, longest=self.longest)


def traced(trace: RequestTrace, prompts: Sequence[Prompt], count: int, rng: Generator, settings: TraceText) -> Workload:
    """Make text with the lengths of a trace's first `count` requests; equal hashes of prompt blocks give equal text."""
    trace = trace.in_order().take(slice(0, count))
    check(len(trace), "the trace has no requests")
    texts, scale = _Texts(prompts), settings.length_scale
    requests, parts, cut = [], [], 0
    for number in range(len(trace)):
        most = max(1, min(round(scale * int(trace.output_tokens[number])), settings.longest // 2))
        wanted = max(1, round(scale * int(trace.prompt_tokens[number])))
        tokens = min(wanted, max(1, int(ROOM * (settings.longest - most)) - TEMPLATE_TOKENS))
        cut += tokens < wanted
        hashes = [] if trace.prefix_blocks is None else [int(one) for one in trace.prefix_blocks[number]]
        domain = texts.domains[(abs(hashes[0]) if hashes else number) % len(texts.domains)]
        ratio = settings.chars_per_token[domain]
        chars = max(1, round(tokens * ratio))
        if not hashes or trace.block_tokens is None:
            blocks = [(number, texts.of(rng, domain, chars, f"({number + 1}) "))]
        else:
            size = max(1, round(scale * trace.block_tokens * ratio))
            blocks = [
                (one, texts.of(np.random.default_rng(abs(one)), domain, size, f"({one}) ")[: chars - start])
                for start, one in zip(range(0, chars, size), hashes, strict=False)
            ]
        parts.append([((key, len(text)), len(text)) for key, text in blocks])
        message = Message("user", "".join(text for _, text in blocks) or ".")
        requests.append(LoadRequest(number, number, domain, (message,), most))
    name = f"lengths of a {trace.source.get('format', 'request')} trace" + (
        f", {cut} prompts cut to the model's context" if cut else ""
    )
    return _workload(name, requests, parts)


# ----------------------------------------------------------------------------------------------------------- arrivals


def arrival_times(
    count: int,
    rng: Generator,
    rate: float | None = None,
    trace: RequestTrace | None = None,
    speed_up: float | None = None,
) -> NDArray[np.float64]:
    """Return arrival times [request] in seconds: Poisson at `rate`, or a trace's, scaled by `speed_up` or to `rate`."""
    check_positive(rate=rate, speed_up=speed_up)
    timed = trace is None or (len(trace) > 1 and trace.duration_s)
    refuse(
        {
            "arrivals without a trace need a rate, and no speed-up": trace is None
            and (rate is None or speed_up is not None),
            f"rate={rate} and speed_up={speed_up} both set how fast the trace is replayed; give one": rate is not None
            and speed_up is not None,
            "the trace has no arrival times that a rate could be set for": rate is not None and not timed,
        }
    )
    if trace is None:
        return PoissonArrivals(rate or 0.0).draw(count, np.ones(1), rng).arrival_s
    scale = 1 / (speed_up or 1.0) if rate is None else (len(trace) - 1) / trace.duration_s / rate
    return ReplayedArrivals(trace, scale).draw(count, np.ones(1), rng).arrival_s


# -------------------------------------------------------------------------------------------------------------- texts


class _Texts:
    """Generator of text of a domain, of any length, from the domain's prompts."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        check(prompts, "there are no prompts to make text of")
        self.domains = list(dict.fromkeys(prompt.domain for prompt in prompts))
        self._pools = {name: [one.prompt for one in prompts if one.domain == name] for name in self.domains}

    def of(self, rng: Generator, domain: str, chars: int, start: str = "") -> str:
        """Return exactly `chars` characters of text that begins with `start`."""
        pool, found = self._pools[domain], start
        while len(found) < chars:
            found += pool[int(rng.integers(len(pool)))] + "\n"
        return found[:chars]


def _workload(
    name: str, requests: list[LoadRequest], parts: Iterable[Sequence[tuple[Hashable, int]]] | None = None
) -> Workload:
    """Build a workload and count the characters that an unlimited prefix cache would hold.

    A prompt is a sequence of `parts`, (key, characters) each; None takes its messages as parts.
    """
    if parts is None:
        parts = ([(message, len(message.content)) for message in request.messages] for request in requests)
    seen: set[int] = set()
    counts = np.zeros((len(requests), 2), np.int64)  # size, shared
    for number, prompt in enumerate(parts):
        state = 0
        for key, size in prompt:
            state = hash((state, key))
            counts[number] += size, size if state in seen else 0  # `state` hashes the whole prefix
            seen.add(state)
    return Workload(name, requests, *counts.T)
