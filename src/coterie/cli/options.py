"""Options that several verbs have, declared once."""

from __future__ import annotations

from typing import Annotated

import typer

FromOption = Annotated[
    str | None, typer.Option("--from", help="Format to read, where the file itself does not show it.")
]
TraceModelOption = Annotated[str | None, typer.Option("--model", help="Model that produced the file.")]
NumExpertsOption = Annotated[
    int | None, typer.Option("--num-experts", min=1, help="Experts per layer, where the file holds ids only.")
]
