"""``coterie serve``: the gateway in front of a fleet."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.output import JsonOption, print_json, print_lines, print_verdict, reporting, shell
from coterie.errors import CoterieError, UnavailableError, check, refuse

if TYPE_CHECKING:
    from coterie.gateway.config import GatewayConfig
    from coterie.gateway.embedded import EmbeddedFleet
    from coterie.gateway.fleet.spec import RouterSpec
    from coterie.gateway.serve import Ready, RunningGateway


def serve_command(
    config: Annotated[
        Path | None, typer.Option("--config", help="YAML file of the fleet: workers, routers, keys, limits.")
    ] = None,
    embedded: Annotated[
        bool,
        typer.Option(
            "--embedded", help="Start a small fleet here: one prefill and three decode workers of coterie-tiny."
        ),
    ] = False,
    demo: Annotated[
        bool,
        typer.Option(
            "--demo",
            help="With --embedded: show the page, compare routers as `coterie demo` does; on a terminal stay up, with "
            "requests that keep the fleet busy.",
        ),
    ] = False,
    port: Annotated[
        int | None,
        typer.Option("--port", help="With --embedded: port to listen on; 0 takes any free port.", min=0, max=65535),
    ] = None,
    router: Annotated[
        str | None,
        typer.Option("--router", help="With --embedded: router of the decode workers, such as joint:experts=0."),
    ] = None,
    folder: Annotated[
        Path, typer.Option("--out", help="With --demo: folder to write the figure and the recorded trace to.")
    ] = Path("out"),
    check: Annotated[bool, typer.Option("--check", help="Read the config, say what it would serve, and end.")] = False,
    live: Annotated[
        bool,
        typer.Option(
            "--live",
            help="With --check: also try each worker's health, models and event streams; exit code 1 if one fails.",
        ),
    ] = False,
    new_key: Annotated[
        str | None, typer.Option("--new-key", help="Print a new API key of this name and the line to store, and end.")
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="With --new-key: an administrator's key.")] = False,
    only: Annotated[
        str | None,
        typer.Option("--only", help="With --new-key: a key that opens `metrics` (for Prometheus) or `peers` alone."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Route requests by prefix, experts and load in front of a live fleet; OpenAI-compatible.

    Serves until Ctrl-C or SIGTERM, and finishes running requests first. SIGHUP reads the config again; an invalid
    config changes nothing. Secrets come from the environment: COTERIE_FLEET_SECRET and COTERIE_WORKER_KEY.
    """
    if new_key is not None:
        _print_key(new_key, admin, only, json)
        return
    refuse(
        {
            "give --config FILE, or --embedded for a small fleet on this machine": (config is None) == (not embedded),
            "--demo, --port and --router need --embedded; a config file names its own": not embedded
            and (demo or port is not None or router is not None),
            "--check is for config files": embedded and check,
            "--live needs --check": live and not check,
        }
    )
    if config is not None:
        _serve_file(config, check, live, json)
    else:
        _serve_embedded(port, router, demo, folder, json)


def _print_key(name: str, admin: bool, only: str | None, json: bool) -> None:
    from coterie.gateway.access import new_key

    key, entry = new_key(name, admin=admin, only=only)
    if json:
        print_json({"key": key, "name": name, "sha256": entry.sha256, "admin": admin, "only": only})
    else:
        print_lines(f"Key, shown once: {key}", f"Line for the keys file:\n{entry.as_yaml()}")


def _serve_file(path: Path, check: bool, live: bool, json: bool) -> None:
    from coterie.gateway.config import read_config
    from coterie.gateway.serve import check_config, run_gateway

    config = read_config(path)
    check_config(config)
    if live:
        _try_workers(config, path, json)
    elif check:
        _print_check(config, path, json)
    else:
        front = None
        if config.picker is not None:
            from coterie.stacks.envoy import picker_class

            front = picker_class()
        run_gateway(config, path, _ready(config, json), front=front)


def _serve_embedded(port: int | None, router: str | None, demo: bool, folder: Path, json: bool) -> None:
    from coterie.control.switchback import SwitchbackSettings
    from coterie.gateway.embedded import NO_TURNS, decode_router, run_embedded
    from coterie.gateway.serve import check_config, run_gateway
    from coterie.gateway.watching.logs import Log

    spec = decode_router(router)
    typer.echo("Starting one prefill and three decode workers of coterie-tiny", err=True)
    with run_embedded() as fleet:
        listen = f"127.0.0.1:{8000 if port is None else port}"
        # The demo compares routers by itself; turns of its few requests would give the page a second number, of noise.
        config = fleet.config(listen, decode=spec, switchback=NO_TURNS if demo else SwitchbackSettings())
        check_config(config)
        if not demo:
            run_gateway(config, None, _ready(config, json), access=fleet.access)
            return
        with _demonstrating(fleet, folder, json) as ready, (fleet.folder / "gateway.log").open("w") as log:
            run_gateway(config, None, ready, Log(log), fleet.access)


def _ready(config: GatewayConfig, json: bool) -> Ready:
    def ready(running: RunningGateway, _: Callable[[], None]) -> None:
        url = running.url
        if json:
            print_json({"url": url, "workers": [worker.id for worker in config.workers]})
        else:
            router = config.decode.router
            by = router if config.handshake == "none" else f"{config.prefill.router} and {router}"
            print_lines(
                f"Serving at {url}: {len(config.workers)} workers, routed by {by}. Ctrl-C ends it.",
                f"Dashboard: {url}/",
                f"Next: {shell('coterie', 'load', url, *_compared(config.decode))}",
            )

    return ready


def _compared(spec: RouterSpec) -> list[str]:
    """Return the options that compare the decode router, or one that its spec can make, with the shortest queue."""
    from coterie.gateway.fleet.spec import RouterSpec

    base = RouterSpec().router
    other = spec.router if spec.router != base else "joint" if spec.fit is None else "latency_aware"
    return ["--router", base, "--router", other]


def _print_check(config: GatewayConfig, path: Path, json: bool) -> None:
    from coterie.gateway.serve import misfits

    said = misfits(config)
    roles = {role: sum(worker.role == role for worker in config.workers) for role in ("prefill", "decode", "both")}
    if json:
        print_json({"listen": config.listen, "workers": roles, "decode": config.decode.router, "notes": said})
    else:
        named = ", ".join(f"{count} {role}" for role, count in roles.items() if count) or "no"
        pods = "" if config.pods is None else f" and the pods of {config.pods.selector}"
        print_lines(*said)
        print_verdict(
            f"{path} is valid: {named} workers{pods} on {config.listen}, decode routed by {config.decode.router}.",
            f"coterie serve --config {path}",
        )


def _try_workers(config: GatewayConfig, path: Path, json: bool) -> None:
    from coterie.gateway.trying import try_workers
    from coterie.net.access import FleetAccess

    tried = asyncio.run(try_workers(config, FleetAccess.read()))
    failed = [worker for worker in tried if worker.problems]
    again = shell("coterie", "serve", "--config", path, *(("--check", "--live") if failed else ()))
    if json:
        workers = [{name: getattr(worker, name) for name in worker.__struct_fields__} for worker in tried]
        print_json({"listen": config.listen, "workers": workers, "next": again})
    else:
        for worker in tried:
            context = "" if worker.context_tokens is None else f", {worker.context_tokens:,} tokens of context"
            well = [] if worker.problems else [f"ready: {', '.join(worker.models)}{context}"]
            print_lines(*(f"{worker.id}: {said}" for said in (*well, *worker.problems)))
        pods = "" if config.pods is None else f"; the pods of {config.pods.selector} were not tried"
        print_verdict(f"{len(tried) - len(failed)} of {len(tried)} workers can serve as {path} says{pods}.", again)
    if failed:
        raise typer.Exit(1)


@contextlib.contextmanager
def _demonstrating(fleet: EmbeddedFleet, folder: Path, json: bool) -> Iterator[Ready]:
    """Show the dashboard's URL and compare routers once the gateway is up, in a separate thread.

    On a terminal, requests then keep the fleet busy until Ctrl-C. Without a terminal the gateway exits, since nobody
    could see it or press Ctrl-C.
    """
    from coterie.answers.demo.serving import keep_busy, run_on
    from coterie.cli.verbs.demo import print_result

    problems: list[BaseException] = []
    stays = sys.stdout.isatty()

    def show(running: RunningGateway) -> None:
        url = running.url
        if not json:
            print_lines(f"Dashboard: {url}/")
        with reporting("Recording", lines=True) as report:
            result = run_on(fleet, running, folder, report)
        print_result(result, json)
        check(result.same_tokens, "routers gave different tokens", UnavailableError)

    def ready(running: RunningGateway, stop: Callable[[], None]) -> None:
        def run() -> None:
            try:
                show(running)
            except BaseException as error:
                problems.append(error)
            if problems or not stays:
                stop()
            else:
                print_lines(
                    "\nThe gateway routes by the fitted router now, and requests keep it busy: "
                    f"{running.url}/ shows it. Ctrl-C ends it."
                )
                with contextlib.suppress(CoterieError):  # the requests fail when the gateway stops
                    asyncio.run(keep_busy(running.url))

        threading.Thread(target=run, name="coterie-demo", daemon=True).start()

    yield ready
    if problems:
        raise problems[0]
