"""Write arrays as ``torch.save`` does, without torch: a zip archive with a pickle and the arrays' bytes."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

_STORAGES = {np.dtype(np.int64): "LongStorage", np.dtype(np.float32): "FloatStorage"}


def torch_file(arrays: Mapping[str, NDArray[np.int64] | NDArray[np.float32]]) -> bytes:
    """Return a file that ``torch.load(…, weights_only=True)`` reads as tensors [row, column] by name."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:  # stored: torch reads no compressed archive
        pickled = b"".join(_text(name) + _tensor(str(at), arrays[name]) for at, name in enumerate(arrays))
        archive.writestr(zipfile.ZipInfo("map/data.pkl"), b"\x80\x02}(" + pickled + b"u.")
        archive.writestr(zipfile.ZipInfo("map/byteorder"), "little")
        for at, array in enumerate(arrays.values()):
            archive.writestr(zipfile.ZipInfo(f"map/data/{at}"), array.astype(array.dtype.newbyteorder("<")).tobytes())
        archive.writestr(zipfile.ZipInfo("map/version"), "3\n")
    return made.getvalue()


def _tensor(key: str, array: NDArray[np.int64] | NDArray[np.float32]) -> bytes:
    """Return the pickle of a tensor over the storage `key`: a call of torch's function that rebuilds it."""
    rows, columns = array.shape
    storage = b"(" + _text("storage") + f"ctorch\n{_STORAGES[array.dtype]}\n".encode() + _text(key) + _text("cpu")
    storage += _number(array.size) + b"tQ"
    size, stride = _number(rows) + _number(columns) + b"\x86", _number(columns) + _number(1) + b"\x86"
    plain = b"\x89ccollections\nOrderedDict\n)R"  # without gradient or hooks
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + _number(0) + size + stride + plain + b"tR"


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def _number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)
