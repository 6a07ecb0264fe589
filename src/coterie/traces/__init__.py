"""Activation traces, load tables and request traces: the formats on disk. See docs/traces.md."""

from coterie.traces.activations import (
    Activations,
    ActivationTrace,
    ActivationWriter,
    Chunk,
    TraceMeta,
    check_unfinished,
)
from coterie.traces.load import LoadTable, choose_windows, domain_of
from coterie.traces.requests import RequestTrace, check_new_folder

__all__ = [
    "ActivationTrace",
    "ActivationWriter",
    "Activations",
    "Chunk",
    "LoadTable",
    "RequestTrace",
    "TraceMeta",
    "check_new_folder",
    "check_unfinished",
    "choose_windows",
    "domain_of",
]
