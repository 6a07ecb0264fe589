"""Hugging Face transformers: exact capture of expert ids, the router dry run, recording. See docs/engines/record.md.

``import transformers`` inside this package imports the library. These modules import it, and torch, only on use.
"""

from coterie.engines.transformers.capture import CapturedStep, ExpertCapture
from coterie.engines.transformers.dry_run import DryRun, DryRunScore, dry_run, score_dry_run
from coterie.engines.transformers.loading import LoadedModel, load_model
from coterie.engines.transformers.recording import Recorded, RecordingSettings, record

__all__ = [
    "CapturedStep",
    "DryRun",
    "DryRunScore",
    "ExpertCapture",
    "LoadedModel",
    "Recorded",
    "RecordingSettings",
    "dry_run",
    "load_model",
    "record",
    "score_dry_run",
]
