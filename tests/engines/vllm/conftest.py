"""Servers that several test files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """Real vLLM servers, ended with the session."""
    from vllm_servers import Fleet

    servers = Fleet(tmp_path_factory.mktemp("vllm"))
    yield servers
    servers.close()
