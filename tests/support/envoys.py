"""A real Envoy that asks pickers, on this machine: one listener with them and one without."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from coterie.net.http1.upstream import Upstream, UpstreamError

BINARY = Path(sys.executable).with_name("envoy")
needs_envoy = pytest.mark.skipif(not BINARY.exists(), reason="Envoy is not installed (make test-scale installs it)")
SUBSET_HEADER = "x-test-subset"
"""Header that becomes the metadata by which a gateway names the endpoints to choose from."""
EXTENSIONS = "type.googleapis.com/envoy.extensions."


class Envoy(NamedTuple):
    url: str
    """Where requests are picked for."""
    plain_url: str
    """Where requests are balanced by Envoy alone."""
    process: subprocess.Popen[bytes]


def config_of(workers: Sequence[str], pickers: Sequence[int], fails_open: bool = False) -> dict[str, Any]:
    """Envoy's config: `workers` are HOST:PORT, `pickers` ports."""
    processing = {
        "request_header_mode": "SEND",
        "response_header_mode": "SEND",
        "request_body_mode": "FULL_DUPLEX_STREAMED",
        "response_body_mode": "FULL_DUPLEX_STREAMED",
        "request_trailer_mode": "SEND",
        "response_trailer_mode": "SEND",
    }
    hint = {"metadata_namespace": "envoy.lb.subset_hint", "key": "x-gateway-destination-endpoint-subset"}
    to_metadata = {
        "@type": EXTENSIONS + "filters.http.header_to_metadata.v3.Config",
        "request_rules": [{"header": SUBSET_HEADER, "on_header_present": {**hint, "type": "STRING"}, "remove": True}],
    }
    asks = {
        "@type": EXTENSIONS + "filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "pickers"}, "timeout": "10s"},
        "processing_mode": processing,
        "message_timeout": "60s",
        "failure_mode_allow": fails_open,
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
        "response_attributes": ["upstream.address"],
    }
    filters = [{"name": "to_metadata", "typed_config": to_metadata}, {"name": "picker", "typed_config": asks}]
    override = {
        "@type": EXTENSIONS + "load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"header": "x-gateway-destination-endpoint"}],
        "fallback_policy": {"policies": [_named("load_balancing_policies.round_robin.v3.RoundRobin")]},
    }
    picked = {"policies": [{"typed_extension_config": {"name": "override", "typed_config": override}}]}
    even = {"policies": [_named("load_balancing_policies.round_robin.v3.RoundRobin")]}
    options = "upstreams.http.v3.HttpProtocolOptions"
    http2 = {"@type": EXTENSIONS + options, "explicit_http_config": {"http2_protocol_options": {}}}
    clusters = [
        {**_cluster("picked", workers), "load_balancing_policy": picked},
        {**_cluster("plain", workers), "load_balancing_policy": even},
        {
            **_cluster("pickers", [f"127.0.0.1:{port}" for port in pickers]),
            "typed_extension_protocol_options": {"envoy.extensions." + options: http2},
            # A dead picker must be known before a request is sent to it: what it was sent, Envoy cannot send elsewhere.
            "health_checks": [
                {
                    "timeout": "30s",
                    "interval": "0.1s",
                    "no_traffic_interval": "0.1s",
                    "unhealthy_threshold": 1,
                    "healthy_threshold": 1,
                    "grpc_health_check": {"service_name": "envoy.service.ext_proc.v3.ExternalProcessor"},
                }
            ],
            "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        },
    ]
    return {
        "admin": {"address": _address("127.0.0.1:0")},
        "static_resources": {"listeners": [_listener("picked", filters), _listener("plain", [])], "clusters": clusters},
    }


def _named(kind: str) -> dict[str, Any]:
    return {"typed_extension_config": {"name": kind, "typed_config": {"@type": EXTENSIONS + kind}}}


def _address(endpoint: str) -> dict[str, Any]:
    host, _, port = endpoint.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def _cluster(name: str, endpoints: Sequence[str]) -> dict[str, Any]:
    hosts = [{"endpoint": {"address": _address(endpoint)}} for endpoint in endpoints]
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "2s",
        "circuit_breakers": {"thresholds": [{"max_retries": 1024}]},  # else Envoy retries three requests at a time
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": hosts}]},
    }


def _listener(name: str, filters: Sequence[dict[str, Any]]) -> dict[str, Any]:
    router = {"name": "router", "typed_config": {"@type": EXTENSIONS + "filters.http.router.v3.Router"}}
    retries = {"retry_on": "connect-failure,refused-stream", "num_retries": 2}
    route = {"match": {"prefix": "/"}, "route": {"cluster": name, "timeout": "0s", "retry_policy": retries}}
    manager = {
        "@type": EXTENSIONS + "filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": name,
        "route_config": {"virtual_hosts": [{"name": name, "domains": ["*"], "routes": [route]}]},
        "http_filters": [*filters, router],
    }
    return {
        "name": name,
        "address": _address("127.0.0.1:0"),
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }


@asynccontextmanager
async def envoy(folder: Path, workers: Sequence[str], pickers: Sequence[int], **more: Any) -> AsyncIterator[Envoy]:
    """Run Envoy in front of `workers`."""
    config, admin = folder / "envoy.json", folder / "admin"
    config.write_bytes(msgspec.json.encode(config_of(workers, pickers, **more)))
    command = [str(BINARY), "-c", str(config), "--admin-address-path", str(admin), "--use-dynamic-base-id"]
    with (folder / "envoy.log").open("wb") as log:
        process = subprocess.Popen([*command, "--concurrency", "1", "-l", "warning"], stdout=log, stderr=log)
    try:
        while not (admin.exists() and admin.read_text()):
            assert process.poll() is None, (folder / "envoy.log").read_text()
            await asyncio.sleep(0.02)
        ports = await _ports(f"http://{admin.read_text().strip()}")
        yield Envoy(f"http://127.0.0.1:{ports['picked']}", f"http://127.0.0.1:{ports['plain']}", process)
    finally:
        process.kill()
        process.wait()


async def _ports(admin_url: str) -> dict[str, int]:
    """Port of each listener, once Envoy serves."""
    upstream = Upstream(admin_url)
    try:
        while True:
            try:
                if (await upstream.send("GET", "/ready", [])).status == 200:
                    answer = await upstream.send("GET", "/listeners?format=json", [])
                    listeners = msgspec.json.decode(await answer.read())["listener_statuses"]
                    address = "local_address"
                    return {item["name"]: item[address]["socket_address"]["port_value"] for item in listeners}
            except UpstreamError:
                pass
            await asyncio.sleep(0.02)
    finally:
        await upstream.close()
