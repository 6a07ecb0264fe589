"""Config files: what is accepted, what is refused in one line, and that nothing else ever happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import InputError
from coterie.gateway.config import GatewayConfig, WorkerEntry, parse_config, read_config

WHERE = Path("fleet.yaml")
WHOLE = """
listen: 127.0.0.1:0
handshake: vllm
workers:
  - {id: p0, url: "http://127.0.0.1:1", role: prefill, kv_events: "tcp://127.0.0.1:2"}
  - {id: d0, url: "http://127.0.0.1:3", role: decode, places: 8}
decode: {router: "joint:kv=0.5"}
limits: {body_bytes: 1000, queue_s: 1.5}
"""


def test_a_whole_file() -> None:
    config = parse_config(WHOLE, WHERE)
    assert [worker.id for worker in config.workers] == ["p0", "d0"]
    assert config.address == ("127.0.0.1", 0)
    assert config.address[0] == "127.0.0.1"
    assert config.decode.router == "joint:kv=0.5"
    assert config.limits.queue_s == 1.5
    assert parse_config("", WHERE) == GatewayConfig()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("handshak: vllm", "known: workers, listen, handshake"),
        ("peers: {url: []}", "known: urls, every_s"),
        ("workers: [{id: a, url: 'http://x', rol: both}]", "known: id, url, role"),
        ("control: {advise: {rank: 8}}", "known: ranks,"),
        ("picker: {mode: other}", "known: pick, prefill, profiles"),
        ("pods: {selector: ''}", "app=vllm"),
        ("pods: {selector: a, api: 'x:1'}", "http://HOST:PORT"),
        ("peers: {urls: ['x:1']}", "http://HOST:PORT"),
        ("listen: 8000", "listen"),
        ("listen: localhost", "HOST:PORT"),
        ("listen: localhost:99999", "0 … 65535"),
        ("workers: [{id: a, url: 'ftp://x'}]", "http://HOST:PORT"),
        ("workers: [{id: a, url: 'http://x:port'}]", "http://x:port"),
        ("workers: [{id: a, url: 'http://x'}, {id: a, url: 'http://y'}]", "'a' is there twice"),
        ("workers: [{id: a, url: 'http://x', role: prefill}]", "set handshake"),
        ("handshake: sglang\nworkers: [{id: a, url: 'http://x', role: prefill}]", "bootstrap_port"),
        ("limits: {queue_s: 0}", "queue_s=0"),
        ("decode: {router: joint, settings: {kv: 0.5}}", "router: joint:kv=0.5"),
        ("limits: {queue_s: .inf}", "queue_s=inf"),
        ("a: &x 1\nb: *x", "alias"),
        ("listen: a:1\nlisten: b:2", "is there twice"),
        ("? [a, b]\n: 1", "not a name"),
        ("[" * 5000, "nested"),
        (f"decisions: {10**30}", f"decisions={10**30} must be in 1 … 1048576"),
        (f"block_size: {10**30}", f"block_size={10**30} must be in 1 … 65536"),
        (
            f"workers: [{{id: a, url: 'http://x', placement_rank: {10**30}}}]",
            f"worker 'a': placement_rank={10**30} must be in 0 … 65535",
        ),
        (f"limits: {{in_flight: {10**30}}}", f"config.limits.in_flight: {10**30} must be below {2**63}"),
        (f"decode: {{seed: -{10**30}}}", f"config.decode.seed: -{10**30} must be above -{2**63}"),
        ("- 1", "object"),
        ("{", "cannot be parsed"),
    ],
)
def test_what_is_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match="fleet") as error:
        parse_config(text, WHERE)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, content in ((tmp_path / "missing", None), (tmp_path / "binary", b"\xff\xfe\x00"), (tmp_path, None)):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(InputError):
            read_config(path)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from([*GatewayConfig.__struct_fields__, "more"])


def test_relative_paths_are_of_the_files_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "fleet" / "fleet.yaml"
    file.parent.mkdir()
    file.write_text(
        "keys: keys.yaml\n"
        "state: /var/state.json\n"
        "decode: {fit: fits/router.safetensors, device: h200}\n"
        "prefill: {device: mine.json}\n"
        "control: {map: ../map.json, apply: true, advise: {ranks: 4, placement: now.json}}\n"
    )
    monkeypatch.chdir(tmp_path)
    config = read_config(Path("fleet/fleet.yaml"))
    assert config.keys == str(file.parent / "keys.yaml")
    assert config.state == "/var/state.json"
    assert config.decode.fit == str(file.parent / "fits" / "router.safetensors")
    assert (config.decode.device, config.prefill.device) == ("h200", str(file.parent / "mine.json"))
    assert config.control.map == str(file.parent / ".." / "map.json")
    assert config.control.advise is not None
    assert config.control.advise.placement == str(file.parent / "now.json")
    assert config.tokenizer is None


@given(st.dictionaries(names, values, max_size=4))
def test_any_values(found: dict[str, Any]) -> None:
    try:
        parse_config(yaml.safe_dump(found), WHERE)
    except InputError as error:
        assert "\n" not in str(error)  # noqa: PT017


@given(st.text(max_size=60))
def test_any_text(text: str) -> None:
    try:
        parse_config(text, WHERE)
    except InputError as error:
        assert "\n" not in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("speed", 0.0),
        ("speed", -1.0),
        ("speed", float("nan")),
        ("speed", float("inf")),
        ("places", 0),
        ("places", 2**30),
    ],
)
def test_wrong_speeds_and_places_of_a_worker(field: str, value: float) -> None:
    wrong: dict[str, Any] = {"id": "a", "url": "http://127.0.0.1:1", field: value}
    with pytest.raises(InputError, match=f"{field}={value}"):
        WorkerEntry(**wrong)
