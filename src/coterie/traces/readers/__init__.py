"""Readers of other systems' formats: importing this package registers them all."""

from coterie.traces.readers import (  # noqa: F401
    azure,
    burstgpt,
    load_history,
    mooncake,
    npz,
    routed_experts,
    servegen,
    tabular,
    trtllm,
)
from coterie.traces.readers._rows import read_unpacked
from coterie.traces.readers.base import Reader, ReadOptions, Trace, detect, kind_of, read_as, read_trace, readers

__all__ = ["ReadOptions", "Reader", "Trace", "detect", "kind_of", "read_as", "read_trace", "read_unpacked", "readers"]
