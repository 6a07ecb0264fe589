"""ServeGen's client data: for each client of a service, the distribution of its requests.

A folder (or a tar or tar.gz of a folder) has two files per client:

    chunk-7-trace.csv     no header; time (s), rate (requests/s), CV of the gaps, Gamma or Weibull, shape, scale:
                          one row per window, the same windows for all clients; no family if the rate is 0
    chunk-7-dataset.json  {"0": {"input_tokens": "{45: 0.0097, 46: 0.0117, …}", "output_tokens": "{…}"}, "21600": …}:
                          from that second on, tokens → probability; an empty "{}" if nothing was sent

A trace is drawn from these distributions. In each window a client sends rate x duration requests; the gaps between them
are drawn from its family and shape and scaled to fill the window, as in ServeGen. Prompt and output lengths are drawn
independently: the data has no joint distribution, so the two are uncorrelated here (ServeGen's own generator correlates
them fully). ``reason_ratio`` splits the output and does not lengthen it; it is not used.
"""

from __future__ import annotations

import csv
import io
import json
import re
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.errors import TraceError, check, check_file, check_positive
from coterie.traces.readers._rows import Row, is_gzip, read_unpacked
from coterie.traces.readers.base import Reader, ReadOptions, readers
from coterie.traces.requests import MAX_TOKENS, MOST_REQUESTS, RequestTrace

DEFAULT_SEED = 0
DEFAULT_DURATION_S = 3600.0
"""Seconds of traffic that `read_trace` draws: the first hour. A day of DeepSeek-R1's 73 clients has 1.4 M requests."""

_FILE = re.compile(r"chunk-(\d{1,9})-(trace\.csv|dataset\.json)")
_COLUMNS = ("time", "rate", "cv", "family", "shape", "scale")
_TAR_END = bytes(1024)  # every tar ends with two empty blocks


class LengthHistogram(NamedTuple):
    """Distribution of prompt or output lengths."""

    tokens: NDArray[np.int64]
    """[bin] length in tokens."""
    cumulative: NDArray[np.float64]
    """[bin] probability of this bin and all before it; the last is 1."""

    def draw(self, rng: Generator, count: int) -> NDArray[np.int64]:
        return self.tokens[np.searchsorted(self.cumulative, rng.random(count), side="right")]


class ClientWindow(NamedTuple):
    """A period in which a client's arrival process is constant."""

    start_s: float
    duration_s: float
    rate: float
    """Requests per second."""
    family: str
    """Distribution of the gaps between requests: Gamma or Weibull; may be empty if the rate is 0."""
    shape: float


class ClientLengths(NamedTuple):
    """Length distributions that apply from `start_s` on."""

    start_s: float
    prompt: LengthHistogram
    output: LengthHistogram


@dataclass(frozen=True, slots=True)
class TrafficClient:
    """One client of the service."""

    id: int
    windows: Sequence[ClientWindow]
    lengths: Sequence[ClientLengths]
    """Length distributions in order of time, without spans in which the client sent nothing."""

    def lengths_at(self, time_s: float) -> ClientLengths:
        """Return the lengths of the latest span that starts at or before `time_s`; the first span if there is none."""
        return next((span for span in reversed(self.lengths) if span.start_s <= time_s), self.lengths[0])


def read_servegen_clients(path: str | Path) -> list[TrafficClient]:
    """Read all clients of a folder, tar or tar.gz, in order of their ids."""
    path = Path(path)
    files = _folder_files(path) if path.is_dir() else _tar_files(path)
    ids = sorted({id for id, _ in files})
    check_file(ids, path, "clients", "found no chunk-*-trace.csv and chunk-*-dataset.json")
    clients: list[TrafficClient] = []
    for id in ids:
        for kind in ("trace.csv", "dataset.json"):
            check_file((id, kind) in files, path, f"chunk-{id}-{kind}", "is missing: every client has both files")
        windows = _windows(path, f"chunk-{id}-trace.csv", files[id, "trace.csv"])
        if clients and [w.start_s for w in windows] != [w.start_s for w in clients[0].windows]:
            raise TraceError(
                path,
                f"chunk-{id}-trace.csv",
                f"{len(windows)} windows up to {windows[-1].start_s:g} s do not match client {clients[0].id}'s "
                f"{len(clients[0].windows)}: cut short?",
            )
        lengths = _lengths(path, f"chunk-{id}-dataset.json", files[id, "dataset.json"])
        check_file(
            lengths or not any(window.rate for window in windows),
            path,
            f"chunk-{id}-dataset.json",
            "has no lengths, but the client sends requests",
        )
        clients.append(TrafficClient(id, windows, lengths))
    return clients


def sample_servegen(
    clients: Sequence[TrafficClient], rng: Generator, start_s: float, duration_s: float, rate_scale: float = 1.0
) -> RequestTrace:
    """Draw the requests of a period; arrival times count from `start_s`. ``extra["client"]`` is the client's id.

    `rate_scale` multiplies every client's rate; the mix of clients and their burstiness do not change.
    """
    check(clients, "clients is empty: there is nothing to draw from")
    check_positive(duration_s=duration_s, rate_scale=rate_scale)
    first, last = clients[0].windows[0], clients[0].windows[-1]
    check(
        first.start_s <= start_s < last.start_s + last.duration_s,
        f"start_s={start_s} must be in {first.start_s:g} … {last.start_s + last.duration_s:g}",
    )
    stop_s = start_s + duration_s
    expected = sum(w.rate * rate_scale * w.duration_s for c in clients for w in c.windows if w.start_s < stop_s)
    check(
        expected <= MOST_REQUESTS,
        f"the clients send about {expected:,.0f} requests; at most {MOST_REQUESTS:,} are drawn",
    )
    arrival, prompt, output, sender = [np.empty(0)], [np.empty(0, np.int64)], [np.empty(0, np.int64)], []
    for client in clients:
        for window in client.windows:
            if not window.rate or window.start_s >= stop_s or window.start_s + window.duration_s <= start_s:
                continue
            times = _arrivals(window, rate_scale, rng)
            times = times[(times >= start_s) & (times < stop_s)]
            lengths = client.lengths_at(window.start_s)
            arrival.append(times - start_s)
            prompt.append(lengths.prompt.draw(rng, len(times)))
            output.append(lengths.output.draw(rng, len(times)))
            sender += [client.id] * len(times)
    return RequestTrace(
        prompt_tokens=np.concatenate(prompt),
        output_tokens=np.concatenate(output),
        arrival_s=np.concatenate(arrival),
        extra={"client": sender},
        source={"format": "servegen", "start_s": start_s, "duration_s": duration_s, "rate_scale": rate_scale},
    ).in_order()


def _arrivals(window: ClientWindow, rate_scale: float, rng: Generator) -> NDArray[np.float64]:
    """Draw the arrival times [request] of one client in one window, in seconds.

    The measured rate fixes the number of requests. Drawing gaps until the window is full would give too many: on
    average (CV² - 1) / 2 more per window, 200 at a CV of 20, the largest of DeepSeek-R1's clients.
    """
    expected = window.rate * rate_scale * window.duration_s
    count = int(expected) + int(rng.random() < expected - int(expected))
    draw = rng.standard_gamma if window.family == "Gamma" else rng.weibull
    gaps = draw(window.shape, count + 1)  # the extra gap is from the last request to the end of the window
    if not gaps.sum():  # a tiny shape can underflow every gap to 0: make one of them the whole window
        gaps[rng.integers(count + 1)] = 1.0
    times = window.start_s + window.duration_s * np.cumsum(gaps)[:-1] / gaps.sum()
    end_s = window.start_s + window.duration_s
    return np.asarray(np.minimum(times, np.nextafter(end_s, 0.0)), np.float64)  # a last gap of 0 would give end_s


def _folder_files(path: Path) -> dict[tuple[int, str], bytes]:
    matches = ((_FILE.fullmatch(file.name), file) for file in path.iterdir())
    return {(int(match[1]), match[2]): read_unpacked(file) for match, file in matches if match}


def _tar_files(path: Path) -> dict[tuple[int, str], bytes]:
    data = read_unpacked(path)  # read it all: only the end of a gzip stream proves that it is complete
    files: dict[tuple[int, str], bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            for member in tar:
                match = _FILE.fullmatch(Path(member.name).name)
                content = tar.extractfile(member) if match and member.isfile() else None
                if match is None or content is None:
                    continue
                key = (int(match[1]), match[2])
                check_file(key not in files, path, member.name, "is there twice: give one service's clients at a time")
                files[key] = content.read()
    except (tarfile.TarError, OverflowError) as error:
        raise TraceError(path, "tar", f"cannot be unpacked: {error}") from None
    check_file(data.endswith(_TAR_END), path, "tar", "has no end mark: the file is cut short")
    return files


def _windows(path: Path, name: str, data: bytes) -> list[ClientWindow]:
    check_file(data.endswith(b"\n"), path, name, "does not end with a newline: the file is cut short")
    rows: list[tuple[float, float, str, float]] = []
    for line, columns in enumerate(csv.reader(data.decode("ascii", "replace").splitlines()), start=1):
        row = Row(path / name, line, dict(zip(_COLUMNS, columns, strict=False)), is_text=True)
        if len(columns) != len(_COLUMNS):
            raise row.error("columns", f"found {len(columns)}, expected {', '.join(_COLUMNS)}")
        time, rate, shape = (row.number(field) for field in ("time", "rate", "shape"))
        if rate and (row.values["family"] not in ("Gamma", "Weibull") or not shape):
            family = row.values["family"]
            raise row.error("family", f"found {family!r} of shape {shape}, expected Gamma or Weibull, above 0")
        if rows and time <= rows[-1][0]:
            raise row.error("time", f"found {time:g}, expected more than the line before, {rows[-1][0]:g}")
        rows.append((time, rate, row.values["family"], shape))
    check_file(len(rows) >= 2, path, name, f"has {len(rows)} windows; the length of a window takes at least 2")
    # The last window is as long as the one before it.
    ends = [row[0] for row in rows[1:]] + [2 * rows[-1][0] - rows[-2][0]]
    return [ClientWindow(row[0], end - row[0], *row[1:]) for row, end in zip(rows, ends, strict=True)]


def _lengths(path: Path, name: str, data: bytes) -> list[ClientLengths]:
    try:
        spans = json.loads(data)
        if not isinstance(spans, dict):
            raise ValueError("expected an object of start → distributions")
        starts = sorted(spans, key=float)
    except (ValueError, RecursionError) as error:
        raise TraceError(path, name, f"is not JSON of this format: {error}") from None
    lengths = []
    for start in starts:
        drawn = [
            _histogram(path, f"{name}, {start}", spans[start], field) for field in ("input_tokens", "output_tokens")
        ]
        if drawn[0] is not None and drawn[1] is not None:
            lengths.append(ClientLengths(float(start), drawn[0], drawn[1]))
    return lengths


def _histogram(path: Path, where: str, span: Mapping[str, Any], field: str) -> LengthHistogram | None:
    """Parse a length distribution; None if it is empty."""
    text = span.get(field) if isinstance(span, dict) else None
    if not isinstance(text, str) or not (text.startswith("{") and text.endswith("}")):
        raise TraceError(path, f"{where}, {field}", f"found {str(text)[:40]!r}, expected '{{tokens: probability, …}}'")
    if not text[1:-1].strip():
        return None
    try:
        pairs = np.array([pair.split(":") for pair in text[1:-1].split(",")], np.float64)  # [bin, (tokens, share)]
        tokens, share = pairs.T
    except ValueError:
        raise TraceError(path, f"{where}, {field}", "holds a pair that is not 'tokens: probability'") from None
    total = float(share.sum())
    in_range = (pairs >= 0).all() and (pairs <= MAX_TOKENS).all()  # both are False for NaN
    check_file(
        (in_range and (tokens % 1 == 0).all() and abs(total - 1) < 1e-3),
        path,
        f"{where}, {field}",
        f"expected whole tokens and shares of at least 0 that sum to 1; they sum to {total:g}",
    )
    cumulative = np.cumsum(share) / total
    cumulative[-1] = 1.0  # rounding may leave less than 1, and a higher draw would have no bin
    return LengthHistogram(tokens.astype(np.int64), cumulative)


def _read(path: Path, options: ReadOptions) -> RequestTrace:
    clients = read_servegen_clients(path)
    start_s = clients[0].windows[0].start_s
    trace = sample_servegen(clients, np.random.default_rng(DEFAULT_SEED), start_s, DEFAULT_DURATION_S)
    if not len(trace) or trace.arrival_s is None:
        raise TraceError(path, "rate", f"no client sends a request in the first {DEFAULT_DURATION_S:g} s")
    source = {**trace.source, "file": path.name, "clients": len(clients), "seed": DEFAULT_SEED}
    if options.model is not None:
        source["model"] = options.model
    return replace(trace, arrival_s=trace.arrival_s - trace.arrival_s[0], source=source)


def _sniff(path: Path) -> bool:
    if path.is_dir():
        return any(_FILE.fullmatch(file.name) for file in path.iterdir())
    try:
        with tarfile.open(path, "r:gz" if is_gzip(path) else "r:") as tar:
            return any(_FILE.fullmatch(Path(member.name).name) for member in islice(tar, 8))
    except (tarfile.TarError, OSError, OverflowError, EOFError, zlib.error):
        return False


readers.add(
    "servegen",
    Reader(_read, _sniff, f"ServeGen client distributions, folder or tar.gz: draws the first {DEFAULT_DURATION_S:g} s"),
)
