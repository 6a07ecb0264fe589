"""The pages of the project, by their path without suffix."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT).with_suffix("")): path
    for path in sorted(
        [
            *ROOT.glob("*.md"),
            *(ROOT / "docs").rglob("*.md"),
            *ROOT.glob("lab/benchmarks/*.md"),
            *ROOT.glob("examples/*.md"),
        ]
    )
}
