"""Every suite runs by its command at a small size: it ends well, with rows, and its tables and notes are printed.

This finds a table that shows a field which rows lack, or a note that cannot be made; other tests check what rows say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from command_line import runner
from coterie.answers.suites import suites
from coterie.types import NVLINK4
from coterie_lab.suites.drift.advice import advice_rows
from coterie_lab.suites.drift.traffic import GPT_OSS
from coterie_lab.suites.eldr.cells import Cell
from coterie_lab.suites.eldr.suite import AnalysisJob
from coterie_lab.suites.eldr.synthetic import SyntheticCell, SyntheticSize, serve_synthetic
from coterie_lab.suites.joint.cells import JointCell
from coterie_lab.suites.joint.prefixes import RECORDED, WHOLE, FleetKind, PrefixCell
from coterie_lab.suites.latency_optimal.domains import DomainSetting
from coterie_lab.suites.latency_optimal.sweep import DriftSetting, SweepSetting
from coterie_lab.suites.placement import cells as placement
from coterie_lab.suites.placement.mixtures import Mixture
from coterie_lab.suites.placement.shifts import Shift
from coterie_lab.suites.placement.traffic import TINY, Chunks, read_chunks
from coterie_lab.suites.regimes.suite import REGIMES
from coterie_lab.suites.sem_moe.locality import CONTENDERS
from coterie_lab.suites.together.groups import CONFIGS
from tiny_traces import save_tiny_trace

FEW = SyntheticSize(recordings=120, fitted=40, prompt_tokens=4, output_tokens=4, requests=40)
MODEL = "deepseek-v2-lite"
DECODE_ONLY = DomainSetting(windows=2, steps=500, tokens=(("decode", 1_024),))


def few_layers(data: Path) -> Chunks:
    chunks = read_chunks(data)
    return chunks._replace(shares=chunks.shares[:, :, :2])


class Small(NamedTuple):
    """A size of a suite that takes no time."""

    arguments: str = ""
    patches: Mapping[str, Any] = MappingProxyType({})
    data: bool = True
    """Whether it reads the folder of real data."""


SMALL = {
    "all-to-all": Small(data=False),
    "caps": Small("--requests 40 --seeds 0 --rates 300 --strategies lpt", data=False),
    "drift": Small(
        "--requests 128 --seeds 0",
        {
            "drift.cells.PER_DECODER": {GPT_OSS: 8},
            "drift.cells.ROUTERS": ("latency_aware",),
            "drift.suite.advice_rows": partial(advice_rows, setting=DECODE_ONLY),
        },
    ),
    "eldr": Small(
        "--requests 40 --seeds 0",
        {
            "eldr.suite.jobs_of": lambda *_: [
                SyntheticCell("topology", 2, 4, 0),
                Cell(MODEL, 2, 4, 0),
                AnalysisJob(MODEL, 0),
            ],
            "eldr.suite.serve_synthetic": partial(serve_synthetic, size=FEW),
        },
    ),
    "joint": Small(
        "--requests 40 --seeds 0",
        {
            "joint.suite.jobs_of": lambda *_: [JointCell("gpt-oss-20b", 2, 0)],
            "joint.suite.prefix_jobs_of": lambda *_: [PrefixCell(RECORDED, 0.25, 0)],
            "joint.prefixes.FLEETS": {WHOLE: FleetKind(per_worker=1)},
            "joint.cells.STEP_TOKENS": (16,),
        },
    ),
    "latency-optimal": Small(
        "--seeds 0",
        {
            "latency_optimal.suite.SweepSetting": partial(
                SweepSetting, DriftSetting(experts=32), model_layers=4, layers=1, warm_up=20, iterations=20, short=5
            ),
            "latency_optimal.suite.DomainSetting": lambda: DECODE_ONLY,
            "latency_optimal.domains._planning_s": lambda *_: 0.01,
            "latency_optimal.suite.ILP_SECONDS": 0.2,
            "latency_optimal.suite.REPEATS": 1,
        },
    ),
    "migration": Small(data=False),
    "placement": Small(
        "--seeds 0",
        {
            "placement.suite.tasks_of": lambda *_: [
                placement.Cell(TINY, 4, 8, 0),
                Mixture(8, 256, 0),
                Shift(TINY, 40, "all", 0),
            ],
            "placement.figures.read_chunks": few_layers,
            "placement.mixtures.read_chunks": few_layers,
        },
    ),
    "predictors": Small("--trace trace", data=False),
    "regimes": Small(
        "--requests 12 --seeds 0 --rates 1.3 --strategies lpt",
        {"regimes.suite.REGIMES": {"decode": REGIMES["decode"]}, "regimes.suite.AS_PUBLISHED": {}},
    ),
    "sem-moe": Small(
        "--requests 12 --seeds 0 --rates 20",
        {
            "sem_moe.locality.EP": (8,),
            "sem_moe.locality.TRACES": (MODEL,),
            "sem_moe.locality.TABLES": Path("none"),
            "sem_moe.locality.CONTENDERS": [contender for contender in CONTENDERS if contender.name != "moetuner"],
            "sem_moe.contenders.BASELINES": ("popularity",),
            "sem_moe.serving.TRACES": (MODEL,),
            "sem_moe.serving.LINKS": (NVLINK4,),
            "sem_moe.serving.PROMPT_TOKENS": 32,
            "sem_moe.serving.MOST": 40,
            "sem_moe.serving.LEAST": 10,
            "sem_moe.serving.MOST_POWER": 1,
            "sem_moe.latency.TRACES": (MODEL,),
            "sem_moe.latency.PROMPTS": (32,),
            "sem_moe.latency.REQUESTS": 4,
            "sem_moe.latency.OUTPUT_TOKENS": 4,
            "sem_moe.prediction.COUNTED": {},
            "sem_moe.wire.RANKS": (2,),
        },
    ),
    "together": Small(
        "--quick --requests 40", {"together.groups.CONFIGS": {"B": CONFIGS["C"]}, "together.groups.WINDOWS": 2}
    ),
}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("suite", suites.names())
def test_every_suite_prints_its_rows(
    suite: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    small = SMALL[suite]
    if small.data:
        request.getfixturevalue("data_dir")
    else:
        monkeypatch.delenv("COTERIE_DATA", raising=False)
    for name, value in small.patches.items():
        monkeypatch.setattr(f"coterie_lab.suites.{name}", value)
    monkeypatch.chdir(tmp_path)
    if "--trace" in small.arguments:
        save_tiny_trace(Path("trace"), 24, 4)
    ran = runner(monkeypatch, capsys, "evaluate")(suite, *small.arguments.split(), "--out", "out")
    assert ran.code == 0, ran.err
    result = json.loads((tmp_path / "out" / f"{suite}.json").read_text())
    assert result["rows"]
    assert ran.out.count("\n- ") == len(result["notes"])
