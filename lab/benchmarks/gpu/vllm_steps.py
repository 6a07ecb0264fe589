"""Whole steps of real vLLM on a GPU under imposed routing: GPU time and time between steps.

    python lab/benchmarks/gpu/vllm_steps.py MODEL DTYPE JOBS.npz OUT.jsonl

Weights are random, of the model's shape; which experts a token takes is written into the router's logits before each
step, under CUDA graphs too. JOBS has `ids` [token, layer, k], and a JSON `jobs`: each job is of one kind:

* decode: `rows` requests of `context` cached tokens decode; step i has the tokens `at_N`[i] [row] of `ids`.
* prefill: one prompt of `tokens` tokens; repeat i has the tokens `at_N`[i] [token].
* replay: step i has the requests `who_N`[i] [row] (-1 is none) with the tokens `at_N`[i]; a request joins with its
  `context`, as if its prompt had been computed elsewhere: the step that computes it is not timed.

A step's `gpu_ms` is from the start of the forward pass to the sampled token; `forward_ms` is the forward pass alone;
`period_ms` is from the start of the step before to its own, and None unless that step was timed too. Scheduling is
asynchronous, as it is by default. Padding rows take the experts of the first row unless the job says otherwise.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

import numpy as np
import torch

SIZES = (1, 2, 4, *range(8, 65, 8))
"""CUDA graphs: vLLM's own sizes up to 64."""
STEP_TOKENS = 8192
LONGEST = 10240
WARM_UP = 6
"""Steps of a decode job that are not kept."""
LOW, HIGH = -30.0, 10.0
"""Logits of experts that a token does not take, and does."""

SHAPES = json.loads(Path(__file__).with_name("shapes.json").read_text())
"""Hugging Face configurations by model, and what quantisation adds to them by weight dtype."""


class Timed(NamedTuple):
    """Events of one step."""

    number: int
    """Place in the job."""
    follows: bool
    """Whether the step before was timed too."""
    start: Any
    forward: Any
    end: Any


class Imposed:
    """The routing of the next step, and the events of those that ran."""

    def __init__(self, num_experts: int, num_layers: int, ids: np.ndarray) -> None:
        self.num_experts, self.num_layers = num_experts, num_layers
        self.ids = torch.from_numpy(ids.astype(np.int64)).cuda()  # [token, layer, k]
        self.layers: dict[int, int] = {}
        self.logits: Any = None  # [layer, row, expert]; made at the first call, with the logits' own dtype
        self.values = torch.linspace(HIGH, HIGH - 2, ids.shape[2]).cuda()
        self.scheduled: dict[str, int] = {}
        self.choose: Any = None
        """Takes a step's requests and their tokens; returns its place in the job and its rows of `ids`, or None."""
        self.padding: Any = None
        """Rows of `ids` for padding rows; None gives them the experts of the first row."""
        self.timed: list[Timed] = []
        self.pending: Any = None
        self.follows = False

    def layer(self, runner: object, logits: Any) -> Any:
        if self.logits is None:
            self.logits = torch.zeros(
                self.num_layers, STEP_TOKENS, self.num_experts, dtype=logits.dtype, device=logits.device
            )
        at = self.layers.setdefault(id(runner), len(self.layers))
        return self.logits[at, : len(logits)]

    def write(self, at: Any, first: int) -> None:
        """Write the experts of tokens `at` into the rows from `first` on."""
        rows = self.logits[:, first : first + len(at)]
        rows.fill_(LOW)
        chosen = self.ids[at].transpose(0, 1)
        rows.scatter_(2, chosen, self.values.to(rows.dtype).expand(chosen.shape))

    def before(self, req_ids: list[str], padded: int) -> None:
        # vLLM adds a random part to the name of a request.
        tokens = {name.rsplit("-", 1)[0]: self.scheduled[name] for name in req_ids}
        self.follows = self.pending is not None
        chosen = self.choose(tokens) if self.choose else None
        if chosen is None:
            self.pending = None
            return
        number, at = chosen
        self.write(at, 0)
        if padded > len(at):
            if self.padding is None:
                self.logits[:, len(at) : padded] = self.logits[:, :1]
            else:
                self.write(self.padding[: padded - len(at)], len(at))
        self.pending = number


def install(imposed: Imposed) -> None:
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    apply, execute = MoERunner._apply_quant_method, GPUModelRunner.execute_model
    forward, sample = GPUModelRunner._model_forward, GPUModelRunner.sample_tokens

    def apply_imposed(self: Any, hidden_states: Any, router_logits: Any, *args: Any, **kwargs: Any) -> Any:
        return apply(self, hidden_states, imposed.layer(self, router_logits), *args, **kwargs)

    def execute_seen(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        imposed.scheduled = dict(scheduler_output.num_scheduled_tokens)
        return execute(self, scheduler_output, *args, **kwargs)

    def forward_timed(self: Any, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        imposed.before(list(self.input_batch.req_ids), len(input_ids))
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        marks[0].record()
        result = forward(self, input_ids, *args, **kwargs)
        marks[1].record()
        if imposed.pending is not None:
            imposed.timed.append(Timed(imposed.pending, imposed.follows, *marks))
        return result

    def sample_timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = sample(self, *args, **kwargs)
        if imposed.pending is not None:
            imposed.timed[-1].end.record()
        return result

    MoERunner._apply_quant_method = apply_imposed
    GPUModelRunner.execute_model = execute_seen
    GPUModelRunner._model_forward = forward_timed
    GPUModelRunner.sample_tokens = sample_timed


class Engine:
    """vLLM with imposed routing."""

    def __init__(self, model: str, dtype: str, ids: np.ndarray, folder: Path) -> None:
        from vllm import LLM

        config = dict(SHAPES["models"][model])
        if dtype in SHAPES["quantized"]:
            config["quantization_config"] = SHAPES["quantized"][dtype]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        experts = config.get("num_local_experts") or config.get("num_experts") or config["n_routed_experts"]
        self.imposed = Imposed(experts, ids.shape[1], ids)
        self.vocabulary = config["vocab_size"]
        install(self.imposed)
        self.llm = LLM(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_num_batched_tokens=STEP_TOKENS,
            max_num_seqs=max(SIZES),
            max_model_len=LONGEST,
            gpu_memory_utilization=0.9,
            compilation_config={"cudagraph_capture_sizes": list(SIZES)},
            dtype="bfloat16",
        )
        self.core = self.llm.llm_engine
        self.rng = np.random.default_rng(0)
        self.count = 0

    def add(self, context: int, name: str | None = None, tokens: int = 4000) -> str:
        from vllm import SamplingParams

        self.count += 1
        name = name or f"r{self.count}"
        prompt = {"prompt_token_ids": self.rng.integers(10, self.vocabulary - 2000, context).tolist()}
        tokens = min(tokens, LONGEST - context - 1)
        self.core.add_request(
            name, prompt, SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, temperature=0.0)
        )
        return name

    def drain(self, names: list[str]) -> None:
        self.imposed.choose = None
        self.core.abort_request(names)
        for _ in range(4):
            self.core.step()

    def times(self) -> list[dict[str, Any]]:
        torch.cuda.synchronize()
        rows: list[dict[str, Any]] = []
        before: Timed | None = None
        for step in self.imposed.timed:
            period = round(before.start.elapsed_time(step.start), 4) if before is not None and step.follows else None
            rows.append(
                {
                    "step": step.number,
                    "gpu_ms": round(step.start.elapsed_time(step.end), 4),
                    "forward_ms": round(step.start.elapsed_time(step.forward), 4),
                    "period_ms": period,
                }
            )
            before = step
        self.imposed.timed = []
        return rows

    def decode(self, rows: int, context: int, at: np.ndarray, padding: np.ndarray | None) -> list[dict[str, Any]]:
        index, place = torch.from_numpy(at.astype(np.int64)).cuda(), [-WARM_UP]
        self.imposed.padding = None if padding is None else torch.from_numpy(padding.astype(np.int64)).cuda()

        def choose(tokens: dict[str, int]) -> Any:
            if len(tokens) != rows or set(tokens.values()) != {1} or place[0] >= len(index):
                return None
            place[0] += 1
            return place[0] - 1, index[max(0, place[0] - 1)]

        names = [self.add(context) for _ in range(rows)]
        self.imposed.choose = choose
        while place[0] < len(index):
            self.core.step()
        self.drain(names)
        return [row for row in self.times() if row["step"] >= 0]

    def prefill(self, tokens: int, at: np.ndarray) -> list[dict[str, Any]]:
        found = []
        for number, row in enumerate(at):
            index = torch.from_numpy(row.astype(np.int64)).cuda()
            self.imposed.choose = lambda seen, n=number, i=index: (n, i) if sum(seen.values()) == tokens else None
            self.add(tokens, tokens=1)
            while self.core.has_unfinished_requests():
                self.core.step()
            found += self.times()
        self.imposed.choose = None
        return found

    def replay(self, who: np.ndarray, at: np.ndarray, contexts: dict[str, int]) -> list[dict[str, Any]]:
        place, here = [0], set[str]()
        index = torch.from_numpy(np.maximum(at, 0).astype(np.int64)).cuda()
        columns = [{str(name): column for column, name in enumerate(row) if name >= 0} for row in who]
        self.imposed.padding = None

        def choose(tokens: dict[str, int]) -> Any:
            if place[0] >= len(columns) or set(tokens.values()) != {1} or tokens.keys() != columns[place[0]].keys():
                return None
            wanted = columns[place[0]]
            place[0] += 1
            rows = torch.tensor([wanted[name] for name in tokens], device="cuda")
            return place[0] - 1, index[place[0] - 1][rows]

        self.imposed.choose = choose
        while place[0] < len(columns):
            wanted = columns[place[0]].keys()
            if gone := here - wanted:
                self.core.abort_request(list(gone))
            for name in wanted - here:
                self.add(contexts[name], name)
            here = set(wanted)
            self.core.step()
        self.drain(list(here))
        return self.times()


def main() -> None:
    model, dtype, jobs_path, out_path = sys.argv[1:5]
    limit = float(sys.argv[5]) if len(sys.argv) > 5 else 1e9
    began = time.perf_counter()
    with np.load(jobs_path) as file:
        arrays = {name: file[name] for name in file.files}
    jobs = json.loads(str(arrays["jobs"]))
    import vllm

    engine = Engine(model, dtype, arrays["ids"], Path("/tmp", f"{model}-{dtype}"))
    load_s = time.perf_counter() - began
    header = {
        "model": model,
        "dtype": dtype,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "graph_sizes": SIZES,
        "load_s": round(load_s, 1),
    }
    print(header, flush=True)
    with Path(out_path).open("w") as out:
        out.write(json.dumps(header) + "\n")
        # The first decoder of every load and router, then the second: a run that is cut short has seen all loads.
        for number, job in sorted(enumerate(jobs), key=lambda numbered: numbered[1].get("decoder", -1)):
            if time.perf_counter() - began > limit:
                print("out of time at job", number, flush=True)
                break
            at = arrays[f"at_{number}"]
            if job["kind"] == "decode":
                rows = engine.decode(job["rows"], job["context"], at, arrays.get(f"padding_{number}"))
            elif job["kind"] == "prefill":
                rows = engine.prefill(job["tokens"], at)
            else:
                rows = engine.replay(arrays[f"who_{number}"], at, job["contexts"])
            kept = {key: value for key, value in job.items() if key != "contexts"}
            out.write(json.dumps({"job": number, **kept, "steps": rows}) + "\n")
            out.flush()
            middle = float(np.median([row["gpu_ms"] for row in rows])) if rows else float("nan")
            spent = time.perf_counter() - began
            print(f"{spent:6.1f} s", kept, len(rows), f"{middle:.3f} ms", flush=True)


if __name__ == "__main__":
    main()
