"""What is known of a request before it runs: its token ids, who has its prefix cached, which experts it will use.

All that is unknown is left out, and routers do without: a gateway serves before it routes well.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import CoterieError
from coterie.gateway.config import GatewayConfig, WorkerEntry
from coterie.gateway.exchange.call import Call
from coterie.gateway.fleet.pool import Held
from coterie.gateway.signals.kv_streams import KvStreams, Secure
from coterie.gateway.signals.model_tokenizers import load_tokenizer
from coterie.gateway.signals.tokens import TokenService
from coterie.routing.base import Request
from coterie.wire.footprints import WireFootprint


class Known(NamedTuple):
    """What is known of one request."""

    ids: NDArray[np.int64] | None = None
    tokens: int = 0
    """Prompt tokens; 0 if unknown."""
    salt: str | None = None


NOTHING = Known()


class Knowledge:
    """Of one gateway; belongs to its event loop."""

    def __init__(self, config: GatewayConfig, pools: list[str], secret: str | None = None) -> None:
        self.config = config
        self._secret = secret
        reason, tokenizer = "no tokenizer is configured", None
        if config.tokenizer is not None:
            try:
                tokenizer = load_tokenizer(config.tokenizer)
            except CoterieError as error:
                reason = str(error)
        self.tokens = TokenService(tokenizer, reason, deadline_s=config.limits.tokenise_s)
        self.streams = {name: KvStreams(block_size=config.block_size) for name in pools}

    async def close(self) -> None:
        self.tokens.close()
        for streams in self.streams.values():
            await streams.close()
