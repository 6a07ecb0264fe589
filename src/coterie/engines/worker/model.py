"""The forward pass of a step: rows of many requests in one pass, each attending to its own blocks.

Rows are packed, not padded: every layer sees a step as one sequence [1, row], except attention, which is replaced by
:func:`packed_attention`. It writes the rows' keys and values to their blocks; then each request's rows attend to that
request's blocks only. So prompts, chunks of prompts and single decode tokens share a step, and a request's result does
not depend on the other requests, up to the rounding of matrix products with different numbers of rows.

Works for every model family that uses the attention interface of transformers. KV is stored as attention sees it:
latent attention (DeepSeek) is stored expanded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.engines.optional import torch
from coterie.engines.transformers.capture import ExpertCapture
from coterie.engines.transformers.loading import load_model, model_digest
from coterie.errors import ConfigError, UnavailableError, check, check_given
from coterie.footprints import block_positions
from coterie.types import narrowest_uint

NAME = "coterie_packed"


class RequestRows(NamedTuple):
    """Rows of one request in a step: tokens `start` … `start + len(tokens) - 1` of the request."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    """Blocks of the request from its first token to at least the last row."""
    sample: bool
    """Whether to compute the logits of the last row."""

    @property
    def end(self) -> int:
        """Index after the last row among the request's tokens."""
        return self.start + len(self.tokens)


class StepResult(NamedTuple):
    logits: NDArray[np.float32]
    """[sampled request, vocabulary], in batch order."""
    expert_ids: NDArray[np.unsignedinteger]
    """[row, layer, k] expert ids."""


class KVStore:
    """Keys and values of every block, tensors key.L and value.L of layer L: [block, offset, head, width].

    A layer's tensors are allocated at its first write, when their shape is known.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.tensors: dict[str, Any] = {}

    def write(self, layer: int, kv_positions: Any, key: Any, value: Any) -> None:
        """Write key and value [row, head, width] to KV positions [row] = block x block_size + offset."""
        for name, rows in ((f"key.{layer}", key), (f"value.{layer}", value)):
            if name not in self.tensors:
                self.tensors[name] = rows.new_empty((self.num_blocks, self.block_size, *rows.shape[1:]))
            self.tensors[name].flatten(0, 1)[kv_positions] = rows

    def read(self, layer: int, blocks: Any, length: int) -> tuple[Any, Any]:
        """Return key and value [head, token, width] of a request's first `length` tokens."""
        key, value = (self._rows(f"{kind}.{layer}", blocks, length) for kind in ("key", "value"))
        return key.transpose(0, 1), value.transpose(0, 1)

    def _rows(self, name: str, blocks: Any, length: int) -> Any:
        """Return a request's first `length` rows of a tensor, [token, head, width]."""
        return self.tensors[name].index_select(0, blocks).flatten(0, 1)[:length]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV over all layers."""
        return sum(int(t.nbytes) for t in self.tensors.values()) // (self.num_blocks * self.block_size)

    def pack(self, blocks: Sequence[int], length: int) -> dict[str, Any]:
        """Return the KV of a request as name → tensor [token, head, width] on the host, for another worker."""
        return {
            name: self._rows(name, torch.tensor(blocks, device=tensor.device), length).cpu().contiguous()
            for name, tensor in self.tensors.items()
        }

    def check(self, tensors: Mapping[str, Any], length: int) -> None:
        """Raise ConfigError unless another worker's tensors match this store's names, dtypes, shapes and are finite."""
        expected = {name: (tensor.dtype, (length, *tensor.shape[2:])) for name, tensor in self.tensors.items()}
        check(set(tensors) == set(expected), f"KV of {len(tensors)} tensors came; this model has {len(expected)}")
        for name, (dtype, shape) in expected.items():
            if tensors[name].dtype != dtype or tuple(tensors[name].shape) != shape:
                received = f"{tensors[name].dtype} {tuple(tensors[name].shape)}"
                raise ConfigError(f"{name} is {received}; this worker keeps {dtype} {shape}")
            check(bool(torch.isfinite(tensors[name]).all()), f"{name} holds values that are not finite")

    def unpack(self, tensors: Mapping[str, Any], kv_positions: NDArray[np.int64], start: int) -> None:
        """Write the checked tensors' rows from `start` on to their KV positions."""
        index = torch.from_numpy(kv_positions)
        with torch.inference_mode():  # the store's tensors were created in inference mode
            for name, rows in tensors.items():
                written, device = rows[start : start + len(kv_positions)], self.tensors[name].device
                self.tensors[name].flatten(0, 1)[index.to(device)] = written.to(device)


class _Part(NamedTuple):
    first: int
    """Index of the request's first row in the step."""
    rows: int
    start: int
    """Index of the first row among the request's tokens."""
    blocks: Any


def packed_attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    _attention_mask: Any,  # unused: the layout determines what each row attends to
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Any = None,
    coterie_layout: tuple[KVStore, Any, list[_Part]] | None = None,  # the store, [row] KV positions, the requests
    **_: Any,
) -> tuple[Any, None]:
    """Store the rows' KV and attend: query, key, value [1, head, row, width] → [1, row, head, width]."""
    store, kv_positions, parts = check_given(
        coterie_layout, "this model was prepared for the worker: call PackedModel.step"
    )
    layer = module.layer_idx
    store.write(layer, kv_positions, key[0].transpose(0, 1), value[0].transpose(0, 1))
    out = query.new_empty((1, query.shape[2], query.shape[1], value.shape[3]))
    for part in parts:
        rows = slice(part.first, part.first + part.rows)
        keys, values = store.read(layer, part.blocks, part.start + part.rows)
        seen = _attend(query[0, :, rows], keys, values, part.start, scaling, sliding_window, s_aux)
        out[0, rows] = seen.transpose(0, 1)
    return out, None


def _attend(query: Any, key: Any, value: Any, start: int, scaling: float | None, window: int | None, sinks: Any) -> Any:
    """Attend from rows [head, row, width], tokens `start` … of a request, to its keys [kv head, token, width]."""
    rows, tokens = query.shape[1], key.shape[1]
    windowed = window is not None and tokens > window
    mask = None
    if windowed or (rows > 1 and start > 0) or (rows > 1 and sinks is not None):
        distance = torch.arange(start, tokens, device=query.device)[:, None] - torch.arange(tokens, device=query.device)
        mask = (distance >= 0) & (distance < (window or tokens))
    if sinks is None:
        return torch.nn.functional.scaled_dot_product_attention(
            query[None],
            key[None],
            value[None],
            attn_mask=mask,
            is_causal=mask is None and rows > 1,
            scale=scaling,
            enable_gqa=query.shape[0] != key.shape[0],
        )[0]
    groups = query.shape[0] // key.shape[0]
    scores = query @ key.repeat_interleave(groups, 0).transpose(1, 2)
    scores = scores * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    # A sink is part of the softmax but adds nothing to the sum.
    sink = sinks.reshape(-1, 1, 1).expand(-1, rows, 1).to(scores.dtype)
    shares = torch.softmax(torch.cat([scores, sink], dim=-1).float(), dim=-1)[..., :-1]
    return shares.to(value.dtype) @ value.repeat_interleave(groups, 0)


class PackedModel:
    """A checkpoint, its tokenizer and its KV store, ready for steps. Everything except loading is single-threaded."""

    def __init__(self, folder: Path, dtype: str, device: str, num_blocks: int, block_size: int) -> None:
        loaded = load_model(folder, dtype, device)  # raises if torch or transformers is missing
        import transformers

        transformers.AttentionInterface.register(NAME, packed_attention)
        self.tokenizer, self.name = loaded.tokenizer, loaded.name
        self.identity = f"{model_digest(folder)}-{dtype}"
        """Identity of model and dtype: equal in workers whose KV is interchangeable."""
        self._model = loaded.model
        self._model.set_attn_implementation(NAME)
        self._device = self._model.get_input_embeddings().weight.device
        self.capture = ExpertCapture(self._model)
        self.expert_dtype = narrowest_uint(self.capture.num_experts - 1)
        self.vocab_size = int(self._model.get_input_embeddings().num_embeddings)
        config = self._model.config.get_text_config()
        self.max_positions = int(getattr(config, "max_position_embeddings", None) or 1 << 30)
        self.eos = _eos(self._model, self.tokenizer)
        self.store = KVStore(num_blocks, block_size)
        self.longest_token = max(map(len, self.tokenizer.get_vocab()))
        """Characters of the longest token; bounds the length of a text that can fit the context."""
        self.tokenizer.encode("warm")  # the first call may change the tokenizer; later calls only read it
        self.step([RequestRows([0], 0, [0], True)])  # allocates the store and checks that expert capture works
        missing = [layer for layer in range(config.num_hidden_layers) if f"key.{layer}" not in self.store.tensors]
        check(
            not missing,
            f"{folder}: layers {missing} keep no keys and values; blocks cannot hold them",
            UnavailableError,
        )

    def step(self, batch: Sequence[RequestRows]) -> StepResult:
        size = self.store.block_size
        kv_positions = [block_positions(rows.blocks, size, rows.start, rows.end) for rows in batch]
        ends = list(accumulate(len(rows.tokens) for rows in batch))
        parts = [
            _Part(end - len(rows.tokens), len(rows.tokens), rows.start, torch.tensor(rows.blocks, device=self._device))
            for rows, end in zip(batch, ends, strict=True)
        ]
        layout = self.store, torch.from_numpy(np.concatenate(kv_positions)).to(self._device), parts
        tokens = [token for rows in batch for token in rows.tokens]
        positions = [position for rows in batch for position in range(rows.start, rows.end)]
        wanted = [end - 1 for rows, end in zip(batch, ends, strict=True) if rows.sample]
        with torch.inference_mode(), self.capture as capture:
            out = self._model(
                input_ids=torch.tensor([tokens], device=self._device),
                position_ids=torch.tensor([positions], device=self._device),
                logits_to_keep=torch.tensor(wanted or [0], device=self._device),
                use_cache=False,
                coterie_layout=layout,
            )
            expert_ids = capture.take().expert_ids.astype(self.expert_dtype)
            logits = out.logits[0, : len(wanted)].float().cpu().numpy()
        return StepResult(logits, expert_ids)


def _eos(model: Any, tokenizer: Any) -> frozenset[int]:
    given = getattr(model.generation_config, "eos_token_id", None)
    end_ids = tokenizer.eos_token_id if given is None else given
    return frozenset(end_ids if isinstance(end_ids, list | tuple) else () if end_ids is None else (end_ids,))
