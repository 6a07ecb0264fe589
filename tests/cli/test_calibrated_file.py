"""A file of ``coterie calibrate``, which holds whole steps alone, prices what verbs and the gateway ask."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from command_line import Run, refused
from coterie.costs.presets import load_preset, save_preset
from coterie.gateway.fleet.spec import RouterSpec, prices_of
from coterie.models import get_model
from coterie.traces.synthetic import SyntheticSettings, generate

MODEL = "gpt-oss-20b"
SMALL = ("--requests", 40, "--splits", 1)
"""A fleet in tenths of a second: what it saves is not asked here."""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    shipped = load_preset("h200")
    steps = {"vllm": {MODEL: {"mxfp4": shipped.engines["vllm"][MODEL]["mxfp4"]}}}
    bare = msgspec.structs.replace(shipped.measurement, shapes=(), contention=())
    preset = msgspec.structs.replace(
        shipped, name="local", measurement=bare, fits={}, tables={}, exchange={}, contention={}, engines=steps
    )
    save_preset(preset, tmp_path / "mine.json")
    return tmp_path / "mine.json"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    spec = get_model(MODEL)
    generate(SyntheticSettings().shaped_like(spec), np.random.default_rng(0), requests=24).save(tmp_path / "trace")
    return tmp_path / "trace"


def test_plan_and_fleet_take_it(run: Run, mine: Path, trace: Path) -> None:
    planned = run("plan", trace, "--preset", mine, "--ranks", 4, "--json")
    assert planned.code == 0
    assert json.loads(planned.out)["measured"]
    served = run("fleet", trace, "--preset", mine, "--decoders", 2, "--in-flight", 2, *SMALL, "--json")
    assert served.code == 0
    assert "was not run in an engine" not in served.out


def test_the_gateway_takes_it(mine: Path) -> None:
    assert prices_of(RouterSpec(router="latency_aware", model=MODEL, device=str(mine)), None).expert_us > 0


def test_what_it_does_not_hold_is_refused(run: Run, mine: Path, trace: Path) -> None:
    refused(
        run("plan", trace, "--preset", mine, "--dtype", "bf16"), "gpt-oss-20b in bf16 was not measured on local, but"
    )
