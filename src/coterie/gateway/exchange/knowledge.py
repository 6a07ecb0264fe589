"""Routing signals of a request before it runs: its token ids, the workers that cache its prefix, its footprint.

Each signal comes from the best available source. Token ids are made by the gateway's tokenizer or by a worker that is
asked for them, or come with the prefill's answer; they are exact or left out. Cached prefixes come from the workers' KV
events; for a worker without KV events, or a prompt without token ids, they are guessed from the gateway's own routing.
Footprints come from the prefill's answer, else they are predicted: from earlier requests with the same prefix, by a
fitted predictor, or from the experts' popularity. Unknown signals are omitted, and routers work without them.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from coterie.errors import CoterieError, check
from coterie.gateway.config import GatewayConfig, WorkerEntry
from coterie.gateway.exchange.call import Call
from coterie.gateway.exchange.pool import Pool
from coterie.gateway.fleet.keeper import Mask
from coterie.gateway.signals import kv_streams, predicted
from coterie.gateway.signals.kv_streams import KvStreams
from coterie.gateway.signals.model_tokenizers import load_tokenizer
from coterie.gateway.signals.predicted import Footprints, open_predictor, popularity_of
from coterie.gateway.signals.prefixes import Claims, PromptKeys, RoutedPrefixes, keys_of_text
from coterie.gateway.signals.tokens import Question, TokenService
from coterie.net.access import SECRET_VARIABLE
from coterie.placement import read_map
from coterie.routing import Request, RouterFit
from coterie.types import Placement
from coterie.wire.event_security import secure_subscriber
from coterie.wire.expert_events import ExpertMap
from coterie.wire.footprints import WireFootprint


class KnownPrompt(msgspec.Struct, frozen=True):
    """Routing signals of one request."""

    ids: NDArray[np.int64] | None = None
    """Token ids, equal to the worker's; None if unknown."""
    tokens: int = 0
    """Prompt tokens; 0 if unknown."""
    salt: str | None = None
    text: PromptKeys | None = None
    """Block keys of the prompt, for guessing cached prefixes; None if not needed."""
    question: Question | None = None
    """Question for the ids that a prefill's answer can settle; None if it cannot, or ids are not needed."""
    claims: dict[str, NDArray[np.int64]] = {}
    """Pool → leading tokens that each worker claims to hold by its KV events, [row], as of the last decision."""


NOTHING = KnownPrompt()


class Knowledge:
    """Routing signals of one gateway. Not thread-safe: belongs to the gateway's event loop."""

    def __init__(self, config: GatewayConfig, pools: list[str], secret: str | None = None) -> None:
        reason, tokenizer = "no tokenizer is configured", None
        try:
            tokenizer = None if config.tokenizer is None else load_tokenizer(config.tokenizer)
        except CoterieError as error:
            reason = str(error)
        reason += ": prefixes are compared as text where no worker makes token ids"
        self.says = "" if tokenizer is not None else reason
        """Warning for the operator that no tokenizer is available; empty if there is one."""
        self.tokens = TokenService(tokenizer, reason, deadline_s=config.limits.tokenise_s)
        self.footprints = footprints_of(config)
        self._placement = None if config.placement is None else read_map(config.placement).placement
        self.maps: dict[str, ExpertMap] = {}
        """Worker id → the newest map that the worker has reported. All ranks of a group report the group's map."""
        self._secret = secret
        self.streams = {name: KvStreams(block_size=config.block_size) for name in pools}
        self.claims = {name: Claims() for name in pools}
        self._routed = {name: RoutedPrefixes() for name in pools}
        self._guessed: dict[str, set[int]] = {name: set() for name in pools}
        """Pool → rows of workers that send no KV events, whose cached prefixes are guessed."""

    # -------------------------------------------------------------------------------------------------------- workers

    def held(self, entry: WorkerEntry) -> Mask | None:
        """Return the experts that a worker holds; None for all.

        Raises ConfigError for a rank that the placement lacks, and for secure events without a fleet secret.
        """
        check(
            not entry.secure_events or self._secret is not None,
            f"worker {entry.id!r}: secure_events=true needs the fleet's secret in {SECRET_VARIABLE}",
        )
        rank, seen = entry.placement_rank, self.maps.get(entry.id)
        placement = self._placement if seen is None else seen.placement()
        return None if placement is None or rank is None else mask_of(placement, rank)

    def follow(self, worker_id: str, rank: int, reported: ExpertMap) -> Mask:
        """Take the map that a worker reports; return what its rank holds. Raises CoterieError if it does not fit."""
        others = [seen.placement() for worker, seen in self.maps.items() if worker != worker_id][:1]
        placement = reported.placement()
        known = [one.held.shape[1:] for one in (self._placement, *others) if one is not None]
        for shape in filter(None, (*known, self.footprints.shape)):
            check(
                shape == placement.held.shape[1:],
                f"it has {placement.held.shape[1:]} layers and experts, expected {shape}",
            )
        mask = mask_of(placement, rank)
        self.maps[worker_id] = reported
        return mask

    def join(self, pool: str, row: int, entry: WorkerEntry) -> None:
        if entry.kv_events is None:
            self._guessed[pool].add(row)
        else:
            secure = partial(secure_subscriber, secret=self._secret) if entry.secure_events and self._secret else None
            self.streams[pool].join(entry.id, row, entry.kv_events, entry.kv_replay, secure, entry.kv_blocks)

    def leave(self, pool: str, row: int, worker_id: str) -> None:
        self.streams[pool].leave(worker_id)
        self._routed[pool].drop(row)
        self._guessed[pool].discard(row)
        self.claims[pool].forget(row)
        self.maps.pop(worker_id, None)

    def restarted(self, pool: str, row: int, worker_id: str) -> None:
        """Forget the cached prefixes of a worker that may have lost them."""
        self.streams[pool].restarted(worker_id)
        self._routed[pool].drop(row)

    def last_errors(self) -> dict[str, str]:
        """Return the last error of each source that has one."""
        errors = {"predictor": self.footprints.last_error, "token ids": self.tokens.last_error}
        for pool, streams in self.streams.items():
            errors[f"kv_events of {pool}"] = streams.last_error
            errors[f"kv_directory of {pool}"] = streams.directory.counters.last_error
        return {source: error for source, error in errors.items() if error}

    # ------------------------------------------------------------------------------------------------------- requests

    async def describe(self, call: Call, ids: NDArray[np.int64] | None = None) -> KnownPrompt:
        """Return the signals in a request's body; token ids only if given, or if they are made in time.

        A worker is asked for them only where a directory of cached blocks or a fitted predictor needs them.
        """
        salt, question = call.salt, None
        ask = self.footprints.predictor is not None or any(streams.workers for streams in self.streams.values())
        if ids is None and (ask or self.tokens.tokenizer is not None or call.listed):
            ids, _, question = await self.tokens.ids(call.path, call.body, ask)
        if ids is not None and not any(self._guessed.values()):
            return KnownPrompt(ids, len(ids), salt)
        text = keys_of_text(call.prompt, call.prompt_bytes, salt, None if ids is None else len(ids))
        return KnownPrompt(ids, text.tokens, salt, text, question)

    def told(self, known: KnownPrompt, ids: bytes, worker_id: str) -> KnownPrompt:
        """Return the signals with the ids of a prefill's answer, unless they cannot be the prompt's."""
        learned = None if known.question is None else self.tokens.learn(known.question, ids, worker_id)
        return known if learned is None else replace(known, ids=learned, tokens=len(learned))

    def wanted(
        self, pool: Pool, call: Call, known: KnownPrompt, footprint: WireFootprint | None, prefilled: bool
    ) -> tuple[Request, str]:
        """Return the request as the router sees it, and the source of its footprint."""
        counts: NDArray[Any] | None = None
        source = "none"
        if footprint is not None:
            counts, source = footprint.counts, "answer"
        elif known is not NOTHING and self.footprints.shape is not None:
            counts, source = self.footprints.footprint(known.ids, known.tokens, call.domain)
        return Request("", known.tokens, counts, call.domain, self._cached(pool, known), prefilled), source

    def routed(self, pool: Pool, row: int, known: KnownPrompt, cached_tokens: int | None = None) -> None:
        """Note that a worker computed this prompt and found `cached_tokens` of it in its cache; None if not reported.

        The report is compared with the worker's claims. If its cache is guessed, assume that it now holds the prefix.
        """
        claims = known.claims.get(pool.name)
        if cached_tokens is not None and claims is not None and row < len(claims):
            self.claims[pool.name].answered(row, claims.item(row), cached_tokens)
        if known.text is not None and (known.ids is None or row in self._guessed[pool.name]):
            self._routed[pool.name].routed(known.text, row, time.monotonic())

    def _cached(self, pool: Pool, known: KnownPrompt) -> NDArray[np.int64] | None:
        """Return the leading tokens that each worker of the pool is believed to hold, [row]; None if unknown."""
        rows, guessed, streams = len(pool.ids), self._guessed[pool.name], self.streams[pool.name]
        believed = None
        if known.ids is not None and streams.workers:
            known.claims[pool.name] = streams.cached(known.ids, rows, known.salt)
            believed = self.claims[pool.name].discounted(known.claims[pool.name])
            if not guessed:
                return believed
        if known.text is None:
            return believed
        by_routing = self._routed[pool.name].cached(known.text, rows, time.monotonic())
        return (
            by_routing if believed is None else np.where(np.isin(np.arange(rows), list(guessed)), by_routing, believed)
        )

    def warm_up(self) -> None:
        """Compile the loops that the first requests and events would wait for: seconds, once per machine."""
        predicted.warm_up()
        if any(streams.workers for streams in self.streams.values()):
            kv_streams.compile_directory()

    async def close(self) -> None:
        self.tokens.close()
        for streams in self.streams.values():
            await streams.close()


def mask_of(placement: Placement, rank: int) -> Mask:
    """Return the experts that a rank of a placement holds, as bits. Raises ConfigError for a rank that it lacks."""
    check(0 <= rank < placement.num_ranks, f"rank={rank} must be at least 0 and below num_ranks={placement.num_ranks}")
    held = np.zeros((placement.num_layers, -(-placement.num_experts // 64) * 64), np.bool_)
    held[:, : placement.num_experts] = placement.held[rank]
    return np.packbits(held, axis=1, bitorder="little").view("<u8").astype(np.uint64)


def footprints_of(config: GatewayConfig) -> Footprints:
    """Make the predictor of footprints from the config: a fit's popularity, a token table."""
    predictor = None if config.predictor is None else open_predictor(config.predictor)
    if config.decode.fit is None:
        return Footprints(predictor=predictor)
    fit = RouterFit.load(config.decode.fit)
    shape = (fit.num_layers, fit.num_experts)
    return Footprints(shape, fit.learned.top_k, predictor=predictor, popularity=popularity_of(fit))
