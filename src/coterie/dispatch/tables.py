"""Rank tables: predicted ranks of tokens, in one file with the placement they were made for.

    tokens      token id → rank in each layer, with confidence; token id → affinity to each rank, over all layers
    contexts    ranks in the previous layers → rank in this layer, with confidence

In both tables a confidence is the expected share of a token's activations that are local on the rank; the table with
the higher confidence decides. A confidence takes one byte (steps of 1 / 255) and a rank one (two above 256 ranks):
together as much as the 16-bit rank alone of the published tables.

A token never seen has no row: its context decides, and without a known context the most popular rank of the layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, TraceError, check, check_new_file, check_within
from coterie.footprints.ranks import MAX_ORDER, context_keys, find_contexts, key_starts
from coterie.traces.store import ArrayFile, write_described
from coterie.types import MAX_SLOTS, Placement, narrowest_uint

FORMAT, VERSION = "coterie-rank-tables", 1
ONE = 255
"""Fixed-point scale of confidences."""
AFFINITY_ONE = 65535
"""Fixed-point scale of affinities."""


class Contexts(NamedTuple):
    """Contexts of all layers, numbered as in :mod:`coterie.footprints.ranks`."""

    order: int
    """Largest number of previous layers in a context, 1 … 5."""
    offsets: NDArray[np.integer]
    """[layer + 1] layer l has rows offsets[l] … offsets[l + 1] - 1."""
    keys: NDArray[np.integer]
    """[row] key of the context, rising within a layer from 0, the empty context."""
    ranks: NDArray[np.integer]
    """[row] rank predicted for the context."""
    confidence: NDArray[np.floating]
    """[row] confidence in the rank, 0 … 1."""


class Ranks(NamedTuple):
    """Predicted rank of each token in a layer."""

    ranks: NDArray[np.int64]
    """[token] predicted rank."""
    confidence: NDArray[np.float32]
    """[token] expected share of the token's activations that are local on that rank."""


@dataclass(frozen=True, slots=True, eq=False)
class RankTables:
    """A placement and the ranks predicted under it; :meth:`of` makes the tables from plain arrays."""

    placement: Placement
    token_ids: NDArray[np.int32]
    """[token] token id, rising."""
    token_ranks: NDArray[np.unsignedinteger]
    """[layer, token] predicted rank."""
    token_confidence: NDArray[np.uint8]
    """[layer, token] confidence in units of 1 / ONE."""
    affinity: NDArray[np.uint16]
    """[token, rank] expected share of the token's activations that are local on the rank, mean over layers, in units
    of 1 / AFFINITY_ONE."""
    order: int
    """Largest number of previous layers in a context."""
    offsets: NDArray[np.int64]
    """[layer + 1] first context row of each layer, and the end."""
    keys: NDArray[np.int64]
    """[row] key of the context."""
    context_ranks: NDArray[np.unsignedinteger]
    """[row] rank predicted for the context."""
    context_confidence: NDArray[np.uint8]
    """[row] confidence in units of 1 / ONE."""
    model: str
    top_k: int
    layer_ids: tuple[int, ...] | None = None
    """Index of each layer in the model, dense layers counted; None if unknown."""

    def __post_init__(self) -> None:
        layers, ranks, tokens = self.num_layers, self.placement.num_ranks, len(self.token_ids)
        rank_dtype, rows = narrowest_uint(ranks - 1), len(self.keys)
        for name, dtype, shape in (
            ("token_ids", np.int32, (tokens,)),
            ("token_ranks", rank_dtype, (layers, tokens)),
            ("token_confidence", np.uint8, (layers, tokens)),
            ("affinity", np.uint16, (tokens, ranks)),
            ("offsets", np.int64, (layers + 1,)),
            ("keys", np.int64, (rows,)),
            ("context_ranks", rank_dtype, (rows,)),
            ("context_confidence", np.uint8, (rows,)),
        ):
            array = getattr(self, name)
            check(
                array.dtype == dtype and array.shape == shape,
                f"{name} is {array.dtype} {array.shape}; expected {np.dtype(dtype)} {shape}",
            )
        experts, named = self.placement.num_experts, layers if self.layer_ids is None else len(self.layer_ids)
        check(1 <= self.top_k <= experts, f"top_k={self.top_k} must be in 1 … num_experts={experts}")
        check(named == layers, f"layer_ids has {named} entries; the placement has {layers} layers")
        check((np.diff(self.token_ids, prepend=-1) > 0).all(), "token_ids must rise, from 0 or more")
        for name in ("token_ranks", "context_ranks"):
            highest = int(getattr(self, name).max(initial=0))
            check(highest < ranks, f"{name} holds {highest}; it must be below num_ranks={ranks}")
        self._check_contexts()

    def _check_contexts(self) -> None:
        check_within(1, MAX_ORDER, order=self.order)
        starts, ends = key_starts(self.placement.num_ranks, self.order), self.offsets
        check(
            ends[0] == 0 and ends[-1] == len(self.keys) and (np.diff(ends) >= 1).all(),
            f"offsets must rise from 0 to the {len(self.keys)} contexts",
        )
        for layer in range(self.num_layers):
            keys, most = self.keys[ends[layer] : ends[layer + 1]], starts[min(self.order, layer) + 1]
            check(keys[0] == 0 and (np.diff(keys) > 0).all(), f"keys of layer {layer} must rise from 0")
            check(keys[-1] < most, f"keys of layer {layer} holds {keys[-1]}; it must be below {most}")

    @classmethod
    def of(
        cls,
        placement: Placement,
        token_ids: NDArray[np.integer],
        ranks: NDArray[np.integer],
        confidence: NDArray[np.floating],
        contexts: Contexts,
        *,
        model: str,
        top_k: int,
        affinity: NDArray[np.floating] | None = None,
        layer_ids: tuple[int, ...] | None = None,
    ) -> RankTables:
        """Make tables from ranks and confidences (0 … 1) [layer, token]; the shape [1, token] is for all layers alike.

        Without `affinity` [token, rank], each layer adds its confidence to its rank, and the mean over layers is taken.
        """
        num_ranks, layers = placement.num_ranks, placement.num_layers
        shape = (layers, len(token_ids))
        for name, array in (("ranks", ranks), ("confidence", confidence)):
            check(
                array.shape in (shape, (1, shape[1])),
                f"{name} has shape {array.shape}; expected [layer, token] = {shape}",
            )
        chosen, sure = _ranks("ranks", np.broadcast_to(ranks, shape), num_ranks), np.broadcast_to(confidence, shape)
        if affinity is None:
            votes = np.zeros((len(token_ids), num_ranks))
            for layer in range(layers):
                votes[np.arange(len(token_ids)), chosen[layer]] += sure[layer]
            affinity = votes / layers
        return cls(
            placement=placement,
            token_ids=np.asarray(token_ids, np.int32),
            token_ranks=chosen,
            token_confidence=_fixed("confidence", sure, ONE, np.uint8),
            affinity=_fixed("affinity", affinity, AFFINITY_ONE, np.uint16),
            order=contexts.order,
            offsets=np.asarray(contexts.offsets, np.int64),
            keys=np.asarray(contexts.keys, np.int64),
            context_ranks=_ranks("ranks of contexts", contexts.ranks, num_ranks),
            context_confidence=_fixed("confidence of contexts", contexts.confidence, ONE, np.uint8),
            model=model,
            top_k=top_k,
            layer_ids=layer_ids,
        )

    @property
    def num_layers(self) -> int:
        return self.placement.num_layers

    def rows_of(self, token_ids: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return [token] the row of each id, the same for all layers; -1 for an id never seen."""
        ids = np.asarray(token_ids)
        if not len(self.token_ids):
            return np.full(len(ids), -1, np.int64)
        at = np.searchsorted(self.token_ids, ids)
        at[at == len(self.token_ids)] = 0
        return np.where(self.token_ids[at] == ids, at, -1)

    def ranks_of(
        self, token_ids: NDArray[np.integer], layer: int, previous: NDArray[np.integer] | None = None
    ) -> Ranks:
        """Return the rank of each token in a layer, from the table with the higher confidence; if equal, the tokens'.

        `previous` [token, layer] are the token's ranks in the previous layers, the latest last; None or a negative rank
        is unknown.
        """
        return self.ranks_at(self.rows_of(token_ids), layer, previous)

    def ranks_at(self, rows: NDArray[np.int64], layer: int, previous: NDArray[np.integer] | None = None) -> Ranks:
        """Like :meth:`ranks_of`, for rows from :meth:`rows_of`, which are the same for all layers of a step."""
        check(0 <= layer < self.num_layers, f"layer={layer} must be in 0 … {self.num_layers - 1}")
        before = np.empty((len(rows), 0), np.int64) if previous is None else previous
        check(len(before) == len(rows), f"previous has {len(before)} tokens; there are {len(rows)}")
        start, stop = int(self.offsets[layer]), int(self.offsets[layer + 1])
        num_ranks = self.placement.num_ranks
        wanted = context_keys(before, num_ranks, self.order)
        context = find_contexts(self.keys[start:stop], wanted, num_ranks, self.order) + start
        ranks = self.context_ranks[context].astype(np.int64)
        sure = self.context_confidence[context]
        if len(self.token_ids):
            own = np.where(rows >= 0, self.token_confidence[layer][rows], 0)
            surer = (rows >= 0) & (own >= sure)
            ranks = np.where(surer, self.token_ranks[layer][rows], ranks).astype(np.int64)
            sure = np.where(surer, own, sure)
        return Ranks(ranks, sure.astype(np.float32) / np.float32(ONE))

    def request_scores(self, token_ids: NDArray[np.integer]) -> NDArray[np.float64]:
        """Return [rank] the mean affinity of a request's tokens, in 0 … 1.

        Tokens never seen are left out; if no token is left, every rank scores 1 / ranks.
        """
        rows, ranks = self.rows_of(token_ids), self.placement.num_ranks
        known = self.affinity[rows[rows >= 0]].astype(np.int64)
        return known.sum(axis=0) / (len(known) * AFFINITY_ONE) if len(known) else np.full(ranks, 1.0 / ranks)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file; the same tables give the same bytes. Refuses to overwrite."""
        check_new_file(Path(path))
        about = {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "num_ranks": self.placement.num_ranks,
            "num_experts": self.placement.num_experts,
            "top_k": self.top_k,
            "order": self.order,
            "layer_ids": None if self.layer_ids is None else list(self.layer_ids),
        }
        write_described(Path(path), self._arrays(), about)

    @classmethod
    def load(cls, path: str | Path) -> RankTables:
        """Map saved tables into memory that processes of one machine share. Every value is checked."""
        file = Path(path)
        arrays = ArrayFile(file)
        about = arrays.about(FORMAT, VERSION)
        stored = {name: arrays[name] for name in _STORED}
        slots = arrays["slot_experts"]
        if slots.dtype != np.int32 or slots.ndim != 2 or 0 in slots.shape or slots.shape[1] > MAX_SLOTS:
            problem = f"is {slots.dtype} {slots.shape}; expected int32 [layer, slot], none 0, at most {MAX_SLOTS} slots"
            raise TraceError(file, "slot_experts", problem)
        try:
            experts, layers = int(about["num_experts"]), about["layer_ids"]
            # Every expert needs a slot; Placement allocates by this number.
            check(1 <= experts <= slots.shape[1], f"num_experts={experts} must be in 1 … num_slots={slots.shape[1]}")
            return cls(
                placement=Placement(slots, int(about["num_ranks"]), experts),
                model=str(about["model"]),
                top_k=int(about["top_k"]),
                order=int(about["order"]),
                layer_ids=None if layers is None else tuple(int(n) for n in layers),
                **stored,
            )
        except KeyError as error:
            raise TraceError(file, f"metadata {error.args[0]}", "is missing") from None
        except (ConfigError, TypeError, ValueError, OverflowError) as error:
            raise TraceError(file, "contents", str(error)) from None

    def _arrays(self) -> dict[str, NDArray[Any]]:
        slots = np.asarray(self.placement.slot_experts, np.int32)
        return {"slot_experts": slots} | {name: getattr(self, name) for name in _STORED}


_STORED = (
    "token_ids",
    "token_ranks",
    "token_confidence",
    "affinity",
    "offsets",
    "keys",
    "context_ranks",
    "context_confidence",
)


def _ranks(name: str, ranks: NDArray[np.integer], num_ranks: int) -> NDArray[np.unsignedinteger]:
    low, high = int(ranks.min(initial=0)), int(ranks.max(initial=0))
    check(low >= 0 and high < num_ranks, f"{name} holds {low if low < 0 else high}; it must be in 0 … {num_ranks - 1}")
    return ranks.astype(narrowest_uint(num_ranks - 1))


def _fixed(name: str, values: NDArray[np.floating], scale: int, dtype: type[np.unsignedinteger[Any]]) -> NDArray[Any]:
    """Return shares in 0 … 1 as fixed-point integers, rounded to the nearest."""
    check(((values >= 0) & (values <= 1 + 1e-6)).all(), f"{name} must be in 0 … 1")  # false for NaN as well
    return np.asarray(np.rint(np.minimum(values, 1.0) * scale), dtype)
