"""Messages of Envoy's external processing and of gRPC's health checks, as far as a picker reads or writes them.

They are declared here by field number, because the package with all of Envoy's messages (xds-protos) installs an
``opentelemetry/__init__.py``, which breaks OpenTelemetry. Fields left out are skipped by the decoder. A map is a
repeated entry of key and value, and an enumeration an int32: the wire is the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2
from google.protobuf.message import DecodeError

from coterie.net.grpc_server import INVALID_ARGUMENT, GrpcError
from coterie.wire.handoff import DP_RANK_HEADER

ENDPOINT = "x-gateway-destination-endpoint"
SUBSET = ENDPOINT + "-subset"
SERVED = ENDPOINT + "-served"
BALANCER, HINT = "envoy.lb", "envoy.lb.subset_hint"
"""Namespaces of metadata: of the chosen endpoints, and of the subset to choose from."""
CHUNK_BYTES = 62_000
"""Most bytes of a body in one message: some Envoys take 64 KiB."""
RANK = DP_RANK_HEADER.lower()
"""Header that no client may set: it names a worker's data-parallel rank."""
OVERWRITE = 2
"""Action on a header that is there already."""

FIELDS = {
    "HeaderValue": "key 1 string, value 2 string, raw_value 3 bytes",
    "HeaderMap": "headers 1 HeaderValue*",
    "HeaderValueOption": "header 1 HeaderValue, append_action 3 int",
    "HeaderMutation": "set_headers 1 HeaderValueOption*, remove_headers 2 string*",
    "Entry": "key 1 string, value 2 Struct",
    "Metadata": "filter_metadata 1 Entry*",
    "HttpHeaders": "headers 1 HeaderMap, end_of_stream 3 bool",
    "HttpBody": "body 1 bytes, end_of_stream 2 bool",
    "HttpTrailers": "",
    "ProcessingRequest": "request_headers 2 HttpHeaders, response_headers 3 HttpHeaders, request_body 4 HttpBody, "
    "response_body 5 HttpBody, request_trailers 6 HttpTrailers, response_trailers 7 HttpTrailers, "
    "metadata_context 8 Metadata, attributes 9 Entry*",
    "StreamedBodyResponse": "body 1 bytes, end_of_stream 2 bool",
    "BodyMutation": "streamed_response 3 StreamedBodyResponse",
    "CommonResponse": "header_mutation 2 HeaderMutation, body_mutation 3 BodyMutation, clear_route_cache 5 bool",
    "HttpResponse": "response 1 CommonResponse",
    "TrailersResponse": "",
    "HttpStatus": "code 1 int",
    "ImmediateResponse": "status 1 HttpStatus, headers 2 HeaderMutation, body 3 bytes",
    "ProcessingResponse": "request_headers 1 HttpResponse, response_headers 2 HttpResponse, "
    "request_body 3 HttpResponse, response_body 4 HttpResponse, request_trailers 5 TrailersResponse, "
    "response_trailers 6 TrailersResponse, "
    "immediate_response 7 ImmediateResponse, dynamic_metadata 8 Struct",
    "HealthCheckRequest": "service 1 string",
    "HealthCheckResponse": "status 1 int",
}
"""Message → its fields: name, number and type; a star marks a repeated field."""


def _classes() -> dict[str, Any]:
    field_type = descriptor_pb2.FieldDescriptorProto
    scalars = {
        "string": field_type.TYPE_STRING,
        "bytes": field_type.TYPE_BYTES,
        "bool": field_type.TYPE_BOOL,
        "int": field_type.TYPE_INT32,
    }
    file = descriptor_pb2.FileDescriptorProto(
        name="coterie/envoy.proto", package="coterie.envoy", syntax="proto3", dependency=[struct_pb2.DESCRIPTOR.name]
    )
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        for text in filter(None, fields.split(", ")):
            label, number, kind = text.rstrip("*").split()
            field = message.field.add(name=label, number=int(number))
            field.label = field_type.LABEL_REPEATED if text.endswith("*") else field_type.LABEL_OPTIONAL
            if kind in scalars:
                field.type = scalars[kind]
            else:
                field.type = field_type.TYPE_MESSAGE
                field.type_name = ".google.protobuf.Struct" if kind == "Struct" else f".coterie.envoy.{kind}"
    pool = descriptor_pool.Default()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"coterie.envoy.{name}")) for name in FIELDS
    }


MESSAGES = _classes()
ProcessingRequest, ProcessingResponse = MESSAGES["ProcessingRequest"], MESSAGES["ProcessingResponse"]
HealthCheckRequest, HealthCheckResponse = MESSAGES["HealthCheckRequest"], MESSAGES["HealthCheckResponse"]


# ------------------------------------------------------------------------------------------------------------ reading


def read_message(kind: Any, message: bytes) -> Any:
    """Decode a message of a class of :data:`MESSAGES`. Raises GrpcError for one that is none."""
    try:
        return kind.FromString(message)
    except DecodeError:
        raise GrpcError(INVALID_ARGUMENT, f"not a {kind.DESCRIPTOR.name}") from None


def message_part(message: bytes) -> tuple[str, Any, Any]:
    """Return a message's part: its kind, itself, and the whole message. Raises GrpcError for one without a part."""
    whole = read_message(ProcessingRequest, message)
    for field, part in whole.ListFields():
        return field.name, part, whole
    raise GrpcError(INVALID_ARGUMENT, "an empty ProcessingRequest")


def pairs(message: Any, names: Collection[str] = ()) -> list[tuple[bytes, bytes]]:
    """Return the headers of a message, or those of these names; Envoy sends names in lower case."""
    return [
        (header.key.encode(), header.raw_value or header.value.encode())
        for header in message.headers.headers
        if not names or header.key in names
    ]


def subset_of(message: Any) -> frozenset[str] | None:
    """Return the endpoints to choose from, by the message's metadata; None if it names none."""
    for entry in message.metadata_context.filter_metadata:
        if entry.key == HINT and SUBSET in entry.value.fields:
            value = entry.value.fields[SUBSET]
            return frozenset(item.string_value for item in value.list_value.values) or endpoints_in(value.string_value)
    return None


def endpoints_in(endpoints: str) -> frozenset[str]:
    """Return the endpoints in a list separated by commas."""
    return frozenset(filter(None, (part.strip() for part in endpoints.split(","))))


def served_by(message: Any) -> str:
    """Return the endpoint that served a request, as Envoy says with the answer's head; empty if it does not.

    The protocol has it in metadata. Plain Envoy can be told to send the attribute ``upstream.address``.
    """
    for entry in (*message.metadata_context.filter_metadata, *message.attributes):
        for name in (SERVED, "upstream.address"):
            if name in entry.value.fields:
                return str(entry.value.fields[name].string_value)
    return ""


# ------------------------------------------------------------------------------------------------------------ writing


def route_to(endpoints: str, headers: Mapping[str, bytes]) -> bytes:
    """Return the answer to a request's headers: the endpoints to go to, first the best, and headers to set."""
    reply = ProcessingResponse()
    common = reply.request_headers.response
    common.clear_route_cache = True
    _set(common.header_mutation, {ENDPOINT: endpoints.encode(), **headers})
    if RANK not in headers:
        common.header_mutation.remove_headers.append(RANK)
    balancer = reply.dynamic_metadata.fields[BALANCER].struct_value
    balancer.fields[ENDPOINT].string_value = endpoints
    return _packed(reply)


def body_replies(kind: str, body: bytes, end: bool) -> Iterator[bytes]:
    """Yield the answers that pass a body on; `kind` is request_body or response_body."""
    for start in range(0, len(body) or 1, CHUNK_BYTES):
        reply = ProcessingResponse()
        streamed = getattr(reply, kind).response.body_mutation.streamed_response
        streamed.body = body[start : start + CHUNK_BYTES]
        streamed.end_of_stream = end and start + CHUNK_BYTES >= len(body)
        yield _packed(reply)


@cache
def plain_reply(kind: str) -> bytes:
    """Return the answer that passes headers or trailers on unchanged."""
    reply = ProcessingResponse()
    getattr(reply, kind).SetInParent()
    return _packed(reply)


def refusal(status: int, body: bytes, headers: Mapping[str, bytes]) -> bytes:
    """Return an answer that Envoy sends to the client at once."""
    reply = ProcessingResponse()
    reply.immediate_response.status.code = status
    reply.immediate_response.body = body
    _set(reply.immediate_response.headers, headers)
    return _packed(reply)


def _packed(reply: Any) -> bytes:
    packed: bytes = reply.SerializeToString()
    return packed


def _set(mutation: Any, headers: Mapping[str, bytes]) -> None:
    for name, value in headers.items():
        option = mutation.set_headers.add(append_action=OVERWRITE)
        option.header.key, option.header.raw_value = name, value
