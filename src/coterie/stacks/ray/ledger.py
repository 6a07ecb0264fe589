"""Replicas and requests of one deployment in a fleet keeper, in the order in which Ray Serve reports them.

Serve asks for a replica several times if all queues are full, may send a request elsewhere than it was told, and may
report the end of an *attempt* (one try of one request on one replica) before it has reported that it was sent. Attempts
of one request share an id, and an end names only that id and the replica. So each attempt is a request of its own to
the keeper: admitted when a replica is chosen, moved if Serve chose another, and finished by the first end that fits.

Nothing here raises on account of a router or of a request's content: Serve only logs an exception, and the request
would wait for ever.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import msgspec
import numpy as np

from coterie.errors import ConfigError
from coterie.gateway.fleet.keeper import NO_SPEC, Choice, FleetKeeper
from coterie.gateway.fleet.spec import RouterSpec
from coterie.routing import Request
from coterie.wire.footprints import read_footprint, without_footprint

PARAMS = "kv_transfer_params"


class ReplicaCall(NamedTuple):
    """A request as the router sees it."""

    request: Request
    footprint: str
    """Source of the footprint: "answer" of the prefill, "none", or "refused" if it is damaged."""


def read_request(arguments: Iterable[Any]) -> ReplicaCall:
    """Read the first argument of a call that has ``kv_transfer_params``, as a key of a body or as an attribute."""
    values = (each.get(PARAMS) if isinstance(each, Mapping) else getattr(each, PARAMS, None) for each in arguments)
    params = next((value for value in values if isinstance(value, Mapping)), {})
    footprint, problem = read_footprint(params)
    wanted = Request(prefilled=bool(without_footprint(params)))
    if footprint is None:
        return ReplicaCall(wanted, "none" if problem is None else "refused")
    wanted = wanted._replace(prompt_tokens=footprint.tokens + footprint.missing, footprint=footprint.counts)
    return ReplicaCall(wanted, "answer")


_LEDGERS: WeakValueDictionary[str, ReplicaLedger] = WeakValueDictionary()


def open_ledger(deployment: str, settings: Mapping[str, Any]) -> ReplicaLedger:
    """Make the ledger of a deployment, which :func:`states` shows as long as its router lives."""
    ledger = _LEDGERS[deployment] = ReplicaLedger(settings)
    return ledger


def states() -> dict[str, dict[str, Any]]:
    """Return deployment → state of its ledger, for the routers of this process."""
    return {deployment: ledger.state() for deployment, ledger in list(_LEDGERS.items())}


class ReplicaLedger:
    """Keeper of one deployment's replicas. Not thread-safe: belongs to the event loop of its router."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """`settings` are fields of a RouterSpec. If no router can be made of them, the shortest queue chooses, and
        `problem` says why."""
        self.problem = ""
        try:
            self.keeper = FleetKeeper(msgspec.convert(settings, RouterSpec))
        except (ConfigError, msgspec.ValidationError) as error:
            self.keeper, self.problem = FleetKeeper(NO_SPEC), str(error)
        self._wanted: dict[str, Request] = {}
        """Attempt → its request, until it is sent."""
        self._sent: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        """(replica, request) → its attempts there that have not ended."""

    def died(self, replica: str) -> None:
        if replica in self.keeper.members:
            self.keeper.leave(replica)

    def reported(self, replica: str, ongoing: int) -> None:
        """Note how many requests a replica has: those beyond this router's own were sent by other routers."""
        member = self.keeper.members.get(replica)
        if member is not None:
            self.keeper.fleet.observe(member.row, ongoing)

    def choose(self, attempt: str, wanted: Request, tried: Collection[str] = ()) -> tuple[Choice, list[str]]:
        """Choose a replica for an attempt and admit it there; return the choice and all replicas, the best first.

        A replica in `tried` has failed the request. Asked again, the choice stays, unless its replica has left.
        """
        keeper, known = self.keeper, self.keeper.requests.get(attempt)
        self._wanted[attempt] = wanted
        left = () if known is None or known.worker_id in keeper.members else (known.worker_id,)
        choice = keeper.route(attempt, wanted, (*tried, *left))
        scores = np.nan_to_num(choice.decision.scores, nan=np.inf)
        others = keeper.members.keys() - {choice.worker_id}
        return choice, [
            choice.worker_id,
            *sorted(others, key=lambda name: (name in tried, scores[keeper.members[name].row])),
        ]

    def sent(self, attempt: str, request: str, replica: str) -> None:
        """Note where Serve sends an attempt, which may not be where it was told."""
        choice, wanted = self.keeper.requests.get(attempt), self._wanted.pop(attempt, Request())
        if choice is None:
            return
        if choice.worker_id != replica:
            self.keeper.route(attempt, wanted, self.keeper.members.keys() - {replica})
        self._sent[replica, request].append(attempt)

    def ended(self, request: str, replica: str) -> None:
        """Finish the oldest attempt of a request on a replica."""
        attempts = self._sent.get((replica, request))
        if attempts:
            self.dropped(attempts.pop(0))
        if not attempts:
            self._sent.pop((replica, request), None)

    def dropped(self, attempt: str) -> None:
        """Finish an attempt that was not sent, or has ended."""
        self._wanted.pop(attempt, None)
        self.keeper.finish(attempt)

    def state(self) -> dict[str, Any]:
        """Return what operators and tests look at: the requests on each replica, and the fallbacks by reason."""
        keeper = self.keeper
        return {
            "problem": self.problem,
            "requests": len(keeper.requests),
            "unfinished": len(self._sent),
            "running": {replica: keeper.running(replica) for replica in list(keeper.members)},
            "fallbacks": dict(keeper.fallbacks),
        }
