"""What padding rows of a decode batch choose and cost in real vLLM, and what helps.

    COTERIE_DATA=… python lab/benchmarks/gpu/padding.py pack padding.npz     # recorded experts for gpt-oss-20b
    python lab/benchmarks/gpu/padding.py coterie-tiny auto padding.npz OUT.jsonl
    python lab/benchmarks/gpu/padding.py gpt-oss-20b mxfp4 padding.npz OUT.jsonl
    python lab/benchmarks/gpu/padding.py table OUT.jsonl

One load of vLLM has graphs for every batch size up to 64. A step is sent to the size that the default sizes would pad
it to, or to its own, by exchanging the table of the graph dispatcher. So one load compares, step by step in turn:

* stale: default sizes; padding rows take the experts of other tokens (gpt-oss: recorded ones) or their own (tiny).
* mask: padding rows take no expert: ids of -1 (vLLM's own mask, `VLLM_MOE_SKIP_PADDING`) or, where router and experts
  are one Triton kernel, the count of rows that its routing takes.
* single: a graph of the batch's own size.

Jobs: `choice` (which experts padding rows choose, the router's own choice), `steps` (times), `equal` (tokens and hidden
states of real rows against those of `stale`), `graphs` (seconds and memory of every capture). Real weights of
coterie-tiny come with the package; gpt-oss-20b has random weights, its router drawn anew so that tokens differ.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coterie.engines.calibration.imposed import ENVIRONMENT as IMPOSED
from coterie.engines.calibration.imposed import HIGH, LOW

HERE = Path(__file__).resolve().parent
TINY = HERE.parents[2] / "src" / "coterie" / "data" / "coterie-tiny"
SHAPES = json.loads((HERE / "shapes.json").read_text())

ENVIRONMENT = {**IMPOSED, "HF_HUB_OFFLINE": "1", "VLLM_MOE_SKIP_PADDING": "1"}
DEVICE = "cuda"
MOST = 64
"""Largest batch, and the number of rows whose experts can be given."""
DEFAULT_SIZES: tuple[int, ...] = (1, 2, 4, *range(8, MOST + 1, 8))
STEP_TOKENS = 8192
CONTEXT, LONGEST = 256, 1024
BATCHES, WARM_UP = 12, 4
"""Batches that each variant runs per batch size, and steps before the first."""
VARIANTS = ("stale", "mask", "single")
TIMED_ROWS = (1, 2, 3, 5, 6, 7, 8, 9, 11, 13, 16, 17, 20, 25, 28, 33, 41, 49, 57, 64)
EQUAL_ROWS = (3, 5, 9, 13, 20, 27, 41)
EQUAL_STEPS = 24


def default_size(rows: int) -> int:
    """The graph that vLLM pads a batch to by default: 1, 2, 4, then multiples of 8."""
    return min(size for size in DEFAULT_SIZES if size >= rows)


def pad_table(default: bool) -> list[int]:
    """Padded size of each batch size, by the default sizes or one by one."""
    return [0, *((default_size(rows) if default else rows) for rows in range(1, MOST + 1))]


class Step(NamedTuple):
    """What the next decode step does."""

    number: int
    variant: str
    at: Any
    """Recorded tokens of the rows, real ones first, then padding; None lets the router choose."""


class Seen(NamedTuple):
    step: Step
    rows: int
    padded: int
    chosen: Any  # [layer, row, k], the router's own choice
    hidden: Any  # [row, hidden] of real rows
    start: Any
    end: Any


class Hooks:
    """Static buffers that captured graphs read, and what the steps showed."""

    def __init__(self, config: dict[str, Any], ids: Any) -> None:
        import torch

        self.experts = config.get("num_local_experts") or config["num_experts"]
        self.top_k, self.num_layers = config["num_experts_per_tok"], config["num_hidden_layers"]
        self.ids: Any = None if ids is None else torch.from_numpy(ids.astype(np.int64)).to(DEVICE)  # [token, layer, k]
        self.values = torch.linspace(HIGH, HIGH - 2, self.top_k).to(DEVICE)
        self.layers: dict[int, int] = {}
        self.logits: Any = None  # [layer, given rows then own rows, expert]
        self.arange = torch.arange(MOST + STEP_TOKENS, device=DEVICE)
        self.source = self.arange[MOST:].clone()  # [row] the row of `logits` that a row is routed by
        self.skip = torch.zeros(STEP_TOKENS, dtype=torch.bool, device=DEVICE)
        # [graph size, 4] rows that count; four wide, so that every pointer is as well aligned as the next.
        self.counts = torch.empty(STEP_TOKENS + 1, 4, dtype=torch.int32, device=DEVICE)
        self.counts.copy_(self.arange[: STEP_TOKENS + 1, None])
        self.next: Any = None
        """Takes the number of rows of a decode step; returns its Step, or None."""
        self.step: Step | None = None
        self.keep_choice = self.keep_hidden = False
        self.seen: list[Seen] = []
        self.graphs: list[dict[str, Any]] = []
        self.tables: dict[bool, list[int]] = {}

    def route(self, runner: object, logits: Any) -> Any:
        import torch

        if self.logits is None:
            shape = (self.num_layers, MOST + STEP_TOKENS, self.experts)
            self.logits = torch.zeros(shape, dtype=logits.dtype, device=logits.device)
        buffer, rows = self.logits[self.layers.setdefault(id(runner), len(self.layers))], len(logits)
        buffer[MOST : MOST + rows].copy_(logits)
        return buffer.index_select(0, self.source[:rows])

    def before(self, rows: int, padded: int) -> None:
        """Fill the buffers for a decode step of `rows` rows that was padded to `padded`."""
        step = self.step
        self.source.copy_(self.arange[MOST:])
        self.skip[:MOST].fill_(False)
        self.counts[: MOST + 1] = self.arange[: MOST + 1, None]
        if step is None:
            return
        if step.at is not None:
            given = self.logits[:, :padded]
            given.fill_(LOW)
            chosen = self.ids[step.at[:padded]].transpose(0, 1)
            given.scatter_(2, chosen, self.values.to(given.dtype).expand(chosen.shape))
            self.source[:padded] = self.arange[:padded]
        if step.variant == "mask":
            self.skip[rows:padded].fill_(True)
            self.counts[padded].fill_(rows)


def install(hooks: Hooks) -> None:
    import torch
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.utils.import_utils import has_triton_kernels
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    apply, execute = MoERunner._apply_quant_method, GPUModelRunner.execute_model
    forward, sample = GPUModelRunner._model_forward, GPUModelRunner.sample_tokens
    capture, capture_all = GPUModelRunner._warmup_and_capture, GPUModelRunner.capture_model

    def apply_routed(self: Any, hidden_states: Any, router_logits: Any, *args: Any, **kwargs: Any) -> Any:
        get_forward_context().is_padding = hooks.skip[: len(router_logits)]
        return apply(self, hidden_states, hooks.route(self, router_logits), *args, **kwargs)

    def execute_seen(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        scheduled = scheduler_output.num_scheduled_tokens
        decode = bool(scheduled) and set(scheduled.values()) == {1}
        hooks.step = hooks.next(len(scheduled)) if decode and hooks.next else None
        single = hooks.step is not None and hooks.step.variant == "single"
        if hooks.tables:
            self.cudagraph_dispatcher._bs_to_padded_graph_size = hooks.tables[not single]
        return execute(self, scheduler_output, *args, **kwargs)

    def forward_seen(self: Any, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        rows, padded, step = len(self.input_batch.req_ids), len(input_ids), hooks.step
        hooks.before(rows, padded)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = forward(self, input_ids, *args, **kwargs)
        if step is not None:
            own = hooks.logits[:, MOST : MOST + padded]
            chosen = own.topk(hooks.top_k, -1).indices.to(torch.int16) if hooks.keep_choice else None
            hidden = result[:rows].clone() if hooks.keep_hidden else None
            hooks.seen.append(Seen(step, rows, padded, chosen, hidden, start, end))
        return result

    def sample_seen(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = sample(self, *args, **kwargs)
        if hooks.step is not None and hooks.seen:
            hooks.seen[-1].end.record()
        return result

    def capture_seen(self: Any, desc: Any, cudagraph_runtime_mode: Any, *args: Any, **kwargs: Any) -> Any:
        torch.cuda.synchronize()
        began, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
        result = capture(self, desc, cudagraph_runtime_mode, *args, **kwargs)
        torch.cuda.synchronize()
        row = {"size": desc.num_tokens, "mode": cudagraph_runtime_mode.name, "s": time.perf_counter() - began}
        hooks.graphs.append({**row, "bytes": free - torch.cuda.mem_get_info()[0]})
        return result

    def capture_all_seen(self: Any) -> Any:
        hooks.graphs = []  # Those before were captured to measure their memory.
        return capture_all(self)

    MoERunner._apply_quant_method = apply_routed
    GPUModelRunner.execute_model = execute_seen
    GPUModelRunner._model_forward = forward_seen
    GPUModelRunner.sample_tokens = sample_seen
    GPUModelRunner._warmup_and_capture = capture_seen
    GPUModelRunner.capture_model = capture_all_seen

    if has_triton_kernels():
        kernels = import_module("triton_kernels.routing")

        routing = kernels.routing

        def routing_masked(logits: Any, *args: Any, **kwargs: Any) -> Any:
            return routing(logits, *args, **{**kwargs, "n_rows": hooks.counts[len(logits), :1]})

        kernels.routing = routing_masked  # type: ignore[attr-defined]


def texts(rng: np.random.Generator) -> list[list[int]]:
    """Prompts for coterie-tiny: pieces of this repository's Python files and pages."""
    from tokenizers import Tokenizer

    encode = Tokenizer.from_file(str(TINY / "tokenizer.json")).encode
    root, prompts = HERE.parents[2], []
    for path in sorted([*root.glob("docs/**/*.md"), *root.glob("src/coterie/*/*.py")]):
        ids = encode(path.read_text()[:20000]).ids
        prompts += [ids[at : at + 96] for at in range(0, len(ids) - 96, 400)]
    return [prompts[i] for i in rng.permutation(len(prompts))[:256]]


class Engine:
    def __init__(self, model: str, dtype: str, ids: Any) -> None:
        from vllm import LLM

        self.tiny, self.rng = model == TINY.name, np.random.default_rng(0)
        if self.tiny:
            folder, config = TINY, json.loads((TINY / "config.json").read_text())
            self.prompts = texts(self.rng)
        else:
            folder, config = Path("/tmp", f"{model}-{dtype}"), dict(SHAPES["models"][model])
            if dtype in SHAPES["quantized"]:
                config["quantization_config"] = SHAPES["quantized"][dtype]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.json").write_text(json.dumps(config))
            self.prompts = self.rng.integers(10, config["vocab_size"] - 2000, (256, CONTEXT)).tolist()
        self.hooks = Hooks(config, None if self.tiny else ids)
        install(self.hooks)
        self.llm = LLM(
            model=str(folder),
            load_format="auto" if self.tiny else "dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_num_batched_tokens=STEP_TOKENS,
            max_num_seqs=MOST,
            max_model_len=LONGEST,
            gpu_memory_utilization=0.05 if self.tiny else 0.9,  # More would be millions of KV blocks, made one by one.
            compilation_config={"cudagraph_capture_sizes": [*range(1, MOST + 1)]},
            dtype="auto" if self.tiny else "bfloat16",
        )
        self.core, self.count = self.llm.llm_engine, 0
        self.hooks.tables = {default: pad_table(default) for default in (True, False)}
        if not self.tiny:
            self.llm.apply_model(redraw)

    def add(self, prompt: list[int], tokens: int) -> str:
        from vllm import SamplingParams

        self.count += 1
        name = f"r{self.count}"
        tokens = min(tokens, LONGEST - len(prompt) - 1)
        settings = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, temperature=0.0)
        self.core.add_request(name, {"prompt_token_ids": prompt}, settings)
        return name

    def drain(self, names: list[str]) -> list[Seen]:
        import torch

        self.hooks.next = None
        self.core.abort_request(names)
        for _ in range(4):
            self.core.step()
        torch.cuda.synchronize()
        seen, self.hooks.seen = self.hooks.seen, []
        return seen

    def at(self) -> Any:
        """Recorded tokens of a batch: its rows are requests of their own, and so are the padding rows."""
        import torch

        if self.hooks.ids is None:
            return None
        each = len(self.hooks.ids) // MOST
        at = self.rng.permutation(MOST) * each + self.rng.integers(each, size=MOST)
        return torch.from_numpy(at).to(DEVICE)

    def times(self, rows: int) -> dict[str, Any]:
        """Whole steps of the variants in turn, on the same batches."""
        order = [(batch, variant) for batch in range(BATCHES) for variant in VARIANTS]
        batches, place = [self.at() for _ in range(BATCHES)], [-WARM_UP]

        def choose(number: int) -> Step | None:
            if number != rows or place[0] >= len(order):
                return None
            place[0] += 1
            batch, variant = order[max(0, place[0] - 1)]
            return Step(place[0] - 1, variant, batches[batch])

        names = [self.add(self.prompts[i], 700) for i in range(rows)]
        self.hooks.next = choose
        while place[0] < len(order):
            self.core.step()
        result: dict[str, Any] = {"rows": rows}
        for seen in self.drain(names):
            if seen.step.number >= 0:
                row = result.setdefault(seen.step.variant, {"padded": seen.padded, "gpu_ms": []})
                row["gpu_ms"].append(round(seen.start.elapsed_time(seen.end), 4))
        return result

    def choices(self, since: str) -> list[dict[str, Any]]:
        """Which experts padding rows choose of themselves, for batches of 1 to `MOST` rows.

        `since` is "prefill": every batch size starts with new prompts, whose tokens the buffers then hold; or
        "departures": a full batch loses one request after the other.
        """
        self.hooks.keep_choice, rows = True, []
        # Real rows choose for themselves too: this job imposes nothing.
        self.hooks.next = lambda number: Step(number, "stale", None)
        if since == "prefill":
            for size in range(1, MOST + 1):
                names = [self.add(self.prompts[(size + i) % 256], 40) for i in range(size)]
                while sum(seen.rows == size for seen in self.hooks.seen) < 8:
                    self.core.step()
                rows.append(summary([seen for seen in self.drain(names) if seen.rows == size]))
                self.hooks.next = lambda number: Step(number, "stale", None)
        else:
            names = [self.add(self.prompts[i], 900) for i in range(MOST)]
            for size in range(MOST, 0, -1):
                while sum(seen.rows == size for seen in self.hooks.seen) < 4:
                    self.core.step()
                # Not the last: rows below move into the place of the one that leaves.
                self.core.abort_request([names.pop(int(self.rng.integers(size)))])
            by_size: dict[int, list[Seen]] = {}
            for seen in self.drain(names):
                by_size.setdefault(seen.rows, []).append(seen)
            rows = [summary(by_size[size]) for size in sorted(by_size)]
        self.hooks.keep_choice = False
        return [{**row, "since": since} for row in rows]

    def equal(self, rows: int) -> dict[str, Any]:
        """Greedy tokens and hidden states of each variant, against those of the first run."""
        self.hooks.keep_hidden = True
        batches, runs = [self.at() for _ in range(EQUAL_STEPS)], {}
        for variant in ("stale", "again", *VARIANTS[1:]):
            place = [0]

            def choose(number: int, variant: str = variant, place: list[int] = place) -> Step | None:
                if number != rows or place[0] >= EQUAL_STEPS:
                    return None
                place[0] += 1
                return Step(place[0] - 1, "stale" if variant == "again" else variant, batches[place[0] - 1])

            names = [self.add(self.prompts[i], EQUAL_STEPS + 20) for i in range(rows)]
            self.hooks.next, tokens = choose, {}
            while place[0] < EQUAL_STEPS:
                for output in self.core.step():
                    tokens[output.request_id] = list(output.outputs[0].token_ids)
            hidden = [seen.hidden.float() for seen in self.drain(names)]
            runs[variant] = [tokens[name][: EQUAL_STEPS - 4] for name in names], hidden
        self.hooks.keep_hidden = False
        reference, states = runs.pop("stale")
        result: dict[str, Any] = {"rows": rows, "padded": default_size(rows)}
        for variant, (chosen, hidden) in runs.items():
            first = (hidden[0] - states[0]).norm() / states[0].norm()
            same = [sum(a == b for a, b in zip(x, y, strict=True)) for x, y in zip(chosen, reference, strict=True)]
            result[variant] = {
                "tokens_equal": sum(same),
                "tokens": rows * len(reference[0]),
                "hidden_error_first_step": float(first),
                "hidden_equal_first_step": bool((hidden[0] == states[0]).all()),
            }
        return result


def redraw(model: Any) -> None:
    """Give norms weight 1 and routers weights of their own: with vLLM's dummy weights all tokens choose the same."""
    import torch

    generator = torch.Generator(DEVICE).manual_seed(0)
    with torch.inference_mode():
        for name, weight in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                weight.data.fill_(1.0)
            elif "mlp.router" in name:
                drawn = torch.randn(weight.shape, device=DEVICE, generator=generator)
                weight.data.copy_(drawn * (0.02 if weight.ndim == 2 else 0.0))


def summary(steps: list[Seen]) -> dict[str, Any]:
    """Mean over steps and layers: experts of the real rows, those that only padding rows touch, and their patterns."""
    counted = []
    for seen in steps:
        for chosen in seen.chosen.cpu().numpy():  # [row, k] of a layer
            mine, padding = set(chosen[: seen.rows].ravel()), chosen[seen.rows :]
            further = set(padding.ravel()) - mine
            counted.append((len(mine), len(further), len({tuple(sorted(row)) for row in padding})))
    means = dict(zip(("distinct", "further", "patterns_of_padding"), np.mean(counted, axis=0).tolist(), strict=True))
    return {"rows": steps[-1].rows, "padded": steps[-1].padded, "steps": len(steps), **means}


def pack(path: Path) -> None:
    """Write recorded experts of `MOST` requests, as many tokens of each: [token, layer, k]."""
    from coterie_lab.suites.eldr.fleets import recorded_source

    tokens, offsets = recorded_source(Path(os.environ["COTERIE_DATA"]), "gpt-oss-20b").trace.arrays()
    offsets = np.asarray(offsets)
    longest = np.argsort(offsets[:-1] - offsets[1:], kind="stable")[: 2 * MOST]
    drawn = np.sort(np.random.default_rng(27).permutation(longest)[:MOST])
    each = min(64, int((offsets[drawn + 1] - offsets[drawn]).min()))
    at = (offsets[drawn + 1] - each)[:, None] + np.arange(each)  # The last tokens of a request are decode tokens.
    np.savez_compressed(path, ids=np.asarray(tokens.expert_ids)[at.ravel()].astype(np.uint8))
    print(f"{path}: {at.size} tokens, {path.stat().st_size / 1e6:.2f} MB")


def measure(given: argparse.Namespace) -> None:
    for name, value in ENVIRONMENT.items():  # before vLLM is imported
        os.environ.setdefault(name, value)
    import torch
    import vllm

    began = time.perf_counter()
    with np.load(given.jobs) as file:
        ids = file["ids"]
    engine = Engine(given.model, given.dtype, ids)
    with given.out.open("w") as out:

        def keep(job: str, row: dict[str, Any]) -> None:
            out.write(json.dumps({"job": job, **row}) + "\n")
            out.flush()

        header = {"model": given.model, "dtype": given.dtype, "vllm": vllm.__version__, "torch": torch.__version__}
        keep("header", {**header, "device": torch.cuda.get_device_name()})
        keep("graphs", {"graphs": engine.hooks.graphs})
        jobs: list[tuple[str, Any]] = [("choice", "prefill"), ("choice", "departures")]
        jobs += [("equal", rows) for rows in EQUAL_ROWS] + [("steps", rows) for rows in TIMED_ROWS]
        if not engine.tiny:
            jobs = [("equal", rows) for rows in EQUAL_ROWS[1:5]] + jobs[2 + len(EQUAL_ROWS) :] + jobs[:2]
        for job, what in jobs:
            if job == "choice":
                for row in engine.choices(what):
                    keep(job, row)
            else:
                keep(job, engine.equal(what) if job == "equal" else engine.times(what))
            print(f"{time.perf_counter() - began:6.1f} s {job} {what}", flush=True)


def table(path: Path) -> None:
    """Print the result of a run: experts by batch size, times against `stale`, what was equal, costs of graphs."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    of = {job: [row for row in rows if row["job"] == job] for job in ("header", "choice", "steps", "equal", "graphs")}
    print(json.dumps(of["header"][0]), "\n")
    print("| requests | padded to | stale, ms | mask, % | own graph, % |\n|---|---|---|---|---|")
    for row in of["steps"]:
        stale = np.array(row["stale"]["gpu_ms"])
        gains = (f"{100 * np.median(np.array(row[name]['gpu_ms']) / stale - 1):+.1f}" for name in VARIANTS[1:])
        print(f"| {row['rows']} | {row['stale']['padded']} | {np.median(stale):.3f} |", " | ".join(gains), "|")
    print(
        "\n| since | requests | padded to | experts a layer | by padding alone | patterns |\n|---|---|---|---|---|---|"
    )
    for row in of["choice"]:
        if row["padded"] > row["rows"]:
            numbers = (f"{row[name]:.1f}" for name in ("distinct", "further", "patterns_of_padding"))
            print(f"| {row['since']} | {row['rows']} | {row['padded']} |", " | ".join(numbers), "|")
    for row in of["equal"]:
        print(f"\n{row['rows']} requests:", {name: row[name] for name in ("again", *VARIANTS[1:])})
    for graph in of["graphs"]:
        print("\n" + graph_costs(graph["graphs"]))


def graph_costs(captured: list[dict[str, Any]]) -> str:
    """Say what graphs cost, by mode: all of them, and those that the default sizes do not have."""
    lines = []
    for mode in sorted({graph["mode"] for graph in captured}):
        mine = [graph for graph in captured if graph["mode"] == mode]
        extra = [graph for graph in mine if graph["size"] <= MOST and default_size(graph["size"]) != graph["size"]]
        for name, part in (("all", mine), ("not in the default sizes", extra)):
            spent, held = sum(graph["s"] for graph in part), sum(graph["bytes"] for graph in part)
            lines.append(f"graphs {mode}, {name}: {len(part)}, {spent:.1f} s, {held / 2**20:.0f} MiB")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="coterie-tiny, gpt-oss-20b; or pack, table")
    parser.add_argument("dtype")
    parser.add_argument("jobs", type=Path, nargs="?")
    parser.add_argument("out", type=Path, nargs="?")
    given = parser.parse_args()
    if given.model == "pack":
        pack(Path(given.dtype))
    elif given.model == "table":
        table(Path(given.dtype))
    else:
        measure(given)


if __name__ == "__main__":
    main()
