"""Load checkpoints from a local folder in a given precision. Nothing is downloaded: hub names raise an error.

NF4 needs bitsandbytes. The library quantises only linear layers, but since version 5 the experts of a layer are
parameters [expert, out, in]. They are quantised here; otherwise nine tenths of a model would stay unquantised.
"""

from __future__ import annotations

import hashlib
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from coterie.errors import ConfigError, TraceError, UnavailableError, check, check_one_of, read_json

DTYPES = ("float32", "float16", "bfloat16", "nf4")
_SAMPLE_BYTES = 1 << 16


class LoadedModel(NamedTuple):
    """A model ready to run, and its tokenizer."""

    model: Any
    tokenizer: Any
    name: str
    """Name of the folder."""


def load_model(path: str | Path, dtype: str = "float32", device: str = "cpu") -> LoadedModel:
    """Load a checkpoint and its tokenizer; errors are one-line messages."""
    folder = check_model_folder(path)
    check_torch_dtype(dtype)
    torch, library = _libraries()
    where = _device(torch, device)
    options: dict[str, Any] = {"local_files_only": True, "dtype": torch.bfloat16 if dtype == "nf4" else dtype}
    quantised = (read_json(folder / "config.json").get("quantization_config") or {}).get("quant_method")
    if dtype == "nf4":
        check(not quantised, f"{folder} is quantised already ({quantised}); nf4 needs a checkpoint that is not")
        options |= {"quantization_config": _nf4(library, torch), "device_map": {"": where}}
    elif quantised == "mxfp4":  # gpt-oss as published: its kernels bypass the experts module
        options["quantization_config"] = library.Mxfp4Config(dequantize=True)
    shown = library.utils.logging.is_progress_bar_enabled()
    library.utils.logging.disable_progress_bar()
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = library.AutoModelForCausalLM.from_pretrained(folder, **options)
    except (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError) as error:
        lines = (str(error) or type(error).__name__).strip().splitlines()
        raise UnavailableError(f"{folder}: transformers cannot load it: {lines[0]}") from None
    finally:
        if shown:
            library.utils.logging.enable_progress_bar()
    if dtype == "nf4":
        _quantise_experts(model)
    else:
        model = model.to(where)
    return LoadedModel(model.eval(), tokenizer, folder.resolve().name)


def check_model_folder(path: str | Path) -> Path:
    """Return the folder of a local checkpoint; raise unless it is a folder with a config.json."""
    folder = Path(path)
    if not folder.is_dir():
        problem = "is a file; a model is a folder" if folder.exists() else "does not exist; nothing is downloaded"
        raise TraceError(folder, "model", problem)
    read_json(folder / "config.json")
    return folder


def check_torch_dtype(dtype: str) -> None:
    check_one_of(DTYPES, dtype=dtype)


def model_digest(path: str | Path) -> str:
    """Return a digest that identifies a checkpoint without reading all of it.

    Small files are hashed completely. Of weights, the size and three samples are hashed, since retraining changes
    nearly all of them.
    """
    digest = hashlib.sha256()
    for file in sorted(Path(path).iterdir()):
        if not file.is_file() or file.suffix not in (".json", ".safetensors", ".bin", ".model", ".jinja"):
            continue
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            if size <= 16 * _SAMPLE_BYTES or file.suffix == ".json":
                digest.update(stream.read())
                continue
            for at in (0, size // 2, size - _SAMPLE_BYTES):
                stream.seek(at)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _libraries() -> tuple[Any, Any]:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # transformers reads it on import
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UnavailableError(f"loading a model needs torch and transformers 5: {error}") from None
    check(
        int(transformers.__version__.split(".")[0]) >= 5,
        f"transformers {transformers.__version__} is too old; 5 or newer is needed",
        UnavailableError,
    )
    return torch, transformers


def _device(torch: Any, device: str) -> Any:
    try:
        where = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device={device!r} must be cpu, cuda or cuda:N") from None
    check(
        where.type != "cuda" or (where.index or 0) < torch.cuda.device_count(),
        f"device={device!r}: this machine has {torch.cuda.device_count()} CUDA devices",
        UnavailableError,
    )
    return where


def _nf4(library: Any, torch: Any) -> Any:
    missing = [name for name in ("bitsandbytes", "accelerate") if find_spec(name) is None]
    check(not missing, f"dtype='nf4' needs {', '.join(missing)}: pip install bitsandbytes accelerate", UnavailableError)
    return library.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )


def _quantise_experts(model: Any) -> None:
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    from coterie.engines.transformers.capture import expert_layers

    for layer in expert_layers(model):
        for name, parameter in list(layer.experts.named_parameters(recurse=False)):
            if parameter.ndim != 3:  # biases are small and stay unquantised
                continue
            before = parameter.detach()
            replace_parameter_4bit(layer.experts, name, compress_statistics=True, quant_type="nf4")
            error = float((getattr(layer.experts, name) - before).abs().mean() / before.abs().mean())
            # NF4's error is 9% of the mean weight; bitsandbytes 0.50 on a CPU has 36% for rows shorter than its block.
            check(
                error < 0.15,
                f"{layer.path}.{name} {tuple(before.shape)} comes back from bitsandbytes {error:.0%} off; "
                "NF4 is 9%: this shape or device is not supported",
                UnavailableError,
            )
