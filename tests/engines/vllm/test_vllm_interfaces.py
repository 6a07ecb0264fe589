"""Features are judged by vLLM's source: fake packages that fit or lack a hook, and the table of versions in the docs.

COTERIE_VLLM_SOURCES names a folder with unpacked wheels of vLLM, one folder each: further columns of the table.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from coterie.engines.vllm import interfaces
from coterie.engines.vllm.interfaces import NEEDS, TESTED, fits, missing

PAGE = Path(__file__).parents[3] / "docs/engines/vllm.md"
Use = Callable[..., None]
HOOKS = {need.split(" | ")[0] for needs in NEEDS.values() for need in needs}


def write_package(root: Path, hooks: set[str], version: str = "0.99.0") -> Path:
    """Write a package `vllm` that defines `hooks` and nothing else."""
    sources: dict[str, dict[str, list[str]]] = {}
    for hook in sorted(hooks):
        module, _, name = hook.partition(":")
        owner, _, member = name.partition("(")[0].rpartition(".")
        parameters = name.partition("(")[2].rstrip(")")
        definition = f"{member} = {{}}"
        if "(" in name:
            definition = f"def {member}({', '.join(filter(None, [owner and 'self', parameters]))}): ..."
        sources.setdefault(module, {}).setdefault(owner, []).append(definition)
    package = root / "vllm"
    for module, owners in sources.items():
        path = package.joinpath(*module.split("."))
        path = (
            path / "__init__.py"
            if any(other.startswith(f"{module}.") for other in sources)
            else path.with_suffix(".py")
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [line.replace(" = {}", " = type('', (), {})") for line in owners.pop("", [])]
        for owner, members in owners.items():
            lines += [f"class {owner}:", *(f"    {member}" for member in members)]
        path.write_text("\n".join(lines))
    (package / "__init__.py").write_text(f"__version__ = {version!r}")
    return package


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Use]:
    """Make a package the vLLM of this process."""

    def put(package: Path, version: str = "0.99.0") -> None:
        module = ModuleType("vllm")
        vars(module).update(__file__=str(package / "__init__.py"), __version__=version)
        monkeypatch.setitem(sys.modules, "vllm", module)
        fits.cache_clear()
        interfaces._names.cache_clear()
        interfaces._warn_once.cache_clear()

    monkeypatch.setattr(interfaces.logger.parent, "propagate", True)
    yield put
    fits.cache_clear()
    interfaces._names.cache_clear()


@pytest.mark.parametrize("version", ["0.99.0", f"{TESTED[0]}.7"])
def test_an_untested_version_that_fits_works_with_one_warning(
    version: str, tmp_path: Path, use: Use, caplog: pytest.LogCaptureFixture
) -> None:
    use(write_package(tmp_path, HOOKS), version)
    with caplog.at_level(logging.WARNING):
        assert all(fits(feature, "left out") for feature in NEEDS)
    messages = [record.getMessage() for record in caplog.records]
    if version.startswith(TESTED):
        assert not messages
    else:
        assert len(messages) == 1
        assert f"vLLM {version} was not tested" in messages[0]
        assert f"(tested: {', '.join(TESTED)})" in messages[0]


@pytest.mark.parametrize("feature", NEEDS)
def test_a_missing_hook_is_named_and_other_features_still_work(
    feature: str, tmp_path: Path, use: Use, caplog: pytest.LogCaptureFixture
) -> None:
    hook = NEEDS[feature][-1].split(" | ")[0]
    use(write_package(tmp_path, HOOKS - {hook}))
    affected = {name for name, needs in NEEDS.items() if NEEDS[feature][-1] in needs}
    with caplog.at_level(logging.WARNING):
        assert not fits(feature, "it is left out")
        assert {name for name in NEEDS if not fits(name, "left out")} == affected
    message = caplog.records[0].getMessage()
    assert f"lacks {NEEDS[feature][-1]}, which {feature} needs: it is left out" in message
    assert all(name in message.partition("still works")[2] for name in set(NEEDS) - affected)


def test_every_need_is_looked_for(tmp_path: Path) -> None:
    for number, hook in enumerate(sorted(HOOKS)):
        package = write_package(tmp_path / str(number), HOOKS - {hook})
        interfaces._names.cache_clear()
        for feature, needs in NEEDS.items():
            # An alternative may be satisfied by another feature's hook; none of today's is.
            assert missing(feature, package) == [need for need in needs if need.split(" | ")[0] == hook]


def test_either_alternative_will_do_and_a_new_parameter_does_not_fit(tmp_path: Path) -> None:
    second = {need.split(" | ")[-1] for needs in NEEDS.values() for need in needs}
    assert not any(missing(feature, write_package(tmp_path / "second", second)) for feature in NEEDS)
    grown = {hook.replace("wait_for_save()", "wait_for_save(step)") for hook in HOOKS}
    lacks = missing("connector", write_package(tmp_path / "grown", grown))
    assert [need.rpartition(".")[2] for need in lacks] == ["wait_for_save()"]


@pytest.mark.parametrize("lost", ["wait_for_save()", "register_connector(name, module_path, class_name)"])
def test_the_plugin_never_stops_an_engine(lost: str, tmp_path: Path) -> None:
    """Without a hook the connector of that name does nothing; without a registry the plugin does not even fail."""
    hooks = {hook for hook in HOOKS if not hook.endswith(lost)}
    write_package(tmp_path, hooks)
    factory = tmp_path / "vllm/distributed/kv_transfer/kv_connector/factory.py"
    factory.write_text(
        factory.read_text().replace("(self, name, module_path, class_name): ...", "(*_): KVConnectorFactory.seen = _")
    )
    script = (
        "from coterie.engines.vllm import plugin\n"
        "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as factory\n"
        "plugin.register()\n"
        "print(getattr(factory, 'seen', 'none'))\n"
        "kind = plugin.CoterieConnector\n"
        "print(kind.__mro__[0].get_num_new_matched_tokens(None, None, 3))\n"
        "print(kind.request_finished_all_groups(None, None, ()))\n"
    )
    source = str(Path(__file__).parents[3] / "src")
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), source])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    registered = "('CoterieConnector', 'coterie.engines.vllm.plugin', 'CoterieConnector')"
    expected = [registered if "wait" in lost else "none", "(0, False)", "(False, None)"]
    assert run.stdout.splitlines() == expected
    assert f"{lost}, which connector needs: CoterieConnector does nothing" in run.stderr


def table() -> dict[str, dict[str, str]]:
    """Return the docs' table: version -> feature -> cell."""
    text = PAGE.read_text()
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in text[text.index("| feature | vLLM") :].split("\n\n")[0].splitlines()
    ]
    versions = [cell.removeprefix("vLLM ") for cell in rows[0][1:]]
    return {version: {row[0]: row[column] for row in rows[2:]} for column, version in enumerate(versions, start=1)}


def packages() -> dict[str, Path]:
    """Return vLLM's packages at hand by minor version: the installed one, and those of COTERIE_VLLM_SOURCES."""
    spec = importlib.util.find_spec("vllm")
    found = [Path(folder) for folder in (spec.submodule_search_locations or [] if spec else [])]
    if sources := os.environ.get("COTERIE_VLLM_SOURCES"):
        found += sorted(Path(sources).glob("*/vllm"))
    versions = {}
    for package in found:
        if match := re.search(r"version = '(\d+\.\d+)", (package / "_version.py").read_text()):
            versions[match[1]] = package
    return versions


def test_the_table_has_every_feature_and_the_tested_versions() -> None:
    cells = table()
    assert all(list(column) == list(NEEDS) for column in cells.values())
    assert {cell.split()[0] for column in cells.values() for cell in column.values()} <= {"run", "read", "no"}
    assert {version for version, column in cells.items() if column["connector"] == "run"} >= set(TESTED)


@pytest.mark.parametrize("version", table())
def test_the_table_says_what_a_version_has(version: str) -> None:
    package = packages().get(version)
    if package is None:
        pytest.skip(f"no source of vLLM {version}: set COTERIE_VLLM_SOURCES to a folder with its unpacked wheel")
    lacks = {feature: missing(feature, package) for feature in NEEDS}
    claimed = {feature for feature, cell in table()[version].items() if not cell.startswith("no")}
    assert {feature for feature, needs in lacks.items() if not needs} == claimed, lacks
