"""How a check fails."""

from __future__ import annotations


def require(holds: bool, message: str) -> None:
    """An `assert` that stays when Python is told to leave asserts out."""
    if not holds:
        raise AssertionError(message)
