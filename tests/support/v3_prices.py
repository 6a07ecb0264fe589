"""Prices for tests of planning."""

from __future__ import annotations

from dataclasses import replace

from coterie.placement import DEEPSEEK_V3_PREFILL, Objective


def v3_prices(**changed: float) -> Objective:
    """DeepSeek-V3's prices in prefill, with some changed."""
    return replace(DEEPSEEK_V3_PREFILL, **changed)
