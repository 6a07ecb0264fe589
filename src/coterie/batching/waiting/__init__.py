"""The waiting list: the simulator's, vLLM's and transformers' requests wait in the same one."""

from coterie.batching.waiting.choosing import Chooser
from coterie.batching.waiting.queue import ChosenBatch, WaitingList
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
