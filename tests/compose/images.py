"""Images that are not ours: pulled where they can be; else the base image is made out of Debian's packages."""

import os
import re
import shlex
import shutil
from pathlib import Path

from tests.compose.command import ROOT, CommandFailed, run, works

_PULL_SECONDS = 900.0
_MAKE_SECONDS = 1800.0
# What `python:*-slim` has and its users count on: `python` and `pip` in /usr/local, free to install into.
_PACKAGES = "python3-venv,ca-certificates"


def can_be_had(image: str) -> bool:
    """Whether it is here, after pulling it if need be."""
    return works("docker", "image", "inspect", image) or works("docker", "pull", "-q", image, seconds=_PULL_SECONDS)


def base_image() -> tuple[str, str]:
    """(image that our Dockerfile starts from, Debian's release that it is)."""
    (image,) = re.findall(r"^FROM (\S+)$", (ROOT / "docker" / "Dockerfile").read_text(), re.MULTILINE)
    return image, image.rpartition("-")[2]


def make_base(image: str, release: str, work: Path) -> None:
    """An image of that name from debootstrap. Raises CommandFailed."""
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        raise CommandFailed(f"{image} cannot be pulled, and to make it takes root and debootstrap")
    print(f"{image} cannot be pulled: making one with debootstrap", flush=True)
    tree = work / "base"
    shutil.rmtree(tree, ignore_errors=True)
    run("debootstrap", "--variant=minbase", f"--include={_PACKAGES}", release, str(tree), seconds=_MAKE_SECONDS)
    run("chroot", str(tree), "python3", "-m", "venv", "/usr/local", seconds=300)
    for left in ("var/cache/apt/archives", "var/lib/apt/lists"):
        shutil.rmtree(tree / left, ignore_errors=True)
    settings = ["ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin", 'CMD ["python3"]']
    changes = " ".join(f"--change {shlex.quote(each)}" for each in settings)
    run(
        "bash",
        "-o",
        "pipefail",
        "-c",
        f"tar -C {shlex.quote(str(tree))} -c . | docker import {changes} - {shlex.quote(image)}",
        seconds=_MAKE_SECONDS,
    )
    shutil.rmtree(tree)


def size(image: str) -> int:
    """In bytes."""
    return int(run("docker", "image", "inspect", image, "--format", "{{.Size}}"))
