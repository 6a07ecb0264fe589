"""Fetch KV from another worker: only from configured peers, with the fleet's grant, and checked before use.

The location of the KV is in the request body, which comes from a client. Therefore the address must be a peer's, the
grant must be signed with the fleet's secret for this exact prompt, redirects are not followed, the answer is not
decompressed, and no more bytes are read than this prompt's KV can take. If anything fails, the prompt is computed on
this worker: a failed fetch costs time but never the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from coterie.engines.worker.config import WorkerConfig
from coterie.engines.worker.engine import Engine
from coterie.engines.worker.protocol import Remote
from coterie.engines.worker.transfer import GRANT_HEADER, Prefilled, check_prefilled, most_bytes, prompt_digest
from coterie.net.access import Address, bearer, is_loopback, parse_address
from coterie.net.http1 import Headers, Upstream, UpstreamError, UpstreamLimits

CONNECT_S = 2.0
DROP_S = 5.0
"""Seconds for telling a peer to drop KV that will not be fetched; the KV expires there in any case."""


class Fetcher:
    def __init__(self, engine: Engine, config: WorkerConfig) -> None:
        self._engine, self._config = engine, config
        self._peers = frozenset(parse_address(peer, "peer") for peer in config.peers)
        self._limits = UpstreamLimits(connect_s=CONNECT_S, head_s=config.fetch_timeout_s, idle_s=config.fetch_timeout_s)
        self._drops: set[asyncio.Task[None]] = set()

    async def fetch(self, remote: Remote, prompt: Sequence[int], salt: str | None) -> Prefilled | None:
        """Fetch the KV of this prompt; None if that fails, and this worker then computes it."""
        outcome = "refused"
        try:
            granted = self._engine.grants.valid(remote.grant, remote.key, prompt_digest(prompt, salt))
            if granted and self._allowed(remote.address):
                outcome = "unreachable"
                data = await self._read(remote, most_bytes(self._engine.model, len(prompt)))
                outcome = "missing"
                if data is not None:
                    outcome = "damaged"
                    prefilled = await asyncio.to_thread(self._engine.codec().from_bytes, data)
                    outcome = "mismatch"
                    check_prefilled(prefilled, prompt, self._engine.model)
                    outcome = "ok"
                    self._engine.metrics.add("kv_fetch_bytes_total", by=len(data))
                    return prefilled
        except asyncio.CancelledError:  # the client has disconnected: the KV will not be fetched
            self._drop(remote)
            outcome = "cancelled"
            raise
        except UpstreamError as error:
            outcome = "damaged" if error.answered else "unreachable"
        except Exception:  # a bad answer of a peer must not fail the request; the counter records it
            return None
        finally:
            self._engine.metrics.add("kv_fetch_total", outcome)
        return None

    async def close(self) -> None:
        """Wait until the pending drop requests to peers are sent."""
        await asyncio.gather(*self._drops, return_exceptions=True)

    def _allowed(self, address: Address) -> bool:
        own_machine = self._config.fleet_secret is None and is_loopback(address.host)
        return address in self._peers if self._peers else own_machine

    async def _read(self, remote: Remote, most: int) -> bytes | None:
        """Return the body of the peer's answer; None if the peer does not have this KV."""
        async with asyncio.timeout(self._config.fetch_timeout_s), self._peer(remote.address) as peer:
            answer = await peer.send("GET", f"/kv/{remote.key}", self._headers(remote))
            return await answer.read(most) if answer.status == 200 else None

    @contextlib.asynccontextmanager
    async def _peer(self, address: Address) -> AsyncIterator[Upstream]:
        """Open a connection for this fetch only: the peer may close a kept-alive connection just as it is reused."""
        peer = Upstream(f"http://{address}", self._limits)
        try:
            yield peer
        finally:
            await peer.close()

    def _headers(self, remote: Remote) -> Headers:
        grant = {} if remote.grant is None else {GRANT_HEADER: remote.grant}
        headers = {**bearer(self._config.worker_key), **grant}
        return [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    def _drop(self, remote: Remote) -> None:
        async def drop() -> None:
            with contextlib.suppress(UpstreamError, TimeoutError):
                async with asyncio.timeout(DROP_S), self._peer(remote.address) as peer:
                    await (await peer.send("DELETE", f"/kv/{remote.key}", self._headers(remote))).read()

        task = asyncio.create_task(drop())
        self._drops.add(task)
        task.add_done_callback(self._drops.discard)
