"""The plugin in real vLLM on a GPU: what it captures under CUDA graphs, what that costs, and the scheduler.

    python lab/benchmarks/gpu/plugin.py run own|plugin|ordered MODEL OUT.npz    # a process each, at the same time if wanted
    python lab/benchmarks/gpu/plugin.py same OWN.npz OTHER.npz                  # tokens and experts of two runs
    python lab/benchmarks/gpu/plugin.py cost MODEL [ROUNDS]

MODEL is a folder; without weights in it, they are random. `own` has vLLM return its routed experts, `plugin` has the
connector, and `ordered` also the scheduler, which is given the footprints that `plugin` wrote to PLUGIN_FOOTPRINTS.
`cost` captures every graph twice, with the hook and without, and times decode steps of 16 rows in turn.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from coterie.engines.calibration.calibrate import model_config
from coterie.engines.calibration.imposed import ENVIRONMENT, ImposedEngine

REQUESTS, PLACES, ANSWER, SHARED = 160, 20, 40, 64
CONTEXT, ROWS, STEPS, KV_BYTES = 512, 16, 60, 8 << 30
EVENTS = "ipc:///tmp/coterie-plugin-{}"
FOOTPRINTS = "PLUGIN_FOOTPRINTS"
CONNECTOR = {"kv_connector": "CoterieConnector", "kv_role": "kv_both"}


def prompts(vocabulary: int) -> list[list[int]]:
    """Prompts of five themes, each with words and a beginning of its own; some longer than a step."""
    rng = np.random.default_rng(0)
    words = rng.integers(10, vocabulary - 10, (5, 40))
    starts = [rng.choice(theme, SHARED) for theme in words]
    lengths = rng.integers(2, 400, REQUESTS)
    return [[*map(int, starts[n % 5]), *map(int, rng.choice(words[n % 5], size))] for n, size in enumerate(lengths)]


class Listener(threading.Thread):
    """Expert events of the connector, by request."""

    def __init__(self, endpoint: str) -> None:
        from coterie.engines.vllm.recording import Subscriber

        super().__init__(daemon=True)
        self.subscriber, self.events, self.stopping = Subscriber(endpoint), dict[str, Any](), False
        self.subscriber.wait(60)
        self.start()

    def run(self) -> None:
        while not self.stopping:
            for event in self.subscriber.events(0.2):
                if hasattr(event, "request_id"):
                    self.events[event.request_id.rsplit("-", 1)[0]] = event


def run(how: str, folder: Path, out: Path) -> None:
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
    import torch
    import vllm

    from coterie.engines.vllm.plugin import register
    from coterie.engines.vllm.settings import ConnectorSettings
    from coterie.footprints.positions import PositionStore
    from coterie.wire.footprints import KEY

    register()
    endpoint, settings = EVENTS.format(os.getpid()), dict[str, Any]()
    if how == "own":
        settings["enable_return_routed_experts"] = True
    else:
        extra = {"footprint": "always", "events": endpoint, "events_queue": 4096, "store": f"plugin-{os.getpid()}"}
        settings["kv_transfer_config"] = {**CONNECTOR, "kv_connector_extra_config": extra}
    if how == "ordered":
        settings["scheduler_cls"] = "coterie.engines.vllm.scheduler.ExpertAwareAsyncScheduler"
        ours = {"strategy": "latency_aware", "device": "h200", "window_size": 64, "decisions": f"{out}.decisions"}
        settings["additional_config"] = {"coterie": {"scheduler": ours}}
    config = json.loads((folder / "config.json").read_text())
    weights = {} if list(folder.glob("*.safetensors")) else {"load_format": "dummy"}
    engine = vllm.LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        max_num_seqs=PLACES,
        max_num_batched_tokens=256,
        max_model_len=1024,
        kv_cache_memory_bytes=KV_BYTES,
        enforce_eager=not torch.cuda.is_available(),
        **weights,
        **settings,
    ).llm_engine
    listener = None if how == "own" else Listener(endpoint)
    sent = os.environ.get(FOOTPRINTS)
    known = json.loads(Path(sent).read_text()) if sent and how == "ordered" else {}
    asked = {"detokenize": False, "temperature": 0.0, "ignore_eos": True, "max_tokens": ANSWER}
    for number, prompt in enumerate(prompts(config["vocab_size"])):
        name = f"r{number}"
        more = {"extra_args": {"kv_transfer_params": {KEY: known[name]}}} if name in known else {}
        engine.add_request(name, {"prompt_token_ids": prompt}, vllm.SamplingParams(**asked, **more))
    began, done = time.perf_counter(), dict[str, Any]()
    while engine.has_unfinished_requests():
        done |= {answer.request_id: answer for answer in engine.step() if answer.finished}
    seconds = time.perf_counter() - began
    arrays: dict[str, Any] = {}
    footprints: dict[str, str] = {}
    for name, answer in done.items():
        tokens = [*answer.prompt_token_ids, *answer.outputs[0].token_ids][:-1]
        arrays[f"{name} tokens"] = np.array(tokens)
        if how == "own":
            parts = [answer.prompt_routed_experts, answer.outputs[0].routed_experts]
            arrays[f"{name} ids"] = np.concatenate([part for part in parts if part is not None])[: len(tokens)]
        else:
            footprints[name] = answer.kv_transfer_params[KEY]
    if listener is not None:
        until = time.monotonic() + 60
        while len(listener.events) < len(done) and time.monotonic() < until:
            time.sleep(0.05)
        listener.stopping = True
        for name, event in listener.events.items():
            assert event.seen().all(), f"{name}: positions without experts"
            assert event.tokens().tolist() == arrays[f"{name} tokens"].tolist(), name
            arrays[f"{name} ids"] = event.ids()
            arrays[f"{name} footprint"] = _counts(footprints[name])
        store = PositionStore.attach(ConnectorSettings(store=f"plugin-{os.getpid()}").store_path("", 0))
        steps, tokens, distinct = store.totals
        print(f"{how}: {steps} steps, {tokens} tokens, {distinct / steps:.2f} distinct experts a step")
        if sent and how == "plugin":
            Path(sent).write_text(json.dumps(footprints))
    np.savez_compressed(out, **arrays)
    print(f"{how}: vLLM {vllm.__version__}, {len(done)} requests in {seconds:.1f} s")


def _counts(text: str) -> Any:
    from coterie.wire.footprints import KEY, footprint_of

    footprint = footprint_of({KEY: text})
    assert footprint is not None
    assert not footprint.missing
    return footprint.counts


def same(own: Path, other: Path) -> None:
    with np.load(own) as file:
        theirs = dict(file)
    with np.load(other) as file:
        ours = dict(file)
    names = [name.removesuffix(" tokens") for name in theirs if name.endswith(" tokens")]
    equal = total = wrong = footprints = 0
    for name in names:
        a, b = theirs[f"{name} tokens"], ours[f"{name} tokens"]
        alike = int(np.argmin(np.append(a[: len(b)] == b[: len(a)], False)))
        equal += alike == len(a) == len(b)
        x, y = theirs[f"{name} ids"][:alike], ours[f"{name} ids"][:alike]
        if y.shape[1] != x.shape[1]:
            sys.exit(f"{name}: ids are {x.shape} and {y.shape}")
        total, wrong = total + x[..., 0].size, wrong + int((np.sort(x) != np.sort(y)).any(axis=2).sum())
        if f"{name} footprint" in ours:
            ids = ours[f"{name} ids"]
            counts = np.stack([np.bincount(layer.ravel(), minlength=int(ids.max()) + 1) for layer in ids.swapaxes(0, 1)])
            footprints += np.array_equal(ours[f"{name} footprint"][:, : counts.shape[1]], counts)
    print(
        f"{equal} of {len(names)} requests have the same tokens; of {total} token-layers before the first other token "
        f"{wrong} have other experts; {footprints} footprints are the counts of their ids"
    )


def cost(folder: Path, rounds: int) -> None:
    os.environ.update(ENVIRONMENT)
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from coterie.engines.vllm.plugin import register

    register()
    config, spec = model_config(folder)
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((4096, spec.num_moe_layers, spec.num_experts)))[..., : spec.top_k]
    engine = ImposedEngine(
        config, spec, ids, (CONTEXT,), 2 * CONTEXT, ROWS, kv_transfer_config=KVTransferConfig(**CONNECTOR)
    )
    runner = next(one for one in gc.get_objects() if isinstance(one, GPUModelRunner))
    connector = get_kv_transfer_group()
    writer = connector._writer
    graphs = {True: dict(runner.model.concrete_cudagraph_entries)}
    assert graphs[True], "no full graph of decode steps"
    runner.model.concrete_cudagraph_entries.clear()
    writer.capture.on = False
    runner.capture_model()
    graphs[False] = dict(runner.model.concrete_cudagraph_entries)
    assert graphs[True].keys() == graphs[False].keys()
    times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for number in range(rounds + 1):
        at = rng.integers(0, len(ids), (STEPS, ROWS))
        for on in (True, False) if rng.random() < 0.5 else (False, True):
            runner.model.concrete_cudagraph_entries = dict(graphs[on])
            writer.store.enabled = on
            before = writer.store.totals[1]
            steps = engine.decode(CONTEXT, at)
            kept = writer.store.totals[1] - before
            assert (kept > 0) == on, f"capture {on}: {kept} tokens were kept"
            if number:  # the first round warms up
                periods = [step.period_us for step in steps if step.period_us]
                times[on].append((float(np.median([step.us for step in steps])), float(np.median(periods))))
    on, off = np.array(times[True]), np.array(times[False])
    report: dict[str, Any] = {"model": spec.name, "dtype": spec.weight_dtype, "software": engine.version}
    for column, name in enumerate(("gpu", "wall")):
        ratios = on[:, column] / off[:, column]
        draws = np.median(rng.choice(ratios, (4000, rounds)), axis=1)
        report[name] = {
            "off_us": round(float(np.median(off[:, column])), 1),
            "on_over_off": round(float(np.median(ratios)), 5),
            "ci95": np.quantile(draws, (0.025, 0.975)).round(5).tolist(),
        }
    print(json.dumps({**report, "rows": ROWS, "rounds": rounds, "steps": STEPS}))


def main() -> None:
    match sys.argv[1:]:
        case ["run", ("own" | "plugin" | "ordered") as how, folder, out]:
            run(how, Path(folder), Path(out))
        case ["same", own, other]:
            same(Path(own), Path(other))
        case ["cost", folder, *rounds]:
            cost(Path(folder), int(rounds[0]) if rounds else 40)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
