"""The reference worker: a small OpenAI-compatible server on transformers. See docs/engines/worker.md.

For demos, fault tests and development without a GPU; not optimised for speed. Everything it does is real: batching,
KV blocks and prefix hits, the handoff of KV between workers, and the recorded experts of every token.

    config    settings                        protocol  parsing of request bodies, building of answers
    blocks    the block table and its events  requests  one request's state: tokens, text, stop strings, sampling
    model     the forward pass over blocks    engine    the loop: waiting → prefill → decode, in one thread
    transfer  KV staged for other workers     fetching  fetching of KV from other workers
    events    event streams                   server    HTTP
    metrics   Prometheus series               embedded  the worker on NumPy, without torch
"""
