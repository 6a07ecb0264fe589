"""Assertions of the contract checks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray


def require(holds: object, message: str) -> None:
    """Raise AssertionError unless `holds`; unlike `assert`, also under ``python -O``."""
    if not holds:
        raise AssertionError(message)


@contextmanager
def no_error(doing: str, but: type[Exception] | tuple[type[Exception], ...] = AssertionError) -> Iterator[None]:
    """Turn any error of the block into an AssertionError that names it; errors of the types `but` pass."""
    try:
        yield
    except but:
        raise
    except Exception as error:
        raise AssertionError(f"{doing} raised {type(error).__name__}: {error}") from error


@contextmanager
def unchanged(doing: str, **arrays: NDArray[np.generic] | None) -> Iterator[None]:
    """Raise AssertionError if the block changes an array; None stands for an input that is not given."""
    copies = {name: None if array is None else array.copy() for name, array in arrays.items()}
    yield
    for name, array in arrays.items():
        require(np.array_equal(array, copies[name]), f"{doing} changed {name}, which it may only read")  # type: ignore[arg-type]
