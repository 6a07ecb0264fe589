"""A stranger's package, installed by pip: each of its policies works by name in every verb, with no file of Coterie
touched.

It is installed into a folder of its own, and one process that sees that folder runs all commands: registries read entry
points once, so those of this process must not see it. In that process evaluations and benches are cut to a size of
seconds; the code that runs is theirs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.engines.tiny import tiny_model_path
from vllm_servers import MODEL, Fleet, needs_vllm

PACKAGE = Path(__file__).parent
ROUTER, STRATEGY, PLANNER = "stranger_overlap", "stranger_short_first", "stranger_one_swap"
PREDICTOR, FORMAT = "stranger_last_seen", "stranger-log"
LAYERS, EXPERTS, TOP_K = 2, 8, 2

PROCESS = """
import contextlib, io, json, os, sys, traceback
os.cpu_count = lambda: 1  # cells of a suite run here, one after the other
from coterie.cli.main import main
answers = sys.stdout
for line in sys.stdin:
    asked, out, err, code = json.loads(line), io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            if isinstance(asked, str):
                exec(asked, {"__name__": "asked"})
            else:
                sys.argv = ["coterie", *asked]
                main()
        except SystemExit as error:
            code = error.code or 0
        except BaseException:
            traceback.print_exc()
            code = 1
    answers.write(json.dumps([code, out.getvalue(), err.getvalue()]) + "\\n")
    answers.flush()
"""

DATA = """
from pathlib import Path
import numpy as np
from coterie.models import get_model
from coterie.traces.arrivals import LognormalLengths
from coterie.traces.synthetic import SyntheticSettings, generate
from coterie.traces.writers import write_trace

settings = SyntheticSettings(lengths=LognormalLengths(12, 0.3, 12, 0.3, 32)).shaped_like(get_model("deepseek-v2-lite"))
write_trace(generate(settings, np.random.default_rng(0), requests=48), Path({path!r}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pip put the package into; its source is copied, because a build leaves files there."""
    folder = tmp_path_factory.mktemp("stranger")
    shutil.copytree(PACKAGE / "src", folder / "source" / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PACKAGE / "pyproject.toml", folder / "source")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-build-isolation", "--no-deps"]
    target = folder / "installed"
    ran = subprocess.run(
        [*pip, "--no-index", "--target", str(target), str(folder / "source")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, f"{ran.stdout}{ran.stderr}\nIs setuptools of the dev extra installed? make install"
    return target


def environment(installed: Path, **more: str) -> dict[str, str]:
    paths = [str(installed), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}


class Coterie:
    """A process that sees the package, and runs one command, or one piece of Python, after the other."""

    def __init__(self, env: dict[str, str], folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROCESS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            cwd=folder,
        )

    def _ask(self, what: str | list[str]) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        code, out, err = json.loads(self.process.stdout.readline())
        assert code == 0, f"{what}: exit code {code}\n{out}\n{err}"
        return str(out)

    def run(self, *words: str | Path) -> Any:
        """What a command prints with --json."""
        return json.loads(self._ask([*map(str, words), "--json"]))

    def python(self, source: str) -> str:
        return self._ask(source)

    def close(self) -> None:
        self.process.communicate(timeout=60)  # the end of its input ends it


@pytest.fixture(scope="module")
def coterie(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coterie]:
    process = Coterie(environment(installed), tmp_path_factory.mktemp("work"))
    yield process
    process.close()


@pytest.fixture(scope="module")
def trace(coterie: Coterie, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated trace of DeepSeek-V2-Lite's shape, laid out as the suites look for recorded ones."""
    path = tmp_path_factory.mktemp("data") / "activations" / "deepseek-v2-lite" / "routing_tokens.npz"
    path.parent.mkdir(parents=True)
    coterie.python(DATA.format(path=str(path)))
    return path


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of the reader's format."""
    rng, lines = np.random.default_rng(0), []
    for request in range(6):
        for phase in ("prefill",) * 4 + ("decode",) * 5:
            ids = np.argsort(rng.random((LAYERS, EXPERTS)), axis=1)[:, :TOP_K]
            lines.append(f"r{request} {phase} " + ";".join(",".join(map(str, row)) for row in ids))
    head, end = f"stranger-log 1 tiny {EXPERTS} {LAYERS} {TOP_K}", f"end {len(lines)}"
    file = tmp_path_factory.mktemp("log") / "tokens.log"
    file.write_text("\n".join([head, *lines, end]) + "\n")
    return file


def test_every_name_is_known(coterie: Coterie) -> None:
    names = coterie.python(
        "from coterie.batching import strategies\n"
        "from coterie.placement import planners\n"
        "from coterie.predictors import predictors\n"
        "from coterie.routing import routers\n"
        "from coterie.traces.readers import readers\n"
        "for one in (routers, strategies, planners, predictors, readers):\n"
        "    print(*one.names())\n"
        "print(routers.parameters('stranger_overlap'))\n"
    ).splitlines()
    for name, known in zip((ROUTER, STRATEGY, PLANNER, PREDICTOR, FORMAT), names, strict=False):
        assert name in known.split()
    assert names[-1] == "{'fitted': True, 'cost': True}"


def test_contracts(coterie: Coterie, trace: Path, log: Path) -> None:
    coterie.python(
        "from pathlib import Path\n"
        "import coterie\n"
        "from coterie.batching import strategies\n"
        "from coterie.costs.lines import DecodeStepPrices\n"
        "from coterie.placement import DEEPSEEK_V3_PREFILL, planners\n"
        "from coterie.predictors import predictors\n"
        "from coterie.routing import routers\n"
        "from coterie.testing import check_planner, check_predictor, check_reader, check_router, check_strategy\n"
        "from coterie.traces.readers import readers\n"
        f"check_strategy(lambda: strategies.make({STRATEGY!r}))\n"
        f"check_planner(lambda: planners.make({PLANNER!r}, {{'objective': DEEPSEEK_V3_PREFILL}}))\n"
        f"check_predictor(lambda: predictors.make({PREDICTOR!r}))\n"
        f"check_reader(readers[{FORMAT!r}], Path({str(log)!r}))\n"
        f"fitted = coterie.fit_router(coterie.open_trace({str(trace)!r}), workers=4)\n"
        "cost = DecodeStepPrices.of(coterie.step_model('deepseek-v2-lite'))\n"
        f"make = lambda: routers.make({ROUTER!r}, {{'fitted': fitted, 'cost': cost, 'seed': 0}})\n"
        "check_router(make, fitted.num_layers, fitted.num_experts, workers=4)\n"
    )


def test_what_a_policy_lacks_is_said(coterie: Coterie) -> None:
    said = coterie.python(
        "from coterie.errors import ConfigError\n"
        "from coterie.routing import routers\n"
        f"try:\n    routers.make({ROUTER!r}, {{'cost': None}})\nexcept ConfigError as error:\n    print(error)\n"
    )
    assert said == f"router '{ROUTER}' needs fitted: what was learned from a trace\n"


def test_simulate_a_strategy(coterie: Coterie) -> None:
    found = coterie.run("simulate", "--strategy", STRATEGY, "--requests", "64")
    assert [row["strategy"] for row in found["rows"]] == ["fcfs", STRATEGY]
    assert found["rows"][1] | {"strategy": ""} != found["rows"][0] | {"strategy": ""}, "it chose otherwise"


def test_simulate_a_predictor(coterie: Coterie, trace: Path) -> None:
    asked = ("--predictor", PREDICTOR, "--strategy", STRATEGY, "--requests", "24", "--places", "4")
    found = coterie.run("simulate", trace, *asked)
    assert found["settings"]["predictor"] == PREDICTOR
    assert found["settings"]["calibration_requests"] > 0


def test_evaluate_caps(coterie: Coterie, tmp_path: Path) -> None:
    few = ("--requests", "64", "--seeds", "42", "--rates", "300")
    found = coterie.run("evaluate", "caps", "--strategies", STRATEGY, *few, "--out", tmp_path)
    assert {row["strategy"] for row in found["rows"]} == {"fcfs", STRATEGY}


def test_evaluate_eldr(coterie: Coterie, trace: Path, tmp_path: Path) -> None:
    """One cell of the suite, on a generated trace in the place of the recorded one."""
    coterie.python(
        "import os\n"
        "from coterie_lab.suites.eldr import suite\n"
        "from coterie_lab.suites.eldr.cells import Cell\n"
        f"os.environ['COTERIE_DATA'] = {str(trace.parents[2])!r}\n"
        "suite.jobs_of = lambda data, seeds: [Cell('deepseek-v2-lite', 2, 4, seeds[0])]\n"
        "suite.ROUTERS = ('round_robin', 'join_shortest_queue', 'locality_band', 'latency_aware')\n"
        "suite._write = lambda *_: []\n"
    )
    few = ("--requests", "60", "--seeds", "0")
    found = coterie.run("evaluate", "eldr", "--routers", ROUTER, *few, "--out", tmp_path)
    row = next(row for row in found["rows"] if row["router"] == ROUTER)
    assert 0 < row["active_experts"] <= 64


def test_evaluate_predictors(coterie: Coterie, trace: Path) -> None:
    found = coterie.run("evaluate", "predictors", "--trace", trace)
    rows = [row for row in found["rows"] if row["predictor"] == PREDICTOR]
    assert rows
    assert all(0 < row["cosine"] <= 1 for row in rows)


def test_bench(coterie: Coterie) -> None:
    coterie.python(
        "from coterie_lab.benches import batching, kvindex, routing\n"
        "batching.SIZES, batching.REPEATS = ((8, 2, 8, 2),), 3\n"
        "routing.LAYERS, routing.SIZES, routing.FIT_REQUESTS, routing.FIT_WORKERS = 2, (4,), 64, 2\n"
        "kvindex.kv_directory_rows = lambda report: []\n"
    )
    rows = coterie.run("bench", "batching")["rows"]
    assert [row["median_us"] > 0 for row in rows if row["strategy"] == STRATEGY] == [True]
    rows = coterie.run("bench", "routing")["rows"]
    assert [row["median_us"] > 0 for row in rows if row.get("router") == ROUTER] == [True]


def test_plan(coterie: Coterie, trace: Path, tmp_path: Path) -> None:
    found = coterie.run("plan", trace, "--planner", PLANNER, "--ranks", "4", "--horizon", "1e9", "-o", tmp_path / "map")
    assert found["planner"] == PLANNER
    assert found["moves"]
    assert found["after_s"] < found["before_s"]


def test_read_its_format(coterie: Coterie, log: Path, tmp_path: Path) -> None:
    found = coterie.run("convert", log, tmp_path / "named", "--from", FORMAT)
    assert (found["from"], found["requests"], found["tokens"], found["layers"]) == (FORMAT, 6, 54, LAYERS)
    found = coterie.run("convert", log, tmp_path / "recognised")
    assert found["from"] == FORMAT
    assert coterie.run("inspect", log)["trace"] == str(log)


def test_in_a_process_of_its_own(installed: Path, log: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "coterie", "convert", str(log), str(tmp_path / "trace"), "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment(installed))
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["from"] == FORMAT


@pytest.mark.long
def test_demo(coterie: Coterie, tmp_path: Path) -> None:
    """Real workers, which compute coterie-tiny, under the stranger's router."""
    coterie.python("from coterie.answers.demo import run\nrun.MAX_TOKENS = 12\n")
    found = coterie.run("demo", "--router", ROUTER, "--requests", "24", "--out", tmp_path)
    assert [row["router"] for row in found["rows"]] == ["join_shortest_queue", "round_robin", ROUTER]
    assert found["same_tokens"]


@pytest.mark.vllm
@needs_vllm
def test_orders_the_waiting_requests_of_vllm(installed: Path, tmp_path: Path) -> None:
    """A real server whose scheduler is told the strategy's name."""
    from coterie.engines.transformers import load_model
    from coterie.engines.transformers.dry_run import dry_run_table

    table, decisions = tmp_path / "table.safetensors", tmp_path / "decisions"
    dry_run_table(load_model(tiny_model_path()).model).save(table)
    ours = {"strategy": STRATEGY, "loads": str(table), "decisions": str(decisions)}
    how = {
        "env": {"PYTHONPATH": environment(installed)["PYTHONPATH"]},
        "extra": (
            "--max-num-seqs",
            "4",
            "--scheduler-cls",
            "coterie.engines.vllm.scheduler.ExpertAwareScheduler",
            "--additional-config",
            json.dumps({"coterie": {"scheduler": ours}}),
        ),
    }
    fleet = Fleet(tmp_path)
    try:
        (server,) = fleet.start({"stranger": how})
        prompts = [[10 + n] * (4 + n % 7) for n in range(32)]
        body = {"model": MODEL, "prompt": prompts, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        answer = server.post("/v1/completions", body)
        assert sorted(choice["index"] for choice in answer["choices"]) == list(range(32))
        said = server.log.read_text()
        assert f"{STRATEGY} orders the waiting requests" in said
        assert "serving goes on" not in said
        assert [json.loads(line) for line in decisions.read_text().splitlines()], "it was asked"
    finally:
        fleet.close()
