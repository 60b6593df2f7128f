"""What a Hugging Face directory says of its model, read without torch."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import msgspec

from common.cache.keys import EmbeddingLayout, KvLayout
from common.engine.settings import EngineSettings
from common.errors import InvalidArgument, ModelNotFound
from common.models.text_config import VISION_ARCHITECTURES, embedding_levels, image_token_id, mrope_section, text_config

SUPPORTED = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MistralForCausalLM",
    "Gemma3ForCausalLM",
    *VISION_ARCHITECTURES,
)
_PROBES = 256  # places of each weight file that enter the revision
_PROBE_BYTES = 4096
_MAX_HEADER_BYTES = 100 * 2**20  # safetensors' own limit


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a text model, or of a vision-language model's text side. max_context and sliding_window in tokens.

    embedding_levels: tensors of an image's embedding (EmbeddingLayout), 0 without vision. mrope_section: empty unless
    positions are three-fold. bidirectional_images: the tokens of an image attend to each other both ways.
    """

    architecture: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    sliding_window: int | None
    eos_token_ids: tuple[int, ...]
    revision: str
    hidden_size: int
    vision: bool = False
    image_token_id: int | None = None
    embedding_levels: int = 0
    mrope_section: tuple[int, ...] = ()
    bidirectional_images: bool = False


def read_config(model_dir: str | Path, *, revision: str = "") -> ModelConfig:
    """Reads config.json, generation_config.json and the headers of the safetensors files.

    revision: taken as given; computed from the files when empty.
    Raises ModelNotFound when there is no such directory or no weights in it, InvalidArgument for what cannot be served.
    """
    root = Path(model_dir)
    if not (root / "config.json").is_file():
        raise ModelNotFound("the model directory has no config.json", field="model_dir")
    config = _read_json(root / "config.json")
    named = config.get("architectures") or ["none named"]
    architecture = str(named[0])
    if architecture not in SUPPORTED:
        raise InvalidArgument(
            f"architecture {architecture} is not supported; supported are {', '.join(SUPPORTED)}", field="model_dir"
        )
    vision = architecture in VISION_ARCHITECTURES
    text = text_config(config, architecture) if vision else config
    heads = _positive(text, "num_attention_heads")
    hidden_size = _positive(text, "hidden_size")
    head_dim = text.get("head_dim")
    if head_dim is None:
        # transformers' own defaults: Qwen3 128 and Gemma3 256 are fixed, the others divide.
        fixed = {"Qwen3ForCausalLM": 128, "Gemma3ForCausalLM": 256}
        head_dim = fixed.get(architecture) or hidden_size // heads
    shape = ModelConfig(
        architecture=architecture,
        num_layers=_positive(text, "num_hidden_layers"),
        num_kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(head_dim),
        vocab_size=_positive(text, "vocab_size"),
        max_context=_positive(text, "max_position_embeddings"),
        sliding_window=text.get("sliding_window"),
        eos_token_ids=_eos_token_ids(root, config if config.get("eos_token_id") is not None else text),
        revision=revision or checkpoint_revision(root),
        hidden_size=hidden_size,
    )
    if not vision:
        return shape
    return msgspec.structs.replace(
        shape,
        vision=True,
        image_token_id=image_token_id(config, architecture),
        embedding_levels=embedding_levels(config, architecture),
        mrope_section=mrope_section(text, architecture),
        bidirectional_images=architecture == "Gemma3ForConditionalGeneration",
    )


def kv_layout(settings: EngineSettings) -> KvLayout:
    """Layout of the pool that an engine with these settings makes."""
    if settings.block_size <= 0 or settings.block_size % 16:
        raise InvalidArgument(f"block_size must be a multiple of 16, got {settings.block_size}", field="block_size")
    if settings.executor == "timed":
        return KvLayout(
            model=settings.served_name or "timed",
            revision=settings.revision or "timed-1",
            dtype="float32",
            num_layers=settings.timed.num_layers,
            num_kv_heads=1,
            head_dim=2,
            block_size=settings.block_size,
        )
    config = read_config(settings.model_dir, revision=settings.revision)
    return KvLayout(
        model=settings.served_name or Path(settings.model_dir).name,
        revision=config.revision,
        dtype=settings.dtype,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=settings.block_size,
    )


def embedding_layout(settings: EngineSettings) -> EmbeddingLayout | None:
    """Layout of the image embeddings that a model with these settings takes; None when it takes no images."""
    if settings.executor == "timed":
        if not settings.timed.image_hidden_size:
            return None
        return EmbeddingLayout(
            model=settings.served_name or "timed",
            revision=settings.revision or "timed-1",
            dtype="float32",
            levels=1,
            hidden_size=settings.timed.image_hidden_size,
        )
    config = read_config(settings.model_dir, revision=settings.revision)
    if not config.vision:
        return None
    return EmbeddingLayout(
        model=settings.served_name or Path(settings.model_dir).name,
        revision=config.revision,
        dtype=settings.dtype,
        levels=config.embedding_levels,
        hidden_size=config.hidden_size,
    )


def checkpoint_revision(root: Path) -> str:
    """32 hex digits over config.json and, of every safetensors file, its name, size, header and spaced probes of its
    data.

    Reads about 1 MiB a file whatever its size, so it costs milliseconds; the probes tell apart two trainings of one
    shape.
    """
    files = sorted(root.glob("*.safetensors"))
    if not files:
        raise ModelNotFound("the model directory has no *.safetensors file", field="model_dir")
    digest = hashlib.sha256((root / "config.json").read_bytes())
    for path in files:
        size = path.stat().st_size
        digest.update(f"\0{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER_BYTES + 1
            if length > min(_MAX_HEADER_BYTES, size):
                raise InvalidArgument(f"{path.name} is not a safetensors file", field="model_dir")
            digest.update(file.read(length))
            start = 8 + length
            step = max(_PROBE_BYTES, (size - start) // _PROBES)
            for offset in range(start, size, step):
                file.seek(offset)
                digest.update(file.read(_PROBE_BYTES))
    return digest.hexdigest()[:32]


def _eos_token_ids(root: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """generation_config.json's ids come first, as in transformers; config.json's only when it names none."""
    path = root / "generation_config.json"
    found = _read_json(path).get("eos_token_id") if path.is_file() else None
    if found is None:
        found = config.get("eos_token_id")
    if found is None:
        return ()
    return tuple(int(token) for token in (found if isinstance(found, list) else [found]))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise InvalidArgument(f"{path.name} is not JSON: {error}", field="model_dir") from error
    if not isinstance(value, dict):
        raise InvalidArgument(f"{path.name} is not a JSON object", field="model_dir")
    return value


def _positive(config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value <= 0:
        raise InvalidArgument(f"config.json: {name} must be a positive integer, got {value!r}", field="model_dir")
    return value
