"""coterie-tiny's tokenizer without a library: byte-level BPE read from its ``tokenizer.json``.

Text is cut at special tokens, every digit apart, the rest into words as GPT-2 does; each word's bytes are merged in the
order the merges were learned. Only what that file uses is supported: anything else in it is refused, never guessed.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unicodedata import category

from coterie.errors import UnavailableError

PRETOKENIZERS = [
    {"type": "Digits", "individual_digits": True},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
]
# Digits are cut out before: what is left of \w but the underscore is a letter.
WORDS = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[^\W\d_]+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")


class BytePairs:
    """What the worker asks of a tokenizer; the chat template is ChatML, as that model's."""

    chat_template = "ChatML"

    def __init__(self, folder: Path) -> None:
        about = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        found = about["pre_tokenizer"]
        if found.get("pretokenizers") != PRETOKENIZERS or about["model"]["type"] != "BPE" or about["normalizer"]:
            raise UnavailableError(f"{folder}/tokenizer.json: only byte-level BPE with single digits is read here")
        self._ids: dict[str, int] = about["model"]["vocab"]
        self._ranks = {tuple(pair): rank for rank, pair in enumerate(about["model"]["merges"])}
        self._special = {token["content"]: int(token["id"]) for token in about["added_tokens"]}
        self._cut = re.compile("(" + "|".join(map(re.escape, self._special)) + ")")
        letters = _byte_letters()
        self._letter = letters  # [byte]
        byte_of = {letter: byte for byte, letter in enumerate(letters)}
        special = set(self._special.values())
        self._bytes = {
            number: bytes(byte_of[letter] for letter in token)
            for token, number in self._ids.items()
            if number not in special
        }
        self._word = lru_cache(maxsize=1 << 16)(self._merged)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; none is added at its ends, in either case."""
        del add_special_tokens
        out: list[int] = []
        for part in self._cut.split(text):
            if part in self._special:
                out.append(self._special[part])
                continue
            for piece in _apart(part):
                for word in WORDS.findall(piece) or [piece]:
                    out += self._word(word)
        return out

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        names = {} if skip_special_tokens else {number: name.encode() for name, number in self._special.items()}
        return b"".join(self._bytes.get(number, names.get(number, b"")) for number in ids).decode("utf-8", "replace")

    def apply_chat_template(self, messages: Any, tokenize: bool = False, add_generation_prompt: bool = True) -> str:
        del tokenize
        said = "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages)
        return said + ("<|im_start|>assistant\n" if add_generation_prompt else "")

    def _merged(self, word: str) -> tuple[int, ...]:
        """Ids of one word: of its neighbours, the pair learned first is merged, until none is known."""
        parts = [self._letter[byte] for byte in word.encode("utf-8", "surrogatepass")]
        while len(parts) > 1:
            pair = min(pairwise(parts), key=lambda two: self._ranks.get(two, len(self._ranks)))
            if pair not in self._ranks:
                break
            joined, at = [], 0
            while at < len(parts):
                both = tuple(parts[at : at + 2]) == pair
                joined.append(parts[at] + parts[at + 1] if both else parts[at])
                at += 2 if both else 1
            parts = joined
        return tuple(self._ids[part] for part in parts)


def _apart(text: str) -> list[str]:
    """Every numeric character alone, what lies between them whole."""
    out, start = [], 0
    for at, letter in enumerate(text):
        if category(letter).startswith("N"):
            out += [text[start:at], letter]
            start = at + 1
    return [piece for piece in (*out, text[start:]) if piece]


def _byte_letters() -> list[str]:
    """[byte] the letter that stands for it in the vocabulary: itself if it can be printed, else one past 255."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    out, next_free = [], 256
    for byte in range(256):
        out.append(chr(byte if byte in plain else next_free))
        next_free += byte not in plain
    return out
