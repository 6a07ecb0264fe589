"""Settings of the connector: ``kv_connector_extra_config`` in vLLM's ``--kv-transfer-config``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from coterie.errors import ConfigError
from coterie.footprints.slots import SUFFIX, store_folder

PREFIX = "coterie-"


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user may set; each has a default."""

    footprint: Literal["handoff", "always", "never"] = "handoff"
    """Which answers carry the request's footprint: those of a prefill for another worker, all, or none."""
    layers: list[int] | None = None
    """Layers of the model whose counts travel in the footprint; None sends all. Recording is not affected."""
    events: str | None = None
    """ZMQ endpoint to publish expert events on, such as tcp://*:5602; a data-parallel rank adds its number."""
    events_queue: int = 100
    """Messages kept for a slow subscriber, and for the publishing thread; past that they are dropped and counted."""
    load_interval_s: float = 1.0
    """Seconds between ExpertLoad events and updates of the metrics."""
    store: str | None = None
    """Name of the slot store's file; None names it after the engine. Processes of one engine must agree."""

    def __post_init__(self) -> None:
        if self.events_queue < 1:
            raise ConfigError(f"events_queue={self.events_queue} must be at least 1")
        if not self.load_interval_s > 0:
            raise ConfigError(f"load_interval_s={self.load_interval_s} must be greater than 0")
        if self.store is not None and (not self.store or "/" in self.store):
            raise ConfigError(f"store={self.store!r} must be a file name without '/'")

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> ConnectorSettings:
        try:
            return msgspec.convert(dict(extra), cls)
        except msgspec.ValidationError as error:
            known = ", ".join(cls.__struct_fields__)
            raise ConfigError(f"kv_connector_extra_config of CoterieConnector: {error}; settings: {known}") from None

    def store_path(self, engine_id: str, rank: int) -> Path:
        return store_folder() / f"{PREFIX}{self.store or engine_id}-{rank}{SUFFIX}"

    def endpoint(self, rank: int) -> str | None:
        """Where this data-parallel rank publishes: the port moves by the rank, a path gets it at its end."""
        if self.events is None or rank == 0:
            return self.events
        base, _, port = self.events.rpartition(":")
        return f"{base}:{int(port) + rank}" if port.isdigit() else f"{self.events}-{rank}"
