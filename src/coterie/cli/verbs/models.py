"""``coterie models``: shapes of known models, or of a ``config.json``, and the sizes of their position stores."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from coterie.cli.output import JsonOption, print_json, print_table
from coterie.errors import check

if TYPE_CHECKING:
    from coterie.footprints.sizing import StoreSize
    from coterie.types import ModelSpec

BLOCK_SIZES = (16, 128)


def models_command(
    name: Annotated[str | None, typer.Argument(help="Show this model only, with all its fields.")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Read the shape from this Hugging Face config.json or its folder.")
    ] = None,
    position_store: Annotated[
        bool, typer.Option("--position-store", help="Show the memory of the position store beside a KV cache instead.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """List model shapes: expert bytes, MoE layers, KV cache per token."""
    from coterie.models import get_model, model_from_config, models

    check(name is None or config is None, f"NAME={name} and --config={config} exclude each other")
    if config is not None:
        specs = [model_from_config(config)]
    else:
        specs = list(models().values()) if name is None else [get_model(name)]
    if position_store:
        _show_position_store(specs, json_output)
        return
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
    from coterie.models import active_params, total_params

    return asdict(spec) | {
        "num_moe_layers": spec.num_moe_layers,
        "expert_bytes": spec.expert_bytes(),
        "kv_bytes_per_token": spec.kv_bytes_per_token,
        "total_params": total_params(spec),
        "active_params": active_params(spec),
    }


def _show_position_store(specs: list[ModelSpec], json_output: bool) -> None:
    from coterie.footprints.sizing import MAX_SHARE_OF_KV, KVDtype, store_size

    sizes = [store_size(spec, dtype, block) for spec in specs for dtype in get_args(KVDtype) for block in BLOCK_SIZES]
    if json_output:
        print_json({"rows": [_size_row(size) for size in sizes]})
        return
    at = {(size.model, size.kv_dtype, size.block_size): size for size in sizes}
    rows = []
    for spec in specs:
        shares = [at[spec.name, dtype, 16] for dtype in ("bf16", "fp8")]
        counts = [at[spec.name, "bf16", block] for block in BLOCK_SIZES]
        percent = [f"{100 * size.share_of_kv:.2f}{'' if size.within_bar else ' !'}" for size in shares]
        percent += [f"{100 * size.counts_share_of_kv:.2f}" for size in counts]
        rows.append([spec.name, shares[0].position_bytes, *percent])
    print_table(
        "Position store, percent of the KV cache",
        ["model", "B/token", "bf16", "fp8", "counts/16", "counts/128"],
        rows,
        note=f"! not under {100 * MAX_SHARE_OF_KV:g}%; counts: published alternative, int8 per block of 16 or 128 "
        "tokens against bf16 KV, clipped at 127",
    )


def _size_row(size: StoreSize) -> dict[str, Any]:
    from coterie.footprints.sizing import H200_BYTES

    return {"slot_bytes" if name == "position_bytes" else name: value for name, value in asdict(size).items()} | {
        "share_of_kv": size.share_of_kv,
        "within_bar": size.within_bar,
        "share_of_hbm": size.share_of_hbm,
        "bytes_beside_kv": size.bytes_beside_kv(),
        "device_bytes": H200_BYTES,
        "counts_share_of_kv": size.counts_share_of_kv,
        "counts_exact": size.counts_exact,
    }
