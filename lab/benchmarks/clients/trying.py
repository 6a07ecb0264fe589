"""Clients of the field against a gateway: OpenAI's Python client, curl and guidellm, each as its users run it.

    python lab/benchmarks/clients recorder          a gateway in front of a worker that keeps what it gets
    python lab/benchmarks/clients embedded          coterie serve --embedded
    python lab/benchmarks/clients vllm              a gateway in front of real vLLM: one prefill and two decode servers
    python lab/benchmarks/clients URL --model NAME  a gateway that runs

Prints a table of what was tried and what came of it; exit code 1 if anything failed. A feature that a worker has not
got (the reference worker knows no tools and no logprobs) must come back as the worker's own refusal. The clients are
installed from PyPI under ``out/clients``, each in an environment of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from clients.checks import FAILED, Asked, Check
from clients.targets import run_embedded, run_recorder, run_vllm
from clients.with_curl import try_curl
from clients.with_load_tools import try_guidellm
from clients.with_openai import try_openai
from coterie.engines.tiny import TINY, tiny_model_path

CLIENTS: dict[str, Callable[[Asked, Path], tuple[str, list[Check]]]] = {
    "openai": lambda asked, _: try_openai(asked),
    "curl": lambda asked, _: try_curl(asked),
    "guidellm": try_guidellm,
}
TARGETS = {"recorder": run_recorder, "embedded": run_embedded, "vllm": run_vllm}
DETAIL = 90
"""Characters shown of a detail."""


def print_checks(versions: dict[str, str], found: Sequence[Check]) -> None:
    print("| client | what | outcome | |\n|---|---|---|---|")
    for one in found:
        detail = " ".join(one.detail.split()).replace("|", "\\|")
        shown = detail if one.outcome == FAILED else detail[:DETAIL]
        print(f"| {one.client} {versions[one.client]} | {one.what} | {one.outcome} | {shown} |")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="recorder, embedded, vllm, or the URL of a gateway")
    parser.add_argument("--model", default=TINY, help="of the gateway at a URL")
    parser.add_argument("--key", help="API key, if the gateway at the URL wants one")
    parser.add_argument("--tokenizer", type=Path, default=tiny_model_path(), help="folder of the model, for guidellm")
    parser.add_argument("--clients", nargs="+", choices=list(CLIENTS), default=list(CLIENTS))
    parser.add_argument("--output", type=Path, help="write what was found as JSON")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a plain one would leave the servers
    versions: dict[str, str] = {}
    found: list[Check] = []
    at_url = Asked(options.target.rstrip("/"), options.model, options.key)
    with TARGETS.get(options.target, lambda: contextlib.nullcontext(at_url))() as asked:
        for client in options.clients:
            print(f"trying {client}", file=sys.stderr)
            versions[client], checks = CLIENTS[client](asked, options.tokenizer)
            found += checks
    print_checks(versions, found)
    if options.output is not None:
        told = {
            "target": options.target,
            "versions": versions,
            "python": platform.python_version(),
            "checks": [one._asdict() for one in found],
        }
        options.output.write_text(json.dumps(told, indent=1, ensure_ascii=False))
    sys.exit(1 if any(one.outcome == FAILED for one in found) else 0)


if __name__ == "__main__":
    main()
