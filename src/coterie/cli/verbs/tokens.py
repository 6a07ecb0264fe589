"""``coterie tokens``: make the token table that vLLM's scheduler takes as `loads`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.files import check_output, read_activations
from coterie.cli.output import (
    FromOption,
    JsonOption,
    NumExpertsOption,
    TraceModelOption,
    print_json,
    print_lines,
    print_table,
    print_verdict,
    reporting,
)
from coterie.errors import check

if TYPE_CHECKING:
    from coterie.traces import ActivationTrace

HELD_OUT = 0.25
"""Share of the requests held out to score a table; the table in the file is fitted on all requests."""
FEW = 8
"""Fewest requests with prompt and answer that a score needs."""
MOST_SCORED = 200
"""Most requests that are scored."""


TITLES = {"token_table": "token table", "popularity": "popularity, the same for all"}


def tokens_command(
    trace: Annotated[Path, typer.Argument(help="Activation trace with token ids, in any known format.")],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="File to write the table to (.safetensors); an older table is replaced."),
    ],
    predictor: Annotated[
        list[str] | None,
        typer.Option(
            "--predictor",
            help="Predictor to score beside the table, such as similar_prefix:similarity=0.8 or recent_popularity; "
            "repeat for several.",
        ),
    ] = None,
    from_: FromOption = None,
    model: TraceModelOption = None,
    num_experts: NumExpertsOption = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed for the requests that are held out.")] = 0,
    json_output: JsonOption = False,
) -> None:
    """Make a token table: the experts each token id activates. vLLM's scheduler takes it as `loads`.

    The table predicts a request's load from its prompt, before the request runs. It is scored on held-out requests.
    """
    from coterie.predictors import TokenTable, predictors

    for name in predictor or ():
        predictors.check(name)
    check_output(output, "--output", "a token table", TokenTable.load, [trace])
    opened = read_activations(trace, from_, model, num_experts)
    check(
        opened.arrays()[0].token_ids is not None,
        f"{trace} has no token ids, which a token table needs; coterie record keeps them",
    )
    found: dict[str, Any] = {"trace": str(trace), "model": opened.meta.model, "requests": opened.num_requests}
    with reporting("Scoring on held-out requests"):
        found |= _write_table(opened, output, seed, predictor or [])
    if json_output:
        print_json(found)
        return
    if (scored := found["scores"]) is not None:
        print_table(
            f"Experts of the answer, predicted from the prompt: {scored['requests']} held-out requests",
            ["predictor", "cosine with the recorded load"],
            [[TITLES.get(name, name), score] for name, score in scored.items() if name != "requests"],
        )
    print_lines(f"Table: {output} ({found['bytes']:,} bytes)")
    print_verdict(found["verdict"], found["next"])


def _write_table(opened: ActivationTrace, output: Path, seed: int, others: list[str]) -> dict[str, Any]:
    from coterie.predictors import TokenTable

    scored = _scores(opened, seed, others)
    table = TokenTable().fit(opened)
    part = output.with_name(output.name + ".part")
    part.unlink(missing_ok=True)
    table.save(part)
    part.replace(output)
    settings = {"coterie": {"scheduler": {"strategy": "latency_aware", "device": "h200", "loads": str(output)}}}
    return {
        "tokens": len(table.rows.token_ids),
        "layers": table.num_layers,
        "experts": table.num_experts,
        "scores": scored,
        "file": str(output),
        "bytes": output.stat().st_size,
        "verdict": _verdict(len(table.rows.token_ids), opened.num_requests, scored),
        "next": "vllm serve MODEL --scheduler-cls coterie.engines.vllm.scheduler.ExpertAwareAsyncScheduler "
        f"--additional-config '{json.dumps(settings)}'",
    }


def _scores(trace: ActivationTrace, seed: int, others: list[str]) -> dict[str, Any] | None:
    """Compute the cosine of predicted and recorded decode loads on held-out requests; None if there are too few."""
    import numpy as np

    from coterie.footprints import footprint
    from coterie.predictors import PredictRequest, predictors
    from coterie.predictors.scoring import cosine
    from coterie.types import DECODE, PREFILL

    tokens, offsets = trace.arrays()
    assert tokens.token_ids is not None
    phases = [tokens.phase[offsets[n] : offsets[n + 1]] for n in range(trace.num_requests)]
    whole = np.flatnonzero([(one == PREFILL).any() and (one == DECODE).any() for one in phases])
    if len(whole) < FEW:
        return None
    held = np.random.default_rng(seed).permutation(whole)[: min(MOST_SCORED, max(2, int(HELD_OUT * len(whole))))]
    rest = np.setdiff1d(np.arange(trace.num_requests), held)
    asked, truth = [], []
    for number in held:
        rows = slice(offsets[number], offsets[number + 1])
        asked.append(PredictRequest(token_ids=tokens.token_ids[rows][phases[number] == PREFILL]))
        truth.append(footprint(tokens.expert_ids[rows][phases[number] == DECODE], trace.meta.num_experts))
    scores: dict[str, Any] = {"requests": len(held)}
    for name in (*TITLES, *others):
        predictor = predictors.make(name).fit(trace, rest)
        scores[name] = float(cosine(np.stack([predictor.predict(one) for one in asked]), np.stack(truth)).mean())
    return scores


def _verdict(tokens: int, requests: int, scored: dict[str, Any] | None) -> str:
    said = f"{tokens:,} token ids of {requests:,} requests"
    if scored is None:
        return f"{said}: too few requests with prompt and answer to score the table (at least {FEW})."
    ours, base = scored["token_table"], scored["popularity"]
    how, use = ("no better", "record more requests before using it")
    if ours > base:
        how, use = ("better", "use it for requests that come without a footprint")
    return (
        f"{said}: the table predicts a request's experts {how} than their popularity does "
        f"(cosine {ours:.3f} against {base:.3f}); {use}."
    )
