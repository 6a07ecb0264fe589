"""vLLM's own parser takes every command that pages show for it; nothing is started."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest

from pages import vllm_commands
from vllm_servers import needs_vllm

PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = make_arg_parser(FlexibleArgumentParser(exit_on_error=False))
for words in json.load(sys.stdin):
    parsed = parser.parse_args(words)
    parsed = {name: getattr(parsed, name) for name in ("model_tag", "data_parallel_size", "enable_expert_parallel")}
    print(json.dumps(parsed))
"""
"""In a process of its own: importing vLLM warns, and its parser ends the process at a word that it does not know."""


@pytest.mark.vllm
@needs_vllm
def test_vllm_takes_the_commands() -> None:
    commands = [shlex.split(command, comments=True) for _, command in vllm_commands()]
    assert all(command[:2] == ["vllm", "serve"] for command in commands)
    asked = json.dumps([command[2:] for command in commands])
    ran = subprocess.run([sys.executable, "-c", PARSE], input=asked, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    parsed = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert [one["model_tag"] for one in parsed] == [command[2] for command in commands]
    assert {one["data_parallel_size"] for one in parsed if one["enable_expert_parallel"]} >= {8, 16}
