"""Shapes of Mixture-of-Experts models: those shipped, and any a Hugging Face ``config.json`` describes.

A config is read by what its keys mean, not by its model type: families give the same number under different names
(``num_experts``, ``n_routed_experts``, ``num_local_experts`` …), so the synonyms below also cover families
published later. This is wrong for a family that gives a common key another meaning. Features that a
:class:`~coterie.types.ModelSpec` cannot hold are left out: sliding windows and linear attention (the KV cache is then
smaller than reported), vision towers, sparse-attention indexers, multi-token prediction layers.

With latent attention `head_dim` is the value head's width; the query's part without rotation is assumed equally wide.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from coterie.errors import ConfigError, TraceError, UnknownNameError, read_json
from coterie.types import ModelSpec, WeightDtype

NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_routed_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts", "moe_topk", "moe_k")
EXPERT_WIDTH = ("moe_intermediate_size", "expert_intermediate_size", "intermediate_size")
SHARED_WIDTH = ("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size")
NUM_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
DENSE_WIDTH = ("dense_intermediate_size", "intermediate_size_mlp", "intermediate_size")
FIRST_MOE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
EVERY_NTH = ("decoder_sparse_step", "moe_layer_frequency", "interleave_moe_layer_step", "moe_layer_interval")
"""Keys for n, where layers n, 2n, … are MoE, counting from one; ``moe_layer_freq`` counts from zero instead."""

_TEXT = ("thinker_config", "text_config", "llm_config", "language_config")
_DTYPES: Mapping[str, WeightDtype] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_QUANTIZED: Mapping[str, WeightDtype] = {
    "fp8": "fp8",  # DeepSeek and others; modelopt's quant_algo
    "fbgemm_fp8": "fp8",
    "float-quantized": "fp8",  # compressed-tensors' format
    "mxfp4": "mxfp4",
}


@cache
def models() -> Mapping[str, ModelSpec]:
    """Return the shipped models by name, sorted."""
    raw = json.loads(files("coterie").joinpath("data/models.json").read_text(encoding="utf-8"))
    return MappingProxyType({name: ModelSpec(name=name, **raw[name]) for name in sorted(raw)})


def get_model(name: str) -> ModelSpec:
    """Return a shipped model by its name or its Hugging Face repository (``Qwen/Qwen3-30B-A3B`` or its last part)."""
    wanted = name.lower().rsplit("/", 1)[-1]
    for spec in models().values():
        repository = spec.source.replace(";", " ").split()[0]
        if wanted in (spec.name, repository.lower().rsplit("/", 1)[-1]):
            return spec
    raise UnknownNameError("model", name, models())


def model_of(name: str, asked: str | None = None) -> ModelSpec:
    """Return the model that `asked` names (a known name, a folder or a config file), else the known model `name`.

    `name` is the model's name in a trace or a load.
    """
    if asked is not None:
        return model_from_config(asked) if Path(asked).exists() else get_model(asked)
    try:
        return get_model(name)
    except UnknownNameError:
        raise ConfigError(f"the trace is of model {name!r}, which is not known: say which with --model") from None


def total_params(spec: ModelSpec) -> int:
    """Return the number of all weights but norms and biases, with both the input and the output embedding.

    Within 3% of the published totals. Too high if the model ties its embeddings, or if its query projection is
    low-rank (DeepSeek-V2 and V3, GLM-5): a ModelSpec does not say so, and the full matrix is counted.
    """
    hidden, moe = spec.hidden_size, spec.num_moe_layers
    moe_layer = spec.num_experts * (spec.expert_params + hidden) + 3 * hidden * spec.shared_intermediate_size
    dense_layer = 3 * hidden * spec.dense_intermediate_size
    attention = spec.num_layers * _attention_params(spec)
    return moe * moe_layer + (spec.num_layers - moe) * dense_layer + attention + 2 * hidden * spec.vocab_size


def active_params(spec: ModelSpec) -> int:
    """Return the number of weights that one token uses: all but the routed experts it did not choose.

    Counts both embeddings, as most model cards do (gpt-oss's leave out the input embedding). Low-rank queries matter
    more here than in :func:`total_params`: the result for DeepSeek-V3 is a fifth above the published 37 billion.
    """
    return total_params(spec) - spec.num_moe_layers * (spec.num_experts - spec.top_k) * spec.expert_params


def _attention_params(spec: ModelSpec) -> int:
    query_out = spec.num_heads * spec.head_dim
    if not spec.kv_lora_rank:
        return 2 * spec.hidden_size * (query_out + spec.num_kv_heads * spec.head_dim)
    query = spec.hidden_size * spec.num_heads * (spec.head_dim + spec.rope_head_dim)
    latent = spec.hidden_size * (spec.kv_lora_rank + spec.rope_head_dim) + spec.kv_lora_rank * 2 * query_out
    return query + latent + spec.hidden_size * query_out


def model_from_config(config: str | Path | Mapping[str, Any], name: str | None = None) -> ModelSpec:
    """Return the model a Hugging Face ``config.json`` describes, given as a file, a model folder, or parsed content.

    Raises :class:`~coterie.errors.TraceError` naming the field and the keys tried: for a dense model, a missing or
    mistyped key, weights in a format without a WeightDtype, or MoE layers in no regular pattern.
    """
    path = Path("config.json" if isinstance(config, Mapping) else config)
    path = path / "config.json" if path.is_dir() else path
    content = _flatten(config if isinstance(config, Mapping) else read_json(path))
    reader = _Config(path, content)
    name = name or str(content.get("_name_or_path") or "").rstrip("/").rsplit("/", 1)[-1] or content.get("model_type")
    try:
        return _spec(reader, str(name or "unnamed").lower())
    except ConfigError as error:
        raise TraceError(reader.path, "shape", str(error)) from None


def _spec(reader: _Config, name: str) -> ModelSpec:
    if reader.content.get("enable_moe_block") is False:
        reader.fail("enable_moe_block", "is false: a dense model, expected a Mixture-of-Experts one")
    num_experts = reader.number("num_experts", NUM_EXPERTS, hint="is this a dense model?")
    num_layers = reader.number("num_layers", ("num_hidden_layers", "num_layers", "n_layer"))
    moe_layers = _moe_layers(reader, num_layers)
    hidden = reader.number("hidden_size", ("hidden_size",))
    num_heads = reader.number("num_heads", ("num_attention_heads",))
    num_kv_heads = reader.number("num_kv_heads", ("num_key_value_heads", "num_kv_heads"), default=num_heads)
    latent = reader.number("kv_lora_rank", ("kv_lora_rank",), default=0, least=0)
    head_dim = reader.number(
        "head_dim",
        # In configs with latent attention `head_dim` is the rotary part's width (GLM-5), or absent.
        ("v_head_dim",) if latent else ("head_dim", "attention_head_dim"),
        default=None if latent or hidden % num_heads else hidden // num_heads,
        hint="" if latent else f"hidden_size={hidden} is no multiple of num_heads={num_heads}",
    )
    width = reader.number("expert_intermediate_size", EXPERT_WIDTH)
    has_dense = len(moe_layers) < num_layers
    return ModelSpec(
        name=name,
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=reader.number("top_k", TOP_K),
        hidden_size=hidden,
        expert_intermediate_size=width,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=reader.number("vocab_size", ("vocab_size",)),
        first_moe_layer=moe_layers.start,
        moe_layer_step=moe_layers.step,
        shared_intermediate_size=_shared_width(reader, hidden, width),
        dense_intermediate_size=reader.number("dense_intermediate_size", DENSE_WIDTH) if has_dense else 0,
        kv_lora_rank=latent,
        rope_head_dim=reader.number("rope_head_dim", ("qk_rope_head_dim",)) if latent else 0,
        weight_dtype=_weight_dtype(reader),
        source=f"{reader.path.name}, model_type {reader.content.get('model_type', 'not given')}",
    )


def _shared_width(reader: _Config, hidden: int, expert_width: int) -> int:
    """Return the summed inner width of the MLPs that every token uses beside its routed experts."""
    content = reader.content
    if content.get("use_residual") is True:  # Arctic: a residual MLP as wide as the model
        return hidden
    if "top_k_experts" in content:  # Gemma 4: the layer's ordinary MLP runs beside the experts
        return reader.number("shared_intermediate_size", ("intermediate_size",))
    if "interleave_moe_layer_step" in content:  # Llama 4: one shared expert as wide as a routed one, without a key
        return expert_width
    if any(key in content for key in SHARED_WIDTH):
        return reader.number("shared_intermediate_size", SHARED_WIDTH, least=0)
    return expert_width * reader.number("n_shared_experts", NUM_SHARED, default=0, least=0)


def _moe_layers(reader: _Config, num_layers: int) -> range:
    """Return the MoE layers as a range; raise TraceError if they have no first layer and fixed step."""
    if num_layers > 10_000:
        reader.fail("num_hidden_layers", f"found {num_layers}, expected at most 10000")
    ids = _moe_layer_ids(reader, num_layers)
    if not ids:
        reader.fail("MoE layers", f"none of the {num_layers} layers is one")
    pattern = range(ids[0], num_layers, ids[1] - ids[0] if len(ids) > 1 else num_layers - ids[0])
    if list(pattern) != ids:
        shown = ", ".join(map(str, ids[:12])) + (" …" if len(ids) > 12 else "")
        reader.fail("MoE layers", f"{shown} of {num_layers} follow no pattern of a first layer and a fixed step")
    return pattern


def _moe_layer_ids(reader: _Config, num_layers: int) -> list[int]:
    # Explicit lists first: if a family gives a list, the other keys are leftovers of the family it derives from.
    dense_kinds: dict[str, Callable[[Any], bool]] = {
        "mlp_layer_types": lambda kind: kind == "dense",
        "hybrid_override_pattern": lambda kind: kind != "E",  # Nemotron-H: one letter a block, E for experts
        "moe_layer_freq": lambda flag: not flag,
    }
    for key, is_dense in dense_kinds.items():
        if key in reader.content and (key != "moe_layer_freq" or isinstance(reader.content[key], list)):
            return [i for i, kind in enumerate(reader.per_layer(key, num_layers)) if not is_dense(kind)]
    if reader.content.get("moe_layers"):
        return sorted(reader.ids("moe_layers", num_layers))

    first = reader.number("first_k_dense_replace", FIRST_MOE, default=0, least=0)
    last = reader.number("moe_layer_end_index", ("moe_layer_end_index",), default=-1, least=-1)
    every = reader.number("decoder_sparse_step", EVERY_NTH, default=1)
    every_from_zero = reader.number("moe_layer_freq", ("moe_layer_freq", "expert_layer_period"), default=1)
    offset = reader.number("expert_layer_offset", ("expert_layer_offset",), default=0, least=0)  # Jamba
    dense = set(reader.ids("mlp_only_layers", num_layers))
    return [
        i
        for i in range(first, num_layers if last < 0 else min(last + 1, num_layers))
        if (i + 1) % every == 0 and i % every_from_zero == offset and i not in dense
    ]


def _weight_dtype(reader: _Config) -> WeightDtype:
    quantization = reader.content.get("quantization_config") or reader.content.get("quantization")
    if quantization is not None:
        said = quantization if isinstance(quantization, Mapping) else {"quant_method": quantization}
        for key in ("quant_method", "format", "quant_algo"):
            if (method := str(said.get(key)).lower()) in _QUANTIZED:
                return _QUANTIZED[method]
        known = ", ".join(_QUANTIZED)
        reader.fail("quantization_config", f"found quant_method {said.get('quant_method')!r}, expected one of {known}")
    dtype = reader.content.get("dtype", reader.content.get("torch_dtype", "bfloat16"))  # default: nearly all are bf16
    plain = str(dtype).removeprefix("torch.")
    if plain not in _DTYPES:
        reader.fail("torch_dtype", f"found {dtype!r}, expected one of {', '.join(_DTYPES)}")
    return _DTYPES[plain]


@dataclass(frozen=True, slots=True)
class _Config:
    """Keys of a config without nulls; errors name the file."""

    path: Path
    content: Mapping[str, Any]

    def fail(self, field: str, problem: str) -> NoReturn:
        raise TraceError(self.path, field, problem)

    def number(
        self, field: str, keys: tuple[str, ...], default: int | None = None, least: int = 1, hint: str = ""
    ) -> int:
        """Return the value of the first key present; it must be a whole number of at least `least`."""
        for key in keys:
            if key in self.content:
                value = self.content[key]
                if isinstance(value, bool) or not isinstance(value, int) or value < least:
                    self.fail(key, f"found {value!r}, expected a whole number of at least {least}")
                return value
        if default is None:
            self.fail(field, f"is missing; expected one of {', '.join(keys)}" + (f"; {hint}" if hint else ""))
        return default

    def per_layer(self, key: str, num_layers: int) -> list[Any] | str:
        value = self.content[key]
        if not isinstance(value, list | str) or len(value) != num_layers:
            size = f"{len(value)} of them" if isinstance(value, list | str) else repr(value)
            self.fail(key, f"found {size}, expected an entry for each of the {num_layers} layers")
        return value

    def ids(self, key: str, num_layers: int) -> list[int]:
        value = self.content.get(key, [])
        if not isinstance(value, list) or not all(type(i) is int and 0 <= i < num_layers for i in value):
            self.fail(key, f"found {value!r}, expected a list of layers in 0 … {num_layers - 1}")
        return value


def _flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the language model's keys over the outer ones: multimodal configs nest it, with dtype or format outside."""
    flat = {key: value for key, value in config.items() if value is not None}
    for key in _TEXT:
        if isinstance(flat.get(key), Mapping):
            return flat | _flatten(flat[key])
    return flat
