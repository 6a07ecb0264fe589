"""Verdict of an inspection: possible gains, their upper limits, how certain they are, and the next command to run."""

from __future__ import annotations

import shlex
from typing import NamedTuple

from coterie.answers.inspect.inspection import Inspection
from coterie.answers.inspect.loads import RankImbalance
from coterie.answers.inspect.samples import DistinctExperts
from coterie.errors import UnknownNameError
from coterie.models import get_model

RANKS = 8
"""Number of ranks that the verdict reports on, if it divides the number of experts."""
DECODERS, IN_FLIGHT = 8, 16
"""Decoders and requests per decoder of the proposed fleet; smaller if half of the recorded requests do not fill it."""
FEW_REQUESTS = 100
"""Number of requests below which the verdict warns that the results depend on the few requests recorded."""
NOTHING_PCT = 1.0
"""Saving of distinct experts, in percent, below which grouping is called next to nothing."""


class Verdict(NamedTuple):
    sentence: str
    then: str
    """Next command to run."""


def inspect_verdict(found: Inspection) -> Verdict:
    if found.kind == "requests":
        return _of_requests(found)
    parts = []
    if found.kind == "activations":
        parts.append(_grouping(found))
    ranks = _ranks(found)
    if ranks is not None and ranks.most_gain is not None:
        parts.append(
            f"a better placement on {ranks.ranks} ranks can shorten MoE steps bound by compute by "
            f"{100 * ranks.most_gain:.0f}% at most"
        )
    said = "; ".join(part for part in parts if part) or "nothing here tells what grouping or placement would win"
    return Verdict(f"{said[0].upper()}{said[1:]}. {_sure(found)}", _next(found))


def _grouping(found: Inspection) -> str:
    best = _best(found)
    if best is None:
        why = (
            "the trace has no decode tokens" if not found.decode_tokens else "no domain has enough requests to compare"
        )
        return f"what grouping like requests would win in decode cannot be told: {why}"
    saved = 100 * (1 - (best.same_domain or 0.0) / (best.mixed or 1.0))
    if saved < NOTHING_PCT:
        return f"grouping by domain has next to nothing to win: {saved:.1f}% fewer experts at batch {best.batch}"
    return (
        f"grouping like requests has something to win: by domain alone {saved:.1f}% fewer experts at batch {best.batch}"
    )


def _best(found: Inspection) -> DistinctExperts | None:
    """Return the batch size at which requests of one domain save the most experts relative to mixed requests."""
    both = [d for d in found.distinct_experts or () if d.mixed and d.same_domain is not None and d.batch > 1]
    return max(both, key=lambda d: 1 - (d.same_domain or 0.0) / (d.mixed or 1.0), default=None)


def _ranks(found: Inspection) -> RankImbalance | None:
    known = found.rank_imbalance or []
    return next((r for r in known if r.ranks == RANKS), known[-1] if known else None)


def _sure(found: Inspection) -> str:
    doubts = []
    if found.requests is not None and found.requests < FEW_REQUESTS:
        doubts.append(f"{found.requests} requests are few")
    drift = found.drift
    if drift is not None and drift.half_life is not None:
        doubts.append(f"the load drifts, half of its change within {drift.half_life:,.3g} {drift.unit}")
    elif drift is not None and not drift.lag:
        if found.kind == "load" and drift.unit == "windows" and found.domains is not None:
            doubts.append("a sum over domains is more even than any of them")
        else:
            doubts.append(f"nothing tells how long it lasts ({drift.reason})")
    return f"How sure: {'; '.join(doubts)}." if doubts else "It is measured on all of the trace, which shows no drift."


def _next(found: Inspection) -> str:
    where, known = shlex.quote(found.trace), _known(found.model)
    model = "" if known else " --model NAME"
    half = (found.requests or 0) // 2
    decoders = next((n for n in (DECODERS, 4, 2) if half >= 2 * n), 0)
    if found.kind == "activations" and found.decode_tokens and decoders:
        in_flight = min(IN_FLIGHT, half // decoders)
        return f"coterie fleet {where} --decoders {decoders} --in-flight {in_flight}{model}"
    return f"coterie plan {where}{model}"


def _known(model: str | None) -> bool:
    try:
        get_model(model or "")
    except UnknownNameError:
        return False
    return True


def _of_requests(found: Inspection) -> Verdict:
    rate = found.arrivals
    said = "The trace gives times and lengths, no experts: whether grouping or placement pays cannot be told from it."
    if rate is not None:
        said += f" {rate.mean:,.3g} requests a second arrive on average, {rate.peak:,.3g} in the busiest stretch."
        return Verdict(said, f"coterie simulate {shlex.quote(found.trace)}")
    return Verdict(f"{said} Nor are arrival times known.", "coterie record --help")
