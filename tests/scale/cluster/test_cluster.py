"""What runs in a cluster: the manifests against Kubernetes' schemas, the alerts in promtool, the image's steps."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from coterie.net.processes import free_port
from image_steps import build, megabytes

ROOT = Path(__file__).resolve().parents[3]
KUBERNETES = "1.34"
MIRROR = "http://deb.debian.org/debian"

pytestmark = pytest.mark.scale


def test_the_manifest_is_one_that_kubernetes_takes() -> None:
    kubernetes = pytest.importorskip("kubernetes_validate")
    for item in yaml.safe_load_all((ROOT / "examples" / "kubernetes" / "gateway.yaml").read_text()):
        kubernetes.validate(item, KUBERNETES, strict=True)
        with pytest.raises(kubernetes.ValidationError):
            kubernetes.validate({**item, "metdata": {}}, KUBERNETES, strict=True)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus")
@pytest.mark.parametrize("words", [("check", "rules", "coterie.rules.yaml"), ("test", "rules", "coterie.tests.yaml")])
def test_the_alerts_fire_when_they_should(words: tuple[str, ...]) -> None:
    folder = ROOT / "examples" / "prometheus"
    done = subprocess.run(["promtool", *words], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("debootstrap") is None, reason="needs root and debootstrap")
def test_the_image_serves_as_a_plain_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Carry out the Dockerfile, start what it starts, and ask its health check."""
    base = tmp_path / "base"
    subprocess.run(
        ["debootstrap", "--variant=minbase", "bookworm", str(base), MIRROR],
        check=True,
        capture_output=True,
        timeout=3600,
    )
    subprocess.run(["chroot", str(base), "apt-get", "clean"], check=True)  # as Debian's own image comes
    image = build(ROOT / "Dockerfile", base, tmp_path)
    port = free_port()
    settings = image.root / "etc" / "coterie"
    settings.mkdir()
    worker = {"id": "w", "url": f"http://127.0.0.1:{free_port()}"}
    config = {"listen": f"127.0.0.1:{port}", "workers": [worker], "state": "/var/lib/coterie/state.json"}
    (settings / "gateway.yaml").write_text(yaml.safe_dump(config))
    size, debian = megabytes(image.root), megabytes(base)
    with capsys.disabled():
        sys.stdout.write(
            f"\nimage: user {image.user}, ports {image.ports}, {size:.0f} MB, of which Debian's {debian:.0f}\n"
        )
    server = subprocess.Popen(image.words([*image.entrypoint, *image.command]), stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert f":{port}" in server.stdout.readline()
        status = Path(f"/proc/{server.pid}/status").read_text()
        assert f"Uid:\t{image.user}\t{image.user}" in status
        health = [word.replace("8000", str(port)) for word in image.health]
        assert subprocess.run(image.words(health), timeout=300).returncode == 0
        server.terminate()
        assert server.wait(timeout=300) in (0, 128 + 15)
    finally:
        server.kill()
        server.wait()
    assert subprocess.run(image.words(health), timeout=300, stderr=subprocess.DEVNULL).returncode != 0
