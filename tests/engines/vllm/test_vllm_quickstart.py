"""The quick start as a user copies it: a real vLLM server, then four commands in fresh shells, each with a verdict."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from coterie.net.processes import ServerProcess, free_port
from vllm_servers import START_S, needs_vllm

PAGE = Path(__file__).parents[3] / "docs/quickstart-vllm.md"
COMMAND_S = 300.0
CPU = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
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


def commands(http: int, events: int) -> list[str]:
    """The page's shell blocks: where the model is, then the five commands; on ports that are free here."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    return [block.replace("8000", str(http)).replace("5602", str(events)) for block in blocks]


@needs_vllm
@pytest.mark.long
@pytest.mark.vllm
def test_five_commands_lead_to_a_verdict_and_a_placement(tmp_path: Path) -> None:
    http, events = free_port(), free_port()
    model, server, *others = commands(http, events)
    assert server.startswith("vllm serve ")
    assert [command.split()[1] for command in others] == ["record", "fleet", "fit", "plan"]
    shell = ["bash", "-euc"]
    env = {**CPU, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    if not list(metadata.distributions(name="vllm")):
        paths = [str(as_package_vllm(tmp_path / "named")), *filter(None, [os.environ.get("PYTHONPATH")])]
        env["PYTHONPATH"] = os.pathsep.join(paths)
    serving = ServerProcess([*shell, f"{model}\nexec {server}"], f"http://localhost:{http}", tmp_path / "log", env)
    with serving.launch():
        serving.wait_ready(START_S)
        for command in others:
            ran = subprocess.run(
                [*shell, f"{model}\n{command}"],
                cwd=tmp_path,
                env={**os.environ, **env},
                capture_output=True,
                text=True,
                timeout=COMMAND_S,
                check=False,
            )
            assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
            assert re.search(r"^\S.* .*\.\nNext: .+$", ran.stdout, re.M), f"{command}\n{ran.stdout}"
    assert "coterie: capturing 8 layers x top 4 of 32 experts" in (tmp_path / "log").read_text()
    assert (tmp_path / "router.safetensors").stat().st_size
    assert (tmp_path / "placement.json").stat().st_size
