"""Coterie's gateway in front of canned workers, as `--gateway` of this benchmark starts it.

    python lab/benchmarks/gateway/ours.py PORT ROUTER tokens|text WORKER_URL [WORKER_URL …]

`tokens` makes the token ids of every prompt with coterie-tiny's tokenizer; `text` compares prefixes as text. Footprints
are predicted from the popularity in coterie-tiny's fit, so that routers by experts have what they look at.
"""

from __future__ import annotations

import sys

from coterie.engines.tiny import tiny_model_path
from coterie.gateway.config import GatewayConfig, WorkerEntry
from coterie.gateway.embedded import tiny_fit_path
from coterie.gateway.fleet.spec import RouterSpec
from coterie.gateway.serve import run_gateway


def config(port: int, router: str, tokens: bool, urls: list[str]) -> GatewayConfig:
    fit = str(tiny_fit_path())
    return GatewayConfig(
        listen=f"127.0.0.1:{port}",
        workers=[WorkerEntry(id=f"worker-{number}", url=url, places=64) for number, url in enumerate(urls)],
        decode=RouterSpec(router, fit=fit),
        tokenizer=str(tiny_model_path()) if tokens else None,
    )


if __name__ == "__main__":
    port, router, how, *urls = sys.argv[1:]
    run_gateway(config(int(port), router, how == "tokens", urls), None, lambda *_: None)
