"""Faults under load: the benchmark for a short time, and how it judges."""

from __future__ import annotations

import json

import pytest

from gateway.faults import main
from gateway.faulty import verdict
from gateway.faulty.client import Asked, State
from gateway.faulty.hands import GATEWAY, Fault
from gateway.faulty.verdict import LOST, RESET, SILENT, WHOLE, recoveries

KILLED = Fault(verdict.CRASH, GATEWAY, began_s=100.0, repaired_s=104.0)
DRAINED = Fault(verdict.DRAIN, GATEWAY, began_s=200.0, repaired_s=206.0)
WORKER = Fault("kill a decode worker", "decode-1", began_s=300.0, repaired_s=305.0)
FAULTS = [KILLED, DRAINED, WORKER]


def asked(state: State, began_s: float, ended_s: float, problem: str = "", name: str = "one", text: str = "") -> Asked:
    return Asked(name, "prompt", 8, True, began_s, None, ended_s, state, problem, text)


@pytest.mark.parametrize(
    ("one", "found"),
    [
        (asked("whole", 99.0, 99.5), WHOLE),
        (asked("told", 99.0, 99.5), verdict.TOLD),
        (asked("before", 99.0, 100.1, "reset"), RESET),
        (asked("before", 103.0, 103.0, "connect"), RESET),
        (asked("silent", 99.0, 100.1), RESET),
        (asked("before", 99.0, 99.9, "reset"), LOST),
        (asked("before", 102.0, 104.5, "502 worker_failed"), LOST),
        (asked("before", 199.5, 200.5, "reset"), verdict.REFUSED),
        (asked("before", 201.0, 201.0, "503 draining"), verdict.REFUSED),
        (asked("before", 201.0, 201.0, "503 overloaded"), LOST),
        (asked("before", 198.0, 200.5, "reset"), verdict.CUT_BY_DRAIN),
        (asked("silent", 199.0, 201.0), SILENT),
        (asked("before", 301.0, 302.0, "502 worker_failed"), LOST),
        (asked("silent", 299.0, 300.1), SILENT),
        (asked("before", 299.0, 390.0, "timeout"), LOST),
    ],
)
def test_only_a_restart_of_the_gateway_explains_a_loss(one: Asked, found: str) -> None:
    assert verdict.class_of(one, FAULTS) == found


def test_recovery_counts_requests_that_were_sent_after_the_fault() -> None:
    answers = [
        asked("whole", 299.0, 300.5, name="before"),
        asked("told", 300.1, 300.6, name="broken"),
        asked("whole", 300.5, 301.5, name="elsewhere"),
        asked("whole", 304.0, 306.0, name="early"),
        asked("whole", 306.0, 307.0, name="back"),
    ]
    served_by = {"elsewhere": "decode-0", "early": "decode-1", "back": "decode-1"}
    (found,) = recoveries(answers, [WORKER], served_by)
    assert (found.repair_s, found.any_s, found.worker_s) == (5.0, 1.5, 2.0)
    again = Fault("stall a decode worker", "decode-1", began_s=306.5, repaired_s=306.8)
    found, _ = recoveries(answers, [WORKER, again], served_by)
    assert (found.any_s, found.worker_s) == (1.5, None), "another fault came before it was back"


def test_answers_to_one_prompt_must_be_the_same() -> None:
    same = [asked("whole", 0, 1, text="yes"), asked("whole", 1, 2, text="yes"), asked("told", 1, 2, text="ye")]
    assert not verdict.different_answers(same)
    assert len(verdict.different_answers([*same, asked("whole", 2, 3, text="no")])) == 1


@pytest.mark.long
def test_twenty_seconds_of_faults(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--minutes", "0.35", "--rate", "4", "--seed", "3", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert (code, result["defects"]) == (0, [])
    assert len(result["faults"]) >= 2
    assert result["by_class"][WHOLE] > 0
