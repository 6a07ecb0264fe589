"""coterie-tiny on NumPy: the same steps as :mod:`coterie.engines.worker.model`, without torch.

Implements Qwen3-MoE as published: RMS norms, normalised queries and keys, rotary positions, grouped-query attention
over a request's own blocks, a softmax over all experts with its top k renormalised. An expert's weights are read once
per step if any row chose the expert, so that a step's time follows its distinct experts, as on a GPU. All arithmetic
is float32. Only for models of this size; larger models need torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unicodedata import category

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from coterie.engines.worker.model import RequestRows, StepResult
from coterie.errors import UnavailableError, check
from coterie.footprints import block_positions
from coterie.types import narrowest_uint

Array = NDArray[np.float32]


class Shape(NamedTuple):
    """Attributes that the engine reads from an expert capture."""

    layer_ids: tuple[int, ...]
    num_experts: int
    top_k: int


class _Layer(NamedTuple):
    norm: Array
    qkv: Array
    query_norm: Array
    key_norm: Array
    out: Array
    mlp_norm: Array
    router: Array
    gate_up: Array
    """[expert, hidden, 2 x inner]"""
    down: Array
    """[expert, inner, hidden]"""


class NumpyStore:
    """Keys and values of every block, two arrays [layer, KV position, head, width]."""

    def __init__(self, layers: int, num_blocks: int, block_size: int, heads: int, width: int) -> None:
        self.block_size = block_size
        shape = (layers, num_blocks * block_size, heads, width)
        self.keys, self.values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV over all layers."""
        return (self.keys.nbytes + self.values.nbytes) // self.keys.shape[1]

    def pack(self, blocks: Sequence[int], length: int) -> dict[str, Array]:
        """Return the KV of a request as name → array [layer, token, head, width], for another worker."""
        kv_positions = block_positions(blocks, self.block_size, 0, length)
        return {"keys": self.keys[:, kv_positions], "values": self.values[:, kv_positions]}

    def check(self, tensors: Mapping[str, Any], length: int) -> None:
        """Raise ConfigError unless another worker's arrays match this store's names, dtypes, shapes and are finite."""
        layers, _, heads, width = self.keys.shape
        right = {name: ((layers, length, heads, width), np.dtype(np.float32)) for name in ("keys", "values")}
        received = {name: (array.shape, array.dtype) for name, array in tensors.items()}
        check(received == right, f"KV {received} came; this worker keeps {right}")
        check(all(np.isfinite(array).all() for array in tensors.values()), "KV holds values that are not finite")

    def unpack(self, tensors: Mapping[str, Any], kv_positions: NDArray[np.int64], start: int) -> None:
        """Write the checked arrays' rows from `start` on to their KV positions."""
        for store, name in ((self.keys, "keys"), (self.values, "values")):
            store[:, kv_positions] = tensors[name][:, start : start + len(kv_positions)]


class NumpyModel:
    """NumPy replacement of :class:`~coterie.engines.worker.model.PackedModel`."""

    def __init__(self, folder: Path, num_blocks: int, block_size: int) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        check(
            config["model_type"] == "qwen3_moe" and config["tie_word_embeddings"] and not config["mlp_only_layers"],
            f"{folder}: only coterie-tiny's kind of model runs on NumPy; install coterie[torch]",
            UnavailableError,
        )
        raw = load_file(folder / "model.safetensors")
        self.name = folder.resolve().name
        digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()[:16]
        self.identity = f"numpy-{digest}-float32"
        """Identity of model and dtype: equal in workers whose KV is interchangeable."""
        self.tokenizer = BytePairs(folder)
        layers, experts = int(config["num_hidden_layers"]), int(config["num_experts"])
        self._heads, self._kv_heads = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
        self._width, self._eps = int(config["head_dim"]), float(config["rms_norm_eps"])
        self.vocab_size, self.max_positions = int(config["vocab_size"]), int(config["max_position_embeddings"])
        pieces = (self.tokenizer.decode([number], skip_special_tokens=False) for number in range(self.vocab_size))
        self.longest_token = max(map(len, pieces))
        """Characters of the longest token; bounds the length of a text that can fit the context."""
        generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
        self.eos: frozenset[int] = frozenset(generation["eos_token_id"])
        self.capture = Shape(tuple(range(layers)), experts, int(config["num_experts_per_tok"]))
        self.expert_dtype = narrowest_uint(experts - 1)
        self._embed = raw["model.embed_tokens.weight"].astype(np.float32)
        self._norm = raw["model.norm.weight"].astype(np.float32)
        self._layers = [_layer(raw, number, experts) for number in range(layers)]
        angles = np.arange(self.max_positions)[:, None] * (
            float(config["rope_theta"]) ** (-np.arange(0, self._width, 2) / self._width)
        )
        both = np.concatenate([angles, angles], axis=1)
        self._cos, self._sin = np.cos(both).astype(np.float32), np.sin(both).astype(np.float32)
        self.store = NumpyStore(layers, num_blocks, block_size, self._kv_heads, self._width)

    def step(self, batch: Sequence[RequestRows]) -> StepResult:
        """Run one forward pass of rows of many requests, each attending to its own blocks."""
        size = self.store.block_size
        seen = [block_positions(rows.blocks, size, 0, rows.end) for rows in batch]
        written = np.concatenate([mine[rows.start :] for mine, rows in zip(seen, batch, strict=True)])
        positions = np.concatenate([np.arange(rows.start, rows.end) for rows in batch])
        ends = np.cumsum([len(rows.tokens) for rows in batch])
        hidden = self._embed[np.concatenate([np.asarray(rows.tokens, np.int64) for rows in batch])]
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        expert_ids = np.empty((len(hidden), len(self._layers), self.capture.top_k), self.expert_dtype)
        for number, layer in enumerate(self._layers):
            query, key, value = self._projected(layer, hidden, cos, sin)
            self.store.keys[number, written], self.store.values[number, written] = key, value
            mixed = np.empty_like(query)
            for rows, end, mine in zip(batch, ends, seen, strict=True):
                part = slice(end - len(rows.tokens), end)
                keys, values = self.store.keys[number, mine], self.store.values[number, mine]
                mixed[part] = _attend(query[part], keys, values, rows.start)
            hidden = hidden + mixed.reshape(len(hidden), -1) @ layer.out
            added, expert_ids[:, number] = self._experts(layer, _normed(hidden, layer.mlp_norm, self._eps))
            hidden = hidden + added
        wanted = [int(end) - 1 for rows, end in zip(batch, ends, strict=True) if rows.sample]
        logits = _normed(hidden[wanted], self._norm, self._eps) @ self._embed.T
        return StepResult(np.asarray(logits, np.float32), expert_ids)

    def _projected(self, layer: _Layer, hidden: Array, cos: Array, sin: Array) -> tuple[Array, Array, Array]:
        """Compute query, key and value [row, head, width]; rotary positions are applied to query and key."""
        heads, kv_heads = self._heads, self._kv_heads
        all_heads = (_normed(hidden, layer.norm, self._eps) @ layer.qkv).reshape(len(hidden), -1, self._width)
        query = _normed(all_heads[:, :heads], layer.query_norm, self._eps)
        key = _normed(all_heads[:, heads : heads + kv_heads], layer.key_norm, self._eps)
        return _turned(query, cos, sin), _turned(key, cos, sin), all_heads[:, heads + kv_heads :]

    def _experts(self, layer: _Layer, hidden: Array) -> tuple[Array, NDArray[np.int64]]:
        """Return the output of the experts [row, hidden], and their ids [row, k]."""
        scores = _softmax(hidden @ layer.router)
        k = self.capture.top_k
        chosen = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        weights = np.take_along_axis(scores, chosen, axis=1)
        weights /= weights.sum(axis=1, keepdims=True)
        # Sort rows by expert, so that each expert's rows are a slice; the rest is one call for all experts.
        order = np.argsort(chosen.ravel(), kind="stable")
        experts, starts = np.unique(chosen.ravel()[order], return_index=True)
        parts = list(zip(experts, starts, [*starts[1:], len(order)], strict=True))
        gathered = hidden[order // k]
        both = np.empty((len(order), layer.gate_up.shape[2]), np.float32)
        for expert, start, end in parts:
            np.matmul(gathered[start:end], layer.gate_up[expert], out=both[start:end])
        gate, up = np.split(both, 2, axis=1)
        inner = gate / (1 + np.exp(-gate)) * up
        made = np.empty((len(order), layer.down.shape[2]), np.float32)
        for expert, start, end in parts:
            np.matmul(inner[start:end], layer.down[expert], out=made[start:end])
        by_choice = np.empty_like(made)
        by_choice[order] = made * weights.ravel()[order, None]
        # Sum in the order of expert ids: a row's result does not depend on the other rows.
        ranked = by_choice.reshape(len(hidden), k, -1)[np.arange(len(hidden))[:, None], np.argsort(chosen, axis=1)]
        out = np.zeros_like(hidden)
        for place in range(k):
            out += ranked[:, place]
        return out, chosen


def _layer(raw: Mapping[str, NDArray[Any]], number: int, experts: int) -> _Layer:
    def weight(name: str) -> Array:
        return raw[f"model.layers.{number}.{name}.weight"].astype(np.float32)

    def of_experts(*names: str) -> Array:
        return np.ascontiguousarray(
            [np.concatenate([weight(f"mlp.experts.{e}.{name}") for name in names]).T for e in range(experts)]
        )

    qkv = np.concatenate([weight(f"self_attn.{name}_proj") for name in "qkv"]).T
    return _Layer(
        norm=weight("input_layernorm"),
        qkv=np.ascontiguousarray(qkv),
        query_norm=weight("self_attn.q_norm"),
        key_norm=weight("self_attn.k_norm"),
        out=np.ascontiguousarray(weight("self_attn.o_proj").T),
        mlp_norm=weight("post_attention_layernorm"),
        router=np.ascontiguousarray(weight("mlp.gate").T),
        gate_up=of_experts("gate_proj", "up_proj"),
        down=of_experts("down_proj"),
    )


def _normed(values: Array, weight: Array, eps: float) -> Array:
    scale = np.sqrt(np.mean(values * values, axis=-1, keepdims=True) + np.float32(eps))
    return np.asarray(values / scale * weight, np.float32)


def _turned(values: Array, cos: Array, sin: Array) -> Array:
    first, second = np.split(values, 2, axis=-1)
    return np.asarray(values * cos + np.concatenate([-second, first], axis=-1) * sin, np.float32)


def _softmax(values: Array) -> Array:
    shares = np.exp(values - values.max(axis=-1, keepdims=True))
    return np.asarray(shares / shares.sum(axis=-1, keepdims=True), np.float32)


def _attend(query: Array, keys: Array, values: Array, start: int) -> Array:
    """Attend from rows [row, head, width], tokens `start` … of a request, to its keys [token, kv head, width]."""
    rows, heads, width = query.shape
    grouped = query.reshape(rows, keys.shape[1], -1, width).transpose(1, 2, 0, 3)  # [kv head, group, row, width]
    scores = grouped @ keys.transpose(1, 2, 0)[:, None] * np.float32(width**-0.5)
    if rows > 1:
        hidden = np.arange(len(keys))[None, :] > np.arange(start, start + rows)[:, None]
        scores[..., hidden] = -np.inf
    mixed = _softmax(scores) @ values.transpose(1, 0, 2)[:, None]
    return np.asarray(mixed.transpose(2, 0, 1, 3).reshape(rows, heads, width), np.float32)


# coterie-tiny's tokenizer without a library: byte-level BPE read from its ``tokenizer.json``.
#
# Text is split at special tokens, then into single digits and GPT-2 words; each word's bytes are merged in the order
# in which the merges were learned. Only the features of that file are supported: a file with others is refused.

PRETOKENIZERS = [
    {"type": "Digits", "individual_digits": True},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
]
CACHED_WORDS, LONGEST_CACHED = 1 << 16, 32
"""Maximum number of cached words, and characters of the longest cached word: under 100 MB for any input."""
_GONE = -1
# Digits are split off before, so what is left of \w except the underscore is a letter.
WORDS = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[^\W\d_]+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")


class BytePairs:
    """The tokenizer interface that the worker uses; the chat template is ChatML, as in coterie-tiny."""

    chat_template = "ChatML"

    def __init__(self, folder: Path) -> None:
        about = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        split, merged = about["pre_tokenizer"].get("pretokenizers"), about["model"]["type"]
        check(
            split == PRETOKENIZERS and merged == "BPE" and not about["normalizer"],
            f"{folder}/tokenizer.json: only byte-level BPE with single digits is read here",
            UnavailableError,
        )
        self._ids: dict[str, int] = about["model"]["vocab"]
        merges = [tuple(pair) for pair in about["model"]["merges"]]
        self._ranks = {(self._ids[left], self._ids[right]): rank for rank, (left, right) in enumerate(merges)}
        self._made = [self._ids[left + right] for left, right in merges]  # [rank] id of the merged pair
        self._special = {token["content"]: int(token["id"]) for token in about["added_tokens"]}
        self._cut = re.compile("(" + "|".join(map(re.escape, self._special)) + ")")
        letters = _byte_letters()
        self._byte_ids = [self._ids[letter] for letter in letters]  # [byte]
        byte_of = {letter: byte for byte, letter in enumerate(letters)}
        self._bytes = {
            number: bytes(byte_of[letter] for letter in token)
            for token, number in self._ids.items()
            if number not in self._special.values()
        }
        self._word = lru_cache(maxsize=CACHED_WORDS)(self._merged)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text; no special tokens are added, whatever `add_special_tokens` is."""
        del add_special_tokens
        out: list[int] = []
        for part in self._cut.split(text):
            if part in self._special:
                out.append(self._special[part])
                continue
            for piece in _apart(part):
                for word in WORDS.findall(piece) or [piece]:
                    out += self._word(word) if len(word) <= LONGEST_CACHED else self._merged(word)
        return out

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        names = {} if skip_special_tokens else {number: name.encode() for name, number in self._special.items()}
        return b"".join(self._bytes.get(number, names.get(number, b"")) for number in ids).decode("utf-8", "replace")

    def apply_chat_template(self, messages: Any, tokenize: bool = False, add_generation_prompt: bool = True) -> str:
        del tokenize
        turns = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages]
        return "".join(turns) + ("<|im_start|>assistant\n" if add_generation_prompt else "")

    def _merged(self, word: str) -> tuple[int, ...]:
        """Return the ids of one word: merge the pair learned first, the leftmost of equals, until no pair is left.

        Uses a heap of pairs and a linked list of the remaining parts: O(n log n). The plain loop, which scans all
        neighbours before each merge, takes a minute for one word of 100 KB.
        """
        ids = [self._byte_ids[byte] for byte in word.encode("utf-8", "surrogatepass")]
        size, ranks = len(ids), self._ranks
        before, after = list(range(-1, size - 1)), list(range(1, size + 1))
        pair_ranks = (ranks.get(pair) for pair in pairwise(ids))
        heap = [rank * size + at for at, rank in enumerate(pair_ranks) if rank is not None]
        heapify(heap)
        while heap:
            rank, at = divmod(heappop(heap), size)
            right = after[at]
            if right == size or ranks.get((ids[at], ids[right])) != rank:  # stale: merged since; `_GONE` is in no pair
                continue
            ids[at], ids[right] = self._made[rank], _GONE
            left, after[at] = before[at], after[right]
            if left >= 0 and (rank_left := ranks.get((ids[left], ids[at]))) is not None:
                heappush(heap, rank_left * size + left)
            if after[at] < size:
                before[after[at]] = at
                if (rank_right := ranks.get((ids[at], ids[after[at]]))) is not None:
                    heappush(heap, rank_right * size + at)
        return tuple(number for number in ids if number != _GONE)


def _apart(text: str) -> list[str]:
    """Split a text into single numeric characters and the pieces between them."""
    out, start = [], 0
    for at, letter in enumerate(text):
        if category(letter).startswith("N"):
            out += [text[start:at], letter]
            start = at + 1
    return [piece for piece in (*out, text[start:]) if piece]


def _byte_letters() -> list[str]:
    """Return each byte's character in the vocabulary, [byte]: itself if printable, else a character past 255."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = count(256)
    return [chr(byte if byte in plain else next(spare)) for byte in range(256)]
