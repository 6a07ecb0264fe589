"""A gateway with an endpoint picker behind a real Envoy, for tests: in this process, on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from canned_workers import Canned
from coterie.gateway.config import GatewayConfig, PickerSection
from coterie.stacks.envoy import picker_class
from coterie.stacks.envoy.picker import Picker
from coterie.wire.handoff import prefill_body
from envoys import Envoy, envoy
from gateway_runs import Client, Got, Run, config_of, gateway


class Picked(NamedTuple):
    client: Client
    """Asks Envoy."""
    found: Run
    picker: Picker
    proxy: Envoy

    def decisions(self, pool: str = "decode") -> list[Any]:
        parts = self.found.running.parts
        parts.watcher.catch_up()
        return parts.decisions.last(1000, pool=pool)


async def ready(picker: Picker) -> None:
    while not picker.ready:
        await asyncio.sleep(0.005)


@asynccontextmanager
async def behind_envoy(folder: Path, config: GatewayConfig, access: Any = None, **more: Any) -> AsyncIterator[Picked]:
    """Envoy in front of the config's workers, which asks the picker of a gateway with that config."""
    async with gateway(config, access=access, front=picker_class()) as found:
        picker = found.running.front
        assert isinstance(picker, Picker)
        endpoints = [entry.url.removeprefix("http://") for entry in config.workers]
        async with envoy(folder, endpoints, [picker.port], **more) as proxy:
            client = Client(proxy.url)
            try:
                await ready(picker)
                yield Picked(client, found, picker, proxy)
            finally:
                await client.upstream.close()


def config_with(workers: Sequence[Canned], mode: str = "pick", **more: Any) -> GatewayConfig:
    """Config with a picker; the worker `p` prefills where the mode needs that."""
    picker = PickerSection(listen="127.0.0.1:0", mode=mode)  # type: ignore[arg-type]
    if mode == "pick":
        return config_of(workers, picker=picker, **more)
    roles = ["prefill" if worker.name == "p" else "decode" for worker in workers]
    return config_of(workers, roles, picker=picker, handshake="vllm", **more)


async def coordinate(client: Client, path: str, body: dict[str, Any]) -> Got:
    """Send the two requests that llm-d's Coordinator sends, and return the second's answer."""
    asked = prefill_body(body)
    first = await client.ask("POST", path, asked, [(b"epp-profile", b"prefill")])
    assert first.status == 200, first
    params = (first.json["kv_transfer_params"] or {}) | {"do_remote_decode": False, "do_remote_prefill": True}
    return await client.ask("POST", path, {**body, "kv_transfer_params": params}, [(b"epp-profile", b"decode")])
