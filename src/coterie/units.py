"""Quantities as messages show them and options give them. Help texts use it before NumPy is loaded."""

from __future__ import annotations

from coterie.errors import ConfigError


def shown_s(seconds: float) -> str:
    """Format seconds for a message, in s, ms or µs."""
    size = abs(seconds)
    if size >= 1 or not size:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if size >= 1e-3 else f"{1e6 * seconds:.3g} µs"


def counted(number: float, what: str) -> str:
    """Format a number of things, such as '1 step' or '1,000 steps'."""
    return f"{number:,.0f} {what}" + ("" if number == 1 else "s")


def parse_speeds(text: str, count: int) -> tuple[float, ...]:
    """Parse relative speeds such as '1,1,0.5'; what they are of checks their number."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--speeds={text} must be {count} numbers with commas between them") from None
