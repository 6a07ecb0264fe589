"""Section `control` of a gateway's config: the loop that re-fits the router and advises on placement.

control:
  min_requests: 128
  advise: {ranks: 8}
  apply: true
  map: /var/lib/coterie/placement.json
"""

from __future__ import annotations

from typing import Literal

import msgspec

from coterie.control.base import ControlSettings
from coterie.costs.contention import Movement
from coterie.errors import ConfigError, check_at_least, check_not_negative, check_positive

DEFAULTS = ControlSettings()


class AdviseSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The expert-parallel group that placement advice is for."""

    ranks: int
    """Ranks of the group."""
    slots_per_rank: int | None = None
    """Places for an expert's weights on a rank, replicas included; None: as many as hold every expert once."""
    ranks_per_node: int | None = None
    """Ranks of a machine; None: all are on one."""
    device: str = "h200"
    """Preset of the device whose steps are priced."""
    model: str | None = None
    """Model whose expert sizes and steps are priced; None: the one that the router was fitted for."""

    placement: str | None = None
    """File of the placement that the group serves with now; None: experts in order, as engines begin."""
    step_tokens: int = 256
    """Tokens of a step over all ranks."""
    horizon: float = 10_000.0
    """Steps that a new placement will serve: moving must pay within them."""
    movement: Movement = "stops"
    """Whether the engine stops for every move or has them `staged` behind its steps."""
    window_s: float = 30.0
    """Time of a window of loads. A plan made on one is measured on the next."""
    min_steps: int = 64
    """Fewest steps of all workers together that make a window."""
    cooldown_s: float = 120.0
    """Time that a plan stands before another is made."""

    def __post_init__(self) -> None:
        check_at_least(1, ranks=self.ranks, slots_per_rank=self.slots_per_rank, ranks_per_node=self.ranks_per_node)
        check_at_least(1, step_tokens=self.step_tokens, min_steps=self.min_steps)
        check_positive(horizon=self.horizon, window_s=self.window_s)
        check_not_negative(cooldown_s=self.cooldown_s)


class ControlSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """When the loop runs, and on how much it decides. Times are in seconds."""

    enabled: bool | None = None
    """Whether the loop runs; None: where a worker has `expert_events` and the decode router uses a fit."""
    tick_s: float = 1.0
    """Time between two looks at what came in."""
    window: int = DEFAULTS.window
    """Requests of a window, whose experts are compared with those of the requests that the router was fitted to."""
    min_requests: int = DEFAULTS.min_requests
    """Fewest requests of the same traffic that a fit is made from."""
    fit_requests: int = DEFAULTS.fit_requests
    """Most requests that a fit is made from."""
    score_requests: int = DEFAULTS.score_requests
    """Requests that a new fit and the one in force are compared on."""
    score: Literal["time", "experts"] = "time"
    """What fits are compared by: decode time, by the prices of the router's model, or the experts that a step touches,
    where the model that serves stands for a larger one."""
    margin: float = DEFAULTS.margin
    """Least predicted saving, as a share, for which the router is swapped."""
    cooldown_s: float = DEFAULTS.cooldown_s
    """Least time between the starts of two fits."""
    advise: AdviseSection | None = None
    """Expert-parallel group to advise on; None: no placement advice."""
    apply: bool = False
    """Whether a plan that pays is written to `map`. Without it advice is shown and nothing is done."""
    map: str | None = None
    """File of the placement map that vLLM's policy loads at its next rearrangement."""
    folder: str | None = None
    """Folder for the fits of the loop; None: a private temporary one, removed at the end."""
    log: str | None = None
    """File that the loop's inputs are written to, to replay its decisions; a number is put behind the name of one that
    is there already. None: none is kept."""

    def __post_init__(self) -> None:
        check_positive(tick_s=self.tick_s)
        try:
            self.settings()
        except ConfigError as error:
            raise ConfigError(f"control: {error}") from None
        if self.apply and self.map is None:
            raise ConfigError("control: apply=true needs map, the file that plans are written to")
        if self.apply and self.advise is None:
            raise ConfigError("control: apply=true needs advise, the group that plans are for")

    def settings(self) -> ControlSettings:
        """Settings of the loop. Raises ConfigError where they do not go together."""
        return ControlSettings(
            window=self.window,
            min_requests=self.min_requests,
            fit_requests=self.fit_requests,
            score_requests=self.score_requests,
            margin=self.margin,
            cooldown_s=self.cooldown_s,
        )
