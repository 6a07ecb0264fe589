"""A fitted router: what it learns, what it says of requests not seen, and its file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from coterie.costs.presets import step_model
from coterie.errors import ConfigError, InputError, NotFittedError, TraceError
from coterie.footprints.signatures import Signature
from coterie.models import get_model
from coterie.routing import LocalityBand, Request, routers
from coterie.routing.calibration import Calibration, calibration
from coterie.routing.clustering import assign, capacities
from coterie.routing.fitted import RouterFit
from coterie.routing.forecast import DecodeForecast
from coterie.routing.learned import Learned
from coterie.routing.union import expected_distinct_saving, tangents, union_clusters
from coterie.traces import ActivationTrace, TraceMeta
from coterie.traces.arrivals import LognormalLengths
from coterie.traces.readers import read_trace
from coterie.traces.synthetic import SyntheticSettings, generate
from coterie.types import Placement

SETTINGS = SyntheticSettings(
    num_layers=4,
    num_experts=16,
    top_k=2,
    specialisation=0.9,
    zipf_exponent=1.2,
    lengths=LognormalLengths(prompt_mean=40, output_mean=40),
)


@pytest.fixture(scope="module")
def known() -> Calibration:
    return calibration(generate(SETTINGS, np.random.default_rng(0), requests=240))


@pytest.fixture(scope="module")
def fitted(known: Calibration) -> RouterFit:
    return RouterFit(5, batch=8).fit(known.take(np.arange(120)), np.random.default_rng(0))


def test_counts_are_those_of_the_phases() -> None:
    trace = generate(SETTINGS, np.random.default_rng(1), requests=20)
    counted = calibration(trace, np.array([3, 7]))
    assert not counted.halved
    for row, request in enumerate((3, 7)):
        tokens = trace.request(request)
        for phase, counts in ((0, counted.prefill), (1, counted.decode)):
            expected = np.zeros((4, 16), int)
            for ids in tokens.only(phase):
                for layer in range(4):
                    np.add.at(expected[layer], ids[layer], 1)
            np.testing.assert_array_equal(counts[row], expected)
    before, after = counted.probabilities
    np.testing.assert_allclose(before.reshape(2, 4, 16).sum(axis=2), 2.0, rtol=1e-5)
    np.testing.assert_allclose(after.reshape(2, 4, 16).sum(axis=2), 2.0, rtol=1e-5)


def test_one_phase_is_halved_and_requests_without_both_are_left_out() -> None:
    ids = np.array([[[e, (e + 1) % 8]] for e in range(7)])
    meta = TraceMeta("m", num_experts=8, num_layers=1, top_k=2)
    halved = calibration(ActivationTrace.from_arrays(meta, ids, np.array([0, 1, 7])))
    assert halved.halved
    assert halved.requests.tolist() == [1], "one token has no halves"
    assert halved.prefill.sum() == halved.decode.sum() == 6
    phase = np.array([0, 0, 0, 1, 1, 1, 1], np.uint8)
    phased = calibration(ActivationTrace.from_arrays(meta, ids, np.array([0, 2, 5, 7]), phase=phase))
    assert not phased.halved
    assert phased.requests.tolist() == [1]


def test_gate_mass_is_summed() -> None:
    meta = TraceMeta("m", num_experts=4, num_layers=1, top_k=2)
    ids = np.array([[[0, 1]], [[0, 2]], [[3, 2]], [[1, 2]]])
    weights = np.array([[[0.75, 0.25]], [[0.5, 0.5]], [[1, 0]], [[1, 0]]], np.float16)
    counted = calibration(ActivationTrace.from_arrays(meta, ids, np.array([0, 4]), gate_weights=weights))
    assert counted.gates is not None
    assert counted.gates[0, 0].tolist() == [1.25, 0.25, 0.5, 0.0]


def test_profiles_belong_to_the_workers_of_the_centroids(known: Calibration, fitted: RouterFit) -> None:
    """Requests near a worker's centroid are, more often than chance, those its profile suits."""
    test = known.take(np.arange(120, 240))
    near = np.array([fitted.similarities(counts).argmax() for counts in test.prefill])
    slopes, offsets = tangents(fitted.profiles, fitted.batch)
    suits = np.array([(slopes @ fitted.profile(counts) + offsets).argmin() for counts in test.prefill])
    assert (near == suits).mean() > 0.5


def test_similarities_are_cosines_with_the_centroids(known: Calibration, fitted: RouterFit) -> None:
    own = fitted.learned.signature.transform(known.prefill[200])
    np.testing.assert_allclose(fitted.similarities(known.prefill[200]), fitted.learned.centroids @ own, atol=1e-6)
    assert not fitted.similarities(np.zeros((4, 16))).any()


def test_many_workers_are_compared_in_eight_bits() -> None:
    rng = np.random.default_rng(2)
    size = 24 * 64
    centroids = rng.random((300, size)).astype(np.float32) ** 4
    centroids /= np.linalg.norm(centroids, axis=1, keepdims=True)
    flat, row = np.zeros(size, np.float32), np.zeros((1, size), np.float32)
    signature = Signature.restored("count", np.ones((24, 64), np.float32), np.arange(24))
    wide = RouterFit(300, weighting="count")
    wide.learned_ = Learned.of(
        model="m",
        num_layers=24,
        num_experts=64,
        top_k=4,
        signature=signature,
        centroids=centroids,
        profiles=np.zeros((300, size), np.float32),
        forecast=DecodeForecast.restored(
            before=flat, after=flat, inward=row, outward=row, own=1.0, noise=1.0, ridge=1.0
        ),
        shares=np.full(300, 1 / 300, np.float32),
    )
    for counts in (rng.integers(0, 50, (24, 64)), np.eye(24, 64)):
        exact = centroids @ signature.transform(counts)
        np.testing.assert_allclose(wide.similarities(counts), exact, atol=2e-3)


def test_profile_of_nothing_is_popularity(known: Calibration, fitted: RouterFit) -> None:
    np.testing.assert_array_equal(fitted.profile(np.zeros((4, 16))), fitted.learned.forecast.map.after)
    assert fitted.profile(known.prefill[130]).shape == (64,)


def test_saves_and_loads(known: Calibration, fitted: RouterFit, tmp_path: Path) -> None:
    fitted.save(tmp_path / "a.safetensors")
    fitted.save(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    again = RouterFit.load(tmp_path / "a.safetensors", model="synthetic", workers=5)
    np.testing.assert_array_equal(again.similarities(known.prefill[150]), fitted.similarities(known.prefill[150]))
    np.testing.assert_array_equal(again.profile(known.prefill[150]), fitted.profile(known.prefill[150]))
    np.testing.assert_array_equal(again.learned.shares, fitted.learned.shares)
    assert (again.batch, again.workers, again.weighting) == (8, 5, "count_idf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]


def test_a_failed_write_leaves_the_old_file(fitted: RouterFit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.safetensors"
    path.write_bytes(b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("coterie.traces.store.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        fitted.save(path)
    assert path.read_bytes() == b"old"
    assert [found.name for found in tmp_path.iterdir()] == ["r.safetensors"]


def test_files_of_others_are_refused(fitted: RouterFit, tmp_path: Path) -> None:
    path = tmp_path / "r.safetensors"
    fitted.save(path)
    with pytest.raises(InputError, match=r"'synthetic'.*'gpt-oss-20b'"):
        RouterFit.load(path, model="gpt-oss-20b")
    with pytest.raises(InputError, match=r"5 workers.* 8"):
        RouterFit.load(path, workers=8)
    with pytest.raises(ConfigError, match=r"5 workers.* 6"):
        fitted.check_workers(6)
    arrays = load_file(path)
    save_file(arrays, tmp_path / "foreign.safetensors")
    with pytest.raises(TraceError, match="coterie-router"):
        RouterFit.load(tmp_path / "foreign.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(path.read_bytes()[:-4])
    (tmp_path / "noise.safetensors").write_bytes(b"not a router at all")
    for name in ("cut", "noise", "absent"):
        with pytest.raises(TraceError, match=name):
            RouterFit.load(tmp_path / f"{name}.safetensors")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("centroids", lambda a: a[:-1], "shape"),
        ("profiles", lambda a: a[:, :-1], "shape"),
        ("profiles", lambda a: a * np.float32(np.nan), "NaN"),
        ("layers", lambda a: a + 4, "rise within"),
        ("after", lambda a: a.astype(np.float64), "float64"),
        ("inward", lambda a: a[:, 1:], "match"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    fitted: RouterFit, tmp_path: Path, name: str, change: object, message: str
) -> None:
    path = tmp_path / "r.safetensors"
    fitted.save(path)
    arrays = load_file(path)
    header = path.read_bytes()
    about = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])["__metadata__"]
    arrays[name] = np.ascontiguousarray(change(arrays[name]))  # type: ignore[operator]
    save_file(arrays, path, about)
    with pytest.raises(TraceError, match=message):
        RouterFit.load(path)


def test_too_few_requests_and_gates_are_refused(known: Calibration) -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ConfigError, match="4 calibration requests"):
        RouterFit(5).fit(known.take(np.arange(4)), rng)
    with pytest.raises(ConfigError, match="gate"):
        RouterFit(5, weighting="gate")


def test_the_same_seed_gives_the_same_router(known: Calibration, fitted: RouterFit, tmp_path: Path) -> None:
    again = RouterFit(5, batch=8).fit(known.take(np.arange(120)), np.random.default_rng(0))
    fitted.save(tmp_path / "a")
    again.save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_faster_workers_get_a_larger_share(known: Calibration) -> None:
    speeds = np.array([1.0, 2.0, 1.0])
    refitted = RouterFit(3, speeds=speeds).fit(known.take(np.arange(120)), np.random.default_rng(0))
    np.testing.assert_allclose(refitted.learned.shares, [0.25, 0.5, 0.25])


def test_real_routing_reaches_most_of_the_limit(data_dir: Path) -> None:
    """gpt-oss-20b, 8 workers: cosine clusters near 0.8 of what a search on the test tokens saves, union more."""
    known = calibration(read_trace(data_dir / "activations/gpt-oss-20b/routing.npz"))  # type: ignore[arg-type]
    reached: dict[str, list[float]] = {"cosine": [], "union": []}
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(known.prefill))
        fit, test = known.take(np.sort(order[:205])), known.take(np.sort(order[205:]))
        refitted = RouterFit(8).fit(fit, np.random.default_rng(seed))
        truth = test.probabilities[1]
        best = union_clusters(truth, 8, 16, np.random.default_rng(0), restarts=5)
        limit = expected_distinct_saving(truth, best.labels, 16)
        limits = capacities(len(truth), 8)
        similar = np.stack([refitted.similarities(counts) for counts in test.prefill])
        expected = np.stack([refitted.profile(counts) for counts in test.prefill])
        slopes, _ = tangents(refitted.profiles, 16)
        for name, costs in (("cosine", -similar), ("union", expected @ slopes.T)):
            reached[name].append(expected_distinct_saving(truth, assign(costs, limits), 16) / limit)
    assert np.mean(reached["cosine"]) > 0.75
    assert np.mean(reached["union"]) > 0.85
    assert np.mean(reached["union"]) > np.mean(reached["cosine"]) + 0.03


def test_a_report_names_every_part(known: Calibration) -> None:
    parts: dict[str, float] = {}
    RouterFit(3).fit(known, np.random.default_rng(0), parts.__setitem__)
    assert list(parts) == ["probabilities", "signature", "cosine clusters", "forecast", "union clusters"]


def test_what_is_not_fitted_says_so() -> None:
    with pytest.raises(NotFittedError, match=r"fit\(\)"):
        RouterFit(3).fleet(4)


def test_every_router_is_made_of_a_fit(known: Calibration, fitted: RouterFit) -> None:
    model = step_model(get_model("gpt-oss-20b"), "h200")
    request = Request("r", 100, known.prefill[0])
    _, layers, experts = known.prefill.shape
    placement = Placement.linear(layers, experts, 5, 5 * experts)
    own: dict[str, dict[str, Any]] = {"domain": {"labels": {}}, "semantic": {"placement": placement}}
    for name in routers:
        decision = fitted.router(name, model, **own.get(name, {})).route(request, fitted.fleet(places=8))
        assert 0 <= decision.worker < 5
    assert fitted.router("locality_band", model, band=0.5) == LocalityBand(fitted, 0.5)
    with pytest.raises(ConfigError, match="'domain' needs labels"):
        fitted.router("domain", model)
    with pytest.raises(ConfigError, match=r"'random' has no setting 'band'.*seed"):
        fitted.router("random", model, band=0.5)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("profiles", lambda a: np.full_like(a, 5.0), "profiles"),
        ("profiles", lambda a: -a, "profiles hold -"),
        ("profiles", lambda a: a * 0.5, "sums of profiles"),
        ("profiles", lambda a: np.full_like(a, np.nan), "NaN"),
        ("centroids", lambda a: a * 3, "lengths of centroids"),
        ("centroids", lambda a: np.full_like(a, np.inf), "NaN or infinity"),
        ("shares", lambda a: a * 2, "shares"),
        ("shares", lambda a: -a, "shares hold -"),
        ("before", lambda a: a + 1, "before and after"),
        ("after", lambda a: a * 0 + 7, "before and after"),
        ("weights", lambda a: -a - 1, "weights"),
        ("layers", lambda a: a - 1, "layers"),
    ],
)
def test_values_that_no_fit_gives_are_refused(
    fitted: RouterFit, tmp_path: Path, name: str, change: Callable[[Any], Any], said: str
) -> None:
    fitted.save(tmp_path / "r.safetensors")
    with safe_open(tmp_path / "r.safetensors", "np") as file:
        arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        about = file.metadata()
    arrays[name] = change(arrays[name])
    save_file(arrays, tmp_path / "r.safetensors", about)
    with pytest.raises(TraceError, match=said):
        RouterFit.load(tmp_path / "r.safetensors")


@pytest.mark.parametrize("key", ["own", "noise", "ridge", "batch"])
@pytest.mark.parametrize("value", [float("nan"), -1.0, float("inf"), 2**70])
def test_settings_that_no_fit_gives_are_refused(fitted: RouterFit, tmp_path: Path, key: str, value: float) -> None:
    fitted.save(tmp_path / "r.safetensors")
    with safe_open(tmp_path / "r.safetensors", "np") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        about = json.loads(file.metadata()["coterie"]) | {key: value}
    save_file(arrays, tmp_path / "r.safetensors", {"coterie": json.dumps(about)})
    if key != "batch" and value == 2**70:
        RouterFit.load(tmp_path / "r.safetensors")  # large, but a number
        return
    with pytest.raises(TraceError):
        RouterFit.load(tmp_path / "r.safetensors")


@pytest.mark.parametrize("more", [1, 5, 20])
def test_a_fit_serves_a_larger_fleet(fitted: RouterFit, more: int) -> None:
    """Rows of the fit stay; further ones go to the largest share per worker, as apportionment by D'Hondt gives it."""
    workers, learned = fitted.workers, fitted.learned
    wide = fitted.widened(workers + more)
    assert wide.workers == workers + more
    np.testing.assert_array_equal(wide.profiles[:workers], fitted.profiles)
    copies = np.array([int((wide.learned.centroids == row).all(axis=1).sum()) for row in learned.centroids])
    assert copies.sum() == workers + more
    # No row could give a copy to another cluster that has a larger share per worker without it.
    per_worker = learned.shares / copies
    with np.errstate(divide="ignore"):
        before = np.where(copies > 1, learned.shares / (copies - 1), np.inf)
    assert before.min() >= per_worker.max()
    assert wide.learned.shares.sum() == pytest.approx(1.0, abs=1e-5)
    assert wide.learned.shares.max() == pytest.approx(per_worker.max())
    counts = np.ones(learned.shape, np.int64)
    router, fleet = LocalityBand(wide), wide.fleet(4)
    assert 0 <= router.route(Request("r", 1, counts), fleet).worker < workers + more
    np.testing.assert_array_equal(wide.similarities(counts)[:workers], fitted.similarities(counts))
    assert fitted.widened(workers) is fitted
    assert fitted.widened(1) is fitted


def test_a_wider_fit_is_saved_as_any(fitted: RouterFit, tmp_path: Path) -> None:
    fitted.widened(fitted.workers + 3).save(tmp_path / "wide.safetensors")
    assert RouterFit.load(tmp_path / "wide.safetensors").workers == fitted.workers + 3
