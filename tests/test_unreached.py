"""Nothing without a caller: every module of Coterie is reached from a root, every public name is used.

Roots are what a user enters by: the command line with its verbs, the front door, the vLLM plugin and other entry
points, `coterie.testing`, modules that pages of the documentation name, and the documented modules, which the lab uses
as any stranger would. A module is reached if a reached module imports it, in a function too, or names it in a string;
a package that calls `import_modules` imports all of its modules.

A public function, class or method is used if its name stands in product code, in the lab or as code in a page, outside
of its own definition: by name, so one use of a common name hides others. Methods of classes that extend a library's are
not looked at: the library calls them.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import coterie

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "coterie"

LATER = {
    "coterie.predictors.transitions": "the plugin's prefetching will use it",
    "coterie.placement.co_clustering": "planners that the sem-moe suite and the expert-parallel layer use",
    "coterie.engines.torch_ep": "the expert-parallel layer, used by docs/expert-parallel-layer.md",
    "coterie.sim.group": "the simulator of an expert-parallel group, docs/group-simulator.md",
    "coterie.dispatch": "tokens to ranks; the expert-parallel layer and the sem-moe suite use it",
    "coterie.footprints.ranks": "footprints by rank, for dispatch",
    "coterie.placement.migration": "rounds and states of a migration, docs/migration.md",
}
"""Modules, with those below them, that later work connects: reason."""

NAMES = {"coterie.gateway.control.streams.ExpertStreams.last_seq": "tests wait for it, so that none waits by the clock"}
"""Names without a use in product code that stay, as `module.name` or `module.Class.method`: reason."""

VERB = re.compile(r"coterie\.cli\.verbs\..*_command")
"""Functions that the table of verbs finds by their name."""
OURS = ("coterie", "typing", "abc", "dataclasses")
"""Packages whose classes do not call methods of classes that extend them."""


@cache
def modules() -> dict[str, Path]:
    """Module of Coterie → its file."""
    files = {}
    for path in SOURCE.rglob("*.py"):
        parts = ("coterie", *path.relative_to(SOURCE).with_suffix("").parts)
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree(path)))


def imports_of(name: str, path: Path) -> Iterator[str]:
    """Modules that a module imports anywhere in it, and those that it names in a string, as the table of verbs does."""
    known = modules()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(
                    [*package.split(".")[: len(package.split(".")) - node.level + 1], *filter(None, [base])]
                )
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
            words = re.findall(r"[\w.]+", node.value)
            yield from (word for word in words if word in known)
            yield from (f"{package}.{word.removesuffix('.py')}" for word in words if word.endswith(".py"))


def roots() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = [*project["scripts"].values()]
    points += [point for group in project["entry-points"].values() for point in group.values()]
    modules_named = {point.partition(":")[0] for point in points}
    modules_named |= {name for name in modules() if name.startswith(("coterie.cli.verbs", "coterie.testing"))}
    modules_named |= {
        "coterie",
        "coterie._front",
        "coterie._compiled_files",
    }  # the last is named in Makefile's environment
    modules_named |= {name for name in modules() if name.endswith(".__main__")}
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition("\n## Documented modules\n")[2].partition("\n## ")[0]
    for line in section.splitlines():
        if line.startswith("| `"):
            package, *more = re.findall(r"`([\w.]+)`", line)
            modules_named |= {package, *(f"{package}.{module}" for module in more)}
    for dotted in re.findall(r"coterie(?:\.\w+)+", "\n".join(pages())):
        modules_named |= {dotted, dotted.rpartition(".")[0]}  # a module, or a name in one
    return modules_named


@cache
def pages() -> tuple[str, ...]:
    """Text of the pages that users read."""
    return tuple(
        path.read_text() for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")) if path.name != "CHANGELOG.md"
    )


@cache
def reached() -> frozenset[str]:
    """Modules that a root imports, directly or through others."""
    known = modules()
    waiting, seen = [name for name in roots() if name in known], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        parents = [".".join(name.split(".")[:end]) for end in range(1, len(name.split(".")))]
        waiting += [target for target in (*imports_of(name, known[name]), *parents) if target in known]
        if "import_modules" in called(name):
            waiting += [other for other in known if other.rpartition(".")[0] == name]
    return frozenset(seen)


def called(name: str) -> set[str]:
    """Names of functions that a module calls when it is imported."""
    statements = [node.value for node in tree(modules()[name]).body if isinstance(node, ast.Expr)]
    return {node.func.id for node in statements if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}


def later(name: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in LATER)


def test_every_module_is_reached() -> None:
    assert sorted(name for name in modules() if name not in reached() and not later(name)) == []


def uses() -> Counter[str]:
    """Name → how often it stands in product code, the lab and pages: as a name, an attribute, an import, a word of a
    string that is not a docstring."""
    counted: Counter[str] = Counter()
    files = [*SOURCE.rglob("*.py")]
    files += [path for folder in ("src", "benchmarks", "training") for path in (ROOT / "lab" / folder).rglob("*.py")]
    for path in files:
        nodes = nodes_of(path)
        docstrings = {
            id(node.value) for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for node in nodes:
            if isinstance(node, ast.Name):
                counted[node.id] += 1
            elif isinstance(node, ast.Attribute):
                counted[node.attr] += 1
            elif isinstance(node, ast.alias):
                counted[node.name.rpartition(".")[2]] += 1
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                counted.update(set(re.findall(r"\w+", node.value)))
    for page in pages():
        code = re.findall(r"^```.*?^```|`[^`\n]+`", page, re.MULTILINE | re.DOTALL)
        counted.update(set(re.findall(r"\w+", "\n".join(code))))
    return counted


def definitions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    """Public functions and classes of modules, and the classes' public methods, as `module.Class.method`."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for module, path in modules().items():
        for node in tree(path).body:
            if isinstance(node, kinds) and not node.name.startswith("_"):
                yield f"{module}.{node.name}", node
                for inner in (
                    node.body if isinstance(node, ast.ClassDef) and not extends_a_library(module, node) else ()
                ):
                    if isinstance(inner, kinds[:2]) and not inner.name.startswith("_"):
                        yield f"{module}.{node.name}.{inner.name}", inner


def extends_a_library(module: str, node: ast.ClassDef) -> bool:
    """Whether a base of the class is imported from outside of Coterie, `typing` and `abc` aside."""
    bases = {name.id for base in node.bases for name in ast.walk(base) if isinstance(name, ast.Name)}
    return bool(bases) and not bases.isdisjoint(imported_from_outside(module))


@cache
def imported_from_outside(module: str) -> set[str]:
    """Names that a module imports from other packages than Coterie, `typing` and `abc`."""
    outside: set[str] = set()
    for statement in nodes_of(modules()[module]):
        if isinstance(statement, ast.ImportFrom) and not (statement.module or "").startswith(
            ("coterie", "typing", "abc")
        ):
            outside |= {alias.asname or alias.name for alias in statement.names}
        elif isinstance(statement, ast.Import):
            outside |= {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
    return outside


def own_uses(node: ast.AST, name: str) -> int:
    """Uses inside of its own definition: a recursion is no caller."""
    return sum(
        (isinstance(inner, ast.Name) and inner.id == name) or (isinstance(inner, ast.Attribute) and inner.attr == name)
        for inner in ast.walk(node)
    )


@cache
def unused() -> tuple[str, ...]:
    counted, everywhere = uses(), set(coterie.__all__)
    defined = Counter(name.rpartition(".")[2] for name, _ in definitions())
    names = []
    for full, node in definitions():
        name = node.name
        by_decorator = any("register" in ast.dump(one) for one in node.decorator_list)
        if by_decorator or VERB.fullmatch(full) or name in everywhere or later(full):
            continue
        if counted[name] <= own_uses(node, name) and defined[name]:
            names.append(full)
    return tuple(sorted(names))


def test_every_public_name_is_used() -> None:
    assert [name for name in unused() if name not in NAMES] == []


def test_the_exceptions_are_needed() -> None:
    assert [name for name in NAMES if name not in unused()] == []
    known = modules()
    assert [name for name in LATER if name not in known] == []
