"""`epd up` with real processes: etcd, gateway and workers (executor `timed`, so that no weights are loaded)."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.models.catalog import DEFAULT_MODEL
from common.process import readable
from common.registry.local_etcd import free_port
from services.commands.models import directory

SECONDS = 120.0


class Mesh:
    """One mesh in the background, asked by the same commands that people use."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.ports = ("--grpc-port", str(free_port()), "--http-port", str(free_port()))
        self.environment = os.environ | {"EPD_RUN_DIR": str(run_dir), "COLUMNS": "120", "NO_COLOR": "1"}
        for name in ("EPD_ETCD", "EPD_ADDRESS", "EPD_CONFIG"):
            self.environment.pop(name, None)

    def epd(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "services.cli", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=self.environment)

    def up(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.epd("up", DEFAULT_MODEL, "--executor", "timed", "--detach", *self.ports, *arguments)

    @property
    def state(self) -> dict:
        return json.loads((self.run_dir / "state.json").read_text())


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    mesh = Mesh(tmp_path / "run")
    try:
        yield mesh
    finally:
        mesh.epd("down")


def wait_for_end(pids: list[int]) -> None:
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        with os.fdopen(descriptor):
            assert readable((descriptor,), SECONDS), f"pid {pid} still runs"


def test_from_up_to_down(mesh: Mesh) -> None:
    started = mesh.up()
    assert started.returncode == 0, started.stdout + started.stderr
    for part in ("ready after", "> What is the capital of France?", "prefill.forward", "decode.steps", "gRPC on"):
        assert part in started.stdout
    assert "Ctrl-C" not in started.stdout  # it runs in the background
    assert "epd down" in started.stdout
    pids = list(mesh.state["processes"].values())
    assert set(mesh.state["processes"]) == {"etcd", "gateway", "prefill-0", "decode-0"}

    assert "SERVING" in mesh.epd("health").stdout
    status = mesh.epd("status").stdout
    for part in ("prefill-0", "decode-0", "timed", "clean"):
        assert part in status

    answer = mesh.epd("generate", "Hello", "--max-tokens", "5", "--json")
    last = json.loads(answer.stdout.splitlines()[-1])
    assert last["usage"]["completion_tokens"] == 5
    trace = mesh.epd("trace", last["accounting"]["trace_id"]).stdout
    assert last["accounting"]["trace_id"] in mesh.epd("trace", last["request_id"]).stdout
    for part in ("gateway.generate", "prefill.run", "decode.run", "transfer.pull"):
        assert part in trace

    again = mesh.epd("up", DEFAULT_MODEL, *mesh.ports)
    assert again.returncode == 2
    assert "epd down" in again.stderr

    assert mesh.epd("down").returncode == 0
    wait_for_end(pids)
    assert mesh.epd("health", "--address", f"127.0.0.1:{mesh.ports[1]}").returncode == 1


def test_a_killed_worker_comes_back_and_a_killed_supervisor_takes_all_along(mesh: Mesh) -> None:
    assert mesh.up("--prefill", "0", "--decode", "0", "--aggregated", "1").returncode == 0
    first = mesh.state["processes"]["both-0"]
    os.kill(first, signal.SIGKILL)
    wait_for_end([first])
    # The gateway waits a while for a worker; a request may still come too early.
    for _ in range(10):
        if (answer := mesh.epd("generate", "Hello", "--max-tokens", "3")).returncode == 0:
            break
    assert answer.returncode == 0, answer.stderr
    assert mesh.state["processes"]["both-0"] != first
    for _ in range(10):  # the mesh looks often, and a command takes longer
        if "back: both-0" in (log := (mesh.run_dir / "up.log").read_text()):
            break
        mesh.epd("health")
    assert "both-0 was ended by SIGKILL" in log
    assert "back: both-0" in log

    pids = list(mesh.state["processes"].values())
    os.kill(mesh.state["pid"], signal.SIGKILL)
    wait_for_end(pids)


def test_a_model_that_cannot_be_served_is_refused_before_anything_starts(mesh: Mesh, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    refused = mesh.epd("up", str(tmp_path / "model"), *mesh.ports)
    assert refused.returncode == 2
    assert "config.json" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_the_same_under_tls(mesh: Mesh) -> None:
    started = mesh.up("--tls")
    assert started.returncode == 0, started.stdout + started.stderr
    ca = mesh.run_dir / "certs" / "ca.pem"
    assert str(ca) in started.stdout
    assert "https://" in started.stdout
    assert not (mesh.run_dir / "certs" / "ca.key").exists()

    # Commands find the authority in the run directory, and the operator's certificate for what workers tell.
    assert mesh.epd("generate", "Hello", "--max-tokens", "3").returncode == 0
    status = mesh.epd("status").stdout
    assert status.count("clean") == 2

    elsewhere = Mesh(mesh.run_dir.parent / "elsewhere")
    address = ("--address", mesh.state["grpc"])
    refused = elsewhere.epd("health", *address)
    assert refused.returncode == 1
    assert "speaks TLS: name its authority with --ca" in refused.stderr
    assert "of an authority that we do not trust" in elsewhere.epd("health", *address, "--ca", "system").stderr
    assert "SERVING" in elsewhere.epd("health", *address, "--ca", str(ca)).stdout


def test_two_models_by_one_command(mesh: Mesh, tmp_path: Path) -> None:
    second = tmp_path / "second"
    second.symlink_to(directory() / DEFAULT_MODEL)
    started = mesh.epd("up", DEFAULT_MODEL, str(second), "--executor", "timed", "--detach", *mesh.ports)
    assert started.returncode == 0, started.stdout + started.stderr
    workers = {"prefill-0", "decode-0", "prefill-1", "decode-1"}
    assert set(mesh.state["processes"]) == {"etcd", "gateway", *workers}
    for model, number in ((DEFAULT_MODEL, 0), ("second", 1)):
        answer = mesh.epd("generate", "Hello", "--model", model, "--max-tokens", "3", "--json")
        last = json.loads(answer.stdout.splitlines()[-1])
        assert (last["model"], last["accounting"]["decode_worker"]) == (model, f"decode-{number}")
