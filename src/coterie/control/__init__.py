"""The live loop: watch a fleet, re-fit its router, advise on placement. It has no clock, no socket and no thread."""

from coterie.control.advice import Advice, AdviceSettings, PlacementAdvisor
from coterie.control.base import (
    KINDS,
    ControlEvent,
    ControlSettings,
    FitJob,
    Kind,
    LoadSeen,
    LoopShape,
    RequestSeen,
    Tick,
)
from coterie.control.loop import ControlLoop
from coterie.control.scoring import FitComparison, Scorer
from coterie.control.switchback import Switchback, SwitchbackSettings, Totals

__all__ = [
    "KINDS",
    "Advice",
    "AdviceSettings",
    "ControlEvent",
    "ControlLoop",
    "ControlSettings",
    "FitComparison",
    "FitJob",
    "Kind",
    "LoadSeen",
    "LoopShape",
    "PlacementAdvisor",
    "RequestSeen",
    "Scorer",
    "Switchback",
    "SwitchbackSettings",
    "Tick",
    "Totals",
]
