"""Placements on disk: every format gives back what it was given, refuses what is damaged, and never replaces a file."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import ConfigError, InputError, TraceError
from coterie.models import get_model
from coterie.placement.maps.formats import PlacementMap, map_formats, read_map, write_map
from coterie.types import Placement

MODEL = get_model("deepseek-v2-lite")  # 27 layers, the first dense, 64 experts
RANKS = 4
WRITTEN = [name for name in map_formats if map_formats[name].write is not None and name != "sglang-das"]
"""Formats that are written and read."""
CHECKED = ("native", "vllm")
"""Formats with a checksum."""


def some_map(seed: int = 0, shares: bool = False, slots: int = 72) -> PlacementMap:
    rng = np.random.default_rng(seed)
    layers, experts = MODEL.num_moe_layers, MODEL.num_experts
    rows = [
        rng.permutation(np.concatenate([np.arange(experts), rng.integers(0, experts, slots - experts)]))
        for _ in range(layers)
    ]
    placement = Placement(np.array(rows, np.int32), RANKS, experts)
    split = None
    if shares:
        weight = rng.random(placement.slot_experts.shape)
        total = np.zeros((layers, experts))
        np.add.at(total, (np.arange(layers)[:, None], placement.slot_experts), weight)
        split = weight / np.take_along_axis(total, placement.slot_experts, axis=1)
    return PlacementMap(placement, MODEL.name, MODEL.moe_layer_ids, split)


def same(a: PlacementMap, b: PlacementMap) -> bool:
    equal = np.array_equal(a.placement.slot_experts, b.placement.slot_experts)
    return equal and (a.placement.num_ranks, a.placement.num_experts) == (
        b.placement.num_ranks,
        b.placement.num_experts,
    )


@pytest.mark.parametrize("format", WRITTEN)
def test_what_is_written_reads_back(tmp_path: Path, format: str) -> None:
    for seed, shares in ((0, False), (1, True)):
        path, given_map = tmp_path / f"map{seed}", some_map(seed, shares)
        written = write_map(path, given_map, format, force=True)
        assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
        found = read_map(path, model=MODEL.name, num_ranks=RANKS)
        assert same(found, given_map)
        assert (found.model, found.layer_ids) == (MODEL.name, MODEL.moe_layer_ids)
        assert ("shares" in written.left_out) == (shares and format != "native")
        if shares and format == "native":
            assert found.shares is not None
            assert given_map.shares is not None
            assert np.array_equal(found.shares, given_map.shares), "bit for bit"
        path.unlink()


def test_own_formats_say_all_by_themselves(tmp_path: Path) -> None:
    for format in CHECKED:
        write_map(tmp_path / format, some_map(), format, force=True)
        found = read_map(tmp_path / format)
        assert same(found, some_map())
        assert found.layer_ids == MODEL.moe_layer_ids


def test_sglang_has_one_key_and_a_row_for_every_layer(tmp_path: Path) -> None:
    given_map = some_map()
    write_map(tmp_path / "m", given_map, "sglang:version=0.5.23")
    value = json.loads((tmp_path / "m").read_text())
    assert list(value) == ["physical_to_logical_map"]
    rows = np.array(value["physical_to_logical_map"])
    assert rows.shape == (MODEL.num_layers, 72)
    assert rows[0].tolist() == [slot % 64 for slot in range(72)], "the dense layer is filled in order"
    assert np.array_equal(rows[1:], given_map.placement.slot_experts)
    unknown = read_map(tmp_path / "m", num_ranks=RANKS)
    assert unknown.placement.num_layers == MODEL.num_layers, "of an unknown model all rows are kept"
    (tmp_path / "moe-only").write_text(json.dumps({"physical_to_logical_map": rows[1:].tolist()}))
    assert same(read_map(tmp_path / "moe-only", model=MODEL, num_ranks=RANKS), given_map)


def test_ascend_and_tensorrt_by_the_letter(tmp_path: Path) -> None:
    placement = Placement(np.array([[0, 1, 2, 0], [2, 1, 0, 1]], np.int32), 2, 3)
    write_map(tmp_path / "a", PlacementMap(placement), "ascend")
    assert json.loads((tmp_path / "a").read_text()) == {
        "moe_layer_count": 2,
        "layer_list": [
            {
                "layer_id": layer,
                "device_count": 2,
                "device_list": [{"device_id": 0, "device_expert": a}, {"device_id": 1, "device_expert": b}],
            }
            for layer, (a, b) in enumerate([([0, 1], [2, 0]), ([2, 1], [0, 1])])
        ],
    }
    write_map(tmp_path / "t", PlacementMap(placement, layer_ids=(3, 5)), "tensorrt-llm")
    assert (tmp_path / "t").read_text() == (
        "num_slots: 4\ninitial_global_assignments:\n  3: [0, 1, 2, 0]\n  5: [2, 1, 0, 1]\nlayer_updates_per_iter: 0\n"
    )
    assert read_map(tmp_path / "t", num_ranks=2).layer_ids == (3, 5)


@pytest.mark.parametrize(
    "text",
    [
        "initial_global_assignments:\n  3:\n  - 0\n  - 1\n  5:\n  - 1\n  - 0\nlayer_updates_per_iter: 0\nnum_slots: 2",
        "# by hand\nnum_slots: 2\ninitial_global_assignments: {3: [0,\n  1], 5: [1, 0]}\nlayer_updates_per_iter: 0",
        "num_slots: 2\nlayer_updates_per_iter: 1 # a layer\ninitial_global_assignments:\n 3: [0, 1]\n 5: [1,\n   0]\n",
    ],
)
def test_yaml_in_the_styles_of_others(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.yaml").write_text(text)
    found = read_map(tmp_path / "m.yaml", num_ranks=2)
    assert found.placement.slot_experts.tolist() == [[0, 1], [1, 0]]
    assert found.layer_ids == (3, 5)


ROWS = [[0, 1], [1, 0]]
TRT = "num_slots: 2\ninitial_global_assignments:\n  3: [0, 1]\n  5: [1, 0]\nlayer_updates_per_iter: 0\n"
ASCEND = {
    "moe_layer_count": 1,
    "layer_list": [
        {
            "layer_id": 0,
            "device_count": 2,
            "device_list": [{"device_id": 0, "device_expert": [0]}, {"device_id": 1, "device_expert": [1]}],
        }
    ],
}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "format: is unknown"),
        ("[1]", "format: is unknown"),
        ('{"physical_to_logical_map": [[0,', "JSON: cannot be parsed"),
        ({"physical_to_logical_map": ROWS, "note": 1}, "note: is not a key"),
        ({"physical_to_logical_map": [[0, 1], [1]]}, "physical_to_logical_map[1]: has 1 slots, the first 2"),
        ({"physical_to_logical_map": [[0, 1], [1, 1]]}, "layer 1 has no slot for expert 0"),
        ({"physical_to_logical_map": [[0, -1]]}, "physical_to_logical_map[0][1]: is -1"),
        ({"physical_to_logical_map": [[0, 1.0]]}, "physical_to_logical_map[0][1]: is 1.0"),
        ({"physical_to_logical_map": [[0, True]]}, "physical_to_logical_map[0][1]: is True"),
        ({"physical_to_logical_map": [[0, 10**9]]}, "slots: are 2 a layer"),
        ({"physical_to_logical_map": []}, "must be a list of at least one"),
        ({"physical_to_logical_map": [[0, 1, 2]]}, "num_slots=3 must be a multiple of num_ranks=2 (remainder 1)"),
        ('{"physical_to_logical_map": [[0, 1]], "physical_to_logical_map": [[1, 0]]}', "is there twice"),
        (TRT.replace("num_slots: 2", "num_slots: 3"), "num_slots: is 3; initial_global_assignments has 2"),
        (TRT.replace("  5", "  3"), "line 4: 3: is there twice"),
        (TRT.replace("[1, 0]", "[1, 0"), "line 4: is '0 layer_updates_per_', expected"),
        (TRT + "]", "line 6: cannot be parsed"),
        (TRT.replace("[1, 0]", "[1, x]"), "line 4: is 'x', expected a whole number"),
        (TRT.replace("[1, 0]", "[1, -0]"), "line 4: is '-0', expected a whole number"),
        (TRT.replace("[1, 0]", "[1, 0x]"), "line 4: is '0x', expected a whole number"),
        (TRT.replace("[1, 0]", "[1, 00]"), "line 4: is '00', expected a whole number"),
        (TRT.replace("[1, 0]", "['1', 0]"), "line 4: is '1', expected a whole number"),
        (TRT.replace("[1, 0]", "[[1], 0]"), "line 4: is nested more than 3 deep"),
        (TRT.replace("[1, 0]", "[" * 200_000), "line 4: is nested more than 3 deep"),
        (TRT.replace("[1, 0]", "&a [1, 0]"), "line 4: has an alias, an anchor or a tag"),
        (TRT.replace("[1, 0]", "*a"), "line 4: has an alias, an anchor or a tag"),
        (TRT.replace("[1, 0]", "!!python/tuple [1, 0]"), "line 4: has an alias, an anchor or a tag"),
        (TRT.replace("  5:", "  '5':"), "line 4: has a key that is neither"),
        (TRT.replace("  5:", "  five:"), "initial_global_assignments: must map layers, by number"),
        (TRT.replace("  5:", f"  {'9' * 18}:"), "initial_global_assignments: must map layers, by number"),
        (TRT.replace("iter: 0", "iter: [0]"), "layer_updates_per_iter: must be a whole number"),
        (TRT + "---\n" + TRT, "YAML: holds several documents"),
        (TRT + "moe: 1\n", "moe: is not a key"),
        (TRT + "num_slots: 2\n", "line 6: num_slots: is there twice"),
        (TRT[: TRT.index("layer_up")], "layer_updates_per_iter: is missing"),
        (ASCEND | {"moe_layer_count": 2}, "moe_layer_count: is 2; layer_list has 1"),
        (json.dumps(ASCEND).replace('"device_id": 1', '"device_id": 0'), "device_list[1].device_id: is 0, expected 1"),
        (json.dumps(ASCEND).replace('"device_count": 2', '"device_count": 3'), "device_count: is 3"),
        (json.dumps(ASCEND).replace("[1]", "[1, 0]"), "device_list[1].device_expert: must be as long"),
        (json.dumps(ASCEND).replace('"layer_id": 0', '"layer_id": 1'), "layer_list[0].layer_id: is 1, expected 0"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: str | dict[str, Any], said: str) -> None:
    path = tmp_path / "map"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(TraceError, match=re.escape(said)) as error:
        read_map(path, num_ranks=2)
    assert str(error.value).startswith(str(path))


def test_a_map_for_something_else_is_refused(tmp_path: Path) -> None:
    for format in WRITTEN:
        write_map(tmp_path / format, some_map(), format, force=True)
        with pytest.raises(TraceError, match=r"model|slots|layers|expert"):
            read_map(tmp_path / format, model="gpt-oss-20b", num_ranks=RANKS)
        with pytest.raises(TraceError, match=r"ranks|device_count"):
            read_map(tmp_path / format, model=MODEL, num_ranks=5)
        with pytest.raises(InputError, match="expert"):
            read_map(tmp_path / format, num_ranks=RANKS, num_experts=65)
    with pytest.raises(TraceError, match="num_ranks"):
        read_map(tmp_path / "sglang", model=MODEL)
    with pytest.raises(TraceError, match="does not exist"):
        read_map(tmp_path / "none")
    with pytest.raises(InputError, match=r"Did you mean 'sglang'\?"):
        read_map(tmp_path / "sglang", "sglan")


def test_engines_need_every_layer(tmp_path: Path) -> None:
    whole = some_map()
    part = PlacementMap(Placement(whole.placement.slot_experts[:3], RANKS, 64), MODEL.name, (1, 2, 3))
    for format in ("sglang", "tensorrt-llm", "ascend"):
        with pytest.raises(ConfigError, match="needs all of them"):
            write_map(tmp_path / "m", part, format)
    with pytest.raises(ConfigError, match="'mine' is not known"):
        write_map(tmp_path / "m", PlacementMap(whole.placement, "mine", MODEL.moe_layer_ids), "sglang:version=0.5.23")
    assert list(tmp_path.iterdir()) == []
    write_map(tmp_path / "m", part)
    assert read_map(tmp_path / "m", model=MODEL).layer_ids == (1, 2, 3)


def test_writing_never_replaces(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_text("mine")
    for format in WRITTEN:
        with pytest.raises(ConfigError, match="exists already"):
            write_map(path, some_map(), format)
    assert path.read_text() == "mine"
    with pytest.raises(ConfigError, match="only read"):
        write_map(tmp_path / "n", some_map(), "rank-expert")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_map(path / "below", some_map())
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_value_checks_itself() -> None:
    placement = some_map().placement
    with pytest.raises(ConfigError, match="26 numbers that rise"):
        PlacementMap(placement, layer_ids=(0, 1))
    with pytest.raises(ConfigError, match="shares has shape"):
        PlacementMap(placement, shares=np.ones((1, 72)))
    for wrong in (np.full((26, 72), np.nan), np.ones((26, 72))):
        with pytest.raises(ConfigError, match="add up to 1"):
            PlacementMap(placement, shares=wrong)


SMALL = PlacementMap(
    Placement(np.array([[0, 1, 2, 3, 10, 11, 4, 5, 6, 7, 8, 9, 0, 1, 2, 11]] * 3, np.int32), 4, 12), "mine", (0, 1, 2)
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("maps")
    for format in WRITTEN:
        write_map(folder / format, SMALL, format, force=True)
    return {format: folder / format for format in WRITTEN}


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(WRITTEN), st.integers(0, 10**6), st.integers(0, 255), st.booleans(), st.booleans())
def test_damaged_bytes_are_refused_or_mean_the_same(
    files: dict[str, Path], format: str, at: int, byte: int, cut: bool, named: bool
) -> None:
    data = bytearray(files[format].read_bytes())
    at %= len(data)
    if cut:
        del data[at:]
    else:
        data[at] = byte
    path = files[format].with_name(f"{format}-damaged")
    path.write_bytes(bytes(data))
    try:
        found = read_map(path, format if named else None, num_ranks=4, num_experts=12)
    except TraceError as error:
        assert str(error).startswith(str(path))  # noqa: PT017  (it may also be read)
        return
    # A format without a checksum cannot tell 0 from 1, but a cut never passes, and what passes is sound.
    if cut or format in CHECKED:
        assert same(found, SMALL)
    assert found.placement.slot_experts.shape == (3, 16)


def test_any_cut_is_refused_or_means_the_same(files: dict[str, Path]) -> None:
    for format, file in files.items():
        data, path = file.read_bytes(), file.with_name("cut")
        for length in (*range(0, len(data), 7), *(at + 1 for at in range(len(data)) if data[at] in b"\n]}")):
            path.write_bytes(data[:length])
            try:
                found = read_map(path, num_ranks=4)
            except TraceError:
                continue
            assert same(found, SMALL), (format, length)


def test_published_placements(data_dir: Path) -> None:
    file = data_dir / "placements/deepseek-v3/placements_rank_layer_expert.npz"
    with pytest.raises(TraceError, match="name one as"):
        read_map(file)
    name = "DSV3_baseline_16_devices_58_MoE_Layers"
    found = read_map(f"{file}#{name}", model="deepseek-v3")
    assert np.array_equal(found.placement.slot_experts, Placement.linear(58, 256, 16).slot_experts)
    uneven = "DSV3_0427_GSM8K_decode_RedFullLays_+10_58_MoELayers_32_dies_epmaxdeploy_12"
    found = read_map(f"{file}#{uneven}", model="deepseek-v3", num_ranks=32)
    assert found.placement.num_slots == 32 * 9
    assert found.placement.duplicates == 48 * 32, "48 layers hold 8 experts a rank, the others 9"
    busy = found.placement.rank_load(np.ones((58, 256)))
    full = found.placement.slot_experts.reshape(58, 32, 9)
    spare = [layer for layer in range(58) if all(len(set(rank)) == 8 for rank in full[layer])]
    assert len(spare) == 48
    assert busy[spare].tolist() == [[8.0] * 32] * 48, "what fills a free slot takes no tokens from others"
    with pytest.raises(TraceError, match="is missing"):
        read_map(f"{file}#nothing")
    with pytest.raises(TraceError, match="16 ranks, expected 8"):
        read_map(f"{file}#{name}", num_ranks=8)


def test_probabilities_for_sglang_das_are_a_torch_file(tmp_path: Path) -> None:
    """What torch reads of it is tested where torch is; here the arrays' bytes."""
    given_map = some_map(1, shares=True)
    write_map(tmp_path / "p.pt", given_map, "sglang-das")
    with zipfile.ZipFile(tmp_path / "p.pt") as archive:
        rows, masses = (
            np.frombuffer(archive.read(f"map/data/{at}"), dtype).reshape(MODEL.num_layers, 72)
            for at, dtype in enumerate(("<i8", "<f4"))
        )
    assert np.array_equal(rows[1:], given_map.placement.slot_experts)
    total = np.zeros((MODEL.num_layers, 64))
    np.add.at(total, (np.arange(MODEL.num_layers)[:, None], rows), masses)
    assert np.allclose(total, 1.0)
    with pytest.raises(ConfigError, match="only written"):
        read_map(tmp_path / "p.pt", "sglang-das")
