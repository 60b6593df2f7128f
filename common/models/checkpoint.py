"""A checkpoint on disk: is it complete and servable, and is it still what was written."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from common.errors import InvalidArgument
from common.models.config import SUPPORTED

MANIFEST = "manifest.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_HASH_CHUNK = 1 << 22

# (stage, done, total); total 0: unknown.
Progress = Callable[[str, int, int], None]


class ManifestFile(msgspec.Struct, frozen=True):
    sha256: str
    size: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a converted model was made from and what came out."""

    name: str
    source: str  # package==version
    source_sha256: str
    converter: str
    license: str
    files: dict[str, ManifestFile]


def sha256_file(path: Path, seen: Callable[[int], None] = lambda _: None) -> str:
    """Hexadecimal sha256 of a file; `seen` is told the bytes of each piece read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_HASH_CHUNK):
            digest.update(piece)
            seen(len(piece))
    return digest.hexdigest()


def write_manifest(
    directory: Path, *, name: str, source: str, source_sha256: str, converter: str, license: str
) -> None:
    """Record every file of a finished model directory."""
    files = {
        path.name: ManifestFile(sha256_file(path), path.stat().st_size)
        for path in sorted(directory.iterdir())
        if path.is_file() and path.name != MANIFEST
    }
    manifest = Manifest(
        name=name, source=source, source_sha256=source_sha256, converter=converter, license=license, files=files
    )
    (directory / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest, or None when there is none that can be read."""
    try:
        return msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError):
        return None


def verify_manifest(directory: Path, progress: Progress = lambda *_: None) -> list[str]:
    """What differs from the manifest, in words; empty when every file is as it was written."""
    manifest = read_manifest(directory)
    if manifest is None:
        return [f"{MANIFEST} is missing or damaged"]
    faults: list[str] = []
    total, done = sum(entry.size for entry in manifest.files.values()), 0
    for name, entry in manifest.files.items():
        path = directory / name
        if not path.is_file():
            faults.append(f"{name} is missing")
        elif path.stat().st_size != entry.size or sha256_file(path) != entry.sha256:
            faults.append(f"{name} has changed")
        done += entry.size
        progress("checking", done, total)
    return faults


def check_checkpoint(directory: Path) -> None:
    """Raises InvalidArgument, naming the remedy, unless `directory` holds a text model that the engine can load."""
    if not directory.is_dir():
        raise _refuse(f"there is no directory {directory}")
    config = _read_config(directory)
    architecture = next(iter(config.get("architectures") or ["none named"]))
    if architecture not in SUPPORTED:
        raise _refuse(
            f"architecture {architecture} in {directory / 'config.json'} is not supported; "
            f"supported are {', '.join(SUPPORTED)}"
        )
    _check_weights(directory)
    if not (directory / "tokenizer.json").is_file():
        raise _refuse(
            f"{directory} has no tokenizer.json; write one with "
            "AutoTokenizer.from_pretrained(directory).save_pretrained(directory)"
        )


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    if not path.is_file():
        if any(directory.glob("*.gguf")):
            raise _refuse(f"{directory} holds a GGUF file only; convert it first with `epd models convert FILE NAME`")
        raise _refuse(f"{directory} has no config.json, so it is not a Hugging Face model directory")
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise _refuse(f"{path} is not valid JSON") from error
    if not isinstance(config, dict):
        raise _refuse(f"{path} is not a JSON object")
    return config


def _check_weights(directory: Path) -> None:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _refuse(f"{index} is damaged") from error
        missing = [shard for shard in shards if not (directory / shard).is_file()]
        if missing:
            raise _refuse(f"{directory} lacks {len(missing)} of {len(shards)} weight files, first {missing[0]}")
        return
    if any(directory.glob("*.safetensors")):
        return
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in _PICKLES)
    if pickles:
        raise _refuse(
            f"{directory} holds weights as pickles only ({pickles[0]}), which can run code and are never loaded; "
            "convert them with AutoModelForCausalLM.from_pretrained(directory).save_pretrained(directory)"
        )
    raise _refuse(f"{directory} has no *.safetensors weights")


def _refuse(message: str) -> InvalidArgument:
    return InvalidArgument(message, field="model")
