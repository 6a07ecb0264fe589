"""``coterie worker``: a small OpenAI-compatible server based on transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from coterie.cli.output import JsonOption, print_json, print_lines


def worker_command(
    model: Annotated[
        str, typer.Option(help="Checkpoint folder, or coterie-tiny, which ships with the package.")
    ] = "coterie-tiny",
    role: Annotated[str, typer.Option(help="Role of the worker: prefill, decode or both.")] = "both",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes any free port.", min=0, max=65535)] = 8100,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    advertise: Annotated[
        str | None, typer.Option(help="Host under which other workers find this one. Default: --host.")
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="Worker, HOST:PORT, that KV may be fetched from; may be repeated.")
    ] = None,
    fleet_secret_file: Annotated[
        Path | None, typer.Option(help="File with the fleet's secret. Default: COTERIE_FLEET_SECRET.")
    ] = None,
    worker_key_file: Annotated[
        Path | None, typer.Option(help="File with the key for private endpoints. Default: COTERIE_WORKER_KEY.")
    ] = None,
    kv_events: Annotated[
        str | None, typer.Option(help="ZMQ endpoint to publish KV events on, such as tcp://127.0.0.1:5601.")
    ] = None,
    kv_replay: Annotated[
        str | None, typer.Option(help="ZMQ endpoint that sends past KV events again, such as tcp://127.0.0.1:5603.")
    ] = None,
    expert_events: Annotated[
        str | None, typer.Option(help="ZMQ endpoint to publish expert events on, such as tcp://127.0.0.1:5602.")
    ] = None,
    event_queue: Annotated[int, typer.Option(help="Messages kept for a slow subscriber.", min=1)] = 1000,
    max_batch: Annotated[int, typer.Option(help="Largest number of requests per step.", min=1)] = 16,
    max_waiting: Annotated[
        int, typer.Option(help="Requests that may wait for the batch; more are answered 429.", min=0)
    ] = 256,
    max_step_tokens: Annotated[
        int, typer.Option(help="Largest number of tokens per step; longer prompts are chunked.", min=1)
    ] = 2048,
    block_size: Annotated[int, typer.Option(help="Tokens per KV block.", min=1)] = 16,
    kv_blocks: Annotated[int, typer.Option(help="Number of KV blocks.", min=1)] = 2048,
    kv_ttl: Annotated[float, typer.Option(help="Seconds to keep prefilled KV for a decode worker to fetch.")] = 60.0,
    drain: Annotated[float, typer.Option(help="Seconds to let running requests finish after SIGTERM.")] = 30.0,
    dtype: Annotated[str, typer.Option(help="Precision to load the checkpoint in.")] = "float32",
    device: Annotated[str, typer.Option(help="Device to run on: cpu, cuda or cuda:N.")] = "cpu",
    served_model_name: Annotated[
        str | None, typer.Option(help="Model name in requests. Default: the folder's name.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Serve a model with continuous batching, prefill/decode handoff, KV events and expert capture.

    For demos, fault tests and development without a GPU. Prints one line when it is ready. Ends on Ctrl-C or SIGTERM,
    after finishing running requests.
    """
    from coterie.engines.tiny import TINY, tiny_model_path
    from coterie.engines.worker.config import Role, WorkerConfig
    from coterie.engines.worker.server import serve_worker
    from coterie.net.access import FleetAccess

    access = FleetAccess.read(fleet_secret_file, worker_key_file)
    config = WorkerConfig(
        model=tiny_model_path() if model == TINY and not Path(model).is_dir() else Path(model),
        role=cast(Role, role),
        host=host,
        port=port,
        advertise=advertise,
        peers=tuple(peer or ()),
        fleet_secret=access.secret,
        worker_key=access.key,
        served_model_name=served_model_name,
        dtype=dtype,
        device=device,
        max_batch=max_batch,
        max_waiting=max_waiting,
        max_step_tokens=max_step_tokens,
        block_size=block_size,
        kv_blocks=kv_blocks,
        kv_ttl_s=kv_ttl,
        drain_s=drain,
        kv_events=kv_events,
        kv_replay=kv_replay,
        expert_events=expert_events,
        event_queue=event_queue,
    )

    def ready(url: str) -> None:
        name = served_model_name or config.model.resolve().name
        if json:
            print_json({"url": url, "model": name, "role": role})
        else:
            print_lines(f"Ready: {url} serves {name} (role {role})")

    serve_worker(config, ready)
