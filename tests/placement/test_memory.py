"""The memory that replicas and KV cache share."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.models import get_model
from coterie.placement.migration.memory import MemoryBudget


def test_real_sizes_of_the_published_model() -> None:
    spec = get_model("deepseek-v3")
    budget = MemoryBudget.of(spec, 163.7e9, 131_072)
    assert budget.replica_bytes == pytest.approx(2.554e9, rel=1e-3), "fp8, 58 layers"
    assert MemoryBudget.of(spec, 163.7e9, 131_072, dtype="bf16").replica_bytes == pytest.approx(5.109e9, rel=1e-3)
    assert budget.session_bytes == 70_272 * 131_072, "latent attention"


@given(
    st.floats(1, 100),
    st.floats(0.1, 10),
    st.floats(0.1, 10),
    st.floats(0.5, 200),
    st.floats(1e-3, 1),
    st.floats(0, 0.2),
)
def test_best_is_the_best_of_all_and_only_unused_memory_is_free(
    available: float, replica: float, session: float, at_hand: float, base: float, gain: float
) -> None:
    budget = MemoryBudget(available, replica, session, at_hand)

    def step_s(replicas: Any, sessions: Any) -> Any:
        return base * (0.5 + 0.5 / (1 + gain * replicas)) + 1e-3 * sessions

    best = budget.best(step_s)
    rates = {n: budget.point(n, step_s).tokens_per_s for n in range(budget.max_replicas + 1)}
    assert best.tokens_per_s == max(rates.values())
    assert best.replicas == min(n for n, rate in rates.items() if rate == best.tokens_per_s)
    free = [n for n in rates if budget.fitting_sessions(n) >= at_hand]
    if gain > 1e-3 and free:
        assert best.replicas >= max(free), "what no request uses is given to replicas, where they help at all"


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="replica_bytes=0"):
        MemoryBudget(1.0, 0, 1.0)
    with pytest.raises(ConfigError, match="replicas=-1"):
        MemoryBudget(1.0, 1.0, 1.0).kv_bytes(-1)
    with pytest.raises(ConfigError, match="counts must name"):
        MemoryBudget(1.0, 1.0, 1.0).best(lambda *_: 1.0, [])
