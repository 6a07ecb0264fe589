"""``coterie fit``: learn a router from a trace, and say how good it is on requests that it did not see."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.markup import escape

from coterie.cli.output import JsonOption, out, print_json, print_table, reporting
from coterie.errors import ConfigError
from coterie.traces import ActivationTrace
from coterie.traces.readers import ReadOptions, read_trace

if TYPE_CHECKING:  # numba and scipy take a second to import: only when a router is fitted
    from coterie.routing.calibration import Calibration
    from coterie.routing.fitted import RouterFit

TEST_SHARE = 0.3
"""Of the requests read; the others calibrate."""


def fit_command(
    trace: Annotated[Path, typer.Argument(help="Activation trace to learn from, in any known format.")],
    workers: Annotated[int, typer.Option("--workers", min=1, help="Decode workers to route to.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write, .safetensors; replaced if it exists.")],
    batch: Annotated[int, typer.Option("--batch", min=1, help="Requests of a worker's decode step.")] = 16,
    requests: Annotated[
        int | None, typer.Option("--requests", min=4, help="Requests to read, drawn by seed; 1,400 if not given.")
    ] = None,
    weighting: Annotated[
        str, typer.Option("--weighting", help="Of signatures: count_idf, count or binary.")
    ] = "count_idf",
    speeds: Annotated[
        str | None, typer.Option("--speeds", help="Relative speed of each worker, such as 1,1,0.5; equal if not given.")
    ] = None,
    from_: Annotated[
        str | None, typer.Option("--from", help="Format to read, where the file itself does not show it.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Model that produced the file.")] = None,
    num_experts: Annotated[
        int | None, typer.Option("--num-experts", min=1, help="Experts per layer, where the file holds ids only.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the split, the pairs and the starts.")] = 0,
    json_output: JsonOption = False,
) -> None:
    """Fit a router to a trace: signatures, clusters, a forecast of decode."""
    from coterie.footprints.signatures import WEIGHTINGS
    from coterie.routing.calibration import calibration
    from coterie.routing.fitted import RouterFit

    allowed = tuple(name for name in WEIGHTINGS if name != "gate")
    if weighting not in allowed:
        raise ConfigError(f"--weighting={weighting} must be one of {', '.join(allowed)}: requests come with counts")
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise ConfigError(f"--output={output} must be a file in a folder that exists")
    rates = None if speeds is None else parse_speeds(speeds, workers)
    opened = read_trace(trace, from_, ReadOptions(model=model, num_experts=num_experts))
    if not isinstance(opened, ActivationTrace):
        raise ConfigError(f"{trace} must be an activation trace; it holds a {type(opened).__name__}")
    opened.validate()
    rng = np.random.default_rng(seed)
    chosen = np.sort(rng.permutation(opened.num_requests)[: requests or 1400])
    with reporting("Counting requests") as report:
        known = calibration(opened, chosen, report)
        order = rng.permutation(len(known.prefill))
        test = np.sort(order[: int(TEST_SHARE * len(order))])
        fit = np.sort(order[len(test) :])
        seconds: dict[str, float] = {}
        fitted = RouterFit(workers, batch, weighting, rates).fit(  # type: ignore[arg-type]
            known.take(fit), rng, lambda part, took: (seconds.update({part: took}), report(part, len(seconds), 5))[0]
        )
        report("Scoring other requests", 0, 1)
        scores = _scores(fitted, known.take(fit), known.take(test), rates, rng)
    fitted.save(output)
    result = {
        "trace": str(trace),
        "model": fitted.model,
        "layers": fitted.num_layers,
        "experts": fitted.num_experts,
        "top_k": fitted.learned.top_k,
        "workers": workers,
        "batch": batch,
        "calibration_requests": len(fit),
        "test_requests": len(test),
        "halves": known.halved,
        "weighting": weighting,
        "seed": seed,
        "layers_kept": fitted.learned.signature.layers.tolist(),
        **scores,
        "fit_s": seconds,
        "file": str(output),
        "bytes": output.stat().st_size,
    }
    if json_output:
        print_json(result)
        return
    _print(result)


def parse_speeds(text: str, workers: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[worker] of '1,1,0.5'."""
    try:
        values = np.array([float(part) for part in text.split(",")])
    except ValueError:
        raise ConfigError(f"--speeds={text} must be numbers with commas between") from None
    if len(values) != workers or not ((values > 0) & (values < np.inf)).all():
        raise ConfigError(f"--speeds={text} must be {workers} numbers above 0, one for each worker")
    return values


def _scores(
    fitted: RouterFit, fit: Calibration, test: Calibration, speeds: Any, rng: np.random.Generator
) -> dict[str, Any]:
    """What the router makes of requests it has not seen, beside round robin."""
    from coterie.footprints.signatures import MAX_PAIRS, WEIGHTINGS, Signature, rho, sample_pairs
    from coterie.routing.clustering import assign, capacities
    from coterie.routing.union import expected_distinct_of, tangents

    requests, workers = len(test.prefill), fitted.workers
    if requests < max(3, workers):
        return {"rho": [], "distinct": []}
    pairs, decode = sample_pairs(requests, MAX_PAIRS, rng), test.decode.reshape(requests, -1)
    rhos = []
    for weighting in WEIGHTINGS:
        learn, seen = (fit.gates, test.gates) if weighting == "gate" else (fit.prefill, test.prefill)
        for mask in (False, True):
            row: dict[str, Any] = {"weighting": weighting, "mask": mask, "rho": None, "layers": None}
            try:
                if learn is not None and seen is not None:
                    made = Signature(weighting, mask).fit(learn, fit.decode, rng)
                    row |= {"rho": rho(made.transform_all(seen), decode, pairs), "layers": len(made.layers)}
            except ConfigError:
                pass  # count_idf where every request activates every expert
            rhos.append(row)
    _, after = test.probabilities
    limits = capacities(requests, workers, speeds)
    slopes, _ = tangents(fitted.profiles, fitted.batch)
    expected = np.stack([fitted.profile(counts) for counts in test.prefill])
    similar = np.stack([fitted.similarities(counts) for counts in test.prefill])
    labels = {
        "round robin": rng.permutation(np.repeat(np.arange(workers), limits))[:requests],
        "cosine clusters": assign(-similar, limits),
        "union clusters": assign(expected @ slopes.T, limits),
    }
    alone = expected_distinct_of(after, np.zeros(requests, np.int64), fitted.batch)
    distinct = [
        {"clusters": name, "experts_per_step": value, "saving_pct": 100 * (1 - value / alone)}
        for name, value in (
            ("one cluster", alone),
            *((name, expected_distinct_of(after, found, fitted.batch)) for name, found in labels.items()),
        )
    ]
    return {"rho": rhos, "distinct": distinct}


def _print(result: dict[str, Any]) -> None:
    out.print(
        f"{escape(result['model'])}: {result['layers']} layers of {result['experts']} experts, "
        f"{result['calibration_requests']:,} requests calibrate, {result['test_requests']:,} test",
        highlight=False,
        soft_wrap=True,
    )
    if result["halves"]:
        out.print("The trace has one phase: first and second halves of requests stand for prefill and decode.")
    if not result["rho"]:
        out.print(f"No scores: {result['test_requests']} requests are too few to test {result['workers']} workers.")
    else:
        rows = [[row["weighting"], row["mask"], row["layers"], row["rho"]] for row in result["rho"]]
        print_table("rho on test requests", ["signature", "layer mask", "layers", "rho"], rows)
        print_table(
            f"Expected distinct experts of a step of {result['batch']}, all layers, test requests",
            ["clusters", "experts", "saving %"],
            [[row["clusters"], row["experts_per_step"], row["saving_pct"]] for row in result["distinct"]],
        )
    print_table("Fitting", ["part", "seconds"], list(result["fit_s"].items()))
    kept = ", ".join(map(str, result["layers_kept"]))
    out.print(f"Layers kept, of {result['layers']}: {kept}", highlight=False, soft_wrap=True)
    out.print(f"Router: {escape(result['file'])} ({result['bytes']:,} bytes)", highlight=False, soft_wrap=True)
