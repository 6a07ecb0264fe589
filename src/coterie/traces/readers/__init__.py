"""Readers of other systems' formats: importing this package registers them all."""

from coterie.registry import import_modules
from coterie.traces.readers._rows import read_unpacked
from coterie.traces.readers.base import (
    Reader,
    ReadOptions,
    Trace,
    detect,
    kind_of,
    read_as,
    read_trace,
    readers,
    requests_of,
    trace_path,
)

import_modules(__name__)

__all__ = [
    "ReadOptions",
    "Reader",
    "Trace",
    "detect",
    "kind_of",
    "read_as",
    "read_trace",
    "read_unpacked",
    "readers",
    "requests_of",
    "trace_path",
]
