"""A recorded trace of coterie-tiny: shipped prompts and greedy answers, run by the NumPy model of the worker."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from coterie.engines.tiny import TINY, tiny_model_path
from coterie.engines.worker.model import RequestRows
from coterie.engines.worker.numpy_model import NumpyModel
from coterie.prompts import load_prompts
from coterie.traces import ActivationTrace, RequestTrace, TraceMeta
from coterie.types import DECODE, PREFILL

BLOCKS = list(range(16))


def save_tiny_trace(folder: Path, requests: int = 48, answer: int = 6) -> Path:
    """Save the trace of as many prompts of all domains, each with `answer` generated tokens but the last."""
    ids, tokens, lengths = _recorded(requests, answer)
    phase = np.concatenate([np.repeat([PREFILL, DECODE], [n - answer, answer]) for n in lengths]).astype(np.uint8)
    prompts = np.array(lengths) - answer
    meta = TraceMeta(TINY, 32, ids.shape[1], ids.shape[2], tuple(range(ids.shape[1])))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    table = RequestTrace(prompts, np.full(requests, answer + 1))
    ActivationTrace.from_arrays(meta, ids, offsets, table, phase, tokens).save(folder)
    return folder


@cache
def _recorded(requests: int, answer: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
    model = NumpyModel(tiny_model_path(), num_blocks=len(BLOCKS), block_size=16)
    shipped = load_prompts()
    ids, tokens, lengths = [], [], []
    for prompt in shipped[:: max(1, len(shipped) // requests)][:requests]:
        given = list(model.tokenizer.encode(prompt.prompt))[:100]
        length = len(given)
        rows, start = given, 0
        for _ in range(answer + 1):
            step = model.step([RequestRows(rows, start, BLOCKS, sample=True)])
            ids.append(step.expert_ids)
            tokens += rows
            start, rows = start + len(rows), [int(step.logits[0].argmax())]
        lengths.append(length + answer)
    return np.concatenate(ids), np.array(tokens, np.int32), lengths
