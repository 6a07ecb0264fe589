"""Settings of the connector (``kv_connector_extra_config`` in vLLM's ``--kv-transfer-config``) and of the EPLB policy.

The policy's settings are in an environment variable: vLLM loads plugins before it has a configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from coterie.engines.vllm import EPLB_VARIABLE
from coterie.errors import ConfigError, check, check_at_least, check_not_negative, check_positive
from coterie.footprints.positions import SUFFIX, store_folder

if TYPE_CHECKING:
    from coterie.placement import RebalancingSettings

PREFIX = "coterie-"


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the connector."""

    footprint: Literal["handoff", "always", "never"] = "handoff"
    """Answers that carry the request's footprint: those of a prefill for another worker, all, or none."""
    layers: list[int] | None = None
    """Layers whose counts are in the footprint; None means all. Recordings always have all layers."""
    events: str | None = None
    """ZMQ endpoint to publish expert events on, such as tcp://*:5602; the data-parallel rank is added to the port."""
    events_queue: int = 100
    """Messages queued for a slow subscriber and for the publishing thread; further messages are dropped and counted."""
    load_interval_s: float = 1.0
    """Seconds between ExpertLoad events and updates of the metrics."""
    store: str | None = None
    """File name of the position store; None uses the engine's id. All processes of an engine need the same name."""

    def __post_init__(self) -> None:
        check_at_least(1, events_queue=self.events_queue)
        check(self.load_interval_s > 0, f"load_interval_s={self.load_interval_s} must be greater than 0")
        check(
            self.store is None or (self.store and "/" not in self.store),
            f"store={self.store!r} must be a file name without '/'",
        )

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> ConnectorSettings:
        try:
            return msgspec.convert(dict(extra), cls)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"kv_connector_extra_config of CoterieConnector: {error}; settings: {', '.join(cls.__struct_fields__)}"
            ) from None

    def store_path(self, engine_id: str, rank: int) -> Path:
        return store_folder() / f"{PREFIX}{self.store or engine_id}-{rank}{SUFFIX}"

    def endpoint(self, rank: int) -> str | None:
        """Return the endpoint of a data-parallel rank: the port plus the rank, or the path with the rank appended."""
        if self.events is None or rank == 0:
            return self.events
        base, _, port = self.events.rpartition(":")
        return f"{base}:{int(port) + rank}" if port.isdigit() else f"{self.events}-{rank}"


class EplbSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the EPLB policy. All ranks must have the same settings."""

    planner: str = "latency_optimal"
    """Name of a registered planner."""
    options: dict[str, Any] = {}
    """Settings of the planner, such as {"max_moves": 500}."""
    when: Literal["always", "pays", "never"] = "always"
    """When to change the map. always: plan in every round; pays: keep the map until a change pays for its moves and
    planning; never: change it only by a file.
    """
    horizon: float = 3000.0
    """Steps between two rearrangements: step_interval of vLLM's --eplb-config. With when=always, moves must pay for
    themselves within this many steps; with when=pays, it is the time between rounds, and the value of moves is learned.
    """
    window: float = 1000.0
    """Steps of vLLM's load window: window_size of its --eplb-config."""
    rebalancing: dict[str, float] = {}
    """With when=pays, settings of the Rebalancer, such as {"min_interval": 2000, "margin": 0.5}. Its first and minimum
    intervals default to `horizon`, its maximum interval to 100 times `horizon`.
    """
    planning_s: float | None = None
    """With when=pays, seconds that planning blocks serving; None uses the measured time of the slowest rank."""
    target_balance: float = 1.0
    """Balance (even ÷ slowest rank time) from which a layer is not improved further; values below 1 save moves."""
    exposed: float = 1.0
    """Share of the movement time that serving waits for. 1 is exact without use_async, and cautious with it."""
    movement: Literal["stops", "staged"] = "stops"
    """staged computes `exposed` from the device's measured contention, for use_async; it needs `device`."""
    model: str | None = None
    """Name of a shipped model shape, for the bytes of an expert and, with `device`, the time of its tokens."""
    device: str | None = None
    """Device preset; needs `model`."""
    expert_bytes: float | None = None
    """Bytes of one expert's weights in one layer; None uses the model's, or 44e6 without a model."""
    intra_gb_s: float = 450.0
    """Bandwidth between ranks of a node, one direction, in GB/s."""
    inter_gb_s: float = 50.0
    """Bandwidth between nodes, in GB/s."""
    initial_map: str | None = None
    """File of a map that the first rearrangement applies; it may be missing if it is also save_map."""
    load_map: str | None = None
    """File of a map made elsewhere. Whenever the file changes, the next rearrangement applies it; it may be missing."""
    save_map: str | None = None
    """File that each new map is written to."""
    scenarios: str | None = None
    """File of single steps to plan for, written by coterie plan --save-scenarios; it may be replaced. Its steps are
    scaled to the mean step that vLLM reports. Without a file, or if ranks have read different files, plans are for
    the mean step.
    """

    def __post_init__(self) -> None:
        check_positive(window=self.window, intra_gb_s=self.intra_gb_s, inter_gb_s=self.inter_gb_s)
        check(
            self.device is None or self.model is not None,
            f"device={self.device!r} needs a model: it says how long that one's experts take",
        )
        if self.when == "pays":
            self._check_paying()
        elif self.rebalancing or self.planning_s is not None:
            raise ConfigError(f"rebalancing and planning_s need when='pays'; it is {self.when!r}")
        check(
            self.load_map is None or self.load_map not in (self.save_map, self.initial_map),
            f"load_map={self.load_map!r} must be a file of its own, not save_map or initial_map",
        )
        check(
            self.scenarios is None or self.when != "never",
            f"scenarios={self.scenarios!r} are planned for, and when='never' plans nothing",
        )
        check(
            self.movement != "staged" or self.device is not None,
            "movement='staged' needs a device: its preset says what moves take from the steps",
        )

    def _check_paying(self) -> None:
        check(
            self.window <= self.horizon,
            f"window={self.window} must be at most horizon={self.horizon}: vLLM would count steps of the last map "
            "under the experts of the new one",
        )
        check_not_negative(planning_s=self.planning_s)
        self.rebalancing_settings()

    def rebalancing_settings(self) -> RebalancingSettings:
        """Return the Rebalancer's settings, with intervals from `horizon`."""
        from coterie.placement import RebalancingSettings  # not needed in every process

        intervals = {"first_interval": self.horizon, "min_interval": self.horizon, "max_interval": 100 * self.horizon}
        try:
            return RebalancingSettings(**(intervals | self.rebalancing))
        except TypeError as error:
            known = ", ".join(field.name for field in fields(RebalancingSettings))
            raise ConfigError(f"rebalancing={self.rebalancing}: {error}; settings: {known}") from None

    @classmethod
    def parse(cls, text: str) -> EplbSettings:
        """Parse the environment variable's value."""
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, ConfigError) as error:
            raise ConfigError(f"{EPLB_VARIABLE}: {error}; settings: {', '.join(cls.__struct_fields__)}") from None
