"""Activation traces, load tables and request traces: the formats on disk. See docs/traces.md."""

from coterie.traces.activations import Activations, ActivationTrace, ActivationWriter, Chunk, TraceMeta
from coterie.traces.load import LoadTable
from coterie.traces.requests import RequestTrace

__all__ = ["ActivationTrace", "ActivationWriter", "Activations", "Chunk", "LoadTable", "RequestTrace", "TraceMeta"]
