"""Start a worker: what can fail is tried in the order of its cost, ports before the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

from coterie.engines.worker.config import WorkerConfig
from coterie.engines.worker.events import EventStream
from coterie.errors import UnavailableError
from coterie.net.processes import bind
from coterie.wire.expert_events import TOPIC as EXPERT_TOPIC

KV_TOPIC = b"kv"

NEEDS = ("torch", "transformers")
"""Packages of the extra `torch`."""


def serve_worker(config: WorkerConfig, ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; `ready` is called once with the URL. Everything wrong raises before that."""
    check_requirements()
    from coterie.engines.transformers.loading import check_model_folder, check_torch_dtype

    check_model_folder(config.model)
    check_torch_dtype(config.dtype)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(bind(config.host, config.port))
        streams = open_streams(config, stack)
        from coterie.engines.worker.server import run_worker

        run_worker(config, listener, ready, *streams)


class Streams(NamedTuple):
    """Event streams of a worker; None where it has none."""

    kv: EventStream | None
    experts: EventStream | None


def open_streams(config: WorkerConfig, stack: contextlib.ExitStack) -> Streams:
    """Bind the configured streams; the stack closes them."""
    kv = experts = None
    queue, secret = config.event_queue, config.fleet_secret
    if config.kv_events is not None:
        kv = EventStream(config.kv_events, KV_TOPIC, queue, secret, config.kv_replay, config.replay_queue)
        stack.callback(kv.close)
    if config.expert_events is not None:
        experts = EventStream(config.expert_events, EXPERT_TOPIC, queue, secret)
        stack.callback(experts.close)
    return Streams(kv, experts)


def check_requirements() -> None:
    missing = [module for module in NEEDS if find_spec(module) is None]
    if missing:
        raise UnavailableError(f"the worker needs {', '.join(missing)}: pip install 'coterie[torch]'")
