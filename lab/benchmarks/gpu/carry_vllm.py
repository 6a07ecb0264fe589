"""Bring vLLM to a GPU machine without a network: pack what it needs here, unpack it there.

    python lab/benchmarks/gpu/carry_vllm.py pack carry               # here: carry/part0 … part6, about 30 MB each
    python lab/benchmarks/gpu/carry_vllm.py unpack FOLDER PART…     # there: one folder, and a .pth file that names it

The machine must have the torch that this vLLM was built for, Triton and transformers. Packed are vLLM's Python files,
three of its extensions (operators, MoE, FlashAttention 3), and the packages that such a machine lacks. Structured
output is left out: `xgrammar` and `llguidance` become empty modules.
"""

from __future__ import annotations

import argparse
import io
import site
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

VLLM = "0.26.0"
PYTHON, PLATFORM = "3.12", "manylinux_2_28_x86_64"
PARTS, NAME = 7, "piece.tar.xz"
EXTENSIONS = ("_C_stable_libtorch", "_moe_C_stable_libtorch", "_vllm_fa3_C")
"""Compiled modules of vLLM that are packed; FlashAttention 2 and the Rust front end, 200 MB, are not."""
PACKAGES = """fastapi starlette pydantic pydantic-core annotated-types typing-inspection annotated-doc anyio sniffio
pydantic-extra-types pycountry openai jiter distro httpx httpcore h11 openai-harmony pyzmq msgspec cachetools cbor2
pybase64 blake3 prometheus-client prometheus-fastapi-instrumentator partial-json-parser lm-format-enforcer interegular
outlines_core lark compressed-tensors loguru depyf astor dill mistral_common tiktoken jsonschema
jsonschema-specifications referencing rpds-py mcp watchfiles setproctitle uvloop ijson python-json-logger py-cpuinfo
model-hosting-container-standards jmespath einops cloudpickle sentencepiece protobuf gguf diskcache six
python-multipart httptools highspy sse-starlette pydantic-settings python-dotenv pyjwt attrs aiohttp aiosignal
aiohappyeyeballs frozenlist multidict yarl propcache httpx2 httpcore2 truststore opentelemetry-api mcp-types uvicorn
click cffi cryptography pycparser requests regex charset-normalizer certifi urllib3 idna packaging pyyaml supervisor
tqdm typing-extensions"""
"""Packages that a machine with torch and transformers alone may lack; what it has itself comes first on its path."""
EMPTY = ("xgrammar", "llguidance")


def download(packages: list[str], folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", PYTHON, "--platform", PLATFORM]
    command += ["--platform", "manylinux2014_x86_64", "--platform", "manylinux_2_17_x86_64", "-d", str(folder)]
    subprocess.run([*command, *packages], check=True)


def wanted(name: str) -> bool:
    """Whether a file of a wheel is packed."""
    if name.startswith("vllm/") and name.endswith(".so"):
        return any(extension in name for extension in EXTENSIONS)
    return not name.startswith("vllm/vllm-rs") and "/tests/" not in name


def pack(out: Path) -> None:
    with tempfile.TemporaryDirectory() as work:
        wheels, tree = Path(work, "wheels"), Path(work, "tree")
        download([f"vllm=={VLLM}", *PACKAGES.split()], wheels)
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as files:
                files.extractall(tree, [name for name in files.namelist() if wanted(name)])
        for name in EMPTY:
            (tree / f"{name}.py").write_text("def __getattr__(name):\n    return object\n")
        with tarfile.open(Path(work, "all.tar.xz"), "w:xz", preset=2) as archive:
            archive.add(tree, ".")
        data = Path(work, "all.tar.xz").read_bytes()
        each = -(-len(data) // PARTS)
        for number in range(PARTS):
            part = out / f"part{number}" / NAME
            part.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(data[number * each :][:each])
            print(f"{part}: {part.stat().st_size / 1e6:.1f} MB")


def unpack(folder: Path, parts: list[Path]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    data = b"".join((part / NAME).read_bytes() for part in parts)
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:xz", ignore_zeros=True) as archive:
        archive.extractall(folder, filter="data")
    Path(site.getsitepackages()[0], "zz-vllm.pth").write_text(f"{folder.resolve()}\n")
    print(f"unpacked {len(parts)} parts in {folder}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("pack", "unpack"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", type=Path, nargs="*")
    given = parser.parse_args()
    if given.what == "pack":
        pack(given.folder)
    else:
        unpack(given.folder, given.parts)


if __name__ == "__main__":
    main()
