"""The router dry run as a token table: run once for a whole vocabulary, then used without torch or the model.

A dry run gives each layer's gate the bare embedding of a token (coterie.engines.transformers.dry_run), so what it
chooses depends on the token alone. Computed for every token of the vocabulary it is a token table, of
vocabulary x layers x top_k x 3 bytes, which a serving process maps. It equals the dry run except where two gate scores
are so near that the shape of a matrix product decides between them.

Not so where a family adds something to the embedding that depends on the place (learned positions), or limits how many
tokens an expert takes. A sample run in another order is compared, and a table that would differ is refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.engines.transformers.dry_run import DryRun, dry_run
from coterie.errors import UnavailableError
from coterie.predictors import TokenTable
from coterie.traces import ActivationTrace, TraceMeta

CHUNK_TOKENS = 1024
"""Tokens of the vocabulary in one pass, at most: attention masks grow with its square."""
SAMPLE_TOKENS = 256
MAX_DIFFERENT = 0.01
"""Share of a sample's choices that may differ when its tokens stand elsewhere: rounding decides between near-equals."""


def dry_run_table(model: Any, name: str | None = None) -> TokenTable:
    """The dry run of every token of the model's vocabulary, as a table that predicts what :func:`dry_run` would.

    Nothing is smoothed. Popularity, which only ids past the vocabulary go by, is the mean over the vocabulary.
    """
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or CHUNK_TOKENS
    chunk = min(CHUNK_TOKENS, int(limit), vocabulary)
    # Spread over the vocabulary, and far from where they stand in it.
    sample = np.random.default_rng(0).permutation(vocabulary)[: min(SAMPLE_TOKENS, chunk)]
    spans = [list(range(start, min(start + chunk, vocabulary))) for start in range(0, vocabulary, chunk)]
    *runs, again = dry_run(model, [*spans, sample.tolist()])
    ids = np.concatenate([run.expert_ids for run in runs])  # [token id, layer, k]
    _check(ids[sample], again, str(model.config.model_type))
    layers, top_k = ids.shape[1:]
    meta = TraceMeta(name or str(model.config.model_type), again.num_experts, layers, top_k, again.layer_ids)
    every = np.arange(vocabulary, dtype=np.int32)
    trace = ActivationTrace.from_arrays(meta, ids, np.array([0, vocabulary]), token_ids=every)
    whole = vocabulary * (layers * top_k * 4 + 12)  # room for all of it, whatever the ids take
    return TokenTable(smoothing=0.0, experts_kept=top_k, max_bytes=whole).fit(trace)


def _check(table: NDArray[np.int32], again: DryRun, kind: str) -> None:
    """Raises where the same tokens choose otherwise in another order."""
    same = (table[..., :, None] == again.expert_ids[..., None, :]).any(axis=-1)  # [token, layer, k]
    different = 1.0 - float(same.mean())
    if different > MAX_DIFFERENT:
        raise UnavailableError(
            f"model type {kind!r}: {different:.1%} of a dry run's choices change with a token's place among others, "
            f"more than the {MAX_DIFFERENT:.0%} that rounding may: its dry run is no table of tokens"
        )
