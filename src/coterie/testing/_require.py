"""Assertion of the contract checks."""

from __future__ import annotations


def require(holds: bool, message: str) -> None:
    """Raise AssertionError unless `holds`; unlike `assert`, also under ``python -O``."""
    if not holds:
        raise AssertionError(message)
