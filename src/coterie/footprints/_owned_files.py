"""Files that belong to a living process: locked by it, and taken over once it is dead.

The kernel gives up a lock (``flock``) with its process, however that ends, so nothing has to be cleaned up by hand.
`magic` is the file's first word once it is whole: nothing else is ever removed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from coterie.errors import ConfigError


def locked_new(path: Path, magic: int) -> int:
    """Create a file and lock it; the store of a dead process is removed first. Returns the descriptor."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            if not remove_dead(path, magic):
                problem = "is the position store of a running engine, or not one of this version"
                raise ConfigError(f"{path} {problem}: name another, or remove it") from None
            continue
        # Another engine that starts just now may have found the file before its lock: then it is gone, or taken.
        if _lock(descriptor) and _same_file(descriptor, path):
            return descriptor
        os.close(descriptor)


def remove_dead(path: Path, magic: int) -> bool:
    """Remove a store that nobody has locked; False where its creator lives or it is no store.

    One that is gone already counts as removed, and one whose creator died before it was whole as a store.
    """
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    except PermissionError:
        return False  # of another user
    try:
        found = int.from_bytes(os.pread(descriptor, 8, 0), sys.byteorder)
        if found not in (0, magic) or not _lock(descriptor):
            return False
        if _same_file(descriptor, path):  # else its name is another's by now
            path.unlink()
        return True
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    import fcntl  # Unix alone has it, and nobody else has stores in files

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
