"""Canned workers in pairs: prefill answers with KV to fetch and footprints, true, damaged or lying."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from canned_workers import Act, Canned, canned_workers, completion
from coterie.gateway.config import GatewayConfig
from coterie.net.http1.messages import HttpRequest
from coterie.net.http1.responder import Responder
from coterie.wire.footprints import WireFootprint, attach_footprint
from gateway_runs import Run, config_of, gateway
from http1_peers import until
from routing_cases import EXPERTS, LAYERS


def params_of(request: HttpRequest, grant: bool = True, footprint: WireFootprint | None = None) -> dict[str, Any]:
    """`kv_transfer_params` of an answer, for the id that the request came under."""
    name = (request.header(b"x-request-id") or b"").decode()
    params: dict[str, Any] = {"do_remote_prefill": True, "remote_request_id": f"cmpl-{name}", "remote_port": 1}
    if grant:
        params["coterie_grant"] = "signed"
    if footprint is not None:
        attach_footprint(params, footprint)
    return params


def footprint_on(experts: tuple[int, ...], tokens: int = 5) -> WireFootprint:
    """Every token takes these experts, in every layer."""
    counts = np.zeros((LAYERS, EXPERTS), np.uint8)
    counts[:, list(experts)] = tokens
    return WireFootprint(counts, tuple(range(LAYERS)), tokens)


def prefills(grant: bool = True, footprint: Callable[[Any], WireFootprint | None] | None = None, **more: Any) -> Act:
    """A prefill worker; `footprint` is made of the body, `more` goes into the answer as it is."""

    async def act(worker: Canned, request: HttpRequest, responder: Responder) -> None:
        if request.method == "DELETE":
            responder.send(200)
            return
        body = msgspec.json.decode(request.body)
        found = None if footprint is None else footprint(body)
        usage = {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}
        fields = {"usage": usage, "kv_transfer_params": params_of(request, grant, found), **more}
        responder.send(200, msgspec.json.encode(completion(worker, **fields)))

    return act


@asynccontextmanager
async def vllm_pair(
    *decoders: str,
    prefill: Act | None = None,
    prefillers: tuple[str, ...] = ("p",),
    wants: Mapping[str, bool] | None = None,
    **more: Any,
) -> AsyncIterator[tuple[Run, dict[str, Canned]]]:
    """A gateway in front of prefill and decode workers; `more` goes into its config.

    `wants` says which decode workers get footprints.
    """
    acts = dict.fromkeys(prefillers, prefill or prefills())
    async with canned_workers(*prefillers, *decoders, **acts) as workers:
        roles = ["prefill"] * len(prefillers) + ["decode"] * len(decoders)
        config: GatewayConfig = config_of(workers, roles, handshake="vllm", **more)
        asked = [replace(entry, footprints=(wants or {}).get(entry.id, False)) for entry in config.workers]
        config = replace(config, workers=asked)
        async with gateway(config) as found:
            await until(lambda: found.open("decode") == set(decoders) and found.open("prefill") == set(prefillers))
            yield found, {worker.name: worker for worker in workers}


def deleted(worker: Canned) -> list[str]:
    """Keys of KV that a worker was told to drop."""
    return [one.path.removeprefix("/kv/") for one in worker.asked if one.method == "DELETE"]
