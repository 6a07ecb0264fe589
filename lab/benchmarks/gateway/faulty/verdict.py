"""Judge a run: requests by outcome, causes of failures, recovery times, different answers."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from gateway.faulty.client import Asked
from gateway.faulty.hands import GATEWAY, Fault

JUST_BEFORE_S = 1.0
"""A request that was sent so shortly before SIGTERM may not have been accepted yet."""
LOST_CONNECTION = ("connect", "reset")
CRASH, DRAIN = "kill -9 the gateway", "SIGTERM the gateway"

WHOLE = "whole"
TOLD = "broken after the first byte, said in an error event"
LEFT = "left by its own client"
REFUSED = "refused while the gateway restarted after SIGTERM"
RESET = "reset or refused by kill -9 of the gateway"
LOST = "DEFECT: lost before the first byte"
CUT_BY_DRAIN = "DEFECT: lost by SIGTERM though it ran before"
SILENT = "DEFECT: broken after the first byte without a word"
DEFECTS = (LOST, CUT_BY_DRAIN, SILENT)
CLASSES = (WHOLE, TOLD, LEFT, REFUSED, RESET, *DEFECTS)


class Recovery(NamedTuple):
    """Times of one fault, in seconds."""

    fault: Fault
    repair_s: float
    """From the fault to its repair: how long it lasted."""
    any_s: float | None
    """From the fault to the end of the first whole answer to a request that was sent after it."""
    worker_s: float | None
    """From the repair to the end of the first whole answer of the worker to a request sent after it."""


def class_of(one: Asked, faults: Sequence[Fault]) -> str:
    """Classify a request by its outcome, and by whether a restart of the gateway explains it."""
    if one.state in ("whole", "told", "left"):
        return {"whole": WHOLE, "told": TOLD, "left": LEFT}[one.state]
    restarts = [
        fault
        for fault in faults
        if fault.kind in (CRASH, DRAIN) and one.began_s <= fault.repaired_s and one.ended_s >= fault.began_s
    ]
    gone = one.problem in LOST_CONNECTION or one.state == "silent"
    if gone and any(fault.kind == CRASH for fault in restarts):
        return RESET
    for fault in restarts:
        if fault.kind == DRAIN and one.state == "before" and (gone or one.problem == "503 draining"):
            return REFUSED if one.began_s >= fault.began_s - JUST_BEFORE_S else CUT_BY_DRAIN
    return LOST if one.state == "before" else SILENT


def recoveries(asked: Sequence[Asked], faults: Sequence[Fault], served_by: Mapping[str, str]) -> list[Recovery]:
    """Times of each fault, but those that a later fault of the same worker or a restart of the gateway cut short."""
    whole = [one for one in asked if one.state == "whole"]
    found = []
    for fault in faults:
        later = [
            one.began_s
            for one in faults
            if one.began_s > fault.began_s and (one.target == fault.target != GATEWAY or one.kind in (CRASH, DRAIN))
        ]
        until_s = min(later, default=math.inf)
        again = [one.ended_s for one in whole if one.began_s >= fault.began_s]
        back = [
            one.ended_s for one in whole if one.began_s >= fault.repaired_s and served_by.get(one.name) == fault.target
        ]
        any_s, worker_s = (min(ends, default=math.inf) for ends in (again, back))
        found.append(
            Recovery(
                fault,
                fault.repaired_s - fault.began_s,
                any_s - fault.began_s if any_s < until_s else None,
                worker_s - fault.repaired_s if worker_s < until_s else None,
            )
        )
    return found


def different_answers(asked: Sequence[Asked]) -> list[str]:
    """Prompts that got different whole answers: faults must not change what a model says."""
    texts: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    for one in asked:
        if one.state == "whole":
            texts[one.prompt, one.max_tokens].add(one.text)
    return [f"{prompt} ({length} tokens)" for (prompt, length), found in texts.items() if len(found) > 1]


def rows_by_kind(found: Sequence[Recovery]) -> list[dict[str, Any]]:
    """One row a kind of fault: how often, how long it lasted, and how long recovery took, median and longest."""
    kinds: defaultdict[str, list[Recovery]] = defaultdict(list)
    for one in found:
        kinds[one.fault.kind].append(one)
    return [
        {
            "fault": kind,
            "times": len(ones),
            "lasted_s": _spread([one.repair_s for one in ones]),
            "served_again_s": _spread([one.any_s for one in ones]),
            "worker_back_s": _spread([one.worker_s for one in ones]),
        }
        for kind, ones in kinds.items()
    ]


def _spread(values: Sequence[float | None]) -> list[float] | None:
    """Median and longest of what is known."""
    known = [value for value in values if value is not None]
    return [round(median(known), 2), round(max(known), 2)] if known else None


def count_classes(asked: Sequence[Asked], faults: Sequence[Fault]) -> dict[str, int]:
    counts = Counter(class_of(one, faults) for one in asked)
    return {name: counts[name] for name in CLASSES if counts[name] or name in (WHOLE, *DEFECTS)}
