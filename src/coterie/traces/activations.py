"""Activation traces: the experts every token of every request activated, exactly.

coterie.traces.segments describes the files, coterie.traces.activation_writer writes them.
"""

from __future__ import annotations

from pathlib import Path

from coterie.traces.activation_writer import ActivationWriter
from coterie.traces.segments import Activations, Chunk, SegmentedTrace, TraceMeta, concat_requests

__all__ = ["ActivationTrace", "Activations", "Chunk", "TraceMeta", "concat_requests"]


class ActivationTrace(SegmentedTrace):
    """A recorded (or synthetic) trace, mapped from disk or held in memory."""

    def save(self, path: str | Path) -> None:
        """Write a joined copy."""
        with ActivationWriter(path, self.meta) as out:
            table = self.requests
            for chunk in self.chunks():
                rows = slice(chunk.first_request, chunk.first_request + len(chunk.offsets) - 1)
                out.append_many(chunk.tokens, chunk.offsets, table.take(rows))
