"""Draw the figures of docs/costs.md from the shipped presets, and that of README.md from the numbers of its table.

python lab/benchmarks/figures.py [docs/figures]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np

from coterie.answers.figures import LIGHT, draw
from coterie.costs.cells import MoeCell, expert_tokens
from coterie.costs.experts import layer_us
from coterie.costs.presets import load_preset, shape_spec
from coterie.types import ModelSpec


def cells_of(preset: str, model: str, dtype: str) -> tuple[ModelSpec, list[MoeCell]]:
    shape = next(s for s in load_preset(preset).measurement.shapes if s.model == model)
    table = next(t for t in shape.moe if t.dtype == dtype)
    return shape_spec(shape), [c for c in table.cells if not c.zipf]


def predicted(preset: str, spec: ModelSpec, dtype: str, tokens: int, active: int, warm: bool) -> float:
    params = load_preset(preset).fits[spec.name].moe[dtype].params
    counts = np.zeros(spec.num_experts)
    counts[:active] = expert_tokens(tokens, spec.top_k, active)
    prices = params.array(spec.expert_bytes(cast(Any, dtype)), 2.0 * spec.expert_params, warm)
    return layer_us(prices, counts, float(tokens))


def active_experts(preset: str, device: str) -> Any:
    """Time of Qwen3-30B-A3B against distinct active experts, one line a batch size."""
    title = f"Qwen3-30B-A3B, bf16, one {device}: dots measured, lines predicted"

    def plot(axes: Any, theme: Any) -> None:
        spec, cells = cells_of(preset, "qwen3-30b-a3b", "bf16")
        for colour, batch in zip(theme.series, (16, 64, 256, 2048), strict=False):
            warm = preset != "h200"  # one table was measured with a cold cache, the other with a warm one
            mine = sorted((c for c in cells if c.tokens == batch and c.warm == warm), key=lambda c: c.active)
            axes.plot([c.active for c in mine], [c.us for c in mine], "o", color=colour, label=f"{batch} tokens")
            levels = np.unique(np.linspace(mine[0].active, mine[-1].active, 40).astype(int))
            line = [predicted(preset, spec, "bf16", batch, int(a), mine[0].warm) for a in levels]
            axes.plot(levels, line, color=colour)
        axes.set(xlabel="distinct active experts", ylabel="experts of one layer, µs", title=title)
        axes.set_ylim(bottom=0)
        axes.grid(True)
        axes.legend(loc="upper left")

    return plot


def tokens(axes: Any, theme: Any) -> None:
    """Time of DeepSeek-V3 against tokens with all experts active, bf16 and fp8."""
    for colour, dtype in zip(theme.series, ("bf16", "fp8"), strict=False):
        spec, cells = cells_of("h200", "deepseek-v3", dtype)
        mine = sorted((c for c in cells if c.active == spec.num_experts and not c.warm), key=lambda c: c.tokens)
        axes.plot([c.tokens for c in mine], [c.us / 1e3 for c in mine], "o", color=colour, label=dtype)
        sizes = np.unique(np.geomspace(mine[0].tokens, mine[-1].tokens, 160).astype(int))
        line = [predicted("h200", spec, dtype, int(t), spec.num_experts, False) / 1e3 for t in sizes]
        axes.plot(sizes, line, color=colour)
    title = "DeepSeek-V3, all 256 experts of a layer, one H200"
    axes.set(xscale="log", xlabel="tokens in the batch", ylabel="experts of one layer, ms", title=title)
    axes.set_ylim(bottom=0)
    axes.grid(True)
    axes.legend(loc="upper left")


def errors(axes: Any, theme: Any) -> None:
    """Held-out error by shape: mean as a bar, worst cell as a dot."""
    rows = [
        (f"{model} {dtype}" + (" (RTX PRO 6000)" if preset == "rtx-pro-6000" else ""), fit.held_out)
        for preset in ("h200", "rtx-pro-6000")
        for model, fits in sorted(load_preset(preset).fits.items())
        for dtype, fit in sorted(fits.moe.items())
    ]
    at = np.arange(len(rows))[::-1]
    axes.barh(at, [e.mape_pct for _, e in rows], color=theme.series[0], label="mean")
    axes.plot([e.worst_pct for _, e in rows], at, "o", color=theme.series[1], label="worst cell")
    axes.axvline(5, color=theme.muted, linestyle=":")
    axes.axvline(15, color=theme.muted, linestyle="--")
    axes.set_yticks(at, [name for name, _ in rows], fontsize=7.5)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.set(xlabel="error on held-out cells, %", title="Error of the MoE model (H200 unless said)")
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.08), ncols=2)


LEVERS = (
    ("Batching", "P99, one GPU's decode", r"^\| batching .*\*\*about (\d)"),
    ("Routing", "TPOT in vLLM, 16 on a decoder, mxfp4", r"\*\*(\d+\.\d)%\*\* of TPOT"),
    ("", "the same, bf16", r"\*\*(\d+\.\d)%\*\* in bf16"),
    ("Placement", "MoE time, 8,192 tokens a step", r"\*\*(\d+\.\d)%\*\* of MoE time"),
    ("", "the same, 256 tokens a step", r"\*\*(\d+\.\d)%\*\* at 256"),
)
"""Name of a lever, what its bar measures, and where README.md states the number."""


def levers(readme: str) -> Any:
    """Draw the savings of each lever as bars, with words large enough for a phone."""

    def plot(axes: Any, theme: Any) -> None:
        for row, (name, measure, pattern) in enumerate(LEVERS):
            found = re.search(pattern, readme, re.M)
            if found is None:
                raise SystemExit(f"README.md has no number for {measure!r}")
            value = float(found[1])
            colour = theme.series[min((row + 1) // 2, 2)]
            axes.barh(row, value, color=colour, height=0.42)
            axes.text(value + 0.15, row, f"{value:g}%" if value else "about 0", va="center", fontsize=17)
            axes.text(0, row - 0.3, f"{name}: {measure}" if name else measure, va="bottom", fontsize=15.5)
        axes.set(xlim=(0, 11), ylim=(4.4, -0.75), yticks=[], xticks=[])
        axes.set_title("Time saved on recorded routing, H200", fontsize=17, loc="left", pad=14)
        for side in ("top", "right", "bottom"):
            axes.spines[side].set_visible(False)

    return plot


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/figures")
    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        "active-experts-h200.png": (active_experts("h200", "H200"), 4.0),
        "active-experts-rtx-pro-6000.png": (active_experts("rtx-pro-6000", "RTX PRO 6000"), 4.0),
        "tokens-deepseek-v3-h200.png": (tokens, 4.0),
        "levers.png": (levers(Path("README.md").read_text()), 5.4),
        "fit-error.png": (errors, 6.5),
    }
    for name, (plot, height) in figures.items():
        (folder / name).write_bytes(draw(plot, LIGHT, height))
        print(folder / name)


if __name__ == "__main__":
    main()
