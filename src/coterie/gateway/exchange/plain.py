"""Workers that serve requests alone: one pool, one choice."""

from __future__ import annotations

import time

from coterie.gateway.config import GatewayConfig
from coterie.gateway.exchange.call import Call, Outcome, Sink
from coterie.gateway.exchange.flow import Flow, Informer, Observer, outcome
from coterie.gateway.exchange.pool import Pool
from coterie.gateway.signals.knowledge import KnownPrompt


class PlainFlow(Flow):
    def __init__(self, pool: Pool, config: GatewayConfig, knowledge: Informer, observer: Observer) -> None:
        super().__init__(config, knowledge, observer)
        self.pool = pool

    async def serve(self, call: Call, sink: Sink, known: KnownPrompt) -> Outcome:
        started = time.monotonic()
        delivered = await self.deliver(self.pool, call, known, sink)
        if delivered.status == 200:
            self.knowledge.routed(self.pool, delivered.sent.choice.row, known)
        return outcome(delivered, call, known, started)
