"""Documents of the corpus, packed into rows of one length for training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tiny_model import DOMAINS, END, GROUPS, Settings


class Documents(NamedTuple):
    tokens: np.ndarray
    offsets: np.ndarray
    domain: np.ndarray
    group: np.ndarray
    """Group of each document, for the information loss."""


class Rows(NamedTuple):
    """Documents packed into rows: -1 marks padding in segment."""

    tokens: Tensor  # [row, token]
    segment: Tensor  # [row, token] which document of its row
    domain: Tensor  # [row, token]
    group: Tensor  # [row, token]


def load(path: Path, groups: str) -> Documents:
    with np.load(path) as data:
        domain = data["domain"].astype(np.int64)
        group = domain
        if groups == "slice":
            group = np.unique(np.stack([domain, data["language"]], axis=1), axis=0, return_inverse=True)[1].reshape(-1)
        if group.max() >= GROUPS:
            raise SystemExit(f"{group.max() + 1} groups of documents; at most {GROUPS} are told apart")
        return Documents(data["tokens"], data["offsets"], domain, group)


def pack(documents: Documents, order: np.ndarray, length: int) -> Rows:
    """Each document of order into the first of a few open rows with room for it."""
    sizes = np.minimum(np.diff(documents.offsets)[order], length)
    open_rows: list[list[int]] = []  # [row, used, documents]
    row_of, start_of, nth_of = (np.zeros(len(order), np.int64) for _ in range(3))
    count = 0
    for n, size in enumerate(sizes.tolist()):
        for row in open_rows:
            if row[1] + size <= length:
                break
        else:
            if len(open_rows) == 16:
                open_rows.remove(max(open_rows, key=lambda r: r[1]))
            row = [count, 0, 0]
            open_rows.append(row)
            count += 1
        row_of[n], start_of[n], nth_of[n] = row
        row[1] += size
        row[2] += 1
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    to = np.repeat(row_of * length + start_of, sizes) + within
    source = np.repeat(documents.offsets[order], sizes) + within

    def placed(values: np.ndarray, empty: int, dtype: type) -> Tensor:
        out = np.full(count * length, empty, dtype)
        out[to] = values
        return torch.from_numpy(out.reshape(count, length))

    return Rows(
        placed(documents.tokens[source], END, np.int16),
        placed(np.repeat(nth_of, sizes), -1, np.int16),
        placed(np.repeat(documents.domain[order], sizes), 0, np.uint8),
        placed(np.repeat(documents.group[order], sizes), 0, np.uint8),
    )


def schedule(documents: Documents, settings: Settings, rng: np.random.Generator) -> tuple[Rows, dict[str, float]]:
    """Rows for the whole run, shuffled, and how often each domain's text is read."""
    sizes = np.diff(documents.offsets)
    total = settings.steps * settings.rows * settings.length
    orders, epochs = [], {}
    for n, share in enumerate(float(s) for s in settings.shares.split(",")):
        members = np.flatnonzero(documents.domain == n)
        want, have = share * total, int(sizes[members].sum())
        epochs[DOMAINS[n]] = want / have
        passes = [rng.permutation(members) for _ in range(math.ceil(want / have))]
        order = np.concatenate(passes)
        orders.append(order[: int(np.searchsorted(np.cumsum(sizes[order]), want))])
    packed = [pack(documents, order, settings.length) for order in orders]
    rows = Rows(*(torch.cat(parts) for parts in zip(*packed, strict=True)))
    shuffle = torch.from_numpy(rng.permutation(len(rows.tokens)))
    return Rows(*(part[shuffle] for part in rows)), epochs
