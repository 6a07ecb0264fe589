"""Secrets, addresses and keys: what is let through, and that no message quotes a secret."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.net.access import (
    KEY_VARIABLE,
    SECRET_VARIABLE,
    Address,
    FleetAccess,
    bearer,
    is_loopback,
    parse_address,
    read_secret,
    shows_key,
)

SECRET = "0123456789abcdef"


def test_secrets_come_from_files_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert FleetAccess.read() == FleetAccess()
    monkeypatch.setenv(SECRET_VARIABLE, f" {SECRET}\n")
    file = tmp_path / "key"
    file.write_text(f"{SECRET}x\n")
    found = FleetAccess.read(key_file=file)
    assert (found.secret, found.key) == (SECRET, f"{SECRET}x")
    assert SECRET not in repr(found)
    fresh = FleetAccess.fresh()
    assert len({fresh.secret, fresh.key, FleetAccess.fresh().secret}) == 3
    for name, value in fresh.environment.items():
        monkeypatch.setenv(name, value)
    assert FleetAccess.read() == fresh


@pytest.mark.parametrize("wrong", ["short", "ü" * 20, "a\x00" * 20, ""])
def test_weak_secrets_are_refused_and_not_quoted(wrong: str, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(wrong)
    with pytest.raises(ConfigError, match="16") as refused:
        read_secret(SECRET_VARIABLE, file)
    assert not wrong or wrong not in str(refused.value).replace(str(file), "")
    with pytest.raises(ConfigError, match="cannot read the secret"):
        read_secret(SECRET_VARIABLE, tmp_path / "none")


def test_what_is_this_machine() -> None:
    for host in ("127.0.0.1", "127.9.8.7", "::1", "[::1]", "localhost", "LOCALHOST"):
        assert is_loopback(host), host
    for host in ("0.0.0.0", "::", "", "10.0.0.1", "localhost.example.com", "127.0.0.1.", "127.1", "0x7f000001", "*"):
        assert not is_loopback(host), host


def test_addresses() -> None:
    assert parse_address("Node-7:8100") == Address("node-7", 8100)
    assert parse_address("[::1]:80") == Address("::1", 80)
    assert str(parse_address("[::1]:80")) == "[::1]:80"
    for wrong in ("", ":", "a", "a:", ":80", "a:0", "a:65536", "a:-1", "a:²", "::1:80", "[]:80", "a:" + "9" * 9):
        with pytest.raises(ConfigError, match="must be HOST:PORT"):
            parse_address(wrong)


@given(st.binary(max_size=40))
def test_no_other_header_shows_the_key(header: bytes) -> None:
    assert shows_key(header, SECRET) == (
        header.lower().startswith(b"bearer ") and header[7:].strip() == SECRET.encode()
    )
    assert shows_key(bearer(SECRET)["Authorization"].encode(), SECRET)
    assert not shows_key(None, SECRET)
    assert bearer(None) == {}
