"""A live gateway's newest requests as a recording to advise on.

The gateway keeps how often each request activated each expert, in its prompt and in its output. The experts of single
tokens are drawn from these counts so that every count comes out exactly and no token has an expert of a layer twice. A
decode step then reads as many distinct experts, on average, as with the recorded tokens: requests of a batch are at
unrelated positions, so that a step sees each of them at a random token. What is lost is which experts go together in a
token and how they change along a request, so the spread over steps is only roughly right.
"""

from __future__ import annotations

import shlex

import msgspec
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.answers.fleet.bench import Source
from coterie.answers.plan.loads import FEWEST_REQUESTS
from coterie.errors import ConfigError, InputError, UnavailableError
from coterie.gateway.config import GatewayConfig, WorkerEntry
from coterie.gateway.control.live import is_wanted
from coterie.gateway.control.messages import KeptRequests
from coterie.net.http_client import Client
from coterie.routing import Calibration
from coterie.traces import ActivationTrace, RequestTrace, TraceMeta
from coterie.types import DECODE, PREFILL

MOST_PROMPT = 1024
"""Most tokens of a prompt that are drawn: routers are shown their footprint, and its length is kept beside them."""
MOST_DRAWN = 1 << 24
"""Most tokens of a request that are believed."""


class GatewayTraffic(msgspec.Struct):
    """Answer of a gateway's ``/requests``."""

    config: GatewayConfig
    workers: list[WorkerEntry]
    """Those of the config, and pods."""
    kept: KeptRequests | None
    reason: str = ""
    """Why nothing is kept; empty if something is."""

    @property
    def worker(self) -> str:
        """URL of the first worker that decodes."""
        return next((worker.url for worker in self.workers if worker.role != "prefill"), "http://HOST:8000")

    @property
    def needed(self) -> str:
        """What to do so that the gateway keeps more requests."""
        config = self.config
        if not all(worker.expert_events for worker in self.workers if worker.role != "prefill"):
            return (
                "give its workers expert_events, from engines with Coterie's plugin, and set control: {enabled: true}"
            )
        if not is_wanted(config.control, config.decode, self.workers):
            return "set control: {enabled: true} in its config"
        return "send it more requests"

    def source(self) -> Source:
        """Return the requests as a trace of drawn tokens, with the exact counts. Raises InputError if there are few."""
        kept = self.kept
        if kept is None or len(kept.finished_s) < FEWEST_REQUESTS:
            seen = 0 if kept is None else len(kept.finished_s)
            why = f" ({self.reason})" if self.reason else ""
            raise ConfigError(
                f"the gateway keeps {seen} finished requests with their experts, and it takes {FEWEST_REQUESTS}{why}: "
                f"{self.needed}, or record a worker: {record_command(self.worker)}"
            )
        rng, finished_s = np.random.default_rng(0), np.array(kept.finished_s)
        try:
            counts = np.frombuffer(kept.counts, "<u4").reshape(kept.shape)
            most = MOST_PROMPT, None
            parts = [drawn_tokens(row[phase], kept.top_k, rng, most[phase]) for row in counts for phase in range(2)]
            tokens = counts[:, :, 0].sum(axis=2, dtype=np.int64) // kept.top_k
            lengths = [len(ids) for ids in parts]
            trace = ActivationTrace.from_arrays(
                TraceMeta(kept.model, kept.shape[3], kept.shape[2], kept.top_k),
                np.concatenate(parts),
                np.concatenate([[0], np.cumsum(lengths)[1::2]]),
                RequestTrace(tokens[:, 0], tokens[:, 1], arrival_s=finished_s - finished_s.min()),
                np.repeat(np.tile(np.array([PREFILL, DECODE], np.uint8), len(counts)), lengths),
            )
        except ValueError as error:
            raise InputError(f"the gateway's counts of {kept.shape} are inconsistent: {error}") from None
        numbers = np.arange(len(counts))
        return Source(trace, Calibration(counts[:, 0], counts[:, 1], None, numbers, False, kept.model, kept.top_k))


async def read_gateway(url: str, key: str | None) -> GatewayTraffic:
    """Read the requests that a gateway keeps; `key` is its admin key. Raises UnavailableError if it does not tell."""
    async with Client(url, key=key) as client:
        status, text = await client.call("GET", "/requests")
    problem: object = f"HTTP {status}"
    try:
        if status == 200:
            return msgspec.json.decode(text, type=GatewayTraffic)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        problem = error
    hint = ": an admin key is needed, in COTERIE_ADMIN_KEY or --admin-key-file" if status in (401, 403) else ""
    raise UnavailableError(
        f"{client.url}/requests answers {problem}, not the requests of a Coterie gateway{hint}; an engine without a "
        f"gateway is recorded: {record_command(client.url)}"
    )


def record_command(url: str) -> str:
    """Return the command that records a server for ten minutes."""
    return shlex.join(["coterie", "record", "--engine", "vllm", "--url", url, "--duration", "600", "-o", "recorded"])


def drawn_tokens(
    counts: NDArray[np.integer], top_k: int, rng: Generator, most: int | None = None
) -> NDArray[np.uint16]:
    """Draw [token, layer, k] experts whose counts are exactly these [layer, expert], or `most` of the tokens.

    Laid out in order over the tokens again and again, the copies of an expert are on consecutive tokens: on no token
    twice, as no expert has more copies than there are tokens. Raises ValueError if they are not.
    """
    experts = np.arange(counts.shape[1], dtype=np.uint16)
    tokens = int(counts[0].sum()) // top_k
    each = counts.sum(axis=1, dtype=np.int64)
    if not 1 <= tokens <= MOST_DRAWN or int(counts.max()) > tokens or (each != tokens * top_k).any():
        raise ValueError(
            f"{each.max()} activations in a layer, {counts.max()} of one expert, are not of {tokens} tokens"
        )
    order = (rng.permutation(tokens)[:most] for _ in counts)
    laid = (np.repeat(experts, row).reshape(top_k, tokens) for row in counts)
    return np.stack([rows[:, shown].T for rows, shown in zip(laid, order, strict=True)], axis=1)
