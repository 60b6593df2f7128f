"""A peft directory with a LoRA adapter, read and checked without torch.

An adapter adds s·B·A to the weights of linear layers, with A [r, in], B [out, r] and s = lora_alpha / r, or
lora_alpha / √r with rslora (peft's LoraConfig).
"""

import hashlib
import json
import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from common.errors import InvalidArgument

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TARGETS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn"),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp"),
}
FIELD = "lora_path"
_MAX_CONFIG_BYTES = 1 << 20
_MAX_HEADER_BYTES = 8 << 20
_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?:model\.)?(?:(?:language_model|text_model)\.)?(?:model\.)?"
    r"layers\.(\d{1,5})\.(self_attn|mlp)\.(\w+)\.lora_([AB])(?:\.default)?\.weight"
)
_DTYPES = ("F32", "F16", "BF16")
# Fields of a LoraConfig that change what is computed in a way that is not done here, with the values that do not.
_NOT_HERE: dict[str, tuple[str, tuple[Any, ...]]] = {
    "use_dora": ("DoRA", (None, False)),
    "modules_to_save": ("modules_to_save (whole layers trained beside the adapter)", (None, [])),
    "bias": ("trained biases", (None, "none")),
    "lora_bias": ("a bias of the adapter's own (lora_bias)", (None, False)),
    "rank_pattern": ("rank_pattern", (None, {})),
    "alpha_pattern": ("alpha_pattern", (None, {})),
    "fan_in_fan_out": ("fan_in_fan_out", (None, False)),
    "trainable_token_indices": ("trainable_token_indices", (None, [], {})),
    "target_parameters": ("target_parameters", (None, [])),
    "layer_replication": ("layer_replication", (None, [])),
    "use_qalora": ("QALoRA", (None, False)),
    "alora_invocation_tokens": ("activated LoRA", (None, [])),
    "arrow_config": ("Arrow", (None,)),
}
_OWN_BASE = ("pissa", "olora", "loftq", "corda")  # ways to begin that change the base model's weights, too

Place = tuple[int, str]  # layer, and module as in TARGETS


class LoraFiles(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter on disk. checksum: 32 hex digits over both files, its identity everywhere in the mesh. names: of the
    tensors A and B of each place. base: the base model as the adapter's maker called it."""

    path: str
    checksum: str
    rank: int
    scale: float
    names: dict[Place, tuple[str, str]]
    base: str = ""


def adapter_path(directory: str, path: str) -> Path:
    """A directory below `directory`, symbolic links followed. path: absolute, or relative to it. Raises
    InvalidArgument."""
    if not directory:
        raise InvalidArgument("adapters are off here: the worker's setting lora.directory is empty", field=FIELD)
    root = Path(directory).resolve()
    try:
        found = (root / path).resolve()
        inside = bool(path) and found != root and found.is_relative_to(root) and found.is_dir()
    except (OSError, ValueError, RuntimeError):  # a null byte, links in a circle
        inside = False
    if not inside:
        raise InvalidArgument("lora_path must be a directory below the workers' lora.directory", field=FIELD)
    return found


def read_adapter(path: Path, *, max_rank: int) -> LoraFiles:
    """Raises InvalidArgument saying what is not supported or does not fit together."""
    raw = _bytes(path / CONFIG, _MAX_CONFIG_BYTES)
    config = _config(raw)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= max_rank:
        raise _refuse(f"r must be 1 to {max_rank} (lora.max_rank), not {str(rank)[:20]}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise _refuse("lora_alpha must be a number")
    header = _header(path / WEIGHTS)
    digest = hashlib.sha256(len(raw).to_bytes(8, "little") + raw)
    with (path / WEIGHTS).open("rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            digest.update(piece)
    return LoraFiles(
        path=str(path),
        checksum=digest.hexdigest()[:32],
        rank=rank,
        scale=alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank,
        names=_places(header, rank),
        base=str(config.get("base_model_name_or_path") or ""),
    )


def _config(raw: bytes) -> dict[str, Any]:
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise _refuse(f"{CONFIG} is not a JSON object")
    if config.get("peft_type") != "LORA":
        raise _refuse("peft_type must be LORA: other kinds of adapters are not supported")
    for field, (words, harmless) in _NOT_HERE.items():
        if config.get(field) not in harmless:
            raise _refuse(f"{words} is not supported ({field} in {CONFIG})")
    begin = config.get("init_lora_weights")
    if isinstance(begin, str) and begin.lower().startswith(_OWN_BASE):
        raise _refuse(f"init_lora_weights {begin[:20]!r} changes the base model, too, and is not supported")
    return config


def _places(header: Mapping[str, Any], rank: int) -> dict[Place, tuple[str, str]]:
    found: dict[Place, dict[str, str]] = {}
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        match = _TENSOR.fullmatch(name)
        if match is None or TARGETS.get(match[3]) != match[2]:
            raise _refuse(
                f"tensor {name[:100]!r} is of no layer that can be adapted here; these can: {', '.join(TARGETS)}"
            )
        side = match[4]
        shape, dtype = tensor.get("shape"), tensor.get("dtype")
        if dtype not in _DTYPES:
            raise _refuse(f"tensor {name[:100]!r} must be one of {', '.join(_DTYPES)}")
        if len(shape) != 2 or shape[0 if side == "A" else 1] != rank:
            raise _refuse(f"tensor {name[:100]!r} has shape {shape}, which is not of rank {rank}")
        of_place = found.setdefault((int(match[1]), match[3]), {})
        if side in of_place:
            raise _refuse(f"tensor {name[:100]!r} is there twice under different names")
        of_place[side] = name
    if not found:
        raise _refuse(f"{WEIGHTS} has no tensors")
    for (layer, module), sides in found.items():
        if len(sides) < 2:
            raise _refuse(f"layer {layer} {module} has only one of lora_A and lora_B")
    return {place: (sides["A"], sides["B"]) for place, sides in found.items()}


def _header(path: Path) -> dict[str, Any]:
    size = _size(path)
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise _refuse(f"{WEIGHTS} is not a safetensors file")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError):
            header = None
    if not isinstance(header, dict) or not all(isinstance(tensor, dict) for tensor in header.values()):
        raise _refuse(f"{WEIGHTS} is not a safetensors file")
    for name, tensor in header.items():
        if name != "__metadata__" and not (
            isinstance(tensor.get("shape"), list) and all(isinstance(each, int) for each in tensor["shape"])
        ):
            raise _refuse(f"{WEIGHTS} is not a safetensors file")
    return header


def _bytes(path: Path, most: int) -> bytes:
    if _size(path) > most:
        raise _refuse(f"{path.name} has more than {most} bytes")
    return path.read_bytes()


def _size(path: Path) -> int:
    try:
        if path.is_file():
            return path.stat().st_size
    except OSError:
        pass
    raise _refuse(f"the directory has no {path.name} that can be read")


def _refuse(message: str) -> InvalidArgument:
    return InvalidArgument(f"the adapter cannot be used: {message}", field=FIELD)
