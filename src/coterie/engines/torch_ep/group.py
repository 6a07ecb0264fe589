"""Collectives of a group of ranks that count bytes and share failures, which torch.distributed does not.

**Bytes.** Each collective adds the bytes that left this rank for another one to `Group.sent_bytes`, under the name
of their content. Bytes that stay on the rank are not counted.

**Failures.** A rank that raises, times out or loses a peer writes the cause into the group's store. Every rank watches
one key of the store in a thread, and an operation waits for its end *or* for that key, so that all ranks raise
RankFailedError with the first cause, at once. gloo alone notifies only the peers of a dead rank, and cannot end an
operation that waits for a rank which is alive but busy elsewhere. An abandoned operation still holds its buffers: after
a failure the group is unusable, and its process should end.

The reduce-scatter on gloo is an all-to-all and a sum in the order of ranks. gloo's own reduce-scatter is an all-reduce
internally and sends twice as much; and the fixed order of the sum makes results independent of the shuffle.

All tensors are on the CPU.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from coterie.engines.optional import dist, torch
from coterie.engines.ranks import FAILED, announce_failure
from coterie.errors import RankFailedError, UnavailableError, check

FOREVER = datetime.timedelta(days=365)
WATCH_S = 30.0
"""Seconds to wait for the store after a failure; it takes milliseconds unless its host is stopped."""
CLOSED = "closed"
"""Value of a rank's own failure key that ends its watch thread; other ranks do not read it."""


class Group:
    """The ranks of the default process group, which must be initialised. All ranks create it at the same time."""

    def __init__(self, timeout_s: float = 300.0) -> None:
        check(
            dist is not None and dist.is_initialized(),
            "an expert-parallel group needs torch.distributed: call init_process_group() first",
            UnavailableError,
        )
        self.rank: int = dist.get_rank()
        self.size: int = dist.get_world_size()
        self.timeout_s = timeout_s
        self.sent_bytes: Counter[str] = Counter()
        """Bytes sent from this rank to others, by content."""
        self._failure: str | None = None
        self._waiting: threading.Event | None = None
        self._store = dist.distributed_c10d._get_default_store()
        while hasattr(self._store, "underlying_store"):  # run_ranks uses no key prefix
            self._store = self._store.underlying_store
        # A separate connection: a wait blocks all other calls on its connection.
        watched = self._store.clone()
        watched.set_timeout(FOREVER)
        self._watch = threading.Thread(target=self._watch_failures, args=(watched,), name="coterie-watch", daemon=True)
        self._watch.start()

    # --------------------------------------------------------------------------------------------------- collectives

    def all_to_all(self, sent: Any, send_counts: Sequence[int], receive_counts: Sequence[int], what: str) -> Any:
        """Send the rows of `sent` [row, ...], grouped by receiver; return the received rows, grouped by sender."""
        received = sent.new_empty((sum(receive_counts), *sent.shape[1:]))
        row_bytes = sent.element_size() * (sent[0].numel() if len(sent) else 0)
        self.sent_bytes[what] += row_bytes * (sum(send_counts) - send_counts[self.rank])
        # Send bytes, since gloo does not support every dtype.
        into, given = _as_bytes(received), _as_bytes(sent)
        self._run(
            what, lambda: dist.all_to_all_single(into, given, list(receive_counts), list(send_counts), async_op=True)
        )
        return received

    def exchange_counts(self, counts: Sequence[int]) -> list[int]:
        """Exchange row counts: from the rows to send to each rank, return the rows to receive from each rank."""
        sent = torch.tensor(counts, dtype=torch.int64)
        ones = [1] * self.size
        return [int(count) for count in self.all_to_all(sent, ones, ones, "counts").tolist()]

    def reduce_scatter(self, blocks: Any, what: str) -> Any:
        """Sum `blocks` [rank, place, ...] over all ranks and return this rank's block, [place, ...]."""
        ones = [1] * self.size
        return functools.reduce(torch.add, self.all_to_all(blocks, ones, ones, what))  # in the order of ranks

    def all_gather(self, block: Any, what: str) -> Any:
        """Return the block of every rank, [rank, ...]; all blocks have the same shape."""
        gathered = block.new_empty((self.size, *block.shape))
        self.sent_bytes[what] += (self.size - 1) * block.numel() * block.element_size()
        own, parts = _as_bytes(block.contiguous().unsqueeze(0)), list(_as_bytes(gathered).split(1))
        self._run(what, lambda: dist.all_gather(parts, own, async_op=True))
        return gathered

    # ------------------------------------------------------------------------------------------------------ failures

    @contextlib.contextmanager
    def guard(self, doing: str) -> Iterator[None]:
        """Announce an error inside to all ranks, so that none waits for this one."""
        try:
            yield
        except RankFailedError:
            raise
        except Exception as error:
            self.fail(f"rank {self.rank} failed in {doing}: {type(error).__name__}: {error}")
            raise

    def fail(self, reason: str) -> None:
        """Make every rank of the group raise; the first reason given is used."""
        with contextlib.suppress(RuntimeError):  # if the store is gone, all ranks have failed already
            announce_failure(self._store, self.size, " ".join(reason.split())[:300])

    def check(self) -> None:
        """Raise RankFailedError if any rank has failed."""
        if self._failure is not None:
            raise RankFailedError(self._failure)

    def close(self) -> None:
        """End the watch thread of a group that has not failed; the process group stays usable for another Group."""
        key = FAILED.format(self.rank)
        self._store.compare_set(key, "", CLOSED)
        self._watch.join()
        if self._failure is None:
            self._store.delete_key(key)

    def _run(self, what: str, start: Callable[[], Any]) -> None:
        """Start an operation; return when it has ended, raise when the operation or any rank has failed."""
        self.check()
        try:
            work = start()
        except RuntimeError as error:
            raise self._lost(what, error) from error
        ended = threading.Event()
        self._waiting = ended
        self.check()  # a failure announced before `_waiting` was set woke nothing
        work.get_future().add_done_callback(lambda _: ended.set())
        in_time = ended.wait(self.timeout_s)
        self._waiting = None
        self.check()
        if not in_time:
            raise self._first_cause(f"rank {self.rank} waited {self.timeout_s:g} s for {what}")
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(what, error) from error

    def _lost(self, what: str, error: RuntimeError) -> RankFailedError:
        return self._first_cause(f"rank {self.rank} lost a peer in {what}: {_first_sentence(error)}")

    def _first_cause(self, problem: str) -> RankFailedError:
        """Announce a problem; return the error with the first announced cause, which may be another rank's."""
        self.fail(problem)
        self._watch.join(WATCH_S)
        return RankFailedError(self._failure or problem)

    def _watch_failures(self, store: Any) -> None:
        key = FAILED.format(self.rank)
        try:
            store.wait([key])
            cause = store.get(key).decode()
        except RuntimeError as error:
            cause = f"rank {self.rank} lost the store of the group: {_first_sentence(error)}"
        if cause == CLOSED:
            return
        self._failure = cause
        if (waiting := self._waiting) is not None:
            waiting.set()


def _first_sentence(error: RuntimeError) -> str:
    """Return the first sentence of gloo's message, without the source location before it."""
    return re.sub(r"^\[[^]]*\] *", "", str(error).splitlines()[0]).partition(". ")[0]


def _as_bytes(tensor: Any) -> Any:
    """View [row, ...] as [row, bytes]."""
    flat = tensor.contiguous().flatten(1) if tensor.dim() > 1 else tensor.contiguous().unsqueeze(1)
    return flat.view(torch.uint8)
