"""``coterie warm``: compile the loops of all verbs in advance."""

from __future__ import annotations

import contextlib
import gc
import io
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from coterie import _compiling
from coterie.cli.output import JsonOption, print_json, print_verdict, reporting
from coterie.cli.verbs import VERBS

MODEL = "gpt-oss-20b"
NEXT = "coterie serve --embedded --demo"
ROUTES = "routing"
"""Name of a step that is not a verb: routing with a fitted router, as the demo and a gateway do."""

GROUPS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (
        ("fit", "trace", "--workers", "2", "--batch", "4", "-o", "router.safetensors"),
        (ROUTES, "trace"),
        ("fleet", "trace", "--decoders", "2", "--in-flight", "4", "--requests", "24", "--splits", "2", "--rate", "40"),
        ("tokens", "trace-with-tokens", "-o", "loads.safetensors"),
        ("advise", "trace", "--decoders", "2", "--in-flight", "4", "--requests", "24", "--splits", "2", "--ranks", "4"),
        ("inspect", "trace"),
        ("plan", "trace", "--ranks", "4", "--slots", "36", "--split", "optimal"),
    ),
    (
        ("plan", "trace", "--ranks", "4"),
        ("plan", "trace", "--ranks", "4", "--slots", "36"),
        ("plan", "trace", "--ranks", "4", "--slots", "36", "--requests", "2", "--steps", "8"),
        ("simulate", "trace", "--requests", "24"),
        ("simulate", "--requests", "40"),
    ),
)
"""Commands to run on a small trace in a temporary folder; groups run in parallel, each in its own process."""


def warm_command(json_output: JsonOption = False) -> None:
    """Compile the loops of all verbs in advance, in parallel processes, by running the verbs on a small trace.

    Otherwise the first run of a verb compiles its loops. Compiled loops are stored beside the package, in a
    source tree in .numba_cache, or in the folder NUMBA_CACHE_DIR; a new version of Coterie, Numba or Python, or another
    processor, needs compiling again.
    """
    started = time.perf_counter()
    total = 1 + sum(map(len, GROUPS))
    compiled = 0
    with tempfile.TemporaryDirectory() as folder, _processes() as pools, reporting("Compiling", lines=True) as report:
        first = pools[0].submit(_run, ("generate", "trace", "--model", MODEL, "--requests", "48"), folder)
        first.result()  # wait, because the other commands read its trace
        steps = [pool.submit(_run, step, folder) for pool, group in zip(pools, GROUPS, strict=True) for step in group]
        for finished, future in enumerate(as_completed([first, *steps]), 1):
            verb, functions = future.result()
            compiled += functions
            report(f"Compiled {finished} of {total}: {verb}", finished, total)
    wall_s = time.perf_counter() - started
    verdict = (
        f"Compiled {compiled} loops in {wall_s:.0f} s; the verbs now start without compiling."
        if compiled
        else f"All loops are compiled already ({wall_s:.0f} s to check)."
    )
    if json_output:
        print_json({"compiled": compiled, "wall_s": wall_s, "verdict": verdict, "next": NEXT})
    else:
        print_verdict(verdict, NEXT)


@contextlib.contextmanager
def _processes() -> Iterator[list[ProcessPoolExecutor]]:
    """Yield one process per group. Processes are spawned, so that each imports Numba and counts what it compiles."""
    with contextlib.ExitStack() as stack:
        spawn = multiprocessing.get_context("spawn")
        yield [stack.enter_context(ProcessPoolExecutor(1, spawn)) for _ in GROUPS]


def _run(words: tuple[str, ...], folder: str) -> tuple[str, int]:
    """Run a command in `folder` with its output suppressed; return its verb and the number of compiled functions."""
    gc.disable()  # the compiler's objects stay: searching them for garbage takes a twelfth of the time
    _compiling.count_from_now()
    os.chdir(folder)
    verb, *arguments = words
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        if verb == ROUTES:
            _route(Path(arguments[0]))
        else:
            VERBS[verb].load(verb)(arguments, standalone_mode=False)
    return verb, _compiling.compiled_functions()


def _route(path: Path) -> None:
    """Simulate a small fleet under every router, and route one request with each, as the demo and a gateway do.

    Also write a copy of the trace with token ids, for `coterie tokens`.
    """
    import numpy as np

    import coterie
    from coterie.control import LoopShape
    from coterie.costs.lines import DecodeStepPrices
    from coterie.errors import ConfigError
    from coterie.footprints import footprint
    from coterie.gateway.config import AdviseSection
    from coterie.gateway.control.driver import advisor_of
    from coterie.gateway.embedded import decode_router
    from coterie.gateway.fleet.spec import RouterSpec
    from coterie.gateway.signals import kv_streams, predicted
    from coterie.routing import RouterFit, routers
    from coterie.traces import ActivationTrace

    trace = ActivationTrace.open(path)
    fitted = RouterFit(2, batch=4).fit(trace, np.random.default_rng(0))
    counts = footprint(trace.request(0).expert_ids, trace.meta.num_experts)
    tokens, offsets = trace.arrays()
    ids = np.arange(len(tokens.expert_ids), dtype=np.int32) % 64  # made-up token ids: a generated trace has none
    ActivationTrace.from_arrays(trace.meta, tokens.expert_ids, offsets, trace.requests, tokens.phase, ids).save(
        "trace-with-tokens"
    )
    kv_streams.compile_directory()
    predicted.warm_up()
    for name in ("joint", None):
        decode_router(name)
    shape = LoopShape(MODEL, fitted.num_layers, fitted.num_experts, fitted.learned.top_k, fitted.workers)
    advisor_of(AdviseSection(ranks=4), shape, RouterSpec())[0].warm_up()
    prices, made = DecodeStepPrices.of(coterie.step_model(MODEL), 4), {}
    for name in routers.names():
        with contextlib.suppress(ConfigError):  # skip routers that need more than a fit, such as labels
            made[name] = routers.make(name, {"fitted": fitted, "cost": prices, "seed": 0})
    for router in made.values():
        router.route(coterie.Request("one", 8, counts), fitted.fleet(4))
    model = coterie.step_model(MODEL)
    coterie.simulate(trace, model=model, decoders=2, in_flight=2, routers=list(made), splits=1, requests=40)
