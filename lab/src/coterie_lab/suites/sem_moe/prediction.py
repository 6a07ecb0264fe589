"""Prediction of a token's experts from its id and from its ranks in earlier layers.

Requests are split by seed, a quarter to fit and the rest to test, as published; requests with one prompt stay on one
side. Token counts by domain, without requests, are fitted on one domain and tested on the others, each in turn.
Intervals are over splits.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.answers.plan.learning import fit_rank_tables
from coterie.answers.suites import Report, SuiteOptions
from coterie.errors import TraceError
from coterie.footprints.ranks import key_starts
from coterie.models import get_model
from coterie.placement.holdings import held_by
from coterie.predictors import TokenTable
from coterie.predictors.scoring import split_groups
from coterie.predictors.token_table import ONE
from coterie.traces.activations import ActivationTrace
from coterie.types import ModelSpec, Placement, narrowest_uint
from coterie_lab.suites.predictors.cases import trace_cases
from coterie_lab.suites.predictors.model import record_prompts
from coterie_lab.suites.predictors.traces import prompt_groups
from coterie_lab.suites.sem_moe.look_back import LookBack, TableShares, look_back, table_shares
from coterie_lab.suites.sem_moe.token_sets import DEFINITIONS, TokenCounts, count_tokens, kurtosis, set_scores
from coterie_lab.suites.shared import spread as finite_spread

TEST_SHARE = 0.75
SEEDS = (0, 1, 2, 3, 4)
RANKS = 8
MAX_TEST_TOKENS = 10_000
"""Most test tokens looked up one by one, drawn by seed."""
PRECISION, F1 = 0.963, 0.788
"""Published for the most frequent k experts of a token, on its own data."""
LOOK_BACK_5 = 0.70
"""Published accuracy of looking back at 5 layers, approximately."""
KURTOSIS = 8.0
"""Published: most tokens are above this value."""
KURTOSIS_OCCURRENCES = (1, 8, 32)
SEEN = ((0, 0), (1, 1), (2, 3), (4, 7), (8, 31), (32, None))
"""Occurrences in the fitted part, for rows of confidence."""
BYTES_MODELS = ("deepseek-v2", "deepseek-v2-lite", "qwen3-30b-a3b", "gpt-oss-20b", "glm-5.2")
COUNTED = {"olmoe": 64, "mixtral-8x7b": 8}
"""Models with counts by domain, with their experts."""

Row = dict[str, Any]


class TokenCase(NamedTuple):
    """A trace whose requests can be split."""

    name: str
    trace: ActivationTrace
    groups: Sequence[Hashable]
    """[request] group of requests with the same prompt."""


class Split(NamedTuple):
    """Token positions of the two parts of a trace."""

    fit_requests: NDArray[np.int64]
    fit: NDArray[np.int64]
    test: NDArray[np.int64]
    sample: NDArray[np.int64]
    """At most MAX_TEST_TOKENS of the test part."""


def prediction_rows(options: SuiteOptions, report: Report) -> list[Row]:
    """Make rows of kurtosis, set scores, confidences, look-back and table bytes for every trace at hand.

    A model (`options.model`) is recorded with its token ids, which needs torch.
    """
    seeds = options.seeds or SEEDS
    rows: list[Row] = []
    cases = _cases(options, report)
    for done, case in enumerate(cases):
        report(f"Prediction on {case.name}", done, len(cases) + 1)
        rows += _case_rows(case, seeds)
    report("Prediction on counted tokens", len(cases), len(cases) + 1)
    file = None if options.data is None else options.data / "activations" / "olmoe-mixtral" / "eid2token_coo.npz"
    if file is not None and file.exists() and options.trace is None:
        for name, experts in COUNTED.items():
            rows += _counted_rows(name, counts_by_domain(file, name, experts))
    return rows + bytes_rows()


def _cases(options: SuiteOptions, report: Report) -> list[TokenCase]:
    paths = [options.trace] if options.trace is not None else []
    if not paths and options.data is not None:
        folders = (options.data / "activations" / name for name in ("gpt-oss-20b", "deepseek-v2-lite"))
        paths = [folder for folder in folders if folder.exists()]
    read = [trace_cases(path, options, [])[0] for path in paths]
    cases = [TokenCase(case.name, case.trace, case.groups) for case in read]
    if options.model is not None:
        recorded = record_prompts(options, report, [])
        cases.append(TokenCase(recorded.loaded.name, recorded.trace, prompt_groups(recorded.trace)))
    return cases


def _case_rows(case: TokenCase, seeds: Sequence[int]) -> list[Row]:
    trace = case.trace
    tokens, _ = trace.arrays()
    splits = [_split(case, seed) for seed in seeds]
    held = held_by(Placement.linear(trace.meta.num_layers, trace.meta.num_experts, _ranks(trace)))
    rows = _look_back_rows(case, splits, held)
    if tokens.token_ids is None:
        return rows
    ids, experts = tokens.token_ids, trace.meta.num_experts
    seen, numbers = np.unique(ids, return_inverse=True)
    counts = [
        [count_tokens(tokens.expert_ids[at], numbers[at], len(seen), experts) for at in (split.fit, split.test)]
        for split in splits
    ]
    both = TokenCounts(*(a + b for a, b in zip(*counts[0], strict=True)))
    top_k = trace.meta.top_k
    rows += kurtosis_rows(case.name, both, top_k)
    rows += sets_rows(case.name, [(fit, test) for fit, test in counts], top_k)
    rows += _confidence_rows(case, splits)
    rows += _tables_rows(case, splits, held)
    return rows


def _ranks(trace: ActivationTrace) -> int:
    """Return RANKS, or the largest part of it that divides the experts."""
    return int(np.gcd(RANKS, trace.meta.num_experts))


def _split(case: TokenCase, seed: int) -> Split:
    fit, test = split_groups(case.groups, np.random.default_rng(seed), TEST_SHARE)
    _, offsets = case.trace.arrays()
    first, second = (np.concatenate([np.arange(offsets[r], offsets[r + 1]) for r in part]) for part in (fit, test))
    sample = np.random.default_rng([seed, 1]).permutation(second)[:MAX_TEST_TOKENS]
    return Split(fit, first, second, np.sort(sample))


def spread(key: str, samples: Sequence[float]) -> Row:
    """Return the mean and its 95% interval over splits; None if a split has no value."""
    if not len(samples) or not np.isfinite(samples).all():
        return {key: None, f"{key}_low": None, f"{key}_high": None}
    return finite_spread(key, samples, "")


def kurtosis_rows(trace: str, counts: TokenCounts, top_k: int) -> list[Row]:
    """Make rows of the kurtosis of tokens' counts over the experts of a layer, all tokens and layers together."""
    everyone = counts.activations.sum(axis=0) / counts.activations.sum(axis=(0, 2))[:, None]  # [layer, expert]
    rng = np.random.default_rng(0)
    rows = []
    for least in KURTOSIS_OCCURRENCES:
        chosen = counts.occurrences >= least
        if not chosen.any():
            continue
        own = kurtosis(counts.activations[chosen])
        draws = top_k * counts.occurrences[chosen]
        chance = kurtosis(np.stack([rng.multinomial(draws, share) for share in everyone], axis=1))
        rows.append(
            {
                "part": "kurtosis",
                "trace": trace,
                "min_occurrences": least,
                "tokens": int(chosen.sum()),
                "median": float(np.median(own)),
                "share_above_8": float((own > KURTOSIS).mean()),
                "by_popularity_median": float(np.median(chance)),
                "by_popularity_above_8": float((chance > KURTOSIS).mean()),
                "published": {"above": KURTOSIS, "tokens": "most"},
            }
        )
    return rows


def sets_rows(trace: str, parts: Sequence[tuple[TokenCounts, TokenCounts]], top_k: int) -> list[Row]:
    """Make rows of precision, recall and F1 for every definition, by the token's own experts and by popularity."""
    rows = []
    for predictor, popular in (("token_table", False), ("popularity", True)):
        scores = [set_scores(fit, test, top_k, popular) for fit, test in parts]
        for name in DEFINITIONS:
            row: Row = {"part": "sets", "trace": trace, "definition": name, "predictor": predictor}
            row |= {"splits": len(parts)}
            for key in ("precision", "recall", "f1"):
                by_layer = np.array([getattr(score[name], key) for score in scores])  # [split, layer]
                row |= spread(key, by_layer.mean(axis=1).tolist())
                row[f"{key}_by_layer"] = [float(v) if np.isfinite(v) else None for v in by_layer.mean(axis=0)]
            rows.append(row | {"published": {"precision": PRECISION, "f1": F1}})
    return rows


class Expected(NamedTuple):
    """The experts that tokens are expected to activate."""

    experts: NDArray[np.int64]
    """[token, layer, k] expert ids, the most likely first."""
    confidence: NDArray[np.float64]
    """[token, layer] expected share of the token's activations that fall on these experts, in 0 … 1."""


def expected_experts(table: TokenTable, token_ids: NDArray[np.integer]) -> Expected:
    """Return the top_k experts that each token activated most, then the most popular experts.

    The confidence is the counted share of these experts, pulled towards their share of all tokens' activations: as if
    `confidence_smoothing` further occurrences had followed popularity.
    """
    rows, per_token, k = table.rows, table.rows.popularity.per_token, table.rows.popularity.top_k
    at = rows.find(token_ids)
    shape = (len(at), table.num_layers)
    experts, share, prior = np.zeros((*shape, k), np.int64), np.zeros(shape), np.zeros(shape)
    for layer, popularity in enumerate(per_token):
        place = np.empty(len(popularity))  # [expert] by popularity, after every expert of a row
        place[np.argsort(-popularity, kind="stable")] = np.arange(len(popularity))
        places, weights = np.tile(place, (len(at), 1)), np.zeros((len(at), len(popularity)))
        own = np.where((at >= 0)[:, None], rows.weights[at, layer] / ONE, 0.0)  # [token, kept]
        kept = own.shape[1]
        token, column = np.nonzero(own)
        expert = rows.experts[at[token], layer, column]
        places[token, expert], weights[token, expert] = column - kept, own[token, column]
        chosen = experts[:, layer] = np.argsort(places, axis=1, kind="stable")[:, :k]
        share[:, layer] = np.take_along_axis(weights, chosen, axis=1).sum(axis=1) / k
        prior[:, layer] = popularity[chosen].sum(axis=1) / k
    counts = np.where(at >= 0, rows.counts[at], 0)  # a token without a row has no trust
    trust = (counts / np.maximum(counts + table.confidence_smoothing, 1e-300))[:, None]
    return Expected(experts, np.minimum(1.0, trust * share + (1 - trust) * prior))


def _confidence_rows(case: TokenCase, splits: Sequence[Split]) -> list[Row]:
    """Compare the confidence of the token table with its hits, by how often a token was seen."""
    trace = case.trace
    tokens, _ = trace.arrays()
    assert tokens.token_ids is not None
    samples: dict[tuple[int, int | None], list[tuple[float, float, int]]] = {}
    for split in splits:
        ids, right = tokens.token_ids[split.sample], tokens.expert_ids[split.sample]
        table = TokenTable().fit(trace, split.fit_requests)
        expected = expected_experts(table, ids)
        hits = (expected.experts[..., None] == right[:, :, None, :]).any(axis=-1).mean(axis=-1)  # [token, layer]
        rows = table.rows.find(ids)
        counts = np.where(rows >= 0, table.rows.counts[rows], 0)
        for low, high in SEEN:
            chosen = (counts >= low) & (counts <= (high if high is not None else np.inf))
            if chosen.any():
                value = (float(expected.confidence[chosen].mean()), float(hits[chosen].mean()), int(chosen.sum()))
                samples.setdefault((low, high), []).append(value)
    return [
        {
            "part": "confidence",
            "trace": case.name,
            "seen_from": low,
            "seen_to": high,
            "tokens": int(np.mean([v[2] for v in values])),
            **spread("confidence", [v[0] for v in values]),
            **spread("hits", [v[1] for v in values]),
            "published": None,
        }
        for (low, high), values in samples.items()
    ]


def _look_back_rows(case: TokenCase, splits: Sequence[Split], held: NDArray[np.bool_]) -> list[Row]:
    ids = case.trace.arrays()[0].expert_ids
    if ids.shape[1] <= 5:
        return []
    results = [look_back(ids[split.fit], ids[split.sample], held) for split in splits]
    rows = []
    for back, runs in enumerate(zip(*results, strict=True)):
        row: Row = {"part": "look_back", "trace": case.name, "ep": len(held), "layers_back": back}
        for key in LookBack._fields[1:]:
            row |= spread(key, [getattr(run, key) for run in runs])
        rows.append(row | {"published": {"about": LOOK_BACK_5} if back == 5 else None})
    return rows


def _tables_rows(case: TokenCase, splits: Sequence[Split], held: NDArray[np.bool_]) -> list[Row]:
    trace = case.trace
    tokens, _ = trace.arrays()
    assert tokens.token_ids is not None
    placement = Placement.linear(trace.meta.num_layers, trace.meta.num_experts, len(held))
    shares = []
    for split in splits:
        tables = fit_rank_tables(trace, placement, split.fit_requests)
        shares.append(table_shares(tables, tokens.expert_ids[split.sample], tokens.token_ids[split.sample], held))
    row: Row = {"part": "rank_tables", "trace": case.name, "ep": len(held), "placement": "vanilla"}
    for key in TableShares._fields:
        row |= spread(key, [getattr(share, key) for share in shares])
    return [row | {"published": None}]


def counts_by_domain(file: Path, model: str, num_experts: int) -> dict[str, TokenCounts]:
    """Read the counts of each domain, over one numbering of tokens, from rows of layer, expert, token, count."""
    with np.load(file, allow_pickle=False) as archive:
        tables = {name.split("|")[1]: archive[name] for name in archive.files if name.split("|")[0] == model}
    seen = np.unique(np.concatenate([table[:, 2] for table in tables.values()]))
    domains = {}
    for domain, table in tables.items():
        layers = int(table[:, 0].max()) + 1
        if int(table.min()) < 0 or int(table[:, 1].max()) >= num_experts:
            raise TraceError(file, f"{model}|{domain}", f"experts must be in 0 … {num_experts - 1}")
        counts = np.zeros((len(seen), layers, num_experts), np.uint32)
        counts[np.searchsorted(seen, table[:, 2]), table[:, 0], table[:, 1]] = table[:, 3]
        top_k = {"olmoe": 8, "mixtral-8x7b": 2}[model]
        domains[domain] = TokenCounts(counts, counts[:, 0].sum(axis=1, dtype=np.int64) // top_k)
    return domains


def _counted_rows(model: str, domains: dict[str, TokenCounts]) -> list[Row]:
    top_k = next(iter(domains.values())).top_k
    whole = _summed(list(domains.values()))
    parts = [
        (fit, _summed([counts for other, counts in domains.items() if other != name])) for name, fit in domains.items()
    ]
    return [*kurtosis_rows(model, whole, top_k), *sets_rows(model, parts, top_k)]


def _summed(parts: Sequence[TokenCounts]) -> TokenCounts:
    activations = np.asarray(np.sum([part.activations for part in parts], axis=0), np.uint32)
    return TokenCounts(activations, np.asarray(np.sum([part.occurrences for part in parts], axis=0)))


class TableBytes(NamedTuple):
    """Sizes in bytes of the tables of a whole vocabulary."""

    published: int
    """Published tables: one 16-bit rank for each token and MoE layer."""
    tokens: int
    """Coterie's token table: ids, ranks, confidences and affinities."""
    contexts: int
    """Coterie's context table: every context of every layer."""


def table_bytes(spec: ModelSpec, num_ranks: int, order: int = 2) -> TableBytes:
    """Return the largest size of a model's tables, with every token and every context seen."""
    rank = narrowest_uint(num_ranks - 1).itemsize
    starts = key_starts(num_ranks, order)
    rows = sum(int(starts[min(order, layer) + 1]) for layer in range(spec.num_moe_layers))
    cells = spec.vocab_size * spec.num_moe_layers
    return TableBytes(
        published=2 * cells,
        tokens=cells * (rank + 1) + spec.vocab_size * (4 + 2 * num_ranks),
        contexts=rows * (8 + rank + 1) + 8 * (spec.num_moe_layers + 1),
    )


def bytes_rows() -> list[Row]:
    """Make rows of the bytes of rank tables for whole vocabularies."""
    rows = []
    for spec in map(get_model, BYTES_MODELS):
        sizes = table_bytes(spec, RANKS)
        row: Row = {"part": "table_bytes", "trace": spec.name, "ep": RANKS}
        row |= {"token_bytes": sizes.tokens, "context_bytes": sizes.contexts}
        published = {"token_bytes": sizes.published, "is": "16-bit rank by token and MoE layer"}
        rows.append(row | {"published": published})
    return rows
