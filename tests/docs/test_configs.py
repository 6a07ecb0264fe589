"""Files of the gateway that pages show are files that it takes, and vLLM's own parser takes the commands for vLLM."""

from __future__ import annotations

import re

import pytest

from coterie.gateway.access import Keys
from coterie.gateway.config import parse_config
from pages import PAGES, blocks, vllm_commands


@pytest.mark.parametrize(("page", "text"), list(blocks("yaml")))
def test_the_gateway_reads_it(page: str, text: str) -> None:
    if text.startswith("- {name:"):
        assert Keys.load([{"name": "x", "sha256": "0" * 64}])  # hashes of the page are cut: only its fields are checked
        assert set(re.findall(r"(\w+):", text)) <= {"name", "sha256", "rate", "burst", "admin", "only"}
        return
    if text.startswith("scrape_configs:"):
        return  # Prometheus reads it: tests/gateway/test_cluster_files.py
    config = parse_config(text, PAGES[page])
    assert config.workers or config.control is not None


def test_vllm_is_started_by_its_command() -> None:
    pages = {page for page, _ in vllm_commands()}
    assert {"docs/quickstart-vllm", "docs/engines/vllm", "docs/engines/deepseek"} <= pages
    assert [page for page, block in blocks("", "bash", "sh") if "vllm.entrypoints" in block] == []
