"""A Docker daemon: the one that is there, or one of this test's own that ends with it."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.compose.command import CommandFailed, run, works

ADVICE = (
    "No Docker daemon answers. Start one, or say with DOCKER_HOST where one is; or, as root on Debian or Ubuntu, let "
    "this test install and run its own:  make compose-test ARGS=--own-daemon"
)
_PROGRAMS = {"dockerd": "docker.io", "docker": "docker.io", "iptables": "iptables", "debootstrap": "debootstrap"}
_START_SECONDS = 180.0  # containers of a run that was broken off may start with it
_END_SECONDS = 90.0


def answers() -> bool:
    return works("docker", "version")


@contextmanager
def own_daemon(work: Path) -> Iterator[None]:
    """Everything it keeps is in `work`, so that the next run has its images; no other daemon is touched.

    Raises CommandFailed when it does not start.
    """
    _install()
    running = work / "run"
    running.mkdir(parents=True, exist_ok=True)
    socket = f"unix://{running}/docker.sock"
    command = ["dockerd", "--data-root", str(work / "data"), "--exec-root", str(running)]
    command += ["--pidfile", str(running / "docker.pid"), "--host", socket]
    before = os.environ.get("DOCKER_HOST")
    with (work / "dockerd.log").open("w") as log:
        # A session of its own: Ctrl-C is for the test, which ends its containers before.
        daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    os.environ["DOCKER_HOST"] = socket
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not answers():
            if daemon.poll() is not None or time.monotonic() > deadline:
                raise CommandFailed(f"dockerd does not start; its log: {work / 'dockerd.log'}")
            time.sleep(0.5)
        yield
    finally:
        if before is None:
            del os.environ["DOCKER_HOST"]
        else:
            os.environ["DOCKER_HOST"] = before
        daemon.terminate()
        try:
            daemon.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
        works("umount", str(running / "netns" / "default"))  # which dockerd leaves


def _install() -> None:
    missing = sorted({package for program, package in _PROGRAMS.items() if shutil.which(program) is None})
    if os.geteuid() != 0:
        raise CommandFailed("--own-daemon needs root")
    if missing:
        print(f"installing {', '.join(missing)}", flush=True)
        run("apt-get", "update", seconds=300)
        run("apt-get", "install", "-y", "--no-install-recommends", *missing, seconds=900)
