"""Which windows of a load table are meant: by label, by number, or all that count every token once."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from coterie.errors import ConfigError
from coterie.traces.load import LoadTable

MERGED = "merged_"
"""How labels of windows begin that are sums of other windows of their table."""


class ChosenWindows(NamedTuple):
    """Windows of a table."""

    windows: list[int]
    """Indices, ascending."""
    what: str
    """Which windows of which file, in words."""


def domain_of(label: str) -> str:
    """The part of a label before a /, which numbers the windows of one domain."""
    return label.split("/")[0]


def choose_windows(path: Path, table: LoadTable, window: str | None) -> ChosenWindows:
    """The windows asked for, of the table read from `path`.

    `window` is a label (also the part before a /), a number from 0, or a range A:B that leaves B out. Without it
    windows named merged_… are left out: they are sums of others, whose tokens would count twice.
    """
    labels = list(table.labels or ())
    if window is None:
        return _all_windows(path, labels, len(table))
    chosen = [i for i, label in enumerate(labels) if label == window or label.startswith(f"{window}/")]
    if not chosen:
        first, colon, last = window.partition(":")
        if not all(part.isdecimal() or (colon and not part) for part in (first, last or first)):
            names = ", ".join(dict.fromkeys(domain_of(label) for label in labels))
            also = f", or one of {names}" if names else ""
            raise ConfigError(f"--window={window} must be a number or a range A:B{also}")
        start, end = _up_to(len(table), first), _up_to(len(table), last)
        stop = (end if last else len(table)) if colon else start + 1
        if not start < stop <= len(table):
            raise ConfigError(f"--window={window} must be within the {len(table)} windows of {path}, counted from 0")
        chosen = list(range(start, stop))
    return ChosenWindows(chosen, f"{window} of {path.name}")


def _up_to(most: int, digits: str) -> int:
    """The number, or one past `most` where it is larger; it may have thousands of digits. No digits are 0."""
    plain = digits.lstrip("0")
    return min(int(plain or "0"), most + 1) if len(plain) <= len(str(most)) else most + 1


def _all_windows(path: Path, labels: list[str], count: int) -> ChosenWindows:
    merged = {i for i, label in enumerate(labels) if label.startswith(MERGED)}
    chosen = [i for i in range(count) if i not in merged]
    if not chosen and count > 1:
        raise ConfigError(f"all {count} windows of {path} are merged ones, which overlap: choose one with --window")
    if not merged or not chosen:
        return ChosenWindows(list(range(count)), f"{count} windows of {path.name}" if count > 1 else path.name)
    are = f"{len(merged)} named {MERGED}… are" if len(merged) > 1 else f"1 named {MERGED}… is"
    return ChosenWindows(chosen, f"{len(chosen)} of {count} windows of {path.name} ({are} left out: sums of others)")
