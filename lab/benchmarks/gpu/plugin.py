"""The plugin in real vLLM on a GPU: what it captures under CUDA graphs, what that costs, and the scheduler.

    python lab/benchmarks/gpu/plugin.py run MODEL SEEN.json        # ids beside those that the engine used
    python lab/benchmarks/gpu/plugin.py ordered MODEL SEEN.json    # the scheduler, given the footprints of SEEN.json
    python lab/benchmarks/gpu/plugin.py cost MODEL [ROUNDS [ROWS]]
    python lab/benchmarks/gpu/plugin.py top_k                      # the top k of logits beside vLLM's bundled kernel

MODEL is a folder. Without weights in it they are random, and every step has a routing drawn anew. The engine's ids are
those of vLLM's own capturer; where a kernel routes internally, as gpt-oss in mxfp4, those of the kernel's top k. `cost`
captures every graph twice, with the hook and without, and times decode steps of ROWS rows, 16 by default, with one and
the other in turn.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from coterie.engines.calibration.calibrate import model_config
from coterie.engines.calibration.imposed import ENVIRONMENT, ImposedEngine, ImposedRouting

REQUESTS, PLACES, ANSWER, SHARED, STEP_TOKENS = 160, 20, 40, 64, 256
CONTEXT, STEPS, KV_BYTES = 512, 60, 8 << 30
EVENTS = "ipc:///tmp/coterie-plugin-{}"
CONNECTOR = {"kv_connector": "CoterieConnector", "kv_role": "kv_both"}
ORDER = {"strategy": "latency_aware", "device": "h200", "window_size": 64}


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

    def wait(self, count: int) -> dict[str, Any]:
        until = time.monotonic() + 60
        while len(self.events) < count and time.monotonic() < until:
            time.sleep(0.05)
        self.stopping = True
        return self.events


class Capturers:
    """The experts that the engine used, seen behind the plugin's hooks in this process, by request.

    They come from vLLM's own capturer, and from the kernel's top k where a kernel routes internally.
    """

    def __init__(self, own: bool = True) -> None:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCapturer
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        initialize, execute = GPUModelRunner.initialize_kv_cache, GPUModelRunner.execute_model
        self.steps: list[tuple[list[tuple[str, int]], Any]] = []
        self.routing: ImposedRouting | None = None

        def initialized(runner: Any, *args: Any, **kwargs: Any) -> None:
            initialize(runner, *args, **kwargs)
            self.runner = runner
            if not own:
                return
            self.own = RoutedExpertsCapturer(runner.scheduler_config.max_num_batched_tokens, runner.vllm_config)
            for module in runner.model.modules():
                if isinstance(module, MoERunner) and module.is_monolithic:
                    self.note_layer(module)
                elif isinstance(module, MoERunner) and (ours := module.router.capture_fn) is not None:
                    module.router.set_capture_fn(partial(self.both, ours, module.layer_id))
            if (kernels := sys.modules.get("triton_kernels.topk")) is not None:
                self.note_top_k(kernels)

        def executed(runner: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            if self.routing is not None and self.routing.logits is not None:
                self.routing.logits.normal_()
            result = execute(runner, scheduled, *args, **kwargs)
            if not own:
                return result
            tokens = scheduled.num_scheduled_tokens
            rows = [(name.rsplit("-", 1)[0], tokens[name]) for name in runner.input_batch.req_ids if name in tokens]
            self.steps.append((rows, self.own.device_buffer[: sum(n for _, n in rows)].clone()))
            return result

        GPUModelRunner.initialize_kv_cache, GPUModelRunner.execute_model = initialized, executed

    def note_layer(self, module: Any) -> None:
        """Note the layer whose kernel is about to route."""
        forward, layer = module.routed_experts.forward_monolithic, module.layer_id

        def noted(**arguments: Any) -> Any:
            self.layer = layer
            return forward(**arguments)

        module.routed_experts.forward_monolithic = noted

    def note_top_k(self, kernels: Any) -> None:
        """Keep the ids of the kernel's own top k; a graph that is captured from now on keeps them at each replay."""
        top_k = kernels.topk

        def noted(*args: Any, **kwargs: Any) -> Any:
            result = top_k(*args, **kwargs)
            ids = result[1]
            self.own.device_buffer[: len(ids), self.layer].copy_(ids)
            return result

        kernels.topk = noted

    def both(self, ours: Any, layer: int, ids: Any) -> None:
        ours(ids)
        self.own.capture(layer, ids)

    def by_request(self) -> dict[str, Any]:
        """Return [token, layer, k] of each request, without the tokens that were cached."""
        parts: dict[str, list[Any]] = {}
        for rows, ids in self.steps:
            start, held = 0, ids.cpu().numpy()
            for name, count in rows:
                parts.setdefault(name, []).append(held[start : start + count])
                start += count
        return {name: np.concatenate(each) for name, each in parts.items()}


def run(folder: Path, seen: Path, ordered: bool) -> None:
    os.environ.update(ENVIRONMENT)
    import vllm

    from coterie.engines.vllm.plugin import register
    from coterie.engines.vllm.settings import ConnectorSettings
    from coterie.footprints.positions import PositionStore
    from coterie.wire.footprints import KEY, footprint_of

    register()
    capturers = Capturers()
    config, spec = model_config(folder)
    weights = {} if list(folder.glob("*.safetensors")) else {"load_format": "dummy"}
    if weights:
        ids = np.zeros((1, spec.num_moe_layers, spec.top_k), np.int64)
        capturers.routing = ImposedRouting(spec, ids, STEP_TOKENS, frozenset())
        capturers.routing.install()
    endpoint, store = EVENTS.format(os.getpid()), f"plugin-{os.getpid()}"
    extra = {"footprint": "always", "events": endpoint, "events_queue": 4096, "store": store}
    settings: dict[str, Any] = {"kv_transfer_config": {**CONNECTOR, "kv_connector_extra_config": extra}}
    before = json.loads(seen.read_text()) if ordered else {}
    if ordered:
        settings["scheduler_cls"] = "coterie.engines.vllm.scheduler.ExpertAwareAsyncScheduler"
        settings["additional_config"] = {"coterie": {"scheduler": {**ORDER, "decisions": f"{seen}.decisions"}}}
    engine = vllm.LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        max_num_seqs=PLACES,
        max_num_batched_tokens=STEP_TOKENS,
        max_model_len=1024,
        kv_cache_memory_bytes=KV_BYTES,
        gpu_memory_utilization=0.25,
        **weights,
        **settings,
    ).llm_engine
    listener = Listener(endpoint)
    asked = {"detokenize": False, "temperature": 0.0, "ignore_eos": True}
    for number, prompt in enumerate(prompts(config["vocab_size"])):
        name = f"r{number}"
        more = {"extra_args": {"kv_transfer_params": {KEY: before[name]["footprint"]}}} if ordered else {}
        sampling = vllm.SamplingParams(**asked, **more, max_tokens=ANSWER // 2 + 7 * number % ANSWER)
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    began, done = time.perf_counter(), dict[str, Any]()
    while engine.has_unfinished_requests():
        done |= {answer.request_id: answer for answer in engine.step() if answer.finished}
    seconds, own, events = time.perf_counter() - began, capturers.by_request(), listener.wait(len(done))
    record: dict[str, Any] = {}
    checked = wrong = cached = 0
    for name, answer in done.items():
        tokens, event = [*answer.prompt_token_ids, *answer.outputs[0].token_ids][:-1], events[name]
        footprint, ids = footprint_of(answer.kv_transfer_params), event.ids()
        assert footprint is not None
        assert event.seen().all()
        assert event.tokens().tolist() == tokens
        counts = [np.bincount(layer.ravel(), minlength=spec.num_experts) for layer in ids.swapaxes(0, 1)]
        np.testing.assert_array_equal(footprint.counts, counts)
        theirs = own[name][: len(tokens) - event.cached_tokens]
        assert len(theirs) == len(tokens) - event.cached_tokens
        wrong += int((np.sort(ids[event.cached_tokens :]) != np.sort(theirs)).any(axis=2).sum())
        checked, cached = checked + theirs[..., 0].size, cached + event.cached_tokens
        record[name] = {"footprint": answer.kv_transfer_params[KEY], "tokens": tokens}
    steps, _, distinct = PositionStore.attach(ConnectorSettings(store=store).store_path("", 0)).totals
    print(
        f"vLLM {vllm.__version__}, {spec.name} in {spec.weight_dtype}: {len(done)} requests, {steps} steps, "
        f"{seconds:.1f} s, async scheduling {engine.vllm_config.scheduler_config.async_scheduling}; of {checked} "
        f"token-layers {wrong} have other experts than the engine used ({cached} cached tokens not compared); "
        f"{len(done)} footprints are the counts of their ids; {distinct / steps / spec.num_moe_layers:.2f} distinct "
        "experts a step and layer"
    )
    if ordered:
        equal = sum(before[name]["tokens"] == record[name]["tokens"] for name in record)
        print(f"{equal} of {len(record)} requests have the tokens of {seen}")
    else:
        seen.write_text(json.dumps(record))


def cost(folder: Path, rounds: int = 40, rows: int = 16) -> None:
    os.environ.update(ENVIRONMENT)
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from coterie.engines.vllm.plugin import register

    register()
    capturers = Capturers(own=False)
    config, spec = model_config(folder)
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((4096, spec.num_moe_layers, spec.num_experts)))[..., : spec.top_k]
    engine = ImposedEngine(
        config, spec, ids, (CONTEXT,), 2 * CONTEXT, rows, kv_transfer_config=KVTransferConfig(**CONNECTOR)
    )
    runner, writer = capturers.runner, get_kv_transfer_group()._writer
    graphs = {True: dict(runner.model.concrete_cudagraph_entries)}
    assert graphs[True], "no full graph of decode steps"
    runner.model.concrete_cudagraph_entries.clear()
    writer.capture.on = False
    runner.capture_model()
    graphs[False] = dict(runner.model.concrete_cudagraph_entries)
    assert graphs[True].keys() == graphs[False].keys()
    times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for number in range(rounds + 1):
        at = rng.integers(0, len(ids), (STEPS, rows))
        for on in (True, False) if rng.random() < 0.5 else (False, True):
            runner.model.concrete_cudagraph_entries = dict(graphs[on])
            writer.store.enabled = on
            time.sleep(0.05)  # the steps before are written by a thread
            before = writer.store.totals[1]
            steps = engine.decode(CONTEXT, at)
            time.sleep(0.05)
            kept = writer.store.totals[1] - before
            assert (kept > 0) == on, f"capture {on}: {kept} tokens were kept"
            if number:  # the first round warms up
                periods = [step.period_us for step in steps if step.period_us]
                times[on].append((float(np.median([step.us for step in steps])), float(np.median(periods))))
    captured, bare = np.array(times[True]), np.array(times[False])
    report: dict[str, Any] = {"model": spec.name, "dtype": spec.weight_dtype, "software": engine.version}
    for column, name in enumerate(("gpu", "wall")):
        ratios = captured[:, column] / bare[:, column]
        draws = np.median(rng.choice(ratios, (4000, rounds)), axis=1)
        report[name] = {
            "off_us": round(float(np.median(bare[:, column])), 1),
            "on_over_off": round(float(np.median(ratios)), 5),
            "ci95": np.quantile(draws, (0.025, 0.975)).round(5).tolist(),
        }
    print(json.dumps({**report, "rows": rows, "rounds": rounds, "steps": STEPS}))


def top_k(rows: int = 100_000) -> None:
    """Compare the top k of logits with the routing of vLLM's bundled triton_kernels: the experts of every gate."""
    import torch
    from vllm.utils.import_utils import has_triton_kernels

    from coterie.engines.kernels.top_k import top_k_into

    assert has_triton_kernels()
    from triton_kernels.routing import routing

    draw = torch.Generator(device="cuda").manual_seed(0)
    for experts, k in ((32, 4), (128, 4)):  # gpt-oss-20b, gpt-oss-120b
        normal = torch.randn(rows, experts, device="cuda", generator=draw).bfloat16()
        few = torch.randint(-3, 4, (rows, experts), device="cuda", generator=draw).bfloat16() * 0.5
        few = torch.where(torch.rand(few.shape, device="cuda", generator=draw) < 0.2, -few, few)  # both zeros
        for name, logits in (("normal", normal), ("seven values", few)):
            ids = torch.full((rows, k), 255, dtype=torch.uint8, device="cuda")
            top_k_into(logits, ids)
            data, gather, _ = routing(logits, k)
            by_expert = torch.repeat_interleave(torch.arange(experts, device="cuda"), data.expt_hist)
            theirs = torch.empty(rows * k, dtype=torch.long, device="cuda")
            theirs[gather.src_indx.long()] = by_expert  # gates in the order of experts
            largest = logits.sort(dim=1, descending=True).values
            tied = int((largest[:, k - 1] == largest[:, k]).sum())
            wrong = int((ids.long().sort().values != theirs.view(rows, k).sort().values).any(dim=1).sum())
            print(f"top {k} of {experts}, {name}: {rows} rows, {tied} with a tie at the k-th place, {wrong} differ")


def main() -> None:
    match sys.argv[1:]:
        case ["run" | "ordered" as how, folder, seen]:
            run(Path(folder), Path(seen), how == "ordered")
        case ["top_k"]:
            top_k()
        case ["cost", folder, *more] if len(more) <= 2:
            cost(Path(folder), *map(int, more))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
