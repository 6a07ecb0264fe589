"""The reference worker: a small OpenAI-compatible server on transformers. See docs/engines/worker.md.

For demos, fault tests and development without a GPU; it claims no speed. What it promises is that everything is real:
the batching, the blocks and their prefix hits, the handoff of KV between workers, the experts beside every block.

    config    settings                        protocol  bodies in, answers out
    blocks    the block table and its events  requests  one request's state: tokens, text, stop strings, sampling
    model     the forward pass over blocks    engine    the loop: waiting → prefill → decode, in one thread
    transfer  KV as bytes                     reports   what subscribers are told
    events    ZMQ                             server    HTTP
    metrics   Prometheus series               launch    what can go wrong at the start
"""

from coterie.engines.worker.config import Role, WorkerConfig
from coterie.engines.worker.launch import serve_worker

__all__ = ["Role", "WorkerConfig", "serve_worker"]
