"""``coterie advise`` as a user runs it: the answer, its page, and the files that turn it on."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest

from command_line import Ran, Run, refused
from coterie.answers.advise.advising import Advised, AdviseSettings
from coterie.answers.advise.decisions import ON, Lever
from coterie.answers.advise.files import write_advice
from coterie.answers.fleet.bench import Source
from coterie.answers.fleet.simulation import FleetSettings
from coterie.errors import InputError
from coterie.gateway.config import read_config
from coterie.placement import read_map
from coterie.routing import RouterFit, calibration
from coterie.traces import ActivationTrace, LoadTable
from coterie.traces.readers import read_as
from coterie.types import Interval
from made_traffics import TRAFFICS

SMALL = ("--splits", 3, "--ranks", 8)
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
    [deployment] = answer["deployments"]
    settings = deployment["settings"]
    assert (answer["dtype"], settings["decoders"], settings["in_flight"]) == ("bf16", 2, 6)
    assert (settings["ranks"], settings["batch"], settings["prefill"]) == (4, 2048, 1)
    assert {one["key"]: one["advice"] for one in deployment["decisions"]}["routing"] in ("on", "try it")
    config = read_config(out / "fleet.yaml")
    assert [worker.id for worker in config.workers] == ["prefill-0", "decode-0", "decode-1"]
    assert config.decode.fit is not None
    assert config.decode.fit == str(out / "router.safetensors")
    assert RouterFit.load(config.decode.fit).workers == 2
    page = (out / "advice.html").read_text()
    assert all(one["title"] in page for one in deployment["decisions"])
    assert "http" not in page.replace("http-equiv", "")
    assert json.loads((out / "advice.json").read_text())["verdict"] == answer["verdict"]

    again = run("advise", traffics / "only placement", *SMALL, "--out", out)
    assert again.code == 0, "earlier advice is replaced"
    assert again.out.splitlines()[0] == again.out.splitlines()[-2], "the verdict comes first and last"
    assert read_map(out / "placement.json").placement.num_ranks == 8
    assert not (out / "router.safetensors").exists(), "what is no longer advised is taken away"


def test_the_written_config_serves_once_its_hosts_are_filled_in(
    run: Run, traffics: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is checked from another folder than the one where it was written, with another number of workers."""
    trace = read_as(ActivationTrace, traffics / "only routing")
    source = Source(trace, calibration(trace, np.arange(24)))
    gain = Interval(6.8, 6.0, 7.7)
    routing = Lever("routing", "Routing: who", ON, "latency_aware", "a queue", "TPOT", gain, "for gpt-oss-20b")
    fleet, settings = FleetSettings(decoders=2, in_flight=6), AdviseSettings(decoders=2, in_flight=6, ranks=1)
    advised = Advised("gpt-oss-20b", "mxfp4", 24, fleet, None, "2 one-GPU decoders", settings, [routing], [])
    monkeypatch.chdir(tmp_path)
    write_advice([advised], source, {"trace": "only routing"}, Path("advice"), None)
    file = tmp_path / "advice" / "fleet.yaml"
    config = read_config(file)
    assert config.handshake == "vllm"
    assert [worker.role for worker in config.workers] == ["prefill", "decode", "decode"]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    refused(
        run("serve", "--config", file, "--check"), "worker 'prefill-0'", "put the worker's host in place of FILL-IN"
    )
    text = file.read_text()
    file.write_text(text.replace("FILL-IN", "10.0.0.2"))
    checked = run("serve", "--config", file, "--check")
    assert checked.code == 0, checked.err
    assert "1 prefill, 2 decode workers" in checked.out
    assert "the fit is for" not in checked.out
    more = "- {id: decode-2, url: 'http://10.0.0.9:8000', role: decode, places: 24}\n"
    file.write_text(text.replace("FILL-IN", "10.0.0.2").replace("workers:\n", f"workers:\n{more}"))
    said = f"{tmp_path / 'advice' / 'router.safetensors'}: the fit is for 2 workers, the decode pool has 3"
    assert said in run("serve", "--config", file, "--check").out
    assert any(
        note.startswith(said) for note in json.loads(run("serve", "--config", file, "--check", "--json").out)["notes"]
    )


def test_the_options_name_the_deployment(run: Run, traffics: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[AdviseSettings] = []

    def note(_: object, __: object, settings: AdviseSettings, *___: object, **____: object) -> None:
        asked.append(settings)
        raise InputError("stop")

    monkeypatch.setattr("coterie.answers.advise.advising.advise", note)
    trace = traffics / "only routing"
    for options in ((), ("--decoders", 4), ("--ranks", 4), ("--decoders", 2, "--ranks", 4)):
        refused(run("advise", trace, *options), "stop")
    named = [(one.decoders, one.gpus, one.ranks) for one in asked]
    assert named == [(None, 1, 1), (4, 1, 1), (0, 1, 4), (2, 4, 4)]
    refused(run("advise", trace, "--decoders", 4, "--batch", 64), "--batch is of a group: name its --ranks")
    refused(run("advise", trace, "--ranks", 4, "--prompts"), "name its --decoders")


def test_a_load_table_is_answered_for_placement_alone(run: Run, tmp_path: Path) -> None:
    hot = np.where(np.arange(32) < 4, 800, 100).astype(np.uint64)
    LoadTable(np.tile(hot, (8, 24, 1)), "gpt-oss-20b").save(tmp_path / "table")
    out = tmp_path / "advice"
    ran = run("advise", tmp_path / "table", "--batch", 4096, "--dtype", "bf16")
    assert ran.code == 0, ran.err
    first = ran.out.splitlines()[0]
    where = "For gpt-oss-20b in bf16 on one expert-parallel group of 8 ranks, 4,096 tokens a step: turn on placement"
    assert first.startswith(where)
    assert "routing, batching, graph sizes (it takes recorded requests" in first
    last = ran.out.splitlines()[-1]
    assert last == f"Next: coterie advise {tmp_path / 'table'} --batch 4096 --dtype bf16 --out advice"
    assert run("advise", tmp_path / "table", "--batch", 4096, "--dtype", "bf16", "--out", out).code == 0
    assert read_map(out / "placement.json").placement.num_ranks == 8
    assert not (out / "fleet.yaml").exists()


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
