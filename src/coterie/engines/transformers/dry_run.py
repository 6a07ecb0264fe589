"""The router dry run: predict each layer's experts by applying its gate to the bare token embeddings.

Each layer's gate, with the norm before it, gets the embeddings that enter the first layer. Attention and experts do not
run, so that a layer costs one small matrix product. The prediction is good where a token's identity determines its
experts and poor where its context does; :func:`score_dry_run` gives the quality by layer.

The code is independent of model families. One token runs through the real model to find the module whose output the
MoE block receives: that is the norm. Then the block itself is called, so that the family's own formula chooses, and
stopped when it passes its choice to the experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.engines.transformers.capture import ExpertCapture, ExpertLayer, router_choice
from coterie.errors import UnavailableError, check, check_given
from coterie.footprints import footprint
from coterie.predictors import TokenTable
from coterie.traces import ActivationTrace, TraceMeta


class DryRun(NamedTuple):
    """Predicted experts of one request's tokens."""

    expert_ids: NDArray[np.int32]
    """[token, layer, k] predicted expert ids."""
    num_experts: int
    layer_ids: tuple[int, ...]

    @property
    def footprint(self) -> NDArray[np.uint32]:
        """Predicted activation counts, [layer, expert]."""
        return footprint(self.expert_ids, self.num_experts)


class DryRunScore(NamedTuple):
    """Agreement of a dry run with the experts that the model used."""

    cosine: NDArray[np.float64]
    """[layer] cosine similarity of the footprints; 1 means equal shares."""
    recall: NDArray[np.float64] | None
    """[layer] share of the used experts that were predicted for the same token; None if the token counts differ."""


class _Stop(Exception):
    """Ends a forward pass once the wanted value is known; carries the value."""


class _Gate(NamedTuple):
    layer: ExpertLayer
    block: Any
    norm: Any
    """Norm before the block; None if the block gets the residual stream directly."""


def dry_run(model: Any, requests: Sequence[Sequence[int]]) -> list[DryRun]:
    """Predict the expert ids of each request, given as token ids."""
    import torch

    capture = ExpertCapture(model)
    device = model.get_input_embeddings().weight.device
    with torch.no_grad():
        gates = _find_gates(model, capture.layers, device)
        runs = []
        for tokens in requests:
            check(len(tokens), "a request without tokens has no dry run")
            states = _embeddings(model, torch.tensor([list(tokens)], device=device))
            ids = np.stack([_choice(gate, states) for gate in gates], axis=1)
            runs.append(DryRun(ids, capture.num_experts, capture.layer_ids))
    return runs


def score_dry_run(predicted: DryRun, truth: NDArray[np.integer]) -> DryRunScore:
    """Compare a dry run with the ids [token, layer, k] that the model used.

    For the same tokens (the prompt's) recall is computed too; for other tokens, such as generated ones, only the
    cosine.
    """
    ids = predicted.expert_ids
    check(
        truth.ndim == 3 and truth.shape[1:] == ids.shape[1:] and len(truth),
        f"truth has shape {truth.shape}; expected [token, {ids.shape[1]}, {ids.shape[2]}]",
    )
    ours, theirs = (a.astype(np.float64) for a in (predicted.footprint, footprint(truth, predicted.num_experts)))
    cosine = (ours * theirs).sum(axis=1) / (np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1))
    return DryRunScore(cosine, _hits(truth, ids).mean(axis=(0, 2)) if len(truth) == len(ids) else None)


def _hits(chosen: NDArray[np.integer], predicted: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Return whether each chosen expert is among the predicted ones of its token and layer, [token, layer, k]."""
    return np.asarray((chosen[..., :, None] == predicted[..., None, :]).any(axis=-1))


def _find_gates(model: Any, layers: list[ExpertLayer], device: Any) -> list[_Gate]:
    """Run one token through the model and find the module whose output each MoE block receives."""
    import torch

    gates: dict[int, _Gate] = {}
    handles = []
    for layer in layers:
        parent = layer.path.rpartition(".")[0]
        holder, _, name = parent.rpartition(".")
        check(
            not name.isdigit(),
            f"{layer.path}: no block of its own holds the gate, so it cannot be run alone",
            UnavailableError,
        )
        block = model.get_submodule(parent)
        seen: list[tuple[Any, Any]] = []
        handles += [
            child.register_forward_hook(lambda m, _, out, seen=seen: seen.append((m, out)))
            for child in model.get_submodule(holder).children()
            if child is not block
        ]

        def note(
            block: Any, args: tuple[Any, ...], layer: ExpertLayer = layer, seen: list[tuple[Any, Any]] = seen
        ) -> None:
            check(len(args) == 1, f"{layer.path}: its block takes more than the hidden states", UnavailableError)
            # Compare memory addresses: a block may get a view of the norm's output.
            norm = next((m for m, out in reversed(seen) if _same_place(out, args[0])), None)
            gates[layer.layer_id] = _Gate(layer, block, norm)

        handles.append(block.register_forward_pre_hook(note))
    try:
        model(input_ids=torch.zeros((1, 1), dtype=torch.int64, device=device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return [gates[layer.layer_id] for layer in layers]


def _same_place(out: Any, given: Any) -> bool:
    return bool(hasattr(out, "data_ptr") and out.data_ptr() == given.data_ptr() and out.numel() == given.numel())


def _embeddings(model: Any, tokens: Any) -> Any:
    """Return the input of the first decoder layer, [1, token, hidden], including a family's scaling of embeddings."""
    first = next(m for path, m in model.named_modules() if path.rpartition(".")[2] == "0" and _is_decoder(model, path))

    def given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[0] if args else kwargs["hidden_states"]

    states = check_given(
        _caught(first, given, lambda: model(input_ids=tokens, use_cache=False)),
        "the model ran without its first decoder layer",
        UnavailableError,
    )
    check(states.ndim == 3, f"the first layer is given {states.ndim} dimensions, not 3", UnavailableError)
    return states


def _is_decoder(model: Any, path: str) -> bool:
    return bool(len(model.get_submodule(path.rpartition(".")[0])) == model.config.get_text_config().num_hidden_layers)


def _choice(gate: _Gate, states: Any) -> NDArray[np.int32]:
    """Return the experts that a gate chooses, [token, k]."""
    normed = states if gate.norm is None else gate.norm(states)
    choice = check_given(
        _caught(gate.layer.experts, router_choice, lambda: gate.block(normed)),
        f"{gate.layer.path}: its block ran without its experts",
        UnavailableError,
    )
    return np.asarray(choice[0].reshape(-1, choice[0].shape[-1]).cpu(), np.int32)


def _caught(module: Any, pick: Callable[[Any, Any], Any], run: Callable[[], Any]) -> Any:
    """Run until `module` is called; return what `pick` takes from its arguments, or None if it was never called."""

    def stop(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Stop(pick(args, kwargs))

    handle = module.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        run()
    except _Stop as reached:
        return reached.args[0]
    finally:
        handle.remove()
    return None


CHUNK_TOKENS = 1024
"""Maximum vocabulary tokens per pass: attention masks grow with the square of this."""
SAMPLE_TOKENS = 256
MAX_DIFFERENT = 0.01
"""Maximum share of a sample's choices that may differ in another token order: rounding decides near-ties."""


def dry_run_table(model: Any, name: str | None = None) -> TokenTable:
    """Run the dry run for every token of the vocabulary and return a table with the predictions of :func:`dry_run`.

    A dry run's choice depends on the token alone, so that the table, of vocabulary x layers x top_k x 3 bytes, works
    without torch and the model. It equals the dry run unless two gate scores are so close that the shape of a matrix
    product decides between them.

    The choice also depends on other tokens if a family adds position-dependent values to the embedding (learned
    positions) or limits the tokens per expert. A sample is therefore run in another order, and the table is refused if
    it differs. No smoothing is applied. Ids past the vocabulary are predicted by popularity, the mean over the
    vocabulary.
    """
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or CHUNK_TOKENS
    chunk = min(CHUNK_TOKENS, int(limit), vocabulary)
    # A random sample of the vocabulary, in another order than in the table.
    sample = np.random.default_rng(0).permutation(vocabulary)[: min(SAMPLE_TOKENS, chunk)]
    spans = [list(range(start, min(start + chunk, vocabulary))) for start in range(0, vocabulary, chunk)]
    *runs, again = dry_run(model, [*spans, sample.tolist()])
    ids = np.concatenate([run.expert_ids for run in runs])  # [token id, layer, k]
    _check(ids[sample], again, str(model.config.model_type))
    layers, top_k = ids.shape[1:]
    meta = TraceMeta(name or str(model.config.model_type), again.num_experts, layers, top_k, again.layer_ids)
    trace = ActivationTrace.from_arrays(
        meta, ids, np.array([0, vocabulary]), token_ids=np.arange(vocabulary, dtype=np.int32)
    )
    whole = vocabulary * (layers * top_k * 4 + 12)  # enough for the whole table with any ids
    return TokenTable(smoothing=0.0, experts_kept=top_k, max_bytes=whole).fit(trace)


def _check(table: NDArray[np.int32], again: DryRun, kind: str) -> None:
    """Raise UnavailableError if the same tokens choose other experts in another order."""
    different = 1.0 - float(_hits(table, again.expert_ids).mean())
    check(
        different <= MAX_DIFFERENT,
        f"model type {kind!r}: {different:.1%} of a dry run's choices change with a token's place among others, "
        f"more than the {MAX_DIFFERENT:.0%} that rounding may: its dry run is no table of tokens",
        UnavailableError,
    )
