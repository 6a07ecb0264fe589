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
    shell,
)
from coterie.errors import check, check_new_file

if TYPE_CHECKING:
    from coterie.traces import ActivationTrace

HELD_OUT = 0.25
"""Share of the requests held out to score a table; the table in the file is fitted on all requests."""
FEW = 8
"""Fewest requests with prompt and answer that a score needs."""
MOST_SCORED, MOST_TOKENS = 200, 20_000
"""Most requests, and about as many tokens, that are scored."""


TITLES = {"token_table": "token table", "popularity": "popularity, the same for all"}


def tokens_command(
    trace: Annotated[Path, typer.Argument(help="Activation trace with token ids, in any known format.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write the table to (.safetensors); an older table is replaced."),
    ] = None,
    transitions: Annotated[
        Path | None,
        typer.Option(
            "--transitions",
            help="New .npy file for transitions [layer - 1, expert, expert]: tokens that activate the one expert, and "
            "the other in the next layer. Needs no token ids.",
        ),
    ] = None,
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

    The table predicts a request's load from its prompt, before the request runs. With --transitions, also or only: how
    a layer's experts lead to the next layer's. Both are scored on held-out requests.
    """
    from coterie.predictors import TokenTable, predictors

    for name in predictor or ():
        predictors.check(name)
    check(output is not None or transitions is not None, "name a file: --output for the table, or --transitions")
    check(output is not None or not predictor, "--predictor is scored beside the table: name its file with --output")
    if output is not None:
        check_output(output, "--output", "a token table", TokenTable.load, [trace])
    check_new_file(transitions)
    check(transitions is None or transitions.suffix == ".npy", f"--transitions={transitions} must end in .npy")
    opened = read_activations(trace, from_, model, num_experts)
    check(
        output is None or opened.arrays()[0].token_ids is not None,
        f"{trace} has no token ids, which a token table needs; coterie record keeps them",
    )
    found: dict[str, Any] = {"trace": str(trace), "model": opened.meta.model, "requests": opened.num_requests}
    with reporting("Scoring on held-out requests") as report:
        if transitions is not None:
            found |= _write_transitions(opened, transitions, seed)
            found["next"] = shell("coterie", "plan", trace, "--planner", "moetuner")
        if output is not None:
            report("Counting tokens", 1, 2)
            table = _write_table(opened, output, seed, predictor or [])
            found |= table | {"verdict": " ".join([table["verdict"], *filter(None, [found.get("verdict")])])}
    if json_output:
        print_json(found)
        return
    if (scored := found.get("scores")) is not None:
        print_table(
            f"Experts of the answer, predicted from the prompt: {scored['requests']} held-out requests",
            ["predictor", "cosine with the recorded load"],
            [[TITLES.get(name, name), score] for name, score in scored.items() if name != "requests"],
        )
    files = {"Table": output, "Transitions": transitions}
    print_lines(*(f"{what}: {file} ({file.stat().st_size:,} bytes)" for what, file in files.items() if file))
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


def _write_transitions(opened: ActivationTrace, file: Path, seed: int) -> dict[str, Any]:
    import numpy as np

    from coterie.footprints.counting import next_layer_recall, transitions
    from coterie.traces.store import replaced

    tokens, offsets = opened.arrays()
    requests = np.random.default_rng(seed).permutation(opened.num_requests)
    held = np.isin(np.repeat(np.arange(len(requests)), np.diff(offsets)), requests[: int(HELD_OUT * len(requests))])
    fitted, unseen = transitions(tokens.expert_ids[~held], opened.meta.num_experts), np.flatnonzero(held)
    with replaced(file) as stream:
        np.save(stream, fitted + transitions(tokens.expert_ids[held], opened.meta.num_experts))
    if len(requests) < FEW or not len(fitted):
        return {"transitions": str(file), "verdict": "Transitions: too few requests or layers to score them."}
    recall = next_layer_recall(fitted, tokens.expert_ids[unseen[:: 1 + len(unseen) // MOST_TOKENS]])
    return {
        "transitions": str(file),
        "next_layer": recall,
        "verdict": f"From a token's experts in a layer, transitions find {recall['transitions']:.1%} of those in the "
        f"next by as many guesses; popularity finds {recall['popularity']:.1%}.",
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
