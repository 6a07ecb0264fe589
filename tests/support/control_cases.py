"""Traffic of two sorts for the control loop, as expert events of workers, and fits made from it.

A model of 2 layers with 16 experts, 2 a token. A request is of one of two kinds, which call experts of their own: four
of the first eight experts in "low" traffic, four of the others in "odd" traffic. A router fitted to one sort of traffic
cannot tell the kinds of the other apart.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.control import LoopShape
from coterie.engines.worker.events import EventStream
from coterie.footprints import footprint
from coterie.routing import Calibration, RouterFit
from coterie.wire.expert_events import TOPIC, ExpertEvents, ExpertLoad, RequestExperts, encode_expert_events

MODEL = "coterie-tiny"
LAYERS, EXPERTS, TOP_K = 2, 16, 2
SHAPE = LoopShape(MODEL, LAYERS, EXPERTS, TOP_K, 2)
GROUPS = {"low": (np.arange(4), np.arange(4, 8)), "odd": (np.arange(8, 16, 2), np.arange(9, 16, 2))}


def ids_of(traffic: str, kind: int, tokens: int, rng: Generator) -> NDArray[np.int64]:
    """[token, layer, k] experts of a request of one kind."""
    chosen = [rng.choice(GROUPS[traffic][kind], TOP_K, replace=False) for _ in range(tokens * LAYERS)]
    return np.asarray(chosen, np.int64).reshape(tokens, LAYERS, TOP_K)


def fit_of(traffic: str, requests: int = 96, workers: int = 2, seed: int = 0) -> RouterFit:
    rng = np.random.default_rng(seed)
    halves = [(ids_of(traffic, number % 2, 12, rng), ids_of(traffic, number % 2, 8, rng)) for number in range(requests)]
    known = Calibration(
        prefill=np.stack([footprint(before, EXPERTS) for before, _ in halves]),
        decode=np.stack([footprint(after, EXPERTS) for _, after in halves]),
        gates=None,
        requests=np.arange(requests),
        halved=False,
        model=MODEL,
        top_k=TOP_K,
    )
    return RouterFit(workers, batch=4).fit(known, rng)


def saved_fit(traffic: str, folder: Path) -> str:
    path = folder / f"{traffic}.safetensors"
    fit_of(traffic).save(path)
    return str(path)


def request_event(
    name: str,
    traffic: str,
    kind: int,
    rng: Generator,
    prompt: int = 12,
    output: int = 9,
    known: NDArray[np.bool_] | None = None,
) -> RequestExperts:
    """A request that ended, of which all tokens but the last were computed."""
    ids = ids_of(traffic, kind, prompt + output - 1, rng)
    tokens = rng.integers(0, 1000, len(ids))
    seen = np.ones(len(ids), np.bool_) if known is None else known
    return RequestExperts.pack(
        ids,
        tokens,
        seen,
        EXPERTS,
        request_id=name,
        model=MODEL,
        layer_ids=list(range(LAYERS)),
        prompt_tokens=prompt,
        output_tokens=output,
        finish="length",
    )


def load_event(traffic: str, rng: Generator, tokens: int = 64, steps: int = 8) -> ExpertLoad:
    ids = np.concatenate([ids_of(traffic, kind, tokens // 2, rng) for kind in (0, 1)])
    return ExpertLoad(
        model=MODEL,
        layer_ids=list(range(LAYERS)),
        num_experts=EXPERTS,
        seconds=0.01,
        steps=steps,
        tokens=tokens,
        counts=footprint(ids, EXPERTS).astype("<u4").tobytes(),
    )


class Publisher:
    """A worker's stream of expert events, on a free port."""

    def __init__(self, name: str, secret: str | None = None) -> None:
        self.name = name
        self.stream = EventStream("tcp://127.0.0.1:*", TOPIC, 10_000, secret)
        self.endpoint = self.stream.endpoint
        self.sent = 0

    def publish(self, *events: RequestExperts | ExpertLoad) -> None:
        self.stream.publish(encode_expert_events(ExpertEvents(time.time(), list(events))))

    def serve(self, traffic: str, count: int, rng: Generator) -> None:
        """Publish requests of both kinds in turn, and a load."""
        for _ in range(count):
            self.sent += 1
            self.publish(request_event(f"{self.name}.{self.sent}", traffic, self.sent % 2, rng))
        self.publish(load_event(traffic, rng))

    def close(self) -> None:
        self.stream.close()
