"""Train coterie-tiny: a Qwen3-MoE of 11M parameters, in minutes on one GPU.

    python lab/training/train.py --corpus carry/tiny --out DIR

Needs torch, numpy and safetensors. A tiny expert is cheaper to compute than to gather for: all 32 are computed for
every token as one wide feed-forward layer, and the routing weights, zero outside the top 4, gate its columns. What is
saved is the published Qwen3-MoE layout, which transformers and vLLM load; routing there is the sparse one.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from documents import Documents, Rows, load, pack, schedule
from tiny_model import CLOSE, DOMAINS, END, Model, Settings

SHIPPED = Path(__file__).parents[2] / "src/coterie/data/coterie-tiny/config.json"
"""The config of the shipped model: what no setting changes is taken from it."""


def predicted(segment: Tensor) -> Tensor:
    """[row, token - 1] whether the next token belongs to the same document."""
    return (segment[:, 1:] == segment[:, :-1]) & (segment[:, 1:] >= 0)


def batch(rows: Rows, which: slice, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(part[which].to(device).long() for part in rows)


class Distinct(NamedTuple):
    """Expected distinct experts of 16 tokens of different requests, taken as independent; layers averaged.

    measure.py counts them in real batches.
    """

    fewer: list[float]  # [domain] share saved by a batch of one domain
    mixed: float


def distinct_experts(chosen: Tensor, size: int = 16) -> Distinct:
    same = (1 - (1 - chosen) ** size).sum(-1).mean(0)
    mixed = (1 - (1 - chosen.mean(1)) ** size).sum(-1).mean()
    return Distinct((1 - same / mixed).tolist(), float(mixed))


class Held(NamedTuple):
    loss: dict[str, float]
    fewer: dict[str, float]
    mixed: float
    balance: float
    information: float


@torch.no_grad()
def held_out(model: Any, rows: Rows, s: Settings, device: torch.device) -> Held:
    """Loss by domain, and an estimate of specialisation, on held-out text."""
    sums, counts = (torch.zeros(len(DOMAINS), device=device) for _ in range(2))
    chosen = torch.zeros(s.layers, len(DOMAINS), s.experts, device=device)
    seen = torch.zeros(len(DOMAINS), device=device)
    balance = information = 0.0
    # Whole steps only, so that the compiled shape serves here too: the last rows are padded with empty ones.
    steps = range(0, len(rows.tokens), s.rows)
    for at in steps:
        parts = batch(rows, slice(at, at + s.rows), device)
        short = s.rows - len(parts[0])
        if short:
            empty = torch.zeros_like(parts[0][:1]).expand(short, -1)
            parts = tuple(torch.cat((p, empty - 1 if n == 1 else empty)) for n, p in enumerate(parts))
        with autocast(device):
            losses = model(*parts)
        _, segment, domain, _ = parts
        inside = predicted(segment)
        of = domain[:, 1:][inside]
        sums.index_add_(0, of, losses.text[inside].float())
        counts.index_add_(0, of, torch.ones_like(of, dtype=torch.float))
        here = torch.zeros(len(DOMAINS), device=device).index_add_(
            0, domain[segment >= 0], torch.ones_like(domain[segment >= 0], dtype=torch.float)
        )
        chosen += losses.chosen * here[None, :, None]
        seen += here
        balance += float(losses.balance.mean()) / len(steps)
        information += float(losses.information.mean()) / len(steps)
    shares = chosen / seen[None, :, None]
    loss = (sums / counts).tolist()
    fewer, mixed = distinct_experts(shares)
    present = [value for value, count in zip(loss, counts.tolist(), strict=True) if count]
    mean = sum(present) / len(present)
    return Held(
        dict(zip(DOMAINS, loss, strict=True)) | {"mean": mean},
        dict(zip(DOMAINS, fewer, strict=True)) | {"mean": sum(fewer) / len(fewer)},
        mixed,
        balance,
        information,
    )


def autocast(device: torch.device) -> Any:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def warm_up(run: Any, rows: Rows, held: Rows, s: Settings, device: torch.device) -> None:
    """Compile both passes before the clock starts."""
    with autocast(device):
        losses = run(*batch(rows, slice(0, s.rows), device))
    (losses.text.mean() + losses.balance.mean() + losses.information.mean()).backward()
    run.zero_grad(set_to_none=True)
    held_out(run, Rows(*(part[: s.rows] for part in held)), s, device)


@dataclass
class Result:
    settings: Settings
    curve: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Tensor] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)


def train(s: Settings, model: Model, run: Any, texts: tuple[Documents, Rows], device: torch.device) -> Result:
    documents, held = texts
    torch.manual_seed(s.seed)
    model.reset()
    rows, epochs = schedule(documents, s, np.random.default_rng(s.seed))
    rows, held = (Rows(*(part.to(device) for part in whole)) for whole in (rows, held))
    steps = min(s.steps, len(rows.tokens) // s.rows)
    epochs = {domain: times * steps * s.rows / len(rows.tokens) for domain, times in epochs.items()}
    warm = time.monotonic()
    warm_up(run, rows, held, s, device)
    warm = time.monotonic() - warm
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimiser = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": s.decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=s.rate,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )
    result, lowest, began, done = Result(s), math.inf, time.monotonic(), 0
    spent_evaluating = 0.0
    first: float | None = None
    for step in range(steps + 1):
        elapsed = time.monotonic() - began
        progress = max(step / steps, elapsed / (60 * s.minutes))
        last = progress >= 1
        if step % s.evaluate == 0 or last:
            mark = time.monotonic()
            scores = held_out(run, held, s, device)
            spent_evaluating += time.monotonic() - mark
            if scores.loss["mean"] < lowest:
                lowest = scores.loss["mean"]
                result.best = {k: v.detach().clone() for k, v in model.state_dict().items()}
            result.curve.append({"step": step, "seconds": round(elapsed, 1), "tokens": done} | scores._asdict())
            losses = " ".join(f"{d} {v:.3f}" for d, v in scores.loss.items())
            fewer = " ".join(f"{100 * v:.1f}" for v in scores.fewer.values())
            print(
                f"{step:6} {elapsed:6.1f}s held-out {losses} | fewer experts % {fewer} of {scores.mixed:.1f} "
                f"| balance {scores.balance:.3f} information {scores.information:.3f}",
                flush=True,
            )
        if last:
            break
        scale = min(1.0, (step + 1) / s.warmup) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for options in optimiser.param_groups:
            options["lr"] = s.rate * scale
        parts = batch(rows, slice(step * s.rows, (step + 1) * s.rows), device)
        with autocast(device):
            losses_now = run(*parts)
        inside = predicted(parts[1])
        text = (losses_now.text * inside).sum() / inside.sum()
        loss = text + s.balance * losses_now.balance.mean() - s.information * losses_now.information.mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        done += parts[0].numel()
        if step == 20:
            if device.type == "cuda":
                torch.cuda.synchronize()
            first, spent_evaluating = time.monotonic(), 0.0
            done_then = done
    if device.type == "cuda":
        torch.cuda.synchronize()
    rate = 0.0 if first is None else (done - done_then) / (time.monotonic() - first - spent_evaluating)
    result.summary = summarise(result, epochs, rate, time.monotonic() - began) | {"warm_up_seconds": round(warm, 1)}
    return result


def summarise(result: Result, epochs: dict[str, float], rate: float, seconds: float) -> dict[str, Any]:
    last, best = result.curve[-1], min(result.curve, key=lambda point: point["loss"]["mean"])
    return {
        "settings": asdict(result.settings),
        "seconds": round(seconds, 1),
        "tokens_per_second": round(rate),
        "epochs": {k: round(v, 2) for k, v in epochs.items()},
        "best_step": best["step"],
        "best": best,
        "last": last,
    }


# Saving


def export(model: Model, weights: dict[str, Tensor], corpus: Path, out: Path) -> None:
    """config.json, generation_config.json, model.safetensors (float16) and the tokenizer's files."""
    from safetensors.torch import save_file

    s = model.s
    tensors = {"model.embed_tokens.weight": weights["embedding"], "model.norm.weight": weights["norm.weight"]}
    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
    for n in range(s.layers):
        to, of = f"model.layers.{n}.", f"layers.{n}."
        tensors[to + "input_layernorm.weight"] = weights[of + "before.weight"]
        tensors[to + "post_attention_layernorm.weight"] = weights[of + "after.weight"]
        tensors[to + "self_attn.q_norm.weight"] = weights[of + "q_norm.weight"]
        tensors[to + "self_attn.k_norm.weight"] = weights[of + "k_norm.weight"]
        for name, published in names.items():
            tensors[f"{to}self_attn.{published}.weight"] = weights[of + name]
        tensors[to + "mlp.gate.weight"] = weights[of + "router"]
        for expert in range(s.experts):
            own = slice(expert * s.width, (expert + 1) * s.width)
            tensors[f"{to}mlp.experts.{expert}.gate_proj.weight"] = weights[of + "gate"][own]
            tensors[f"{to}mlp.experts.{expert}.up_proj.weight"] = weights[of + "up"][own]
            tensors[f"{to}mlp.experts.{expert}.down_proj.weight"] = weights[of + "down"][:, own]
    out.mkdir(parents=True, exist_ok=True)
    halves = {name: tensor.to("cpu", torch.float16).contiguous() for name, tensor in tensors.items()}
    save_file(halves, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads(SHIPPED.read_text()) | {
        "vocab_size": len(weights["embedding"]),
        "hidden_size": s.hidden,
        "intermediate_size": s.width * s.top_k,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "moe_intermediate_size": s.width,
        "num_experts": s.experts,
        "num_experts_per_tok": s.top_k,
        "router_aux_loss_coef": s.balance,
    }
    generation = {"do_sample": False, "eos_token_id": [CLOSE, END], "pad_token_id": END}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(corpus / name, out / name)


# Command line


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True, help="folder written by corpus.py")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model, curve.json and summary.json")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for f in fields(Settings):
        parser.add_argument(f"--{f.name.replace('_', '-')}", type=type(f.default), default=f.default)
    return parser.parse_args()


def main() -> None:
    chosen = options()
    s = Settings(**{f.name: getattr(chosen, f.name) for f in fields(Settings)})
    device = torch.device(chosen.device)
    torch.set_float32_matmul_precision("high")
    vocabulary = len(json.loads((chosen.corpus / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"])
    documents = load(chosen.corpus / "train.npz", s.groups)
    # Held-out slices may be fewer than the training ones; only domains are read from them.
    held_documents = load(chosen.corpus / "heldout.npz", "domain")
    held = pack(held_documents, np.random.default_rng(0).permutation(len(held_documents.domain)), s.length)
    held = Rows(*(part[: s.held or None] for part in held))
    model = Model(s, vocabulary).to(device)
    run = model if chosen.no_compile else torch.compile(model, dynamic=False)
    size = sum(p.numel() for p in model.parameters())
    print(f"{asdict(s)}: {size:,} parameters, {len(documents.tokens):,} tokens of text", flush=True)
    result = train(s, model, run, (documents, held), device)
    print(json.dumps(result.summary), flush=True)
    chosen.out.mkdir(parents=True, exist_ok=True)
    for name, told in (("summary", result.summary), ("curve", result.curve)):
        (chosen.out / f"{name}.json").write_text(json.dumps(told, indent=1) + "\n")
    export(model, result.best, chosen.corpus, chosen.out)


if __name__ == "__main__":
    main()
