"""Exercises with answers, made by packages that generate them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sources import Text

SEED = 20

# Left out: gsm_symbolic, whose templates are GSM8K's test problems.
REASONING = (
    "basic_arithmetic calendar_arithmetic chain_sum coin_flip complex_arithmetic count_primes decimal_arithmetic "
    "dice family_relationships fraction_simplification gcd lcm leg_counting number_filtering number_sequence "
    "number_sorting polynomial_equations power_function prime_factorization products simple_equations "
    "simple_geometry simple_integration time_intervals"
)


def exercises(per_kind: int) -> Iterator[tuple[str, str, Text]]:
    """(generator, licence, text) of both maths generators."""
    import random

    import mathgenerator
    import reasoning_gym

    for kind in REASONING.split():
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
