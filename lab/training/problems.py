"""Word problems with worked answers in the eleven languages of the maths prompts, written for this project.

Ten situations; in each language the same ten, with its own names and things (phrases.json). Counts are drawn from
numbers that take the same plural in every language here (Russian: 5 to 20, 25 to 30, ...), so that a sentence is right
for any draw.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

COUNTS = [n for n in range(5, 96) if n < 21 or n % 10 in (0, 5, 6, 7, 8, 9)]


class Problem(NamedTuple):
    """A question, and its answer worked out in one line of arithmetic per step."""

    language: str
    question: str
    answer: str


class Phrases(NamedTuple):
    """Phrases of a language: {x} and {y} are names, {i} a thing, {a}, {b}, {c} counts."""

    names: str
    things: str
    answer: str
    situations: tuple[str, ...]
    genitive: str = ""
    """The names declined, {x_gen}, in the order of `names`; empty where names do not decline."""
    dative: str = ""
    """{x_dat}"""


PHRASES = {
    language: Phrases(**phrases)
    for language, phrases in json.loads(Path(__file__).with_name("phrases.json").read_text("utf-8")).items()
}


def _numbers(situation: int, rng: np.random.Generator) -> tuple[int, int, int, list[str], int]:
    """Counts that make the situation possible, its arithmetic and its result."""

    def pick(low: int = 5, high: int = 95) -> int:
        return int(rng.choice([n for n in COUNTS if low <= n <= high]))

    a, b, c = pick(), pick(5, 50), pick(5, 20)
    if situation == 0:
        a = pick(c, 95)
        return a, b, c, [f"{a} + {b} = {a + b}", f"{a + b} - {c} = {a + b - c}"], a + b - c
    if situation == 1:
        a, b = pick(5, 20), pick(5, 20)
        c = (a * b // 50 + 1) * 50
        return a, b, c, [f"{a} x {b} = {a * b}", f"{c} - {a * b} = {c - a * b}"], c - a * b
    if situation == 2:
        a, b = pick(5, 30), pick(5, 30)
        return a, b, c, [f"{a} x {b} = {a * b}", f"{a * b} - {c} = {a * b - c}"], a * b - c
    if situation == 3:
        a = pick(5, 10)
        return a, b, c, [f"{a} x {b} = {a * b}", f"{a * b} x {c} = {a * b * c}"], a * b * c
    if situation == 4:
        share = int(rng.integers(2, 10))
        c = pick(5, 10)
        options = [n for n in COUNTS if n + share * c in COUNTS]
        if not options:
            return _numbers(situation, rng)
        b = int(rng.choice(options))
        a = b + share * c
        return a, b, c, [f"{a} - {b} = {a - b}", f"{a - b} / {c} = {share}"], share
    if situation in (5, 6):
        b, c = pick(20, 95), pick(5, 10)
        a = b * c + 5 * int(rng.integers(2, 60))
        a += (5 - a) % 5
        return a, b, c, [f"{b} x {c} = {b * c}", f"{a} - {b * c} = {a - b * c}"], a - b * c
    if situation == 7:
        b = pick(5, 10)
        return a, b, c, [f"{a} x {b} = {a * b}", f"{a} + {a * b} = {a + a * b}"], a + a * b
    if situation == 8:
        a = pick(10, 95)
        return a, b, c, [f"{a} x {b} = {a * b}", f"{a * b} - {c} = {a * b - c}"], a * b - c
    a, b = pick(5, 40), pick(5, 20)
    return a, b, c, [f"{a} + {b} = {a + b}", f"{a + b} + {c} = {a + b + c}"], a + b + c


def problems(language: str, count: int, rng: np.random.Generator) -> Iterator[Problem]:
    """count problems in a language; the same generator state gives the same problems."""
    phrases = PHRASES[language]
    names, things = phrases.names.split(), phrases.things.split(",")
    genitive, dative = ((case or phrases.names).split() for case in (phrases.genitive, phrases.dative))
    for _ in range(count):
        situation = int(rng.integers(len(phrases.situations)))
        a, b, c, steps, result = _numbers(situation, rng)
        x, y = (int(n) for n in rng.choice(len(names), 2, replace=False))
        words = {"x": names[x], "y": names[y], "x_gen": genitive[x], "x_dat": dative[x]}
        thing = things[int(rng.integers(len(things)))]
        question = phrases.situations[situation].format(i=thing, a=a, b=b, c=c, **words)
        closing = phrases.answer.format(r=result)
        yield Problem(language, question, ". ".join(steps) + ". " + closing)
