"""Measure coterie-tiny on requests it was not trained on: the numbers of its model card.

    python lab/training/measure.py --model DIR --corpus carry/tiny --out DIR

Needs torch, transformers and numpy; five minutes on two CPU cores. Every request is asked through the chat template
and answered greedily; expert ids are taken from the routers of the transformers model, prefill and decode apart.

Distinct experts: 16 requests, one token of each, as in a decode step. The same requests are arranged by domain and
mixed, many times over; the interval is a bootstrap over the held-out problems.
"""

from __future__ import annotations

import argparse
import json
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tiny_model import DOMAINS

BATCH = 16
LONGEST_PROMPT, LONGEST_ANSWER = 384, 256


class Request(NamedTuple):
    """A held-out request and what the model made of it."""

    domain: str
    language: str
    problem: int
    prompt: str
    answer: str
    ended: bool
    prefill: np.ndarray  # [token, layer, k]
    decode: np.ndarray  # [token, layer, k]; the tokens generated, but for the last, which no step consumed


class Routers:
    """The expert ids each router chose in the last forward pass."""

    def __init__(self, model: Any) -> None:
        self.ids: dict[int, torch.Tensor] = {}
        for n, layer in enumerate(model.model.layers):
            layer.mlp.gate.register_forward_hook(self._keep(n))

    def _keep(self, n: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            self.ids[n] = output[2]

        return hook

    def take(self, batch: int) -> np.ndarray:
        """[batch, token, layer, k]"""
        stacked = torch.stack([self.ids[n] for n in sorted(self.ids)], dim=1)
        return stacked.reshape(batch, -1, *stacked.shape[1:]).cpu().numpy().astype(np.uint8)


# Loss


def losses(model: Any, corpus: Path, device: str) -> dict[str, dict[str, float]]:
    """Nats per token by domain: the model, and two unigram models fitted on the training text."""
    with np.load(corpus / "train.npz") as train:
        vocabulary, sizes = model.config.vocab_size, np.diff(train["offsets"])
        of = np.repeat(train["domain"], sizes)
        counts = [np.bincount(train["tokens"][of == n], minlength=vocabulary) + 1.0 for n in range(len(DOMAINS))]
    with np.load(corpus / "heldout.npz") as held:
        tokens, offsets, domain = held["tokens"].astype(np.int64), held["offsets"], held["domain"]
    overall = sum(counts)
    order = np.argsort(np.diff(offsets))
    sums: dict[str, Counter[str]] = {d: Counter() for d in DOMAINS}
    for at in range(0, len(order), 32):
        chosen = order[at : at + 32]
        texts = [torch.from_numpy(tokens[offsets[n] : offsets[n + 1]]) for n in chosen]
        padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True).to(device)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(t) for t in texts], batch_first=True).to(device)
        with torch.no_grad():
            logits = model(padded, attention_mask=mask).logits[:, :-1].float()
        nats = torch.nn.functional.cross_entropy(logits.transpose(1, 2), padded[:, 1:], reduction="none").cpu().numpy()
        for row, n in enumerate(chosen):
            name, text = DOMAINS[domain[n]], texts[row][1:].numpy()
            sums[name]["tokens"] += len(text)
            sums[name]["model"] += float(nats[row, : len(text)].sum())
            own = counts[domain[n]]
            sums[name]["unigram_all"] -= float(np.log(overall[text] / overall.sum()).sum())
            sums[name]["unigram_domain"] -= float(np.log(own[text] / own.sum()).sum())
    return {
        d: {key: s[key] / s["tokens"] for key in ("model", "unigram_domain", "unigram_all")} | {"tokens": s["tokens"]}
        for d, s in sums.items()
    }


# Requests


def answer(model: Any, tokenizer: Any, rows: list[dict[str, Any]], device: str) -> list[Request]:
    """Greedy answers to all requests, with the routing of every token."""
    routers, ends = Routers(model), set(model.generation_config.eos_token_id)
    asked = []
    for row in rows:
        turns = [{"role": "user", "content": row["prompt"]}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        asked.append(tokenizer(text)["input_ids"])
    # A prompt too long keeps its beginning and the four tokens that open the answer.
    asked = [i if len(i) <= LONGEST_PROMPT else i[: LONGEST_PROMPT - 8] + i[-8:] for i in asked]
    out: list[Request] = []
    order = np.argsort([len(i) for i in asked])
    together = 120 if device == "cpu" else 480
    for at in range(0, len(order), together):
        chosen = order[at : at + together]
        out += _answer_batch(model, tokenizer, routers, ends, [(rows[n], asked[n]) for n in chosen], device)
    return out


@torch.no_grad()
def _answer_batch(
    model: Any, tokenizer: Any, routers: Routers, ends: set[int], items: list[tuple[dict[str, Any], Any]], device: str
) -> list[Request]:
    width = max(len(ids) for _, ids in items)
    tokens = torch.tensor([[0] * (width - len(ids)) + list(ids) for _, ids in items], device=device)
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for _, ids in items], device=device)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    state = model(tokens, attention_mask=mask, position_ids=position, use_cache=True)
    prefill = routers.take(len(items))
    following, steps, written = state.logits[:, -1].argmax(-1), [], []
    open_ = torch.ones(len(items), dtype=torch.bool)
    for _ in range(LONGEST_ANSWER):
        written.append(following.cpu().numpy())
        open_ &= torch.tensor([int(t) not in ends for t in following])
        if not open_.any():
            break
        mask = torch.cat((mask, torch.ones_like(mask[:, :1])), dim=1)
        position = position[:, -1:] + 1
        state = model(
            following[:, None],
            attention_mask=mask,
            position_ids=position,
            use_cache=True,
            past_key_values=state.past_key_values,
        )
        steps.append(routers.take(len(items))[:, 0])
        following = state.logits[:, -1].argmax(-1)
    answers = np.stack(written, axis=1)  # [request, token]
    routed = np.stack(steps, axis=1) if steps else np.zeros((len(items), 0, *prefill.shape[2:]), np.uint8)
    out = []
    for n, (row, ids) in enumerate(items):
        stop = next((t for t, token in enumerate(answers[n]) if int(token) in ends), None)
        length = len(answers[n]) if stop is None else stop
        text = tokenizer.decode(answers[n][:length])
        out.append(
            Request(
                row["domain"],
                row["language"],
                row["problem"],
                row["prompt"],
                text,
                stop is not None,
                prefill[n, width - len(ids) :],
                routed[n, :length],
            )
        )
    return out


# Distinct experts


class Tokens(NamedTuple):
    """Decode tokens as bit sets of experts, for arranging requests quickly."""

    bits: np.ndarray  # [token, layer] of all requests, one after the other
    starts: np.ndarray  # [request]
    lengths: np.ndarray  # [request]
    problems: dict[str, dict[int, np.ndarray]]  # group -> problem -> requests


def bit_sets(requests: list[Request], group: Callable[[Request], str | None]) -> Tokens:
    bits = [np.bitwise_or.reduce(np.left_shift(np.uint64(1), r.decode.astype(np.uint64)), axis=-1) for r in requests]
    lengths = np.array([len(b) for b in bits])
    problems: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for n, request in enumerate(requests):
        name = group(request)
        if lengths[n] and name is not None:
            problems[name][request.problem].append(n)
    kept = {g: {p: np.array(r) for p, r in found.items()} for g, found in problems.items() if len(found) >= BATCH}
    return Tokens(np.concatenate(bits), np.cumsum(lengths) - lengths, lengths, kept)


def arrange(tokens: Tokens, pools: dict[str, list[int]], times: int, rng: np.random.Generator) -> np.ndarray:
    """[arrangement, group + 1, layer] distinct experts in a step; the last row is the same requests mixed.

    A batch of one group never holds one problem twice.
    """
    drawn = []
    for name, pool in pools.items():
        members = [tokens.problems[name][p] for p in pool]
        table = np.array([np.resize(m, max(map(len, members))) for m in members])  # [problem, its requests, repeated]
        sizes = np.array([len(m) for m in members])
        problem = np.argsort(rng.random((times, len(pool))), axis=1)[:, :BATCH]
        request = table[problem, (rng.random(problem.shape) * sizes[problem]).astype(int)]
        token = tokens.starts[request] + (rng.random(problem.shape) * tokens.lengths[request]).astype(int)
        drawn.append(tokens.bits[token])
    sets = np.stack(drawn, axis=1)  # [arrangement, group, request, layer]
    same = np.bitwise_count(np.bitwise_or.reduce(sets, axis=2))
    flat = sets.reshape(times, -1, sets.shape[-1])
    order = np.argsort(rng.random(flat.shape[:2]), axis=1)
    shuffled = np.take_along_axis(flat, order[:, :, None], axis=1).reshape(sets.shape)
    mixed = np.bitwise_count(np.bitwise_or.reduce(shuffled, axis=2)).mean(1, keepdims=True)
    return np.concatenate([same, mixed], axis=1)


def specialisation(
    tokens: Tokens, rng: np.random.Generator, times: int = 3000, samples: int = 200
) -> dict[str, Any] | None:
    """Distinct experts of one group's batch against a mixed one, by group and layer, with a 95% interval.

    None if fewer than two groups have the problems for a batch.
    """
    if len(tokens.problems) < 2:
        return None
    names = list(tokens.problems)
    pools = {g: sorted(p) for g, p in tokens.problems.items()}
    counted = arrange(tokens, pools, times, rng).mean(0)  # [group + 1, layer]
    per_group = 1 - counted[:-1].mean(1) / counted[-1].mean()
    replicas = []
    for _ in range(samples):
        some = {g: _resampled(p, rng) for g, p in pools.items()}
        again = arrange(tokens, some, 60, rng).mean(0)
        replicas.append(1 - again[:-1].mean(1) / again[-1].mean())
    low, high = np.percentile(np.array(replicas), [2.5, 97.5], axis=0)
    means = np.percentile(np.array(replicas).mean(1), [2.5, 97.5])
    return {
        "mixed": counted[-1].mean(),
        "same": dict(zip(names, counted[:-1].mean(1).tolist(), strict=True)),
        "fewer": dict(zip(names, per_group.tolist(), strict=True)),
        "interval": {n: [float(low[i]), float(high[i])] for i, n in enumerate(names)},
        "mean": float(per_group.mean()),
        "mean_interval": means.tolist(),
        "by_layer": (1 - counted[:-1].mean(0) / counted[-1]).tolist(),
        "by_group_and_layer": {n: (1 - counted[i] / counted[-1]).tolist() for i, n in enumerate(names)},
        "problems": {g: len(p) for g, p in pools.items()},
    }


def _resampled(pool: list[int], rng: np.random.Generator) -> list[int]:
    """A bootstrap sample: a problem drawn twice is in it once, since a batch cannot hold it twice."""
    drawn = dict.fromkeys(rng.choice(pool, len(pool)).tolist())
    while len(drawn) < BATCH:
        drawn[int(rng.choice(pool))] = None
    return list(drawn)


# Prefill and decode


def correlation(requests: list[Request], experts: int) -> dict[str, Any]:
    """Pearson of a request's prefill and decode frequencies over experts, by layer; beside it, another's decode."""
    chosen = [r for r in requests if len(r.decode) >= 8]

    def frequency(ids: np.ndarray) -> np.ndarray:
        return np.stack([np.bincount(ids[:, n].ravel(), minlength=experts) for n in range(ids.shape[1])]) / len(ids)

    before = np.array([frequency(r.prefill) for r in chosen])  # [request, layer, expert]
    after = np.array([frequency(r.decode) for r in chosen])

    def pearson(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        a, b = a - a.mean(-1, keepdims=True), b - b.mean(-1, keepdims=True)
        return (a * b).sum(-1) / np.sqrt((a**2).sum(-1) * (b**2).sum(-1)).clip(min=1e-12)

    other = np.random.default_rng(1).permutation(len(chosen))
    return {
        "requests": len(chosen),
        "by_layer": pearson(before, after).mean(0).tolist(),
        "another_request": pearson(before, after[other]).mean(0).tolist(),
    }


# Text


def script(text: str) -> str:
    """The script most of the letters are in."""
    found = Counter(unicodedata.name(c, "?").split()[0] for c in text if c.isalpha())
    # Japanese is written in three scripts; one of them alone is Chinese's too.
    if found["HIRAGANA"] + found["KATAKANA"] > 0.1 * max(1, sum(found.values())):
        return "JAPANESE"
    return found.most_common(1)[0][0] if found else "?"


def texts(requests: list[Request]) -> dict[str, dict[str, float]]:
    out = {}
    for domain in DOMAINS:
        own = [r for r in requests if r.domain == domain]
        lengths = [len(r.decode) for r in own]
        out[domain] = {
            "requests": len(own),
            "ended": sum(r.ended for r in own) / len(own),
            "median_tokens": float(np.median(lengths)),
            "p90_tokens": float(np.percentile(lengths, 90)),
            "same_script": sum(script(r.prompt) == script(r.answer) for r in own) / len(own),
        }
    return out


def samples(requests: list[Request], rng: np.random.Generator) -> list[dict[str, str]]:
    out = []
    for domain in DOMAINS:
        own = [r for r in requests if r.domain == domain]
        for n in rng.choice(len(own), 4 if domain == "math-other" else 2, replace=False):
            r = own[n]
            out.append({"domain": domain, "language": r.language, "prompt": r.prompt, "answer": r.answer})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True, help="folder written by corpus.py")
    parser.add_argument("--out", type=Path, required=True, help="folder for measurements.json and samples.json")
    parser.add_argument("--per-domain", type=int, default=1000, help="requests asked in each domain, at most")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(options.device).eval()
    # The loop over experts: it runs in float32 on every device.
    model.set_experts_implementation("eager")
    rng = np.random.default_rng(3)
    rows = [json.loads(line) for line in (options.corpus / "heldout.jsonl").read_text(encoding="utf-8").splitlines()]
    asked = []
    for domain in DOMAINS:
        own = [r for r in rows if r["domain"] == domain]
        most = options.per_domain * (4 if domain == "math-other" else 1)  # a batch of each of its languages
        asked += [own[n] for n in sorted(rng.permutation(len(own))[:most])]
    requests = answer(model, tokenizer, asked, options.device)
    maths = bit_sets(requests, lambda r: r.language if r.domain.startswith("math") else None)
    code = bit_sets(requests, lambda r: r.language if r.domain == "code" else None)
    domains = specialisation(bit_sets(requests, lambda r: r.domain), rng)
    if domains is None:
        raise SystemExit("too few requests: ask more with --per-domain")
    measured = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "loss": losses(model, options.corpus, options.device),
        "domains": domains,
        "languages": specialisation(maths, rng),
        "programming": specialisation(code, rng),
        "correlation": correlation(requests, model.config.num_experts),
        "texts": texts(requests),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "measurements.json").write_text(json.dumps(measured, indent=1) + "\n")
    shown = json.dumps(samples(requests, rng), indent=1, ensure_ascii=False)
    (options.out / "samples.json").write_text(shown + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in measured.items() if k != "languages"}, indent=None))


if __name__ == "__main__":
    main()
