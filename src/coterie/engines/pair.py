"""Serve a request by a pair: prefill on one worker, decode on another chosen when the first has answered.

A client's view of vLLM's handshake (:mod:`coterie.wire.handoff`), with what the footprint is for: `choose` sees it
before the decode worker is picked. A prefill worker that fails costs time, not the request: the decode worker then
computes the prompt itself. Counters say how often.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from coterie.errors import CoterieError, InputError
from coterie.net.http_client import Answer, Client
from coterie.wire.footprints import WireFootprint, footprint_of, without_footprint
from coterie.wire.handoff import decode_body, prefill_body


@dataclass(slots=True)
class PairCounts:
    handoffs: int = 0
    footprints: int = 0
    """Handoffs that came with one."""
    damaged: int = 0
    """Footprints that could not be read."""
    prefill_failures: int = 0
    """Requests whose prefill worker failed; decoded all the same."""
    problems: list[str] = field(default_factory=list)
    """Why, the first few."""


class Handoff(NamedTuple):
    answer: Answer
    """The decode worker's."""
    footprint: WireFootprint | None
    decoder: int


class Pair:
    """One prefill worker and several decoders. Close the clients yourself."""

    def __init__(
        self, prefill: Client, decoders: list[Client], choose: Callable[[WireFootprint | None], int] | None = None
    ) -> None:
        self._prefill, self._decoders = prefill, decoders
        self._choose = choose or (lambda _: self.counts.handoffs % len(decoders))
        self.counts = PairCounts()

    async def serve(self, path: str, body: Mapping[str, Any]) -> Handoff:
        """One request, not streamed."""
        request = {"request_id": uuid.uuid4().hex, **body}
        first = await self._prefill.post(path, prefill_body(request))
        params: dict[str, Any] | None = None
        footprint = None
        if first.problem is None:
            self.counts.handoffs += 1
            params = first.body.get("kv_transfer_params")
            footprint = self._footprint(params)
        else:
            self.counts.prefill_failures += 1
            self._note(first.problem)
        decoder = self._choose(footprint)
        answer = await self._decoders[decoder].post(path, decode_body(request, without_footprint(params or {})))
        return Handoff(answer, footprint, decoder)

    def _footprint(self, params: Mapping[str, Any] | None) -> WireFootprint | None:
        try:
            footprint = footprint_of(params)
        except InputError as error:
            self.counts.damaged += 1
            self._note(str(error))
            return None
        self.counts.footprints += footprint is not None
        return footprint

    def _note(self, problem: str | CoterieError) -> None:
        if len(self.counts.problems) < 5:
            self.counts.problems.append(str(problem))
