"""Swap the routers of a Coterie gateway between blocks of a comparison, and restore the original at its end."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from coterie.errors import ConfigError, CoterieError, UnavailableError
from coterie.net.http_client import Client

DECODE = "decode"


async def routers_in_use(gateway: Client) -> dict[str, str]:
    """Return pool → router in use; raise if the server is not a Coterie gateway."""
    status, text = await gateway.call("GET", "/routers")
    try:
        answer = json.loads(text)
        pools = answer.get("pools", answer)
        in_use = {name: str(spec["router"]) for name, spec in pools.items()}
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        in_use = {}
    if status != 200 or not in_use:
        hint = "; an admin key is needed" if status in (401, 403) else ""
        raise UnavailableError(
            f"{gateway.url}/routers answers HTTP {status}, not the routers of a Coterie gateway{hint}"
        )
    return in_use


async def use_router(gateway: Client, pool: str, wanted: str, spec: Mapping[str, Any] | None = None) -> None:
    """Swap a pool's router; raise with the gateway's reason if it refuses the name or a setting.

    `spec` holds further configuration of the router, such as the file of its fit.
    """
    status, text = await gateway.call("PUT", f"/routers/{pool}", {**(spec or {}), "router": wanted})
    if status == 200:
        return
    try:
        error = json.loads(text)["error"]
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, RecursionError, LookupError, TypeError):
        pass
    wrong = ConfigError if status in (400, 404, 422) else UnavailableError
    raise wrong(f"{gateway.url} does not take router {wanted!r} for pool {pool!r}: HTTP {status}: {text[:300]}")


@asynccontextmanager
async def put_back(gateway: Client, pool: str | None = None) -> AsyncIterator[str]:
    """Yield the pool (None: decode, or the only pool) and restore its router at the end, also after an exception."""
    in_use = await routers_in_use(gateway)
    if pool is None:
        pool = DECODE if DECODE in in_use else next(iter(in_use)) if len(in_use) == 1 else ""
    if pool not in in_use:
        raise ConfigError(f"pool={pool!r} must be one of {', '.join(in_use)}")
    try:
        yield pool
    except BaseException:
        with suppress(CoterieError):  # the exception of the block matters more than a failure to restore
            await use_router(gateway, pool, in_use[pool])
        raise
    await use_router(gateway, pool, in_use[pool])
