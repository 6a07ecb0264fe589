"""``coterie models``: shapes of known models, or of a ``config.json``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.output import JsonOption, print_json, print_table
from coterie.errors import check

if TYPE_CHECKING:
    from coterie.types import ModelSpec


def models_command(
    name: Annotated[str | None, typer.Argument(help="Show this model only, with all its fields.")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Read the shape from this Hugging Face config.json or its folder.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """List model shapes: expert bytes, MoE layers, KV cache per token."""
    from coterie.models import get_model, model_from_config, models

    check(name is None or config is None, f"NAME={name} and --config={config} exclude each other")
    if config is not None:
        specs = [model_from_config(config)]
    else:
        specs = list(models().values()) if name is None else [get_model(name)]
    rows = [_row(spec) for spec in specs]
    if json_output:
        print_json({"rows": rows})
    elif name is None and config is None:
        print_table(
            "Models",
            ["model", "MoE layers", "experts", "dtype", "expert MB", "KV B/token"],
            [
                [
                    row["name"],
                    row["num_moe_layers"],
                    f"{row['top_k']} of {row['num_experts']}",
                    row["weight_dtype"],
                    row["expert_bytes"] / 1e6,
                    row["kv_bytes_per_token"],
                ]
                for row in rows
            ],
            note="expert MB: one expert of one layer in its dtype; KV: 16-bit, all layers",
        )
    else:
        print_table(rows[0]["name"], ["field", "value"], rows[0].items())


def _row(spec: ModelSpec) -> dict[str, Any]:
    from coterie.footprints.sizing import position_bytes
    from coterie.models import active_params, total_params

    return asdict(spec) | {
        "num_moe_layers": spec.num_moe_layers,
        "expert_bytes": spec.expert_bytes(),
        "kv_bytes_per_token": spec.kv_bytes_per_token,
        "position_store_bytes_per_token": position_bytes(spec),
        "total_params": total_params(spec),
        "active_params": active_params(spec),
    }
