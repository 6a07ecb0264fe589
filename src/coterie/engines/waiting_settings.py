"""Ordering of waiting requests: the user's settings, the expert loads of requests, and the cost of a step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from coterie.batching import Strategy, strategies
from coterie.batching.base import DEFAULT_MAX_SKIPS, Loads, SpreadCost
from coterie.batching.waiting import Chooser, DecisionFile, RequestView
from coterie.costs.lines import StepCost
from coterie.costs.presets import step_model
from coterie.errors import ConfigError, InputError, check, check_at_least, check_not_negative
from coterie.models import model_from_config
from coterie.predictors import PredictRequest, TokenTable
from coterie.types import Placement, Topology
from coterie.wire.footprints import WireFootprint

T = TypeVar("T", bound=Hashable)

TYPICAL_TOKENS = 1024
"""Prompt (prefill) or context (decode) tokens of a typical request, for the part of a step's time that is independent
of its requests.
"""


class OrderingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for the ordering of waiting requests."""

    strategy: str
    """Name of a registered strategy."""
    options: dict[str, Any] = {}
    """Settings of the strategy."""
    window_size: int = 32
    """Number of oldest waiting requests that a strategy may choose from."""
    batch_size: int = 8
    """Requests selected at once, or the number of free places if that is larger. With 1, an engine that frees one place
    at a time always takes the oldest request.
    """
    min_batch_trigger: int = 1
    """Number of waiting requests at which they start; fewer start once the oldest has waited an interval. CAPS has 16:
    a strategy then has requests to choose from, which a short queue pays for by waiting. 1 holds none back.
    """
    scheduling_interval_ms: float = 100.0
    """Longest time, in milliseconds, that a request is held back for `min_batch_trigger`."""
    max_skips: int | None = DEFAULT_MAX_SKIPS
    """Times a request may be passed over before it must be selected; null sets no limit."""
    phase: Literal["decode", "prefill"] = "decode"
    """Tokens that a request's load is computed for: one decode step (1 token), or all tokens still to be prefilled."""
    loads: str | None = None
    """Path of a token table that predicts the load of requests without a footprint."""
    device: str | None = None
    """Device preset for `latency_aware`, which then minimises the predicted step time on that device. Without a preset
    the strategy evens out expert load, which is right across ranks but wrong for decode on a single device.
    """
    seed: int = 0
    """Seed for strategies that draw at random."""
    decisions: str | None = None
    """File that receives a line of JSON for every selection: the window, the selected requests and the reason. For
    debugging only: the file grows without bound.
    """

    def __post_init__(self) -> None:
        sizes = {"window_size": self.window_size, "batch_size": self.batch_size, "max_skips": self.max_skips}
        check_at_least(1, **sizes, min_batch_trigger=self.min_batch_trigger)
        check_not_negative(scheduling_interval_ms=self.scheduling_interval_ms)

    @classmethod
    def parse(cls, given: object, where: str) -> OrderingSettings:
        """Check and convert the user's settings; `where` names their source in error messages."""
        try:
            return msgspec.convert(given, cls)
        except (msgspec.ValidationError, ConfigError) as error:
            raise ConfigError(f"{where}: {error}; settings: {', '.join(cls.__struct_fields__)}") from None

    def make(self, cost: StepCost | None = None) -> Strategy:
        """Create the strategy; `cost` is the step cost of `device`, if `device` is set."""
        check(
            "max_skips" not in self.options,
            f"options={self.options}: max_skips is a setting of its own, beside options",
        )
        check(
            cost is None or "cost" in strategies.parameters(self.strategy),
            f"device={self.device!r}: strategy {self.strategy!r} does not price steps; leave it out",
        )
        context = {"cost": SpreadCost() if cost is None else cost}
        try:
            return strategies.make(self.strategy, context, max_skips=self.max_skips, **self.options)
        except (ConfigError, TypeError) as error:
            raise ConfigError(f"options={self.options}: {error}") from None

    def chooser(
        self, view: RequestView[T], shape: tuple[int, int] = (1, 1), cost: StepCost | None = None
    ) -> Chooser[T]:
        """Create a chooser that an engine's waiting queue can call; serving continues if the strategy fails.

        The strategy is warmed up for loads of `shape` [layer, expert]. `cost` is the step cost of `device`, if
        that is set.
        """
        chooser = Chooser(
            strategy=self.make(cost),
            view=view,
            rng=np.random.default_rng(self.seed),
            window_size=self.window_size,
            batch_size=self.batch_size,
            report=view.report,
            decided=None if self.decisions is None else DecisionFile(self.decisions),
        )
        chooser.warm_up(shape)
        return chooser


class LoadSource:
    """Expert load per token of a request: from its footprint, or predicted by a token table."""

    def __init__(self, table: TokenTable | None, num_layers: int = 0, num_experts: int = 0) -> None:
        """Set the shape of the loads: the table's if there is one, else the given shape, which counts dense layers."""
        self.table = table
        self.layer_ids = tuple(range(num_layers))
        self.shape = (num_layers, num_experts)
        if table is not None:
            self.shape = (table.num_layers, table.num_experts)
            self.layer_ids = table.rows.layer_ids or tuple(range(table.num_layers))

    @classmethod
    def open(cls, path: str | None, num_layers: int = 0, num_experts: int = 0) -> LoadSource:
        table = None if path is None else TokenTable.load(path)
        if table is not None and num_experts and table.num_experts != num_experts:
            raise ConfigError(f"loads={path!r}: a table of {table.num_experts} experts; the model has {num_experts}")
        return cls(table, num_layers, num_experts)

    def share(self, token_ids: Sequence[int] | None, footprint: WireFootprint | None) -> Loads | None:
        """Return the activations per token, [layer, expert]; None if nothing is known.

        Layers that the footprint lacks are predicted by the table; without a table their load is 0.
        """
        load: Loads | None = None
        if self.table is not None:
            load = self.table.predict(
                PredictRequest(token_ids=(None if token_ids is None else np.asarray(token_ids, np.int64)), num_tokens=1)
            )
        if footprint is None or not footprint.tokens:
            return load
        check(
            footprint.counts.shape[1] == self.shape[1],
            f"a footprint of {footprint.counts.shape[1]} experts; expected {self.shape[1]}",
            InputError,
        )
        load = np.zeros(self.shape) if load is None else load
        row_of = {layer: row for row, layer in enumerate(footprint.layer_ids)}
        for row, layer in enumerate(self.layer_ids):
            if layer in row_of:  # a client's footprint may be wrong: a token activates an expert at most once
                load[row] = np.minimum(footprint.counts[row_of[layer]] / footprint.tokens, 1.0)
        return load

    def placement(self, reported: Placement, layer_ids: Sequence[int]) -> Placement:
        """Return a placement of the loads' layers from one of the layers `layer_ids`.

        Loads may have rows of dense layers, which nothing activates, or be of some layers only. A table without layer
        ids is of the layers that route, in order.
        """
        check(
            self.shape[1] == reported.num_experts and len(layer_ids) == reported.num_layers,
            f"it has {reported.num_experts} experts in {reported.num_layers} layers; "
            f"expected {self.shape[1]} in {len(layer_ids)}",
            InputError,
        )
        if self.shape[0] == reported.num_layers:
            return reported
        row_of = dict(zip(layer_ids, reported.slot_experts, strict=True))
        dense = np.arange(reported.num_slots, dtype=np.int32) % reported.num_experts
        rows = np.stack([row_of.get(layer, dense) for layer in self.layer_ids])
        return Placement(rows, reported.num_ranks, reported.num_experts)


def step_cost(
    device: str,
    phase: str,
    config: Mapping[str, Any],
    requests: int,
    num_ranks: int = 1,
    placement: Placement | None = None,
) -> StepCost:
    """Return the cost of a step of about `requests` requests on a preset's device; `config` is from ``config.json``.

    `placement` is that of the layers of the loads; without it experts are in order on `num_ranks` ranks.
    """
    spec = model_from_config(config)
    if placement is None and num_ranks > 1:
        placement = Placement.linear(spec.num_moe_layers, spec.num_experts, num_ranks)
    return StepCost.for_phase(
        step_model(spec, device, topology=Topology(num_ranks)), phase, requests, TYPICAL_TOKENS, placement
    )
