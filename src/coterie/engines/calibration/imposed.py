"""vLLM under imposed routing: whole steps, timed from the start of the forward pass to the sampled token.

Weights are random, of the shape that a config describes. Which experts a token takes is written into the router's
logits before each step, so that it holds under CUDA graphs too. Scheduling is vLLM's own. In steps of certain sizes the
experts are left out, which tells their time from that of the rest.

Works with vLLM 0.26 to 0.32, whose model runner and MoE layer have the methods that are wrapped here. Wrong for models
with grouped top-k, which admit experts of a few groups only: imposed experts of other groups are not taken.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from coterie.engines.optional import torch
from coterie.errors import UnavailableError, check
from coterie.types import ModelSpec

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",
}
"""What vLLM reads when it is imported: it must run in this process, where its methods are wrapped."""
LARGEST_GRAPH = 4096
"""Largest step with a CUDA graph. vLLM's default is 512; above it the time of the host to launch a step would count."""
LEFT_OUT = 8
"""A graph for `size` tokens has a twin for as many more, in which the experts are left out."""
WARM_UP = 6
"""Decode steps that are not kept."""
LOW, HIGH = -30.0, 10.0
"""Logits of experts that a token does not take, and does."""

Ids = NDArray[np.integer]
Choose = Callable[[dict[str, int]], tuple[int, Any] | None]
"""Takes a step's requests and their tokens; returns its number and its rows of `ids`, or None to leave it out."""


class TimedStep(NamedTuple):
    """Times of one step, in microseconds."""

    number: int
    us: float
    forward_us: float
    """Forward pass without output head and sampling."""
    period_us: float | None
    """From the start of the step before; None if that one was not timed."""


class _HostMark:
    """A CUDA event's methods for a device without CUDA: the host's clock."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, other: _HostMark) -> float:
        return 1e3 * (other.at - self.at)


class _Marks(NamedTuple):
    number: int
    follows: bool
    """Whether the step before was timed too."""
    start: Any
    forward: Any
    end: Any


class ImposedRouting:
    """The experts of the next step's tokens, and the marks of the steps that ran."""

    def __init__(self, spec: ModelSpec, ids: Ids, step_tokens: int, left_out: frozenset[int]) -> None:
        """`ids` [token, layer, k] are all tokens that steps will have; steps of sizes `left_out` have no experts."""
        self.cuda = torch.cuda.is_available()
        self.device = "cuda" if self.cuda else "cpu"
        self.shape = spec.num_moe_layers, step_tokens, spec.num_experts
        self.left_out = left_out
        self.ids = self.tensor(ids)
        self.values = torch.linspace(HIGH, HIGH - 2, ids.shape[2], device=self.device)
        self.layers: dict[int, int] = {}
        self.logits: Any = None  # [layer, row, expert]; made at the first call, in the dtype of the router's own
        self.scheduled: dict[str, int] = {}
        self.choose: Choose | None = None
        self.marks: list[_Marks] = []
        self.pending: int | None = None
        self.follows = False

    def tensor(self, array: Ids) -> Any:
        return torch.from_numpy(array.astype(np.int64)).to(self.device)

    def mark(self) -> Any:
        return torch.cuda.Event(enable_timing=True) if self.cuda else _HostMark()

    def layer(self, runner: object, logits: Any) -> Any:
        """Return the logits that stand in for a layer's own."""
        if self.logits is None:
            self.logits = torch.zeros(*self.shape, dtype=logits.dtype, device=logits.device)
        at = self.layers.setdefault(id(runner), len(self.layers))
        return self.logits[at, : len(logits)]

    def before(self, requests: Sequence[str], padded: int) -> None:
        """Write the experts of the step that is about to run with `padded` rows."""
        # vLLM adds a random part to the name of a request.
        tokens = {name.rsplit("-", 1)[0]: self.scheduled[name] for name in requests}
        chosen = self.choose(tokens) if self.choose else None
        self.follows, self.pending = self.pending is not None, None
        if chosen is None:
            return
        self.pending, rows = chosen
        out, chosen = self.logits[:, : len(rows)], self.ids[rows].transpose(0, 1)
        out.fill_(LOW).scatter_(2, chosen, self.values.to(out.dtype).expand(chosen.shape))
        self.logits[:, len(rows) : padded] = out[:, :1]  # padding rows get the experts of the first row

    def timed(self) -> list[TimedStep]:
        """Return the times of the steps since the last call."""
        if self.cuda:
            torch.cuda.synchronize()
        steps: list[TimedStep] = []
        before: Any = None
        for one in self.marks:
            whole, forward = (1e3 * one.start.elapsed_time(mark) for mark in (one.end, one.forward))
            follows = before is not None and one.follows
            steps.append(
                TimedStep(one.number, whole, forward, 1e3 * before.elapsed_time(one.start) if follows else None)
            )
            before = one.start
        self.marks = []
        return steps

    def install(self) -> None:
        """Wrap the methods of vLLM that route, compute experts and run a step, in this process."""
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        apply, execute = MoERunner._apply_quant_method, GPUModelRunner.execute_model
        forward, sample = GPUModelRunner._model_forward, GPUModelRunner.sample_tokens

        def imposed(runner: Any, hidden_states: Any, router_logits: Any, *args: Any, **kwargs: Any) -> Any:
            return apply(runner, hidden_states, self.layer(runner, router_logits), *args, **kwargs)

        def left_out(compute: Any) -> Any:
            def experts(layer: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
                return torch.zeros_like(x) if len(x) in self.left_out else compute(layer, x, *args, **kwargs)

            return experts

        def execute_seen(runner: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            self.scheduled = dict(scheduled.num_scheduled_tokens)
            return execute(runner, scheduled, *args, **kwargs)

        def forward_timed(runner: Any, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
            self.before(list(runner.input_batch.req_ids), len(input_ids))
            start, middle, end = self.mark(), self.mark(), self.mark()
            start.record()
            result = forward(runner, input_ids, *args, **kwargs)
            middle.record()
            if self.pending is not None:
                self.marks.append(_Marks(self.pending, self.follows, start, middle, end))
            return result

        def sample_timed(runner: Any, *args: Any, **kwargs: Any) -> Any:
            result = sample(runner, *args, **kwargs)
            if self.pending is not None:
                self.marks[-1].end.record()
            return result

        MoERunner._apply_quant_method = imposed
        RoutedExperts.forward_modular = left_out(RoutedExperts.forward_modular)
        RoutedExperts.forward_monolithic = left_out(RoutedExperts.forward_monolithic)
        GPUModelRunner.execute_model = execute_seen
        GPUModelRunner._model_forward = forward_timed
        GPUModelRunner.sample_tokens = sample_timed


class ImposedEngine:
    """vLLM with imposed routing; one per process."""

    def __init__(
        self,
        config: dict[str, Any],
        spec: ModelSpec,
        ids: Ids,
        prompts: Sequence[int],
        longest: int,
        rows: int,
        **settings: Any,
    ) -> None:
        """Start vLLM for prompts of the sizes `prompts`, up to `longest` tokens a request, and `rows` requests.

        `settings` are further arguments of vLLM.
        """
        check(ids.shape[1:] == (spec.num_moe_layers, spec.top_k), f"ids are {ids.shape}; they do not fit {spec.name}")
        os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
        try:
            import vllm
        except ImportError:
            raise UnavailableError("calibration needs vLLM in this environment: pip install vllm") from None
        self.spec, self.longest, self.count = spec, longest, 0
        self.version = f"vllm {vllm.__version__}, torch {torch.__version__}"
        twins = frozenset(size + LEFT_OUT for size in prompts)
        # Not a twin's size: vLLM reserves memory for the experts in a first step of this size.
        self.step_tokens = max(*twins, rows) + LEFT_OUT
        self.routing = ImposedRouting(spec, ids, self.step_tokens, twins)
        self.routing.install()
        sizes = {1, 2, 4, *range(8, rows + 8, 8)}  # decode: vLLM's own
        sizes |= {size for size in (*prompts, *twins) if size <= LARGEST_GRAPH + LEFT_OUT}
        folder = tempfile.TemporaryDirectory(prefix="coterie-")
        Path(folder.name, "config.json").write_bytes(msgspec.json.encode(config))
        self.engine = vllm.LLM(
            model=folder.name,
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_num_batched_tokens=self.step_tokens,
            max_num_seqs=rows,
            max_model_len=longest,
            gpu_memory_utilization=0.9,
            dtype="bfloat16" if self.routing.cuda else "float32",
            enforce_eager=not self.routing.cuda,
            **({"compilation_config": {"cudagraph_capture_sizes": sorted(sizes)}} if self.routing.cuda else {}),
            **settings,
        ).llm_engine
        folder.cleanup()
        self._rng = np.random.default_rng(0)

    def add(self, context: int, name: str | None = None, tokens: int = 4000) -> str:
        """Add a request with `context` prompt tokens that decodes up to `tokens`."""
        from vllm import SamplingParams

        self.count += 1
        name = name or f"r{self.count}"
        prompt = {"prompt_token_ids": self._rng.integers(10, self.spec.vocab_size - 10, context).tolist()}
        limit = min(tokens, self.longest - context - 1)
        settings = SamplingParams(max_tokens=limit, ignore_eos=True, detokenize=False, temperature=0.0)
        self.engine.add_request(name, prompt, settings)
        return name

    def drop(self, names: Sequence[str]) -> None:
        """End requests, and leave the engine idle."""
        self.routing.choose = None
        self.engine.abort_request(list(names))
        for _ in range(4):  # steps that were scheduled ahead
            self.engine.step()

    def decode(self, context: int, at: Ids) -> list[TimedStep]:
        """Time decode steps of requests with `context` cached tokens; step i has the tokens at[i] [row] of `ids`."""
        rows, number = self.routing.tensor(at), -WARM_UP

        def choose(tokens: dict[str, int]) -> tuple[int, Any] | None:
            nonlocal number
            if len(tokens) != at.shape[1] or set(tokens.values()) != {1} or number >= len(rows):
                return None
            number += 1
            return number - 1, rows[max(0, number - 1)]

        names = [self.add(context) for _ in range(at.shape[1])]
        self.routing.choose = choose
        while number < len(rows):
            self.engine.step()
        self.drop(names)
        return [step for step in self.routing.timed() if step.number >= 0]

    def prefill(self, prompts: int, at: Ids) -> list[TimedStep]:
        """Time steps of `prompts` equal prompts; step i has the tokens at[i] [token] of `ids`."""
        steps: list[TimedStep] = []
        for number, row in enumerate(at):
            rows = self.routing.tensor(row)
            self.routing.choose = lambda seen, n=number, r=rows: (n, r) if sum(seen.values()) == len(r) else None
            for _ in range(prompts):
                self.add(len(row) // prompts, tokens=1)
            while self.engine.has_unfinished_requests():
                self.engine.step()
            steps += self.routing.timed()
        self.drop([])
        return steps
