"""Quantities as messages show them. Imports nothing: help texts use it before NumPy is loaded."""

from __future__ import annotations


def shown_s(seconds: float) -> str:
    """Format seconds for a message, in s, ms or µs."""
    size = abs(seconds)
    if size >= 1 or not size:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if size >= 1e-3 else f"{1e6 * seconds:.3g} µs"


def counted(number: float, what: str) -> str:
    """Format a number of things, such as '1 step' or '1,000 steps'."""
    return f"{number:,.0f} {what}" + ("" if number == 1 else "s")
