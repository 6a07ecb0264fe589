"""Expert events of canned workers, at the rate of a busy fleet: what the control loop has to follow.

    python lab/benchmarks/gateway/publishing.py RATE ENDPOINT [ENDPOINT …]

RATE is the requests a second of each worker. A request has 200 tokens of coterie-tiny's shape, of one of three domains
that change every minute; loads are told once a second.
"""

from __future__ import annotations

import sys
import time

import numpy as np
from numpy.random import Generator

from coterie.engines.tiny import TINY
from coterie.engines.worker.events import EventStream
from coterie.footprints import footprint
from coterie.gateway.embedded import tiny_fit_path
from coterie.routing import RouterFit
from coterie.wire.expert_events import TOPIC, ExpertEvents, ExpertLoad, RequestExperts, encode_expert_events

PROMPT, OUTPUT = 152, 49
DOMAINS, CHANGE_S = 3, 60.0


class Worker:
    """One stream."""

    def __init__(self, endpoint: str, number: int, rng: Generator) -> None:
        fit = RouterFit.load(tiny_fit_path())
        self.layers, self.experts, self.top_k = fit.num_layers, fit.num_experts, fit.learned.top_k
        self.stream, self.number, self.rng, self.sent = EventStream(endpoint, TOPIC, 10_000), number, rng, 0
        self.load = np.zeros((self.layers, self.experts), np.uint32)

    def request(self, domain: int) -> None:
        """A request that ended: each domain calls experts of its own more often."""
        tokens = PROMPT + OUTPUT - 1
        liking = np.random.default_rng(domain).random((self.layers, self.experts)) ** 4
        noise = self.rng.gumbel(size=(tokens, self.layers, self.experts))
        ids = np.argpartition(-(np.log(liking + 1e-3) + noise), self.top_k, axis=2)[:, :, : self.top_k]
        self.load += footprint(ids, self.experts)
        self.sent += 1
        event = RequestExperts.pack(
            ids,
            self.rng.integers(0, 4096, tokens),
            np.ones(tokens, np.bool_),
            self.experts,
            request_id=f"canned.{self.number}.{self.sent}",
            model=TINY,
            layer_ids=list(range(self.layers)),
            prompt_tokens=PROMPT,
            output_tokens=OUTPUT,
            finish="length",
        )
        self.stream.publish(encode_expert_events(ExpertEvents(time.time(), [event])))

    def tell_load(self, seconds: float) -> None:
        tokens = int(self.load[0].sum()) // self.top_k
        if tokens:
            event = ExpertLoad(
                model=TINY,
                layer_ids=list(range(self.layers)),
                num_experts=self.experts,
                seconds=seconds,
                steps=max(1, tokens // 16),
                tokens=tokens,
                counts=self.load.astype("<u4").tobytes(),
            )
            self.stream.publish(encode_expert_events(ExpertEvents(time.time(), [event])))
            self.load[:] = 0


def publish(rate: float, endpoints: list[str]) -> None:
    workers = [Worker(endpoint, number, np.random.default_rng(number)) for number, endpoint in enumerate(endpoints)]
    begun, done, told = time.monotonic(), 0, 0.0
    while True:
        passed = time.monotonic() - begun
        for _ in range(int(passed * rate) - done):
            done += 1
            for worker in workers:
                worker.request(int(worker.rng.integers(DOMAINS)) + DOMAINS * int(passed / CHANGE_S))
        if passed - told >= 1.0:
            for worker in workers:
                worker.tell_load(passed - told)
            told = passed
        time.sleep(0.5 / rate)


if __name__ == "__main__":
    publish(float(sys.argv[1]), sys.argv[2:])
