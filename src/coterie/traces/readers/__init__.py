"""Readers of other systems' formats: importing this package registers them all."""

from coterie.traces.readers.base import Reader, ReadOptions, Trace, detect, read_trace, readers

__all__ = ["ReadOptions", "Reader", "Trace", "detect", "read_trace", "readers"]
