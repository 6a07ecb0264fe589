"""``coterie advise`` as a user runs it: the answer, its page, and the files that turn it on."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from command_line import Ran, Run, refused
from coterie.gateway.config import read_config
from coterie.placement import read_map
from coterie.routing import RouterFit
from made_traffics import TRAFFICS

SMALL = ("--decoders", 2, "--in-flight", 4, "--requests", 64, "--splits", 3, "--ranks", 8)
FLEET = """
handshake: vllm
workers:
  - {id: prefill-0, url: "http://10.0.0.2:8000", role: prefill}
  - {id: decode-0, url: "http://10.0.0.3:8000", role: decode, places: 12}
  - {id: decode-1, url: "http://10.0.0.4:8000", role: decode, places: 12}
decode: {model: gpt-oss-20b, dtype: bf16}
control: {advise: {ranks: 4, step_tokens: 2048}}
"""


@pytest.fixture(scope="module")
def traffics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("advise")
    for name in ("only routing", "only placement"):
        TRAFFICS[name]().trace.save(place / name)
    return place


def test_what_pays_is_written_so_that_it_can_be_used(run: Run, traffics: Path, tmp_path: Path) -> None:
    out, fleet = tmp_path / "advice", tmp_path / "mine.yaml"
    fleet.write_text(FLEET)
    small = ("--requests", 96, "--splits", 3, "--out", out, "--json")
    ran = run("advise", traffics / "only routing", "--fleet", fleet, *small)
    assert (ran.code, ran.err) == (0, "")
    answer = json.loads(ran.out)
    assert (answer["dtype"], answer["settings"]["decoders"], answer["settings"]["in_flight"]) == ("bf16", 2, 6)
    assert (answer["settings"]["ranks"], answer["settings"]["batch"], answer["settings"]["prefill"]) == (4, 2048, 1)
    assert {one["key"]: one["advice"] for one in answer["decisions"]}["routing"] in ("on", "try it")
    config = read_config(out / "fleet.yaml")
    assert [worker.id for worker in config.workers] == ["prefill-0", "decode-0", "decode-1"]
    assert config.decode.fit is not None
    assert RouterFit.load(config.decode.fit).workers == 2
    page = (out / "advice.html").read_text()
    assert all(one["title"] in page for one in answer["decisions"])
    assert "http" not in page.replace("http-equiv", "")
    assert json.loads((out / "advice.json").read_text())["verdict"] == answer["verdict"]

    again = run("advise", traffics / "only placement", *SMALL, "--out", out)
    assert again.code == 0, "earlier advice is replaced"
    assert again.out.splitlines()[0] == again.out.splitlines()[-2], "the verdict comes first and last"
    assert read_map(out / "placement.json").placement.num_ranks == 8
    assert not (out / "router.safetensors").exists(), "what is no longer advised is taken away"


def test_an_interrupt_ends_in_one_line_and_leaves_no_page_without_its_files(
    run: Run, traffics: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it simulates, while it draws, and while it writes the files beside the page, also over earlier advice."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    out, small = tmp_path / "advice", ("--decoders", 2, "--in-flight", 4, "--requests", 48, "--splits", 2, "--ranks", 8)

    def interrupt(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    def advise() -> Ran:
        return run("advise", traffics / "only placement", *small, "--out", out)

    monkeypatch.setattr("coterie.answers.advise.fleets.Fleets.decisions", lambda _: iter(()))  # takes most of the time
    try:
        for place in ("advise.advising.Fleets.decisions", "figures.draw", "advise.files.replace_map"):
            with monkeypatch.context() as patch:
                patch.setattr(f"coterie.answers.{place}", interrupt)
                ran = advise()
            assert (ran.code, ran.out, ran.err) == (130, "", "interrupted\n")
            assert not (out / "advice.html").exists()
        assert advise().code == 0, "what was left can be replaced"
        with monkeypatch.context() as patch:
            patch.setattr("coterie.answers.advise.files.replace_map", interrupt)
            assert advise().code == 130
        assert not (out / "advice.html").exists(), "a page beside files of another advice would lie"
    finally:
        signal.signal(signal.SIGINT, handler)


def test_what_cannot_be_advised_on_is_refused(run: Run, traffics: Path, tmp_path: Path) -> None:
    refused(run("advise", "http://127.0.0.1:9"), "does not answer")
    refused(run("advise", "http://"), "HOST")
    refused(run("advise", tmp_path), str(tmp_path))
    refused(run("advise", tmp_path / "none"), "none")
    refused(run("advise", "ftp://127.0.0.1:9"), "http://HOST:PORT")
    refused(run("advise", "127.0.0.1:9"), "http://127.0.0.1:9")
    (tmp_path / "empty").write_text(" ")
    refused(run("advise", traffics / "only routing", "--admin-key-file", tmp_path / "empty"), "--admin-key-file")
    (tmp_path / "mine").write_text("x")
    refused(run("advise", traffics / "only routing", "--out", tmp_path), str(tmp_path))
    assert (tmp_path / "mine").read_text() == "x"
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text("workers: []")
    refused(run("advise", traffics / "only routing", "--fleet", fleet), "no worker that decodes")
    refused(run("advise", traffics / "only routing", "--ranks", 5), "must be a multiple of ranks=5")
