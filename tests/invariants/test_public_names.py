"""A public name of the package has one meaning: a class or a function of that name is defined once.

Private modules and names (``_name``) are left out, and two kinds that a rule gives their names: `main`, which Python's
entry points are called, and ``VERB_command``, which the command line finds by the verb.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import coterie

ROOT = Path(coterie.__file__).parent
KEPT = {
    "ExpertAwareScheduler": "the class that a user names for vLLM, and the one for transformers",
    "LatencyAware": "one policy in two registries: routers and batching strategies",
    "RoundRobin": "one policy in two registries: routers and planners",
}
"""Names that are defined twice, and why."""


def public_names() -> dict[str, list[str]]:
    """Name → modules that define a class or a function of that name."""
    modules: dict[str, list[str]] = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        module = path.relative_to(ROOT)
        if any(part.startswith("_") and part != "__init__.py" for part in module.parts):
            continue
        for statement in ast.parse(path.read_text()).body:
            if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = statement.name
                if not name.startswith("_") and name != "main" and not name.endswith("_command"):
                    modules[name].append(str(module))
    return modules


def test_public_names_are_unique() -> None:
    twice = {name: modules for name, modules in public_names().items() if len(modules) > 1}
    assert {name: modules for name, modules in twice.items() if name not in KEPT} == {}
    assert [name for name in KEPT if name not in twice] == [], "defined once by now"
    assert len(KEPT) <= 15
