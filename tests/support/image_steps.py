"""Carry out a Dockerfile without a daemon: its stages in folders that begin as a Debian made by debootstrap, by chroot.

Only what the project's Dockerfile uses is understood; anything else raises ValueError. Needs root.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

TIMEOUT_S = 1800
HOST_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf")
"""What lets a command inside reach the packages, as a daemon's network would; removed from what is measured."""
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


@dataclass
class Image:
    root: Path
    env: dict[str, str] = field(default_factory=lambda: {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
    user: str = "0"
    workdir: str = "/"
    ports: list[int] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)

    def words(self, command: list[str], user: str | None = None) -> list[str]:
        """Return the words that run a command inside, as a container would."""
        env = [f"{name}={value}" for name, value in self.env.items()]
        user = self.user if user is None else user
        inside = ["/usr/bin/env", "-i", f"--chdir={self.workdir}", *env, *command]
        return ["chroot", f"--userspec={user}:{user}", str(self.root), *inside]


def megabytes(folder: Path) -> float:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if not path.is_symlink()) / 1e6


def instructions(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in joined.splitlines() if line.strip()]


def build(dockerfile: Path, base: Path, folder: Path) -> Image:
    """Carry out all stages, each from a copy of `base`; returns the last one."""
    stages: dict[str, Image] = {}
    image = Image(base)
    for word, rest in instructions(dockerfile.read_text()):
        if word == "FROM":
            name = rest.partition(" AS ")[2] or "last"
            image = stages[name] = Image(folder / name)
            subprocess.run(["cp", "-a", str(base), str(image.root)], check=True)
            for file in HOST_FILES:
                if Path(file).exists():
                    shutil.copy(file, image.root / file[1:])
        elif word == "RUN":
            _run(image, rest)
        elif word == "COPY":
            *sources, target = rest.removeprefix("--from=build ").split()
            origin = stages["build"].root if rest.startswith("--from=build") else dockerfile.parent
            for source in sources:
                _copy(origin / source.lstrip("/"), image.root / target.lstrip("/"), into=target.endswith("/"))
        elif word == "ENV":
            image.env |= dict(item.split("=", 1) for item in rest.split())
        elif word == "USER":
            image.user = rest
        elif word == "WORKDIR":
            image.workdir = rest
        elif word == "EXPOSE":
            image.ports = [int(port) for port in rest.split()]
        elif word in ("ENTRYPOINT", "CMD"):
            setattr(image, "entrypoint" if word == "ENTRYPOINT" else "command", json.loads(rest))
        elif word == "HEALTHCHECK":
            image.health = json.loads(rest.partition("CMD ")[2])
        else:
            raise ValueError(f"{word} {rest}")
    return image


def _run(image: Image, line: str) -> None:
    outside = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    kept, image.env = image.env, {**image.env, **outside}
    certificates = image.root / str(CERTIFICATES)[1:]
    if certificates.exists():  # a machine behind a proxy of its own trusts that proxy's certificate
        shutil.copy(CERTIFICATES, certificates)
    done = subprocess.run(
        image.words(["/bin/sh", "-c", line], user="0"), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    image.env = kept
    assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def _copy(source: Path, target: Path, into: bool) -> None:
    target = target / source.name if into else target
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-a", str(source), str(target)], check=True)
