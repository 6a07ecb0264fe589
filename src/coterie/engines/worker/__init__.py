"""The reference worker: a small OpenAI-compatible server on transformers. See docs/engines/worker.md.

For demos, fault tests and development without a GPU; it claims no speed. What it promises is that everything is real:
the batching, the blocks and their prefix hits, the handoff of KV between workers, the experts beside every block.

    config    settings                        protocol  bodies in, answers out
    blocks    the block table and its events  requests  one request's state: tokens, text, stop strings, sampling
    model     the forward pass over blocks    engine    the loop: waiting → prefill → decode, in one thread
    transfer  KV handed to another worker     fetching  KV handed over by one
    events    what subscribers are told       server    HTTP
    metrics   Prometheus series               embedded  the worker on NumPy, without torch
"""
