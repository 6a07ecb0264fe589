"""The shipped prompts are usable as they are."""

from __future__ import annotations

import re
from collections import Counter

from coterie.prompts import load_prompts


def test_enough_of_each() -> None:
    prompts = load_prompts()
    assert len(prompts) >= 300
    assert len({p.domain for p in prompts}) >= 5
    assert len({p.lang for p in prompts}) >= 4
    assert min(Counter(p.domain for p in prompts).values()) >= 10, "a domain of a few prompts cannot be sampled"


def test_ids_are_unique() -> None:
    counts = Counter(p.id for p in load_prompts())
    assert [name for name, count in counts.items() if count > 1] == []


def test_fields_are_filled_and_clean() -> None:
    for prompt in load_prompts():
        assert re.fullmatch(r"[a-z0-9-]+", prompt.id), prompt
        assert re.fullmatch(r"[a-z_-]+", prompt.domain), prompt
        assert re.fullmatch(r"[a-z]{2}", prompt.lang), prompt
        assert prompt.prompt == prompt.prompt.strip() != "", prompt


def test_no_machine_path() -> None:
    # A path of somebody's own machine has no place in a shipped prompt.
    own = re.compile(r"/(home|Users|root|work|mnt|tmp)/\w|[A-Z]:\\Users\\")
    assert [p.id for p in load_prompts() if own.search(p.prompt)] == []
