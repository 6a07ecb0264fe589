"""The report: figures, the page, and the folder they go to."""

from __future__ import annotations

import shutil
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from coterie.answers import figures
from coterie.answers.inspect.inspection import inspect_trace
from coterie.answers.inspect.sections import sections, write_inspection
from coterie.answers.page import MARKER, cell_text, check_report_folder
from coterie.errors import ConfigError, TraceError
from coterie.traces import LoadTable, RequestTrace
from coterie.traces.arrivals import LognormalLengths
from coterie.traces.synthetic import SyntheticSettings, generate


@pytest.fixture(scope="module")
def found() -> Any:
    settings = SyntheticSettings(
        num_layers=3,
        num_experts=8,
        top_k=2,
        domains=("<script>", "b & c"),
        lengths=LognormalLengths(prompt_mean=20, output_mean=10),
    )
    return inspect_trace(generate(settings, np.random.default_rng(0), requests=200), "a<b", np.random.default_rng(0))


@pytest.fixture(scope="module")
def request_only() -> Any:
    table = RequestTrace(np.arange(1, 31), np.arange(1, 31), np.linspace(0, 50, 30))
    return inspect_trace(table, "r", np.random.default_rng(0))


@pytest.fixture(scope="module")
def report(found: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    page, *pictures = write_inspection(found, tmp_path_factory.mktemp("report") / "r")
    return SimpleNamespace(page=page, figures=pictures)


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.urls: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: Any, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        self.urls += [v for k, v in attrs if k in ("src", "srcset", "href")]
        if tag not in ("meta", "img", "source"):
            self.open.append(tag)

    def handle_endtag(self, tag: Any) -> None:
        assert self.open.pop() == tag


def test_page_is_whole_and_self_contained(report: Any) -> None:
    text = report.page.read_text()
    page = Page(text)
    assert page.open == [], "every element is closed"
    assert page.urls
    links = [url.removeprefix("#") for url in page.urls if url.startswith("#")]
    assert links, "findings come first, each with a link to its section"
    assert links == [attrs["id"] for tag, attrs in page.tags if tag == "section" and "id" in attrs]
    assert all(url.startswith(("data:image/png;base64,", "#")) for url in page.urls)
    assert "http" not in text.replace("http-equiv", "")
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    images = [attrs for tag, attrs in page.tags if tag == "img"]
    assert len(images) == len(report.figures) == 7
    assert all(attrs["alt"] for attrs in images)
    assert sum(tag == "table" for tag, _ in page.tags) >= len(images), "a table beside each figure"
    assert "prefers-color-scheme: dark" in text
    assert "width=device-width" in text
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in report.figures)


def test_same_numbers_same_bytes_and_only_own_files_are_replaced(
    found: Any, report: Any, request_only: Any, tmp_path: Path
) -> None:
    first = write_inspection(request_only, tmp_path / "first")[0].read_bytes()
    folder = tmp_path / "r"
    shutil.copytree(report.page.parent, folder)  # an earlier report with more figures
    (folder / "notes.txt").write_text("mine")
    page, *pictures = write_inspection(request_only, folder)
    assert page.read_bytes() == first
    assert {p.name for p in folder.iterdir()} == {MARKER, "notes.txt", "report.html", "arrivals.png"}
    assert [p.name for p in pictures] == ["arrivals.png"]
    (folder / "load.png").write_text("mine too")
    with pytest.raises(ConfigError, match=r"load\.png exists"):
        write_inspection(found, folder)
    assert (folder / "load.png").read_text() == "mine too"


def test_foreign_folders_are_refused(request_only: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        write_inspection(request_only, tmp_path)
    with pytest.raises(ConfigError, match="is a file"):
        check_report_folder(tmp_path / "file")
    (tmp_path / MARKER).write_text("{}")
    with pytest.raises(TraceError, match="expected 'coterie-report'"):
        check_report_folder(tmp_path)
    (tmp_path / MARKER).write_text('{"format": "coterie-report", "files": ["../file", "file/../file", 3]}')
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / MARKER).rename(inner / MARKER)
    write_inspection(request_only, inner)
    assert (tmp_path / "file").exists(), "a marker does not reach outside its folder"


def test_sections_without_data_are_left_out(request_only: Any) -> None:
    assert [s.key for s in sections(request_only)] == ["arrivals", "lengths"]
    load = inspect_trace(LoadTable(np.array([[[3, 1], [0, 0]]], np.uint64)), "l", np.random.default_rng(0))
    assert [s.key for s in sections(load)] == ["load", "ranks", "drift"]
    for section in sections(load):
        if section.plot is not None:
            assert figures.draw(section.plot, figures.DARK).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("cell", "text"), [(None, "–"), (1234567, "1,234,567"), (0.12345, "0.123"), (12345.6, "12,346"), ("a", "a")]
)
def test_cell_text(cell: float | str | None, text: str) -> None:
    assert cell_text(cell) == text
