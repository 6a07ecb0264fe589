"""A comparison of routers that somebody runs on the fleet, and tells the gateway of for its page: `PUT /comparison`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
Text = Annotated[str, msgspec.Meta(max_length=500)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]
Percent = Annotated[float, msgspec.Meta(ge=-1_000_000, le=100)]
Experts = Annotated[float, msgspec.Meta(ge=0, le=100_000)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class ComparisonRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The same requests under one router."""

    router: Name
    experts: Experts
    """Distinct experts of a layer in a token's decode step."""
    saving_pct: Percent = 0.0
    """Fewer than under the first router."""
    low_pct: Percent = 0.0
    high_pct: Percent = 0.0
    """Both: the 95% interval of the saving."""
    step_ms: Milliseconds | None = None
    """A token's decode step on the hardware that `Comparison.hardware` names, predicted."""
    requests: Annotated[list[Count], msgspec.Meta(max_length=64)] = []
    """[worker]"""


class Comparison(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rows so far, the first is the one that the others are compared with."""

    state: Literal["running", "done", "failed"]
    rows: Annotated[list[ComparisonRow], msgspec.Meta(max_length=12)] = []
    stage: Text = ""
    """What is being done."""
    done: Count = 0
    total: Count = 0
    """Both: of the stage."""
    routers: Annotated[list[Name], msgspec.Meta(max_length=12)] = []
    """All that will have a row."""
    hardware: Text = ""
    verdict: Text = ""
