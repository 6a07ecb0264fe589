"""The ring of decisions: the last N, formatted when asked, with nothing of the prompt."""

from __future__ import annotations

import json
import math
import weakref
from typing import Any

import msgspec
import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.gateway.watching.decisions import Decisions
from coterie.routing import Decision


def decision(*scores: float, reason: str = "cheapest step") -> Decision:
    return Decision(int(np.argmin(scores)), np.array(scores), reason)


def shown_by(decisions: Decisions) -> Any:
    """The last decisions as a client reads them."""
    return json.loads(msgspec.json.encode(decisions.last()))


def test_a_decision_is_shown_with_its_scores_and_reason() -> None:
    decisions = Decisions()
    decisions.add(
        "req-1",
        "decode",
        "w2",
        ("w1", None, "w2"),
        decision(2.0, 9.0, 1.5),
        time_s=1_700_000_000.25,
        fallback=None,
        cached=np.array([0, 0, 64]),
        beliefs=np.array([1.0, 1.0, 0.25]),
        source="prefix",
        prompt_tokens=100,
        decision_s=37.25e-6,
        router="latency_aware",
    )
    assert shown_by(decisions) == [
        {
            "id": "req-1",
            "time": "2023-11-14T22:13:20.250+00:00",
            "pool": "decode",
            "worker": "w2",
            "router": "latency_aware",
            "scores": {"w1": 2.0, "w2": 1.5},
            "reason": "cheapest step",
            "fallback": None,
            "prompt_tokens": 100,
            "cached_tokens": 64,
            "cached_tokens_by_worker": {"w1": 0, "w2": 64},
            "claims_believed": {"w1": 1.0, "w2": 0.25},
            "footprint": "prefix",
            "decision_us": 37.2,
        }
    ]


def test_the_last_are_kept_newest_first_and_filtered() -> None:
    decisions = Decisions(most=3)
    for number in range(5):
        worker = f"w{number % 2}"
        decisions.add(
            str(number), "prefill" if number == 3 else "decode", worker, ("w0", "w1"), decision(0, 1), time_s=0
        )
    assert [one["id"] for one in decisions.last()] == ["4", "3", "2"]
    assert [one["id"] for one in decisions.last(1)] == ["4"]
    assert decisions.last(-5) == []
    assert [one["id"] for one in decisions.last(pool="decode")] == ["4", "2"]
    assert [one["id"] for one in decisions.last(worker="w1")] == ["3"]
    assert (decisions.recorded, len(decisions)) == (5, 3)


def test_odd_decisions_are_shown_too() -> None:
    decisions = Decisions()
    decisions.add("i" * 5000, "decode", "w1", ("w1", "w2"), decision(math.inf, math.nan), time_s=0.0)
    decisions.add("short", "decode", "gone", ("w1", "w2"), decision(1.0), time_s=0.0, cached=np.array([3]))
    late, early = decisions.last()
    for scores in ([[1.0, 2.0]], [[1.0], [2.0, 3.0]], ["a"], None, [1.0, 2.0]):
        odd = Decision(0, scores, "a plugin's")  # type: ignore[arg-type]
        decisions.add("odd", "decode", "w1", ("w1", "w2"), odd, time_s=0.0, prompt_tokens=np.int64(5))  # type: ignore[arg-type]
        shown = shown_by(decisions)[0]
        assert shown["scores"] == ({"w1": 1.0, "w2": 2.0} if scores == [1.0, 2.0] else {})
        assert shown["prompt_tokens"] == 5
    assert early["scores"] == {"w1": None, "w2": None}
    assert len(early["id"]) == 200
    assert (late["scores"], late["cached_tokens"], late["cached_tokens_by_worker"]) == ({"w1": 1.0}, None, {"w1": 3})
    assert len(shown_by(decisions)) == 7


def test_no_profile_is_kept() -> None:
    class Profile(np.ndarray):
        pass

    decisions, profile = Decisions(), np.zeros(58 * 256, np.float32).view(Profile)
    kept = weakref.ref(profile)
    decisions.add("a", "decode", "w1", ("w1",), decision(1.0)._replace(profile=profile), time_s=0.0)
    del profile
    assert kept() is None


def test_a_ring_of_none_keeps_none() -> None:
    decisions = Decisions(most=0)
    decisions.add("a", "decode", "w1", ("w1",), decision(1.0), time_s=0.0)
    assert decisions.last() == []
    with pytest.raises(ConfigError, match="most=-1 must be at least 0"):
        Decisions(most=-1)
