"""HTTP/1.1 at protocol level: a bounded server and a pooled client, on asyncio's event loop or uvloop's.

Both write and parse (httptools) messages in the callbacks of the transport, without an asyncio stream or a timer per
request: one periodic sweep checks all deadlines.
"""

from coterie.net.http1.messages import Headers, HttpError, HttpRequest, Limits, is_event_stream, passed_on
from coterie.net.http1.server import Handler, HttpServer, Responder
from coterie.net.http1.upstream import Answer, Upstream, UpstreamError, UpstreamLimits

__all__ = [
    "Answer",
    "Handler",
    "Headers",
    "HttpError",
    "HttpRequest",
    "HttpServer",
    "Limits",
    "Responder",
    "Upstream",
    "UpstreamError",
    "UpstreamLimits",
    "is_event_stream",
    "passed_on",
]
