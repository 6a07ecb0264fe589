"""Decode steps beside copies of weights, on a GPU: the cells from which a preset's contention is fitted.

    python lab/benchmarks/gpu/contention.py --output CELLS.json [--model gpt-oss-20b] [--batch 64] [--context 1024]
    python lab/benchmarks/make_presets.py contention PRESET CELLS.json OUT.json

The same cells as ``coterie calibrate --contention`` measures; this needs torch and NumPy alone. The second command adds
them to a preset, which must be of the same device, and fits it again.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path

import torch

from coterie.engines.calibration.contention import ContentionSettings, measure_contention
from coterie.engines.calibration.timing import describe_hardware, describe_software
from coterie.models import get_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", default="gpt-oss-20b")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    device = torch.device("cuda")
    settings = ContentionSettings(batch=options.batch, context=options.context, rounds=options.rounds)
    cells = measure_contention(get_model(options.model), device, settings)
    for one in cells:
        slower = one.beside_us - one.alone_us
        print(
            f"{one.path:15} {one.nbytes / 1e6:9.1f} MB a step, {one.nbytes / one.copy_us / 1e3:7.1f} GB/s alone: step "
            f"{one.alone_us:9.1f} -> {one.beside_us:9.1f} us ({100 * slower / one.alone_us:+.2f}%, spread "
            f"{one.spread_us:.1f} us), exposed {slower / one.copy_us:.4f}",
            flush=True,
        )
    found = {
        "hardware": describe_hardware(device),
        "software": describe_software(),
        "date": datetime.date.today().isoformat(),
        "model": options.model,
        "batch": options.batch,
        "context": options.context,
        "contention": [one._asdict() for one in cells],
    }
    options.output.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
