"""curl against a gateway, by the script that tries clients: what it can do on this machine without installing any."""

from __future__ import annotations

import shutil

import pytest

from clients.checks import PASSED
from clients.targets import run_recorder
from clients.with_curl import try_curl


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl() -> None:
    with run_recorder() as (asked, _):
        _, found = try_curl(asked)
    assert len(found) > 10
    assert [one for one in found if one.outcome != PASSED] == []
