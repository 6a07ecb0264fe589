"""The waiting list: the simulator's, vLLM's and transformers' requests wait in the same one."""

from coterie.batching.waiting.choosing import Chooser
from coterie.batching.waiting.queue import Batch, WaitingList
from coterie.batching.waiting.report import Counters, Decision, DecisionFile, Report
from coterie.batching.waiting.views import RequestView, RowView, ServerView

__all__ = [
    "Batch",
    "Chooser",
    "Counters",
    "Decision",
    "DecisionFile",
    "Report",
    "RequestView",
    "RowView",
    "ServerView",
    "WaitingList",
]
