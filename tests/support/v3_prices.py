"""Prices for tests of planning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coterie.placement import DEEPSEEK_V3_PREFILL, Objective


def v3_prices(**changed: Any) -> Objective:
    """DeepSeek-V3's prices in prefill, with some changed."""
    return replace(DEEPSEEK_V3_PREFILL, **changed)
