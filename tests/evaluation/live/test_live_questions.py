"""What a live comparison is said to mean."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.evaluation.live.questions import QUESTIONS, answer_of, ask_live
from coterie.evaluation.load.compare import Change
from coterie.evaluation.load.report import LoadReport, Row
from coterie.evaluation.load.routers import RouterSetting
from coterie.evaluation.load.run import LoadRun
from coterie.evaluation.load.summary import summarise
from coterie.routing import routers
from coterie.types import Interval

ASKED = QUESTIONS["joint"]
NONE, LESS, MORE = Interval(-1.0, -4.0, 2.0), Interval(-8.0, -10.0, -6.0), Interval(5.0, 2.0, 8.0)


def answer(**changes: Interval) -> str:
    summary = summarise([LoadRun()], np.random.default_rng(0))
    told = [Change(name, found) for name, found in changes.items()]
    rows = [Row(name, summary, told if name == ASKED.asked else [], None, None, None) for name in (ASKED.base, "joint")]
    return answer_of(ASKED, LoadReport("m", "", "", 0.0, False, rows, [], ""))


def test_where_it_adds_nothing_that_is_said_with_the_numbers() -> None:
    said = answer(experts=NONE, ttft_mean=NONE, tpot_mean=NONE)
    assert said.startswith("The expert term adds nothing that this run can tell (joint against joint:experts=0: ")
    assert "mean TTFT -1.0 [-4.0, +2.0]%" in said


def test_fewer_experts_that_save_no_time_are_called_that() -> None:
    said = answer(experts=LESS, ttft_mean=NONE, tpot_mean=NONE)
    assert "experts a step -8.0 [-10.0, -6.0]%." in said
    assert "did not make it faster here" in said
    assert "CPU" in said


def test_what_is_faster_or_slower_is_said() -> None:
    assert answer(experts=LESS, tpot_mean=LESS).endswith("mean TPOT -8.0 [-10.0, -6.0]%.")
    assert answer(experts=NONE, ttft_mean=MORE).endswith("It does not pay here.")
    assert answer(experts=MORE, ttft_mean=NONE).endswith("experts a step +5.0 [+2.0, +8.0]%. It does not pay here.")


def test_routers_of_the_questions_exist() -> None:
    for question in QUESTIONS.values():
        for name in (question.base, question.asked, *question.others):
            routers.check(RouterSetting.parse(name).router)
    with pytest.raises(ConfigError, match="joint, experts"):
        ask_live("prefixes", "http://127.0.0.1:9", [])
