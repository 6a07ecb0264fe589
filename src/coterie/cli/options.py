"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

FromOption = Annotated[
    str | None, typer.Option("--from", help="Format of the input; detected from the file by default.")
]
TraceModelOption = Annotated[
    str | None, typer.Option("--model", help="Name of the model that produced the trace, if the file does not give it.")
]
NumExpertsOption = Annotated[
    int | None, typer.Option("--num-experts", min=1, help="Experts per layer, if the file holds expert ids only.")
]
