"""API keys: entries are checked one by one, and no message, entry or check gives a key away."""

from __future__ import annotations

import hashlib
import hmac
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ConfigError, InputError, TraceError
from coterie.gateway.access import Keys, new_key

FIELDS = ("name", "sha256", "admin", "only", "rate", "burst", "key")
HASH = hashlib.sha256(b"the key").hexdigest()


def test_a_new_key_opens_what_its_entry_says() -> None:
    key, entry = new_key("search", rate=5, burst=10)
    keys = Keys.load([new_key("other").entry, entry, new_key("on-call", admin=True).entry])
    assert keys.check(f"Bearer {key}".encode()) == entry
    assert keys.check(f"bearer  {key} ".encode()) == entry
    assert len(keys.entries) == 3
    assert new_key("search").key != key
    assert key not in entry.as_yaml()


@pytest.mark.parametrize(
    "header", [None, b"", b"Bearer", b"Bearer ", b"Basic the key", b"the key", b"Bearer the ke", b"Bearer the key!"]
)
def test_anything_else_opens_nothing(header: bytes | None) -> None:
    assert Keys.load([{"name": "a", "sha256": HASH}]).check(header) is None
    assert Keys.load([]).check(header) is None


@given(header=st.binary(max_size=600), scheme=st.sampled_from([b"", b"Bearer ", b"BEARER\t", b"bearer "]))
def test_any_bytes_are_answered(header: bytes, scheme: bytes) -> None:
    assert Keys.load([{"name": "a", "sha256": HASH}]).check(scheme + header) is None


@given(
    entries=st.lists(
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.just(HASH),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5),
        ),
        max_size=4,
    )
)
def test_any_list_is_taken_or_refused_in_one_line(entries: list[Any]) -> None:
    said = ""
    try:
        assert len(Keys.load(entries).entries) == len(entries)
    except ConfigError as error:
        said = str(error)
    assert "\n" not in said


def test_a_long_header_is_not_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Keys.load([{"name": "a", "sha256": hashlib.sha256(b"x" * 30_000).hexdigest()}])
    monkeypatch.setattr(hashlib, "sha256", None)
    assert keys.check(b"Bearer " + b"x" * 30_000) is None


def test_every_entry_is_compared_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [new_key(f"caller {number}") for number in range(20)]
    keys, compared = Keys.load([one.entry for one in made]), []
    compare = hmac.compare_digest

    def counted(stored: bytes, presented: bytes) -> bool:
        compared.append(stored)
        return compare(stored, presented)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    for number in (0, 10, 19):
        found = keys.check(f"Bearer {made[number].key}".encode())
        assert found is not None
        assert found.name == f"caller {number}"
    assert len(compared) == 3 * 20


def test_files_are_yaml_or_json_and_an_entry_goes_round(tmp_path: Path) -> None:
    key, entry = new_key("a: tricky # name", admin=True, rate=0.5, burst=3)
    for name in ("keys.yaml", "keys.json"):
        path = tmp_path / name
        text = entry.as_yaml()
        path.write_text(text if name == "keys.yaml" else json.dumps(yaml.safe_load(text), indent="\t"))
        path.chmod(0o600)
        keys = Keys.load(path)
        assert keys.warnings == ()
        assert keys.check(f"Bearer {key}".encode()) == entry


@pytest.mark.parametrize(
    ("mode", "said"), [(0o600, ""), (0o400, ""), (0o640, "may read"), (0o644, "may read"), (0o622, "may write")]
)
def test_a_file_that_others_may_open_is_said(mode: int, said: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"- {{name: a, sha256: {HASH}}}\n")
    path.chmod(mode)
    assert [said in line and f"mode {mode:o}" in line for line in Keys.load(path).warnings] == ([True] if said else [])


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["a"], "keys: entry 1: Expected `object`"),
        ([{"sha256": HASH}], "keys: entry 1: Object missing required field `name`"),
        ([{"name": "a"}], "keys: entry 1 ('a'): Object missing required field `sha256`"),
        ([{"name": "a", "sha256": "the key"}], "keys: entry 1 ('a'): sha256 must be 64 hexadecimal digits"),
        ([{"name": "a", "sha256": "é" * 64}], "keys: entry 1 ('a'): sha256 must be 64 hexadecimal digits"),
        ([{"name": "", "sha256": HASH}], "keys: entry 1 (''): name must have 1 to 128 printable characters"),
        ([{"name": "a\nb", "sha256": HASH}], r"keys: entry 1 ('a\nb'): name must have 1 to 128 printable"),
        ([{"name": "a", "sha256": HASH, "rate": 0}], "keys: entry 1 ('a'): rate=0.0 must be above 0"),
        ([{"name": "a", "sha256": HASH, "rate": float("nan")}], "keys: entry 1 ('a'): rate=nan must be above 0"),
        ([{"name": "a", "sha256": HASH, "rate": 1, "burst": 0.5}], "keys: entry 1 ('a'): burst=0.5 must be at least 1"),
        (
            [{"name": "a", "sha256": HASH, "only": "live"}],
            "keys: entry 1 ('a'): only='live' must be one of metrics, peers",
        ),
        (
            [{"name": "a", "sha256": HASH, "only": "peers", "admin": True}],
            "keys: entry 1 ('a'): only='peers' opens nothing else: leave out admin",
        ),
        ([{"name": "a", "sha256": HASH, "burst": 5}], "keys: entry 1 ('a'): burst=5.0 needs a rate"),
        ([{"name": "a", "sha256": HASH, "key": "secret"}], "keys: entry 1 ('a'): Object contains unknown field `key`"),
        (
            [{"name": "a", "sha256": HASH}, {"name": "a", "sha256": HASH[::-1]}],
            "keys: entry 2 ('a'): name is that of entry 1 ('a')",
        ),
        (
            [{"name": "a", "sha256": HASH}, {"name": "b", "sha256": HASH.upper()}],
            "keys: entry 2 ('b'): sha256 is that of entry 1 ('a')",
        ),
    ],
)
def test_a_wrong_entry_is_named_in_one_line_without_its_secret(entries: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Keys.load(entries)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert "the key" not in str(caught.value).replace("of the key", "").replace("not the key", "")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\xff\xfe", "is not UTF-8"),
        (b"- {name: [", "is not YAML: see line 1"),
        (b"- &a [*a]\n", "entry 1: Expected"),
        (b"[" * 500, "is not YAML"),
        (b"2024-99-99", "is not YAML"),
        (b"name: a", "must be a list"),
        (b"", "must be a list"),
        (b"#" * (1 << 20) + b"#", "has 1048577 bytes"),
    ],
)
def test_a_damaged_file_is_said_in_one_line(text: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_bytes(text)
    with pytest.raises(InputError, match=message) as caught:
        Keys.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_device_are_said(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="does not exist"):
        Keys.load(tmp_path / "none.yaml")
    (tmp_path / "keys.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        Keys.load(tmp_path / "keys.json")
    with pytest.raises(TraceError, match="is a device"):
        Keys.load("/dev/zero")
