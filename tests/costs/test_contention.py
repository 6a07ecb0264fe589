"""Contention: slowdowns put in are found again, presets keep them, and links are priced by their bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import pytest

from coterie.costs.cells import ContentionCell
from coterie.costs.movement import fit_contention, staged_exposed
from coterie.costs.presets import Preset, load_preset, save_preset, step_model
from coterie.errors import ConfigError, TraceError
from coterie.models import get_model
from coterie.types import NVLINK4, PCIE5, Link, Topology

STEP_US = 9_500.0
EXPERT = 49_766_400  # gpt-oss-20b in bf16


def cells(
    path: Literal["device", "host-to-device"], bytes_per_us: float, us_per_byte: float, noise_us: float = 0.0
) -> list[ContentionCell]:
    """Steps that lose so many microseconds per byte, beside copies of 1 to 8 experts."""
    rng = np.random.default_rng(3)
    return [
        ContentionCell(
            path,
            count * EXPERT,
            count * EXPERT / bytes_per_us,
            STEP_US,
            STEP_US + us_per_byte * count * EXPERT + noise_us * float(rng.normal()),
        )
        for count in (1, 2, 4, 8)
    ]


HOST, DEVICE = (54_700.0, 2e-8), (2.0e6, 1e-7)


def both(noise_us: float = 0.0) -> list[ContentionCell]:
    return cells("host-to-device", *HOST, noise_us) + cells("device", *DEVICE, noise_us)


def test_the_slowdown_put_in_is_found_again() -> None:
    found = fit_contention(both())
    assert set(found) == {"device", "host-to-device"}
    for path, (speed, slope) in (("host-to-device", HOST), ("device", DEVICE)):
        assert found[path].us_per_byte == pytest.approx(slope)
        assert found[path].exposed == pytest.approx(slope * speed)
        assert found[path].largest_exposed == pytest.approx(slope * speed)
        assert found[path].cells == 4


def test_noise_of_a_step_moves_the_fit_less_than_single_cells() -> None:
    found = fit_contention(both(noise_us=3.0))["device"]
    assert found.us_per_byte == pytest.approx(DEVICE[1], rel=0.2)
    assert found.largest_exposed >= found.exposed


def test_no_slowdown_and_too_much_stay_shares() -> None:
    faster = [msgspec.structs.replace(one, beside_us=one.alone_us - 1.0) for one in cells("device", *DEVICE)]
    assert fit_contention(faster)["device"].exposed == 0.0
    assert fit_contention(faster)["device"].us_per_byte == 0.0
    slower = [msgspec.structs.replace(one, beside_us=one.alone_us + 3 * one.copy_us) for one in both()]
    assert fit_contention(slower)["device"].exposed == 1.0
    assert staged_exposed(fit_contention(slower), Topology(8, intra=Link("fast", 4e12, 0.0))) == 1.0
    assert fit_contention([]) == {}


def test_a_link_shows_what_its_bytes_take_from_the_steps() -> None:
    found = fit_contention(both())
    near, host = DEVICE[1] * 1e-6 * NVLINK4.bytes_per_s, HOST[1] * 1e-6 * PCIE5.bytes_per_s
    assert staged_exposed(found, Topology(1)) == pytest.approx(host), "one device loads from its host alone"
    assert staged_exposed(found, Topology(8)) == pytest.approx(max(near, host))
    slow = Topology(16, intra=Link("slow", 1e9, 0.0), inter=Link("fast", 900e9, 0.0))
    assert staged_exposed(found, slow) == pytest.approx(DEVICE[1] * 1e-6 * 900e9)


def test_a_preset_without_contention_says_how_to_measure_it() -> None:
    with pytest.raises(ConfigError, match="contention, which the preset does not hold"):
        staged_exposed({}, Topology(8))


def with_contention(preset: Preset) -> Preset:
    measurement = msgspec.structs.replace(preset.measurement, contention=tuple(both()))
    return msgspec.structs.replace(preset, measurement=measurement, contention=fit_contention(both()))


def test_a_preset_keeps_contention_and_changes_nothing_else(tmp_path: Path) -> None:
    plain = load_preset("rtx-pro-6000")
    made = with_contention(plain)
    save_preset(made, tmp_path / "made.json")
    found = load_preset(str(tmp_path / "made.json"))
    assert found == made
    assert found.contention == fit_contention(both())
    assert found.measurement.contention == tuple(both())
    assert found.fits == plain.fits
    model = step_model(get_model("qwen3-30b-a3b"), found)
    assert model.contention == found.contention


def test_a_file_from_before_contention_still_loads() -> None:
    old = msgspec.to_builtins(load_preset("rtx-pro-6000"))
    del old["contention"], old["measurement"]["contention"]
    assert msgspec.convert(old, Preset).contention == {}


def test_contention_that_is_no_number_of_a_device_is_refused(tmp_path: Path) -> None:
    made = with_contention(load_preset("rtx-pro-6000"))
    bad = {"device": msgspec.structs.replace(made.contention["device"], us_per_byte=-1.0)}
    save_preset(msgspec.structs.replace(made, contention=bad), tmp_path / "bad.json")
    with pytest.raises(TraceError, match="us_per_byte"):
        load_preset(str(tmp_path / "bad.json"))
