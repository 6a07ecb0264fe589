"""Results of trials of a gateway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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
    got: Sequence[Any] | None = None
    """Requests as the worker behind the gateway got them, if it keeps them."""
