"""Readers of other systems' request traces: real files, and every way a file can be wrong."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ConfigError, TraceError
from coterie.traces import RequestTrace
from coterie.traces.readers import ReadOptions, detect, read_trace, readers
from coterie.traces.readers.servegen import TrafficClient, read_servegen_clients, sample_servegen

REQUEST_FORMATS = ("azure", "burstgpt", "csv", "jsonl", "mooncake", "servegen")
MOONCAKE = '{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
CSV = "arrival_s,prompt_tokens,output_tokens\n"
JSONL = '{"arrival_s": 1.5, "prompt_tokens": 10, "output_tokens": 2}\n'


def read(folder: Path, text: str, name: str = "file") -> RequestTrace:
    (folder / name).write_text(text, newline="")
    trace = read_requests(folder / name)
    assert trace.arrival_s is not None
    assert trace.arrival_s[0] == 0
    assert (np.diff(trace.arrival_s) >= 0).all()
    return trace


def arrivals(trace: RequestTrace) -> np.ndarray:
    assert trace.arrival_s is not None
    return trace.arrival_s


def read_requests(path: Path, format: str | None = None) -> RequestTrace:
    trace = read_trace(path, format)
    assert isinstance(trace, RequestTrace)
    return trace


# ------------------------------------------------------------------------------------------------------ real files


def test_mooncake_conversations(data_dir: Path) -> None:
    trace = read_requests(data_dir / "requests/mooncake/conversation_trace.jsonl")
    assert len(trace) == 12_031
    assert trace.block_tokens == 512
    assert trace.prefix_blocks is not None
    assert trace.prefix_blocks[1].tolist() == [0, *range(14, 28)]
    assert (trace.prompt_tokens[0], trace.output_tokens[0]) == (6758, 500)
    assert 3500 < trace.duration_s < 3600


def test_azure_code_has_its_last_line_though_no_newline_ends_it(data_dir: Path) -> None:
    path = data_dir / "requests/azure-2023/AzureLLMInferenceTrace_code.csv"
    assert not path.read_bytes().endswith(b"\n")
    trace = read_requests(path)
    assert len(trace) == len(path.read_text().splitlines()) - 1 == 8_819
    assert (trace.prompt_tokens[-1], trace.output_tokens[-1]) == (549, 173)
    assert trace.arrival_s is not None
    assert trace.arrival_s[1] == pytest.approx(0.052, abs=1e-12)


def test_servegen_clients_and_the_hour_drawn_from_them(data_dir: Path) -> None:
    path = data_dir / "requests/servegen-deepseek-r1/deepseek-r1.tar.gz"
    clients = read_servegen_clients(path)
    assert len(clients) == 73
    trace = read_requests(path)
    # The rates are counts of a window over its length, so the draw has as many requests as they sum to.
    assert len(trace) == round(sum(w.rate * w.duration_s for c in clients for w in c.windows if w.start_s < 3600))
    assert trace.source["seed"] == 0
    assert trace.source["duration_s"] == 3600
    busiest = max(clients, key=lambda c: c.windows[0].rate)
    lengths = busiest.lengths[0]
    mean = float(lengths.prompt.tokens @ np.diff(lengths.prompt.cumulative, prepend=0))
    drawn = trace.prompt_tokens[np.array(trace.extra["client"]) == busiest.id]
    assert drawn.mean() == pytest.approx(mean, rel=0.1)


def test_every_real_file_has_at_most_one_reader(data_dir: Path) -> None:
    found = {}
    for path in sorted(data_dir.rglob("*")):
        names = [name for name in readers if readers[name].sniff(path)]
        assert len(names) <= 1, path
        if path.is_file() and names:
            found[path.relative_to(data_dir).as_posix()] = names[0]
    assert found["requests/mooncake/conversation_trace.jsonl"] == "mooncake"
    assert found["requests/azure-2023/AzureLLMInferenceTrace_code.csv"] == "azure"
    assert found["requests/servegen-deepseek-r1/deepseek-r1.tar.gz"] == "servegen"
    assert sum(name in REQUEST_FORMATS for name in found.values()) == 3


# ----------------------------------------------------------------------------------------------------- small files


def test_mooncake_sorts_and_counts_from_the_first(tmp_path: Path) -> None:
    early = '{"timestamp": 1000, "input_length": 512, "output_length": 9, "hash_ids": [7], "user": "a"}\n'
    trace = read(tmp_path, MOONCAKE + early)
    assert trace.arrival_s is not None
    assert trace.arrival_s.tolist() == [0.0, 2.0]
    assert trace.output_tokens.tolist() == [9, 5]
    assert trace.prefix_blocks is not None
    assert [b.tolist() for b in trace.prefix_blocks] == [[7], [1, 2]]
    assert trace.extra == {"user": ["a", None]}
    assert trace.source == {"format": "mooncake", "file": "file"}


def test_azure_zones_and_fractions(tmp_path: Path) -> None:
    rows = "2024-05-10 00:00:00.0099301+00:00,10,1\n2024-05-10 02:00:00.509931+02:00,20,2\r\n2024-05-10T00:00:02Z,30,3"
    trace = read(tmp_path, AZURE + rows)
    assert trace.arrival_s is not None
    assert trace.arrival_s.tolist() == [0.0, 0.5000009, 1.9900699]
    assert trace.prompt_tokens.tolist() == [10, 20, 30]


def test_burstgpt_with_and_without_sessions(tmp_path: Path) -> None:
    trace = read(tmp_path, BURST + "45,ChatGPT,1087,230,1317,Conversation log\n5,GPT-4,472,0,472,API log\n", "one")
    assert trace.arrival_s is not None
    assert trace.arrival_s.tolist() == [0.0, 40.0]
    assert trace.output_tokens.tolist() == [0, 230], "a failed request is kept"
    assert trace.extra["Model"] == ["GPT-4", "ChatGPT"]
    header = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    trace = read(tmp_path, header + "19440110.0,1722ac82,43,GPT-4,906,446,1352,Conversation log\n", "two")
    assert trace.extra["Session ID"] == ["1722ac82"]
    assert trace.source["format"] == "burstgpt"


def test_plain_tables(tmp_path: Path) -> None:
    rows = "b,9,1,2,x,code\na,4,3,4,y,math\n"
    trace = read(tmp_path, "id,timestamp,prompt_tokens,output_tokens,tenant,domain\n" + rows, "c")
    assert (trace.ids, trace.domains, trace.extra) == (["a", "b"], ["math", "code"], {"tenant": ["y", "x"]})
    assert trace.arrival_s is not None
    assert trace.arrival_s.tolist() == [0.0, 5.0]
    line = {"arrival_s": 2, "prompt_tokens": 40, "output_tokens": 1, "prefix_blocks": [5, 6], "block_tokens": 32}
    trace = read(tmp_path, json.dumps(line | {"n": 3}) + "\n\n", "j")
    assert trace.block_tokens == 32
    assert trace.prefix_blocks is not None
    assert trace.prefix_blocks[0].tolist() == [5, 6]
    assert trace.extra == {"n": [3]}


def test_gzip_is_read_as_the_file_in_it(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl.gz").write_bytes(gzip.compress(MOONCAKE.encode()))
    assert detect(tmp_path / "m.jsonl.gz") == "mooncake"
    assert len(read_requests(tmp_path / "m.jsonl.gz")) == 1


def test_model_option_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "m").write_text(MOONCAKE)
    named = read_trace(tmp_path / "m", options=ReadOptions(model="kimi"))
    assert isinstance(named, RequestTrace)
    assert named.source["model"] == "kimi"


# --------------------------------------------------------------------------------------------------- damaged files

DAMAGED = [
    ("mooncake", "", "file: is empty"),
    ("mooncake", "\n\n", "file: is empty"),
    ("mooncake", MOONCAKE + MOONCAKE[:40], "line 2: is not JSON: .* cut short"),
    ("mooncake", MOONCAKE + "{oops}\n" + MOONCAKE, "line 2: is not JSON"),
    ("mooncake", "[1, 2]\n", r"line 1: holds \[1, 2\], expected a JSON object"),
    ("mooncake", "[" * 100_000, "line 1: is not JSON"),
    ("mooncake", MOONCAKE.replace("output_length", "outputs"), "line 1, output_length: is missing"),
    ("mooncake", MOONCAKE.replace("[1, 2]", "[1]"), "line 1, hash_ids: found 1 hashes, expected 2 for 600 tokens"),
    ("mooncake", MOONCAKE.replace("[1, 2]", '[1, "2"]'), "line 1, hash_ids: found .* expected a list of 64-bit"),
    ("mooncake", MOONCAKE.replace("[1, 2]", f"[1, {2**64}]"), "line 1, hash_ids: .* 64-bit"),
    ("mooncake", MOONCAKE.replace("3000", "-1"), "line 1, timestamp: found -1, expected a finite number"),
    ("mooncake", MOONCAKE.replace("3000", "NaN"), "line 1, timestamp: found nan"),
    ("mooncake", MOONCAKE.replace("3000", "Infinity"), "line 1, timestamp: found inf"),
    ("mooncake", MOONCAKE.replace("600", '"600"'), "line 1, input_length: found '600', expected a whole number"),
    ("mooncake", MOONCAKE.replace("600", "600.5"), "line 1, input_length: found 600.5"),
    ("mooncake", MOONCAKE.replace(": 5,", ": true,"), "line 1, output_length: found True"),
    ("azure", "", "file: is empty"),
    ("azure", AZURE, "requests: has a header and no requests"),
    ("azure", "TIMESTAMP,ContextTokens\n", "line 1, GeneratedTokens: column is missing; the header has TIMESTAMP"),
    ("azure", AZURE + "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17", "line 3, ContextTokens: is missing"),
    ("azure", AZURE + "2023-11-16 18:17:03,4808,10,1\n", "line 2: has 4 values, the header names 3"),
    ("azure", AZURE + "yesterday,4808,10\n", "line 2, TIMESTAMP: found 'yesterday', expected a time like"),
    ("azure", AZURE + "2023-13-16 18:17:03,4808,10\n", "line 2, TIMESTAMP"),
    ("azure", AZURE + "9999-11-16 18:17:03,4808,10\n", "line 2, TIMESTAMP"),
    ("azure", AZURE + "2023-11-16 18:17:03,-4808,10\n", "line 2, ContextTokens: found '-4808'"),
    ("azure", AZURE + "2023-11-16 18:17:03,4808,ten\n", "line 2, GeneratedTokens: found 'ten'"),
    ("azure", AZURE + '2023-11-16 18:17:03,4808,"1', "line 2: is not CSV: unexpected end of data"),
    ("burstgpt", BURST.replace("Model,", "") + "1,2,3,5,API log\n", "line 1, Model: column is missing"),
    ("burstgpt", BURST + "nan,ChatGPT,1,2,3,API log\n", "line 2, Timestamp: found 'nan', expected a finite number"),
    ("burstgpt", BURST + "-5,ChatGPT,1,2,3,API log\n", "line 2, Timestamp: found '-5'"),
    ("burstgpt", BURST + "1_0,ChatGPT,1,2,3,API log\n", "line 2, Timestamp: found '1_0'"),
    ("burstgpt", BURST + "5,ChatGPT,1,,3,API log\n", "line 2, Response tokens: found ''"),
    ("csv", "prompt_tokens,output_tokens\n1,2\n", "line 2, arrival_s: is missing, and so is timestamp"),
    ("csv", CSV.replace("prompt", "output") + "1,2,3\n", "line 1, prompt_tokens: column is missing"),
    ("csv", "arrival_s,prompt_tokens,output_tokens,x,x\n1,2,3,4,5\n", "line 1, x: names 2 columns"),
    ("csv", CSV + "inf,2,3\n", "line 2, arrival_s: found 'inf'"),
    ("csv", CSV + "1,2,99999999999999999999\n", "line 2, output_tokens: found '9"),
    ("csv", CSV + "1,٣,3\n", "line 2, prompt_tokens: found '٣'"),
    ("jsonl", JSONL.replace("1.5", "null"), "line 1, arrival_s: found None"),
    ("jsonl", JSONL + JSONL.replace("arrival_s", "timestamp"), "line 2, arrival_s: is missing"),
    ("jsonl", JSONL + JSONL.replace("}", ', "id": "a"}'), "line 2, id: is given here and missing on the first line"),
    ("jsonl", JSONL.replace("}", ', "id": "a"}') + JSONL, "line 2, id: is missing here"),
    ("jsonl", JSONL.replace("}", ', "id": "\\ud800"}'), "line 1: is not JSON: .* surrogates not allowed"),
    ("jsonl", JSONL.replace("}", ', "id": 7}'), "line 1, id: found 7, expected text"),
    ("jsonl", JSONL.replace("}", ', "prefix_blocks": [1]}'), "line 1, prefix_blocks: must come with block_tokens"),
    ("jsonl", JSONL.replace("}", ', "prefix_blocks": [1], "block_tokens": 0}'), "line 1, block_tokens: found 0"),
]


@pytest.mark.parametrize(("format", "text", "message"), DAMAGED)
def test_damage_is_named_with_file_line_and_field(tmp_path: Path, format: str, text: str, message: str) -> None:
    (tmp_path / "file").write_text(text, newline="")
    with pytest.raises(TraceError, match=f"file: {message}"):
        read_trace(tmp_path / "file", format)


@pytest.mark.parametrize("format", REQUEST_FORMATS)
def test_missing_file_foreign_bytes_and_cut_gzip(tmp_path: Path, format: str) -> None:
    with pytest.raises(TraceError, match="does not exist"):
        read_trace(tmp_path / "none", format)
    (tmp_path / "bytes").write_bytes(bytes(range(128, 256)) * 20)
    with pytest.raises(TraceError):
        read_trace(tmp_path / "bytes", format)
    whole = gzip.compress((MOONCAKE * 500).encode())
    (tmp_path / "cut.gz").write_bytes(whole[:-9])
    with pytest.raises(TraceError, match=r"cut short|missing"):
        read_trace(tmp_path / "cut.gz", format)


@given(st.binary(max_size=300))
def test_no_bytes_make_a_sniff_raise(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("sniff") / "file"
    for content in (data, b"\x1f\x8b" + data, gzip.compress(data)):
        path.write_bytes(content)
        assert not any(readers[name].sniff(path) for name in REQUEST_FORMATS)


@given(cut=st.integers(0, 10_000))
def test_a_cut_mooncake_file_is_never_a_wrong_trace(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    lines = [
        json.dumps({"timestamp": 1000 * i, "input_length": 600 + i, "output_length": i, "hash_ids": [i, i + 1]}) + "\n"
        for i in range(100)
    ]
    path = tmp_path_factory.mktemp("cut") / "file"
    kept = "".join(lines)[: cut % len("".join(lines))]
    path.write_text(kept)
    try:
        trace = read_requests(path, "mooncake")
    except TraceError:
        return
    complete = sum(kept.startswith("".join(lines[: n + 1]).rstrip("\n")) for n in range(100))
    assert len(trace) == complete, "a cut between two lines is all that passes, and all whole lines are there"


# -------------------------------------------------------------------------------------------------------- ServeGen

TRACE = "0,0.1,1.0,Gamma,1.0,10.0\r\n600,0.5,2.0,Weibull,0.6,1.0\r\n1200,0,0,,0,0\r\n"
DATASET = json.dumps(
    {
        "0": {"input_tokens": "{10: 0.25, 20: 0.75}", "output_tokens": "{1: 1.0}", "reason_ratio": "{}"},
        "600": {"input_tokens": "{}", "output_tokens": "{}", "reason_ratio": "{}"},
    }
)


def service(folder: Path, clients: int = 2) -> Path:
    folder.mkdir()
    for i in range(clients):
        (folder / f"chunk-{i}-trace.csv").write_text(TRACE, newline="")
        (folder / f"chunk-{i}-dataset.json").write_text(DATASET)
    return folder


def packed(folder: Path, target: Path) -> bytes:
    with tarfile.open(target, "w:gz") as tar:
        tar.add(folder, arcname="service")
    return target.read_bytes()


def test_servegen_folder_and_tar_are_the_same_clients(tmp_path: Path) -> None:
    folder = service(tmp_path / "s")
    packed(folder, tmp_path / "s.tar.gz")
    assert detect(folder) == detect(tmp_path / "s.tar.gz") == "servegen"
    one, two = read_requests(folder), read_requests(tmp_path / "s.tar.gz")
    np.testing.assert_array_equal(one.arrival_s, two.arrival_s)
    np.testing.assert_array_equal(one.prompt_tokens, two.prompt_tokens)
    assert len(one) == 2 * (60 + 300)
    assert set(one.prompt_tokens.tolist()) == {10, 20}
    assert one.source["clients"] == 2


def test_servegen_rate_window_and_seed(tmp_path: Path) -> None:
    clients = read_servegen_clients(service(tmp_path / "s"))

    def draw(seed: int, start_s: float, duration_s: float, rate_scale: float = 1.0) -> RequestTrace:
        return sample_servegen(clients, np.random.default_rng(seed), start_s, duration_s, rate_scale)

    np.testing.assert_array_equal(draw(1, 0, 1800).arrival_s, draw(1, 0, 1800).arrival_s)
    assert not np.array_equal(arrivals(draw(1, 0, 1800)), arrivals(draw(2, 0, 1800)))
    assert len(draw(1, 600, 600)) == 600
    assert len(draw(1, 600, 600, rate_scale=2.5)) == 1500
    assert len(draw(1, 1200, 600)) == 0, "the last window is silent"
    half = draw(1, 750, 300)
    assert 150 < len(half) < 450
    assert half.arrival_s is not None
    assert half.arrival_s.min() >= 0
    assert half.arrival_s.max() < 300
    with pytest.raises(ConfigError, match=r"start_s=1800 must be in 0 … 1800"):
        draw(1, 1800, 60)
    with pytest.raises(ConfigError, match=r"rate_scale=0 must be"):
        draw(1, 0, 60, rate_scale=0)


def test_servegen_gaps_have_the_family_and_shape_of_the_file(tmp_path: Path) -> None:
    """Many windows of one client: the gaps' CV is that of the distribution they are drawn from."""
    folder = service(tmp_path / "s", clients=1)
    (folder / "chunk-0-trace.csv").write_text("0,10,2,Gamma,0.25,0.4\n6000,10,2,Gamma,0.25,0.4\n", newline="")
    (client,) = read_servegen_clients(folder)
    trace = sample_servegen([client], np.random.default_rng(0), 0, 6000)
    assert trace.arrival_s is not None
    gaps = np.diff(trace.arrival_s)
    assert gaps.std() / gaps.mean() == pytest.approx(2.0, rel=0.05), "a gamma of shape 1/4 has a CV of 2"
    assert gaps.mean() == pytest.approx(0.1, rel=0.01)


def test_servegen_shape_so_small_that_every_gap_underflows(tmp_path: Path) -> None:
    folder = service(tmp_path / "s", clients=1)
    (folder / "chunk-0-trace.csv").write_text("0,0.1,99,Gamma,0.00001,1\n60,0.1,99,Gamma,0.00001,1\n", newline="")
    trace = sample_servegen(read_servegen_clients(folder), np.random.default_rng(0), 0, 120)
    assert len(trace) == 12
    assert trace.arrival_s is not None
    assert np.isfinite(trace.arrival_s).all()


def damaged_service(tmp_path: Path, name: str, text: str) -> list[TrafficClient]:
    folder = service(tmp_path / "s")
    (folder / name).write_text(text, newline="")
    return read_servegen_clients(folder)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("chunk-1-trace.csv", TRACE[:-1], "does not end with a newline"),
        ("chunk-1-trace.csv", TRACE[: TRACE.index("1200")], "2 windows up to 600 s do not match client 0's 3"),
        ("chunk-1-trace.csv", TRACE.replace(",10.0", ""), "line 1, columns: found 5, expected time, rate, cv"),
        ("chunk-1-trace.csv", TRACE.replace("0.5", "fast"), "line 2, rate: found 'fast'"),
        ("chunk-1-trace.csv", TRACE.replace("0.5", "nan"), "line 2, rate: found 'nan'"),
        ("chunk-1-trace.csv", TRACE.replace("Weibull", "Pareto"), "line 2, family: found 'Pareto'"),
        ("chunk-1-trace.csv", TRACE.replace("600,", "0,"), "line 2, time: found 0, expected more than"),
        ("chunk-1-trace.csv", "0,0.1,1.0,Gamma,1.0,10.0\n", "has 1 windows"),
        ("chunk-1-dataset.json", DATASET[:-20], "is not JSON of this format"),
        ("chunk-1-dataset.json", "[]", "is not JSON of this format"),
        ("chunk-1-dataset.json", DATASET.replace("0.75", "0.5"), "0, input_tokens: .* they sum to 0.75"),
        ("chunk-1-dataset.json", DATASET.replace("20:", "20.5:"), "0, input_tokens: expected whole tokens"),
        ("chunk-1-dataset.json", DATASET.replace("20: 0.75", "20"), "0, input_tokens: holds a pair"),
        ("chunk-1-dataset.json", DATASET.replace("input_tokens", "text_tokens"), "input_tokens: found 'None'"),
        ("chunk-1-dataset.json", "{}", "has no lengths, but the client sends requests"),
        ("chunk-2-trace.csv", TRACE, "chunk-2-dataset.json: is missing"),
    ],
)
def test_damaged_servegen_files_are_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        damaged_service(tmp_path, name, text)


def test_every_cut_of_a_servegen_tar_is_an_error(tmp_path: Path) -> None:
    whole = packed(service(tmp_path / "s"), tmp_path / "s.tar.gz")
    for size in range(0, len(whole), 23):
        (tmp_path / "cut.tar.gz").write_bytes(whole[:size])
        with pytest.raises(TraceError):
            read_servegen_clients(tmp_path / "cut.tar.gz")
    tar = gzip.decompress(whole)
    for size in range(512, tar.rindex(b"chunk-"), 512):  # the tar cut, and packed again
        (tmp_path / "cut.tar.gz").write_bytes(gzip.compress(tar[:size]))
        with pytest.raises(TraceError):
            read_servegen_clients(tmp_path / "cut.tar.gz")


def test_a_tar_of_two_services_is_refused(tmp_path: Path) -> None:
    folder = service(tmp_path / "s")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(folder, arcname="a")
        tar.add(folder, arcname="b")
    (tmp_path / "two.tar").write_bytes(buffer.getvalue())
    with pytest.raises(TraceError, match="is there twice"):
        read_servegen_clients(tmp_path / "two.tar")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match="found no chunk"):
        read_servegen_clients(tmp_path / "empty")
