"""One Ray for the whole session: its start takes half a minute on two cores."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coterie.net.processes import free_port
from ray_apps import Serving

ROOT = Path(__file__).parents[3]


STARTS = 10
"""Ray gives its node 30 s to start, whatever the machine is doing, and has no setting for it."""


def start_ray(init: Callable[..., object], shutdown: Callable[[], None], folder: str) -> None:
    for left in reversed(range(STARTS)):
        try:
            # More processors than there are: actors wait for them, and these do little at a time.
            init(num_cpus=8, include_dashboard=False, object_store_memory=200_000_000, _temp_dir=folder)
        except Exception as error:
            shutdown()
            if not left or "timed out during startup" not in str(error):
                raise
        else:
            return


@pytest.fixture(scope="session")
def serving() -> Iterator[Serving]:
    pytest.importorskip("ray", reason="needs Ray Serve: pip install 'coterie[ray]'")
    paths = [ROOT / "src", ROOT / "tests" / "support", ROOT / "examples" / "ray"]
    settings = {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]),
        "COTERIE_PLUGINS": str(ROOT / "tests" / "support" / "raising_router.py"),
        "RAY_AUTH_MODE": "disabled",  # no file with a token in the user's folder
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "60",  # on a busy machine 0.1 s is over before a replica answers
        "RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "60",
    }
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="coterie-ray-", ignore_cleanup_errors=True) as folder,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # Ray's own
        for name, value in settings.items():
            patch.setenv(name, value)
        patch.syspath_prepend(str(paths[-1]))
        import ray
        from ray import serve

        start_ray(ray.init, ray.shutdown, folder)
        port = free_port()
        serve.start(http_options={"port": port})
        running = Serving(port)
        running.start("canned", "raising", "several", "latency_aware")
        yield running
        serve.shutdown()
        ray.shutdown()
