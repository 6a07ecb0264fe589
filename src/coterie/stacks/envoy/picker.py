"""The picker's gRPC server: a stream for each of Envoy's requests, and health checks.

It is a front of a gateway's process: workers, health checks, signals, routers, limits, metrics and reloads are those
of the gateway.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from coterie.errors import ConfigError, check_given
from coterie.gateway.config import PickerSection, address_of
from coterie.gateway.serve import RunningGateway
from coterie.net.access import Address
from coterie.stacks.envoy import untested
from coterie.stacks.envoy.exchange import Exchange
from coterie.stacks.envoy.messages import HealthCheckRequest, HealthCheckResponse, ProcessingRequest, ProcessingResponse

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
READY = ("", "readiness", SERVICE)
"""Services whose health is whether requests are served; `liveness` only tells that the process answers."""
SERVING, NOT_SERVING = 1, 2


class Picker:
    """Endpoint picker of a running gateway."""

    def __init__(self, running: RunningGateway) -> None:
        self.gateway, self.parts = running.gateway, running.parts
        self.section: PickerSection = check_given(self.parts.config.picker, "the config has no section picker")
        self.port = 0
        """Port in use; 0 before the start."""
        self._server: grpc.aio.Server | None = None

    @property
    def ready(self) -> bool:
        """Whether requests are served: every worker was checked once, and the gateway does not shut down."""
        members = [member for pool in self.parts.pools.values() for member in pool.members.values()]
        return not self.gateway.draining and all(member.health.checks for member in members)

    async def start(self) -> None:
        """Serve. Raises ConfigError if the port or the certificate cannot be used."""
        for problem in untested():
            self.parts.log.warning(problem)
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        process = grpc.stream_stream_rpc_method_handler(
            self._process, ProcessingRequest.FromString, ProcessingResponse.SerializeToString
        )
        check = grpc.unary_unary_rpc_method_handler(
            self._check, HealthCheckRequest.FromString, HealthCheckResponse.SerializeToString
        )
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(SERVICE, {"Process": process}),
                grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check}),
            )
        )
        address, files = str(Address(*address_of(self.section.listen))), (self.section.key, self.section.certificate)
        try:
            if files[0] is None:
                self.port = self._server.add_insecure_port(address)
            else:
                pair = tuple(Path(file or "").read_bytes() for file in files)
                self.port = self._server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        except (RuntimeError, OSError) as error:
            raise ConfigError(f"picker: listen={self.section.listen} cannot be served: {error}") from None
        await self._server.start()

    async def close(self, drain_s: float) -> None:
        if self._server is not None:
            await self._server.stop(drain_s)

    async def _check(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        if request.service == "liveness":
            return HealthCheckResponse(status=SERVING)
        if request.service not in READY:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"services are liveness, readiness and {SERVICE}")
        return HealthCheckResponse(status=SERVING if self.ready else NOT_SERVING)

    async def _process(self, _: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        task = asyncio.current_task()
        assert task is not None
        await Exchange(self.gateway, self.section, context, task).run()
