"""The picker over gRPC itself: health names, TLS, metadata, several messages, what Envoy seldom sends."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("hpack", reason="the picker needs coterie[envoy]")

import grpc
import grpc.aio

from canned_workers import canned_workers, held
from coterie.errors import ConfigError
from coterie.gateway.config import GatewayConfig, PickerSection
from coterie.stacks import envoy
from coterie.stacks.envoy.messages import (
    CHUNK_BYTES,
    MESSAGES,
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingRequest,
    ProcessingResponse,
    body_replies,
)
from coterie.stacks.envoy.picker import SERVICE, Picker
from gateway_runs import Run, config_of, gateway, run, settled
from http1_peers import until
from picked import config_with, ready

pytestmark = pytest.mark.scale


class Asked(NamedTuple):
    channel: grpc.aio.Channel
    picker: Picker
    found: Run

    def stream(self) -> Any:
        method = self.channel.stream_stream(
            f"/{SERVICE}/Process", ProcessingRequest.SerializeToString, ProcessingResponse.FromString
        )
        return method()

    async def health(self, service: str) -> int:
        method = self.channel.unary_unary(
            "/grpc.health.v1.Health/Check", HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
        )
        return int((await method(HealthCheckRequest(service=service))).status)


@asynccontextmanager
async def asked(config: GatewayConfig) -> AsyncIterator[Asked]:
    async with gateway(config, front=envoy.picker_class()) as found:
        picker = found.running.front
        assert isinstance(picker, Picker)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{picker.port}") as channel:
            yield Asked(channel, picker, found)


def head(headers: Mapping[str, str] = {}) -> Any:
    message = ProcessingRequest()
    for name, value in {":path": "/v1/completions", ":method": "POST", **headers}.items():
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    return message


def body(data: bytes, end: bool = True) -> Any:
    return ProcessingRequest(request_body=MESSAGES["HttpBody"](body=data, end_of_stream=end))


def answer(status: str, data: bytes) -> list[Any]:
    first = ProcessingRequest()
    first.response_headers.headers.headers.add(key=":status", raw_value=status.encode())
    return [first, ProcessingRequest(response_body=MESSAGES["HttpBody"](body=data, end_of_stream=True))]


def test_health_names() -> None:
    async def test() -> None:
        async with canned_workers("a") as workers, asked(config_with(workers)) as found:
            await ready(found.picker)
            for service in ("liveness", "readiness", SERVICE, ""):
                assert await found.health(service) == 1
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await found.health("else")
            assert raised.value.code() == grpc.StatusCode.NOT_FOUND
            found.found.running.gateway.draining = True
            assert [await found.health(service) for service in ("liveness", "readiness", SERVICE)] == [1, 2, 2]
            stream = found.stream()
            await stream.write(head())
            assert (await stream.read()).immediate_response.status.code == 503
            stream.cancel()

    run(test)


def test_a_request_that_the_end_of_the_drain_cuts_did_not_leave() -> None:
    async def test() -> None:
        async with canned_workers("a") as workers, asked(config_with(workers)) as found:
            await ready(found.picker)
            for leaves in (True, False):
                stream = found.stream()
                await stream.write(head())
                await stream.write(body(b'{"prompt": "x"}'))
                assert (await stream.read()).HasField("request_headers")
                if leaves:
                    stream.cancel()
                    await settled(found.found)
            found.found.running.stop(asyncio.Event())
            await found.found.running.close(0)
            ended = 'coterie_gateway_requests_total{outcome="%s",path="/v1/completions"}'
            assert [found.found.metrics[ended % one] for one in ("cancelled", "drained")] == [1, 1]

    run(test)


def test_bytes_that_are_no_message_are_the_senders_fault() -> None:
    async def test() -> None:
        async with canned_workers("a") as workers, asked(config_with(workers)) as found:
            await ready(found.picker)
            for method in (f"/{SERVICE}/Process", "/grpc.health.v1.Health/Check"):
                for message in (b"\xff", b"\x0a\xff") if "Health" in method else (b"\xff", b"\x12\xff", b""):
                    stream = found.channel.stream_stream(method)()
                    await stream.write(message)
                    await stream.done_writing()
                    assert await stream.code() == grpc.StatusCode.INVALID_ARGUMENT, (method, message)
            await settled(found.found)
            assert found.found.metrics['coterie_gateway_errors_total{kind="handler"}'] == 0

    run(test)


def test_not_ready_before_each_worker_was_checked() -> None:
    async def test() -> None:
        async with canned_workers("a") as workers, asked(config_with(workers)) as found:
            await ready(found.picker)
            found.found.running.parts.pools["decode"].members["a"].health.checks = 0
            assert [await found.health(service) for service in ("readiness", "liveness")] == [2, 1]

    run(test)


def test_header_and_metadata_name_the_same_endpoints_best_first() -> None:
    async def test() -> None:
        async with canned_workers("a", "b", "c") as workers:
            picker = PickerSection(listen="127.0.0.1:0", endpoints=2)
            async with asked(config_of(workers, picker=picker)) as found:
                await until(lambda: found.found.open("decode") == {"a", "b", "c"})
                stream = found.stream()
                await stream.write(head())
                await stream.write(body(b'{"prompt": "x"}'))
                reply = await stream.read()
                mutation = reply.request_headers.response.header_mutation
                set_to = {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}
                named = reply.dynamic_metadata.fields["envoy.lb"].struct_value
                value = named.fields["x-gateway-destination-endpoint"].string_value
                assert set_to["x-gateway-destination-endpoint"] == value
                assert set_to["content-length"] == "15"
                assert list(mutation.remove_headers) == ["x-data-parallel-rank"]
                known = {worker.url.removeprefix("http://") for worker in workers}
                first, second = value.split(",")
                assert {first, second} < known
                parts = found.found.running.parts
                parts.watcher.catch_up()
                (decision,) = parts.decisions.last()
                assert parts.pools["decode"].members[decision["worker"]].entry.url == f"http://{first}"
                stream.cancel()
                await settled(found.found)

    run(test)


def test_a_subset_in_metadata_may_be_a_list_and_empty() -> None:
    async def test() -> None:
        async with canned_workers("a", "b") as workers, asked(config_with(workers)) as found:
            await until(lambda: found.found.open("decode") == {"a", "b"})
            only = workers[1].url.removeprefix("http://")
            for allowed, status in (([only], 0), ([], 503)):
                first = head()
                hint = first.metadata_context.filter_metadata.add(key="envoy.lb.subset_hint").value
                values = hint.fields["x-gateway-destination-endpoint-subset"].list_value
                values.SetInParent()
                for endpoint in allowed:
                    values.values.add(string_value=endpoint)
                stream = found.stream()
                await stream.write(first)
                await stream.write(body(b'{"prompt": "x"}'))
                reply = await stream.read()
                assert reply.immediate_response.status.code == status
                if not status:
                    named = reply.dynamic_metadata.fields["envoy.lb"].struct_value
                    assert named.fields["x-gateway-destination-endpoint"].string_value == only
                stream.cancel()
            await settled(found.found)

    run(test)


def test_a_body_in_pieces_and_trailers() -> None:
    async def test() -> None:
        async with canned_workers("a") as workers, asked(config_with(workers)) as found:
            await until(lambda: found.found.open("decode") == {"a"})
            stream = found.stream()
            data = b'{"prompt": "%b"}' % (b"x" * 100_000)
            await stream.write(head())
            for start in range(0, len(data), 40_000):
                await stream.write(body(data[start : start + 40_000], end=False))
            await stream.write(ProcessingRequest(request_trailers=MESSAGES["HttpTrailers"]()))
            assert (await stream.read()).HasField("request_headers")
            pieces = [await stream.read() for _ in range(2)]
            streamed = [piece.request_body.response.body_mutation.streamed_response for piece in pieces]
            assert b"".join(piece.body for piece in streamed) == data
            assert max(len(piece.body) for piece in streamed) == CHUNK_BYTES
            assert not any(piece.end_of_stream for piece in streamed)
            assert (await stream.read()).HasField("request_trailers")
            for part in answer("200", b'{"usage": {"prompt_tokens": 3, "completion_tokens": 2}}'):
                await stream.write(part)
                await stream.read()
            assert await stream.read() is grpc.aio.EOF
            await settled(found.found)

    run(test)


def test_the_load_moves_to_the_endpoint_that_served() -> None:
    """The protocol names it in the metadata of the answer's head."""

    async def test() -> None:
        async with canned_workers("a", "b") as workers, asked(config_with(workers)) as found:
            await until(lambda: found.found.open("decode") == {"a", "b"})
            stream = found.stream()
            await stream.write(head())
            await stream.write(body(b'{"prompt": "x", "stream": true}'))
            await stream.read()
            await stream.read()
            keeper = found.found.running.parts.pools["decode"].keeper
            (choice,) = keeper.requests.values()
            other = next(worker for worker in workers if worker.name != choice.worker_id)
            for endpoint, where in (("10.0.0.1:80", choice.worker_id), (other.url[7:], other.name)):
                first, _ = answer("200", b"")
                served = first.metadata_context.filter_metadata.add(key="envoy.lb").value
                served.fields["x-gateway-destination-endpoint-served"].string_value = endpoint
                await stream.write(first)
                await stream.read()
                (choice,) = keeper.requests.values()
                assert choice.worker_id == where
            stream.cancel()
            await settled(found.found)

    run(test)


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_stream_may_end_anywhere(after: int) -> None:
    async def test() -> None:
        async with canned_workers("a", a=held) as workers, asked(config_with(workers)) as found:
            await until(lambda: found.found.open("decode") == {"a"})
            for cancelled in (True, False):
                stream = found.stream()
                for part in [head(), body(b'{"prompt": "x"}'), answer("200", b"")[0]][:after]:
                    await stream.write(part)
                if after == 2:
                    await stream.read()
                if cancelled:
                    stream.cancel()
                else:
                    await stream.done_writing()
                    while await stream.read() is not grpc.aio.EOF:
                        pass
                await settled(found.found)
            stream = found.stream()
            await stream.write(head())
            await stream.write(body(b'{"prompt": "x"}'))
            assert (await stream.read()).HasField("request_headers"), "the next request is answered"
            stream.cancel()
            await settled(found.found)

    run(test)


def test_tls(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("key.pem", "cert.pem")]
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    )
    subprocess.run([*command.split(), "-keyout", files[0], "-out", files[1]], check=True, capture_output=True)

    async def test() -> None:
        async with canned_workers("a") as workers:
            picker = PickerSection(listen="127.0.0.1:0", key=files[0], certificate=files[1])
            async with gateway(config_of(workers, picker=picker), front=envoy.picker_class()) as found:
                assert isinstance(found.running.front, Picker)
                credentials = grpc.ssl_channel_credentials(Path(files[1]).read_bytes())
                address = f"localhost:{found.running.front.port}"
                async with grpc.aio.secure_channel(address, credentials) as channel:
                    assert await Asked(channel, found.running.front, found).health("liveness") == 1

    run(test)


def test_a_port_in_use_is_one_line() -> None:
    async def test() -> None:
        async with canned_workers("a") as workers, asked(config_with(workers)) as found:
            taken = PickerSection(listen=f"127.0.0.1:{found.picker.port}")
            with pytest.raises(ConfigError, match="cannot be served"):
                async with gateway(config_of(workers, picker=taken), front=envoy.picker_class()):
                    pass

    run(test)


def test_an_untested_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert envoy.untested() == []
    monkeypatch.setattr(envoy, "version", lambda _: "99.1.2")
    assert [problem.split()[1:3] for problem in envoy.untested()] == [["hpack", "99.1.2"], ["protobuf", "99.1.2"]]
    monkeypatch.setattr(envoy, "version", lambda _: "main")
    assert len(envoy.untested()) == 2


def test_a_body_is_cut_into_messages_and_an_empty_one_is_sent() -> None:
    for size in (0, 1, CHUNK_BYTES, CHUNK_BYTES + 1):
        replies = [
            ProcessingResponse.FromString(reply).request_body.response.body_mutation.streamed_response
            for reply in body_replies("request_body", b"x" * size, True)
        ]
        assert sum(len(reply.body) for reply in replies) == size
        assert [reply.end_of_stream for reply in replies] == [False] * (len(replies) - 1) + [True]
