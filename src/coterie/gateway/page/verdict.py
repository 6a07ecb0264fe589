"""What the fleet does now and what was last decided, in a sentence or two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Told = Mapping[str, Any]


def verdict(workers: Sequence[Told], minute: Told, decisions: Sequence[Told], events: Sequence[Told]) -> str:
    """Of a snapshot's workers, its last minute, its decisions (newest first) and the loop's events (newest last)."""
    return f"{_fleet(workers)}{_minute(minute)}. {_decided(decisions)}{_changed(events)}"


def _fleet(workers: Sequence[Told]) -> str:
    if not workers:
        return "The fleet has no workers: every request is refused"
    well = sum(bool(worker["open"]) for worker in workers)
    running = sum(int(worker["running"]) for worker in workers)
    requests = "no request" if not running else f"{running} request{'s' if running > 1 else ''}"
    if well == len(workers):
        named = f"All {len(workers)} workers are" if len(workers) > 1 else "The one worker is"
    elif well:
        away = ", ".join(str(worker["id"]) for worker in workers if not worker["open"])
        named = f"{well} of {len(workers)} workers are open (not {_cut(away, 60)}) and"
        return f"{named} serve {requests} now"
    else:
        return f"None of {len(workers)} workers is open: requests wait or are refused"
    return f"{named} open and serve{'' if len(workers) > 1 else 's'} {requests} now"


def _minute(minute: Told) -> str:
    ended, seconds = int(minute["ended"]), float(minute["seconds"])
    if not ended:
        return f"; none ended in the last {seconds:g} s"
    said = f"; {ended} ended in the last {seconds:g} s"
    if minute["failed"]:
        said += f", {minute['failed']} of them without an answer"
    medians = [
        f"{name} {_ms(minute[key]['p50'])}"
        for name, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"))
        if minute[key]["p50"] is not None
    ]
    return f"{said} (medians: {', '.join(medians)})" if medians else said


def _decided(decisions: Sequence[Told]) -> str:
    last = next((one for one in decisions if one["pool"] == "decode"), decisions[0] if decisions else None)
    if last is None:
        return "Nothing has been routed yet."
    return f"The last request went to {_cut(last['worker'], 40)}: {_cut(last['reason'], 120)}."


def _changed(events: Sequence[Told]) -> str:
    kinds = ("refit_taken", "fall_back", "plan_made", "refit_kept", "plan_kept", "refit_failed", "swap_failed", "drift")
    last = next((one for one in reversed(events) if one.get("kind") in kinds), None)
    if last is None:
        return ""
    return f" The loop last decided ({str(last['kind']).replace('_', ' ')}): {_cut(last.get('reason'), 120)}."


def _cut(value: object, most: int) -> str:
    text = str(value).rstrip(". ")
    return text if len(text) <= most else text[: most - 1] + "…"


def _ms(value: float) -> str:
    return f"{value / 1e3:.2f} s" if value >= 1000 else f"{value:.3g} ms"
