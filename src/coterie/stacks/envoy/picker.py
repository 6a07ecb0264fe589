"""The picker's gRPC server: a stream for each of Envoy's requests, and health checks.

It is a front of a gateway's process: workers, health checks, signals, routers, limits, metrics and reloads are those
of the gateway.
"""

from __future__ import annotations

from coterie.errors import ConfigError, check_given
from coterie.gateway.config import PickerSection, address_of
from coterie.gateway.serve import RunningGateway
from coterie.net.grpc_server import NOT_FOUND, GrpcCall, GrpcError, GrpcServer
from coterie.stacks.envoy import untested
from coterie.stacks.envoy.exchange import Exchange
from coterie.stacks.envoy.messages import HealthCheckRequest, HealthCheckResponse, read_message

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
READY = ("", "readiness", SERVICE)
"""Services whose health is whether requests are served; `liveness` only tells that the process answers."""
SERVING, NOT_SERVING = 1, 2


class Picker:
    """Endpoint picker of a running gateway."""

    def __init__(self, running: RunningGateway) -> None:
        self.gateway, self.parts, self._counters = running.gateway, running.parts, running.server.counters
        self.section: PickerSection = check_given(self.parts.config.picker, "the config has no section picker")
        self.port = 0
        """Port in use; 0 before the start."""
        self._server: GrpcServer | None = None

    @property
    def ready(self) -> bool:
        """Whether requests are served: every worker was checked once, and the gateway does not shut down."""
        members = [member for pool in self.parts.pools.values() for member in pool.members.values()]
        return not self.gateway.draining and all(member.health.checks for member in members)

    async def start(self) -> None:
        """Serve. Raises ConfigError if the port or the certificate cannot be used."""
        for problem in untested():
            self.parts.log.warning(problem)
        handlers = {f"/{SERVICE}/Process": self._process, "/grpc.health.v1.Health/Check": self._check}
        server = GrpcServer(handlers, self._failed)
        tls, listen = self.section.tls(), self.section.listen
        try:
            self.port = await server.start(*address_of(listen), tls)
        except OSError as error:
            raise ConfigError(f"picker: listen={listen} cannot be served: {error}") from None
        self._server = server

    async def close(self, drain_s: float) -> None:
        if self._server is not None:
            await self._server.close(drain_s)

    def _failed(self, error: BaseException) -> None:
        self._counters.errors += 1
        self.parts.log.failed(error)

    async def _check(self, stream: GrpcCall) -> None:
        service = read_message(HealthCheckRequest, await stream.read() or b"").service
        if service != "liveness" and service not in READY:
            raise GrpcError(NOT_FOUND, f"services are liveness, readiness and {SERVICE}")
        healthy = service == "liveness" or self.ready
        reply = HealthCheckResponse(status=SERVING if healthy else NOT_SERVING)
        await stream.write(reply.SerializeToString())

    async def _process(self, stream: GrpcCall) -> None:
        await Exchange(self.gateway, self.section, stream).run()
