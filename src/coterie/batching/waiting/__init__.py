"""The waiting list, used alike for requests of the simulator, of vLLM and of transformers."""

from coterie.batching.waiting.choosing import Chooser
from coterie.batching.waiting.queue import ChosenBatch, WaitingList
from coterie.batching.waiting.trigger import BatchTrigger
from coterie.batching.waiting.views import (
    BatchDecision,
    DecisionFile,
    RequestView,
    RowView,
    ServerView,
    WaitingCounters,
    WaitingReport,
)

__all__ = [
    "BatchDecision",
    "BatchTrigger",
    "Chooser",
    "ChosenBatch",
    "DecisionFile",
    "RequestView",
    "RowView",
    "ServerView",
    "WaitingCounters",
    "WaitingList",
    "WaitingReport",
]
