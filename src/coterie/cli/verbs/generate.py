"""``coterie generate``: make a synthetic activation trace, from a preset or fitted to a recorded trace."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.files import read_activations, trace_summary
from coterie.cli.output import JsonOption, err, print_json, print_table, reporting
from coterie.errors import ConfigError, check

if TYPE_CHECKING:  # numba takes half a second to import: only when a trace is made
    import numpy as np

    from coterie.traces.synthetic import SyntheticSettings

_UNITS = {
    "": 1,
    **{f"{p}b": 1000**i for i, p in enumerate(("", "k", "m", "g", "t"))},
    **{f"{p}ib": 1024**i for i, p in enumerate(("k", "m", "g", "t"), start=1)},
}


def generate_command(
    out: Annotated[Path, typer.Argument(help="Folder to write; it must not hold a trace.")],
    preset: Annotated[
        str | None, typer.Option("--preset", help="Named settings: balanced (default), bursty or drifting.")
    ] = None,
    like: Annotated[
        Path | None, typer.Option("--like", help="Recorded trace, in any known format, whose routing to imitate.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Model to take experts, layers and top-k from (see coterie models).")
    ] = None,
    requests: Annotated[
        int | None, typer.Option("--requests", min=1, help="Number of requests to generate. Default: 1,000.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", min=1, help="Exact number of tokens to generate, instead of --requests.")
    ] = None,
    size: Annotated[
        str | None,
        typer.Option("--size", help="Size on disk to generate, such as 500MB or 10GB, instead of --requests."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", help="Mean requests per second. Default: that of the preset or recorded trace."),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            "--seed", min=0, help="Seed of the random generator; the same seed and settings give the same bytes."
        ),
    ] = 0,
    json_output: JsonOption = False,
) -> None:
    """Generate a synthetic activation trace."""
    import numpy as np

    from coterie.traces.arrivals import at_rate
    from coterie.traces.requests import check_new_folder
    from coterie.traces.synthetic import generate, generate_to

    check(
        sum(value is not None for value in (requests, tokens, size)) <= 1,
        "--requests, --tokens and --size exclude each other",
    )
    nbytes = None if size is None else parse_size(size)
    if requests is None and tokens is None and nbytes is None:
        requests = 1000
    check_new_folder(out)  # fail before the recorded trace is read and fitted
    rng = np.random.default_rng(seed)
    settings = _settings(preset, like, model, rng)
    if rate is not None:
        settings = replace(settings, arrivals=at_rate(settings.arrivals, rate))
    source = {"seed": seed, "preset": preset, "like": None if like is None else str(like)}
    generate(settings, np.random.default_rng(0), tokens=1)  # compile first: wall_s must not include compiling
    started = time.perf_counter()
    with reporting("Generating tokens") as report:
        trace = generate_to(
            out,
            settings,
            rng,
            requests=requests,
            tokens=tokens,
            nbytes=nbytes,
            source=source,
            progress=partial(report, "Generating tokens"),
        )
    summary = {
        **trace_summary(out, trace),
        "duration_s": trace.requests.duration_s,
        "seed": seed,
        "wall_s": time.perf_counter() - started,
        "domains": list(settings.domains),
    }
    if json_output:
        print_json(summary)
    else:
        rows = summary | {"domains": ", ".join(settings.domains)}
        print_table("Generated", ["field", "value"], rows.items())


def _settings(preset: str | None, like: Path | None, model: str | None, rng: np.random.Generator) -> SyntheticSettings:
    from coterie.models import get_model
    from coterie.traces.fitting import fit_synthetic
    from coterie.traces.synthetic import presets

    if like is None:
        chosen = presets["balanced" if preset is None else preset]
        return chosen if model is None else chosen.shaped_like(get_model(model))
    check(model is None, f"--model={model} and --like={like} exclude each other: the trace has a shape of its own")
    base = None if preset is None else presets[preset]
    recorded = read_activations(like, named="--like=")
    with err.status("Fitting the recorded trace"):
        return fit_synthetic(recorded, rng, base)


def parse_size(text: str) -> int:
    """Parse a size such as '10GB' (10 x 1000³), '2GiB' (2 x 1024³) or '4096' into bytes."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
        raise ConfigError(f"--size={text!r} must be a number above 0 and a unit, such as 500MB, 10GB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2]])
