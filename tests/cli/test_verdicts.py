"""What fleet, simulate and plan say of one trace has one form, and each names its baseline."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from command_line import Run
from coterie.answers.verdicts import HARDLY, NOT, PAYS, UNTOLD
from coterie.models import get_model
from coterie.traces.arrivals import LognormalLengths
from coterie.traces.synthetic import SyntheticSettings, generate_to

MODEL = "gpt-oss-20b"
FLEET = ("--router", "latency_aware", "--decoders", 2, "--in-flight", 4, "--requests", 64)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("verdicts") / "trace"
    settings = SyntheticSettings(specialisation=0.9, lengths=LognormalLengths(16, 0.3, 24, 0.3, 48), model=MODEL)
    generate_to(place, settings.shaped_like(get_model(MODEL)), np.random.default_rng(0), requests=60)
    return place


@pytest.mark.parametrize(
    ("verb", "options", "who", "baseline", "sure"),
    [
        ("fleet", (*FLEET, "--splits", 2), "latency_aware", "join_shortest_queue", "95% "),
        ("fleet", (*FLEET, "--splits", 1), "latency_aware", "join_shortest_queue", "no interval: one split"),
        ("simulate", ("--strategy", "lpt", "--requests", 30), "lpt", "fcfs", "no interval: one run"),
        (
            "plan",
            ("--ranks", 4),
            "the plan",
            "the placement that runs now (experts in order)",
            "(one split: no interval)",
        ),
        ("plan", ("--ranks", 4, "--batch", 16), "the plan", "the placement that runs now", "(one split: no interval)"),
    ],
)
def test_one_form(
    run: Run, trace: Path, verb: str, options: tuple[object, ...], who: str, baseline: str, sure: str
) -> None:
    ran = run(verb, trace, *options, "--json")
    assert (ran.code, ran.err) == (0, "")
    verdict = json.loads(ran.out)["verdict"]
    assert verdict.startswith(tuple(f"{opening} for " for opening in (PAYS, HARDLY, NOT, UNTOLD)))
    where, gain = verdict.split(": ", 1)
    assert MODEL in where
    assert " in mxfp4 on " in where
    assert gain.startswith((f"{who} takes ", f"{who} adds "))
    against = gain.split(" against ", 1)[1].split(";")[0]
    assert against.startswith(baseline)
    assert sure in against
