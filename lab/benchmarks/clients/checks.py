"""Results of trials of a gateway."""

from __future__ import annotations

from typing import NamedTuple

PASSED = "passed"
REFUSED = "refused by the worker"
FAILED = "failed"


class Check(NamedTuple):
    client: str
    what: str
    outcome: str
    """PASSED, FAILED, or REFUSED: the worker has not got this feature, and its own answer came through."""
    detail: str = ""


class Asked(NamedTuple):
    """The gateway under test, the model it serves, and its API key if it needs one."""

    url: str
    model: str
    key: str | None = None
