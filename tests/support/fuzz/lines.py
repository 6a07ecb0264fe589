"""Random argument lines for every verb, in one process: ``python -m fuzz.lines COUNT SEED FOLDER [SECONDS]``.

Options and their types are read from the app, so a new verb or option is drawn without being listed here. A line that
is valid may take long: it is interrupted after SECONDS. Prints one JSON object: how often every exit code came, the
lines that ended in any other way, changed an input or asked for too much memory, and the peak memory of the process.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import resource
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import typer

from coterie.answers.page import MARKER
from coterie.cli.main import app, main
from fuzz import files

WHOLE = [
    "0",
    "-1",
    "1",
    "2",
    "4",
    "8",
    "24",
    "100",
    "65537",
    "1000000",
    "2147483648",
    "4294967296",
    "9223372036854775807",
    "9223372036854775808",
    "1.5",
    "x",
]
WHOLE += [str(2**70), "9" * 4400, ""]
REAL = [*["0", "-1", "0.5", "1", "100", "1e9", "1e300", "1e-300", "nan", "inf", "-inf", "1e999", "x"], ""]
NAMES = [
    "all",
    "balanced",
    "gpt-oss-20b",
    "coterie-tiny",
    "h200",
    "poisson",
    "bursty",
    "decode",
    "prefill",
    "npz",
    "csv",
    "native",
    "latency_optimal",
    "eplb",
]
NAMES += ["latency_aware", "fcfs", "1,1", "nan,1", "2:1", "10TB", "0", "-1", "count", "binary", "bf16", "fp8"]
NAMES += ["", "a\x1b[2Jb", "[red]x[/]", "\udcff", "x" * 5000, "9" * 4400, f"0:{2**70}"]
SERVERS = ("demo", "load", "record", "serve", "warm", "worker")
"""Verbs that would listen, send or start processes: their lines have a wrong option at the end."""
CODES = (0, 1, 2, 130)
TOO_MUCH = "asks for more than this machine has"


def leaves(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "commands"):
        yield words, command
        return
    for name in command.list_commands(None):
        child = command.get_command(None, name)
        yield from leaves(child, (*words, name))


def inputs(folder: Path) -> list[str]:
    """Good and bad inputs: samples, mutated ones, pipes, devices, folders, names that are not UTF-8."""
    (folder / "good").mkdir(parents=True)
    made = [sample.path for sample in files.samples(folder / "good")]
    rng = Random(0)
    (folder / "bad").mkdir()
    for path in made:
        if path.is_file():
            changed = files.mutate_inside(path.name, path.read_bytes(), rng)
            (folder / "bad" / path.name).write_bytes(changed)
    made += sorted((folder / "bad").iterdir())
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "empty").mkdir()
    (folder / "nothing.npz").touch()
    strange = Path(os.fsdecode(os.fsencode(folder) + b"/\xff\x1b[2J.npz"))
    shutil.copy(folder / "good" / "own.npz", strange)
    more = [folder / name for name in ("pipe", "loop", "empty", "nothing.npz", "missing")]
    return [str(path) for path in (*made, *more, strange, Path("/dev/zero"), Path("/dev/null"), folder)]


def line_of(words: tuple[str, ...], command: Any, rng: Random, given: list[str], out: Path) -> list[str]:
    """One argument line: mostly what the verb takes, with a few values wrong."""
    line = list(words)
    for param in command.params:
        if param.name in ("help", "_help"):
            continue
        argument = type(param).__name__.endswith("Argument")
        if not argument and rng.random() > (0.9 if param.required else 0.25):
            continue
        if argument and not param.required and rng.random() < 0.3:
            continue
        if getattr(param, "is_flag", False):
            line.append(rng.choice(param.opts))
            continue
        for _ in range(2 if param.multiple and rng.random() < 0.3 else 1):
            value = value_of(param, rng, given, out)
            line += [value] if argument else [rng.choice(param.opts), value]
    if rng.random() < 0.05:
        line.insert(rng.randrange(len(line) + 1), rng.choice(("--", "-", "--no-such", "--json=1", "extra", "-o")))
    if words[0] in SERVERS:
        line.append("--no-such-option")
    return [part.replace("\x00", "") for part in line]


def value_of(param: Any, rng: Random, given: list[str], out: Path) -> str:
    kind = repr(getattr(param, "type_descriptor", None) or param.type).lower()
    plain = rng.random() < 0.6  # else nothing would get past the first check
    if "int" in kind:
        return rng.choice(WHOLE[2:7] if plain else WHOLE)
    if "float" in kind:
        return rng.choice(REAL[2:5] if plain else REAL)
    if param.name in ("out", "output", "out_file", "out_folder", "folder", "dst"):
        new = str(out / f"o{rng.randrange(10**6)}")
        return new if plain else rng.choice((str(out / "o.png"), *given, "/dev/full", ""))
    if "path" in kind or rng.random() < 0.2:
        return rng.choice([path for path in given if "/good/" in path] if plain else given)
    return rng.choice(NAMES)


def contents(folder: Path) -> dict[str, str]:
    found = {}
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            if path.is_file():
                found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def said(stderr: str) -> list[str]:
    """Lines about this command: no warnings, and nothing about what an interrupted one left in this process."""
    mine = [line for line in stderr.strip().splitlines() if not line.startswith(("warning: ", "client_session: "))]
    return [line for line in mine if not line.startswith("Unclosed ")]


def interrupt(_: int, frame: FrameType | None) -> None:
    """Ctrl-C, but not within an import: a module imported by half would fail in every later line of this process."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            return
        frame = frame.f_back
    signal.raise_signal(signal.SIGINT)


def call(line: list[str], seconds: float) -> tuple[int | None, str, str]:
    """Exit code, both streams, and a traceback instead of a code where there was one."""
    from coterie.cli import output

    streams = io.StringIO(), io.StringIO()

    before = signal.signal(signal.SIGALRM, interrupt)
    sys.argv = ["coterie", *line]
    code: int | None = None
    output.out.file, output.err.file = streams
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else -1
    except BaseException:
        streams[1].write(traceback.format_exc())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return code, streams[0].getvalue(), streams[1].getvalue()


def run(count: int, seed: int, folder: Path, seconds: float) -> dict[str, Any]:
    rng = Random(seed)
    given = inputs(folder / "inputs")
    out = folder / "out"
    out.mkdir()
    os.chdir(out)
    verbs = dict(leaves(typer.main.get_command(app)))
    codes: Counter[str] = Counter()
    failures: list[str] = []
    before = contents(folder / "inputs")
    peak = 0
    for number in range(count):
        words = sorted(verbs)[number % len(verbs)]
        line = line_of(words, verbs[words], rng, given, out)
        code, stdout, stderr = call(line, seconds)
        codes[str(code)] += 1
        shown = (
            " ".join(part if len(part) < 60 else part[:20] + "…" for part in line).encode("ascii", "replace").decode()
        )
        if code not in CODES or "Traceback" in stderr:
            failures.append(f"{number}: {shown}: {stderr[-2000:]}")
        elif code == 2 and len(said(stderr)) > 1 and "Usage" not in stderr:
            failures.append(f"{number}: {shown}: more than a line: {stderr[-1000:]}")
        elif TOO_MUCH in stderr:
            failures.append(f"{number}: {shown}: {stderr[-300:]}")
        if code == 0 and "--json" in line and "--help" not in line:
            try:
                stdout.encode()
                json.loads(stdout)
            except ValueError:
                failures.append(f"{number}: {shown}: no JSON: {stdout[:200]!r}")
        now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if now > 2 << 20 and now > peak + (1 << 18):
            failures.append(f"{number}: {shown}: {now / (1 << 20):.1f} GB of memory")
        peak = max(peak, now)
        if code != 2:
            after = contents(folder / "inputs")
            if any(after.get(path) != digest for path, digest in before.items()):
                failures.append(f"{number}: {shown}: changed or removed an input")
                before = after
            left = [path.name for path in out.rglob(".*") if path.name != MARKER]
            if left:
                failures.append(f"{number}: {shown}: left {left}")
        shutil.rmtree(out)
        out.mkdir()
        os.chdir(out)
    lost = [path for path, digest in before.items() if contents(folder / "inputs").get(path) != digest]
    failures += [f"lost or changed: {path}" for path in lost]
    return {"verbs": len(verbs), "codes": dict(codes), "failures": failures, "peak_bytes": 1024 * peak}


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_DATA, (6 << 30, 6 << 30))
    limit = float(sys.argv[4]) if len(sys.argv) > 4 else 5.0
    print(json.dumps(run(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), limit)))  # noqa: T201
