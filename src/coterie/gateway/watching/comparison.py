"""Results of a comparison of routers on the fleet, sent with `PUT /comparison` and shown on the dashboard."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
Text = Annotated[str, msgspec.Meta(max_length=500)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]
Percent = Annotated[float, msgspec.Meta(ge=-1_000_000, le=100)]


class ComparisonRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Results of the same requests under one router."""

    router: Name
    experts: Annotated[float, msgspec.Meta(ge=0, le=100_000)]
    """Distinct experts per layer in a token's decode step, on average."""
    saving_pct: Percent = 0.0
    """Reduction of `experts` relative to the first router, in percent."""
    low_pct: Percent = 0.0
    high_pct: Percent = 0.0
    """`low_pct` and `high_pct` bound the 95% confidence interval of `saving_pct`."""
    step_ms: Annotated[float, msgspec.Meta(ge=0, le=1e9)] | None = None
    """Predicted time of a token's decode step on `Comparison.hardware`; None if not predicted."""
    requests: Annotated[list[Count], msgspec.Meta(max_length=64)] = []
    """Number of requests sent to each worker, [worker]."""


class Comparison(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State of a comparison: the rows so far. The first row is the baseline of the others."""

    state: Literal["running", "done", "failed"]
    rows: Annotated[list[ComparisonRow], msgspec.Meta(max_length=12)] = []
    stage: Text = ""
    """Description of the current stage."""
    done: Count = 0
    total: Count = 0
    """`done` of `total` units of the current stage are finished."""
    routers: Annotated[list[Name], msgspec.Meta(max_length=12)] = []
    """Names of all routers that will have a row."""
    hardware: Text = ""
    verdict: Text = ""
