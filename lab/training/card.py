"""The model card of coterie-tiny, from what measure.py found."""

from __future__ import annotations

from typing import Any

from tiny_model import DOMAINS

BATCH = 16
LONGEST_ANSWER = 256


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def card(m: dict[str, Any], run: dict[str, Any], corpus: dict[str, Any]) -> str:
    """README.md: what the model is, what it was trained on, what was measured."""
    s, domains, rise = run["settings"], m["domains"], run["largest_rise"]
    rises = ", ".join(f"{d} {rise[d]:.4f}" for d in DOMAINS)
    low, high = domains["mean_interval"]
    layers = "".join(f" {n} |" for n in range(1, s["layers"] + 1))
    lines = [
        "# coterie-tiny",
        "",
        f"A Mixture-of-Experts language model of {m['parameters']:,} parameters, trained for Coterie so that routing "
        "can be recorded and scheduled offline with experts that really specialise. It continues text in the language "
        "and domain asked, and stops; it knows nothing. "
        f"`Qwen3MoeForCausalLM`: {s['layers']} layers, hidden {s['hidden']}, {s['experts']} experts of {s['width']}, "
        f"top {s['top_k']}, float16. Licence: MIT.",
        "",
        "## Held-out loss",
        "Nats per token on requests it was not trained on. The unigram models are fitted on the training text of the "
        "same domain, and on all of it.",
        "",
        "| domain | tokens | model | unigram, domain | unigram, all |",
        "|---|---|---|---|---|",
        *(
            f"| {d} | {x['tokens']:,} | {x['model']:.3f} | {x['unigram_domain']:.3f} | {x['unigram_all']:.3f} |"
            for d, x in m["loss"].items()
        ),
        "",
        f"Averaged over domains it was lowest at step {run['best_step']:,} of {run['last']['step']:,}: the checkpoint "
        f"kept. The most it rose at any evaluation above its lowest before: {rise['mean']:.4f} ({rises}).",
        "",
        "## Specialisation",
        f"Distinct experts in a decode step of {BATCH} requests, averaged over layers: the same held-out requests "
        f"arranged by domain, and mixed. Mixed: {domains['mixed']:.2f} of {s['experts']}. Intervals: bootstrap over "
        "problems, 95%.",
        "",
        "| domain | problems | distinct | fewer than mixed, % | interval |",
        "|---|---|---|---|---|",
        *(
            f"| {d} | {domains['problems'][d]} | {domains['same'][d]:.2f} | {percent(domains['fewer'][d])} "
            f"| {interval(domains['interval'][d])} |"
            for d in DOMAINS
        ),
        f"| **mean** | | | **{percent(domains['mean'])}** | {interval([low, high])} |",
        "",
        within(m["languages"], "one language of the maths requests against all eleven"),
        "",
        within(m["programming"], "one programming language against all six"),
        "",
        "| layer |" + layers,
        "|---" * (s["layers"] + 1) + "|",
        "| fewer experts, same domain, % |" + "".join(f" {percent(v)} |" for v in domains["by_layer"]),
        "| correlation of prefill and decode |" + "".join(f" {v:.2f} |" for v in m["correlation"]["by_layer"]),
        "| with another request's decode |" + "".join(f" {v:.2f} |" for v in m["correlation"]["another_request"]),
        "",
        "## Answers",
        f"Greedy, through the chat template, at most {LONGEST_ANSWER} tokens.",
        "",
        "| domain | requests | ended by itself, % | median tokens | 90th percentile | in the script asked, % |",
        "|---|---|---|---|---|---|",
        *(
            f"| {d} | {x['requests']} | {percent(x['ended'])} | {x['median_tokens']:.0f} | {x['p90_tokens']:.0f} "
            f"| {percent(x['same_script'])} |"
            for d, x in m["texts"].items()
        ),
        "",
        "## Training",
        training_note(run),
        "",
        "| domain | tokens of text | times read |",
        "|---|---|---|",
        *(f"| {d} | {corpus['tokens'][d]:,} | {run['epochs'][d]:.1f} |" for d in DOMAINS),
        "",
        f"{corpus['held_out_requests']:,} requests are held out, by problem: no translation of a held-out problem, no "
        "version of it in another programming language and no text with much of its wording is trained on.",
        "",
        "| text | licence | characters |",
        "|---|---|---|",
        *(f"| {x['source']} | {x['licence']} | {x['characters']:,} |" for x in corpus["sources"]),
        "",
        "The prompts are those of GSM8K, HumanEval and PubMedQA (MIT), MGSM and MBXP (CC-BY-4.0), MT-Bench, Vicuna, "
        "AlpacaEval, Arena-Hard, ru-alpaca and LawBench (Apache-2.0) and BELLE (ODC-By). `lab/training/` in the "
        "repository rebuilds the corpus, the model and this page.",
        "",
    ]
    return "\n".join(lines)


def interval(bounds: list[float]) -> str:
    return f"{percent(bounds[0])} to {percent(bounds[1])}"


def within(part: dict[str, Any] | None, what: str) -> str:
    if part is None:
        return f"Within a task, {what}: not measured, too few requests were asked."
    listed = ", ".join(f"{g} {percent(v)}" for g, v in sorted(part["fewer"].items()))
    return f"Within a task, {what} mixed: {percent(part['mean'])}% fewer ({interval(part['mean_interval'])}): {listed}."


def training_note(run: dict[str, Any]) -> str:
    s = run["settings"]
    text = (
        f"{run['last']['step']:,} steps of {s['rows']} rows of {s['length']} tokens in {run['seconds']:.0f} s on one "
        f"GPU ({run['tokens_per_second']:,} tokens/s), AdamW at {s['rate']:g} with cosine decay, "
        f"weight decay {s['decay']:g}, load-balancing loss {s['balance']:g} over the whole batch."
    )
    if s["information"]:
        text += (
            f" Specialisation is encouraged: the mutual information between {s['groups']} and expert (Mod-Squad, "
            f"arXiv:2212.08066) is maximised with weight {s['information']:g}; "
            "`lab/training/README.md` has the run without."
        )
    return text
