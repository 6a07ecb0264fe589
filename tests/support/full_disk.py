"""A disk that is full: the system refuses to write a file beyond a size, as it does where no space is left."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

FULL = "File too large"
"""What the system says; of a disk without space it says "No space left on device"."""


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """Limit the size of every file that this process writes. Python ignores the signal, so that the write fails.

    Bytecode of what is imported meanwhile is not written: Python would keep the part that fits.
    """
    bytecode = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = bytecode
