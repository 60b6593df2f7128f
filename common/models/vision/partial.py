"""Parts of a vision-language checkpoint: the language model without vision tensors, the tower without language ones.

The whole model is laid out on the meta device, which takes no memory; then only the part's tensors are read.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.initialization import guard_torch_init_functions

from common.errors import InvalidArgument
from common.models.text_config import VISION_ARCHITECTURES

# torch's default dtype is the process's: whoever loads a model holds this.
LOADING = threading.RLock()

_HEAD = "lm_head.weight"
_TEXT_MODELS = ("language_model", "text_model")


class LanguagePart(nn.Module):
    """model: the text model, called with input_ids or inputs_embeds. lm_head: hidden states to logits.

    final_logit_softcapping: bound of the logits, or None.
    """

    def __init__(self, model: nn.Module, lm_head: nn.Module) -> None:
        super().__init__()
        self.model: Any = model
        self.lm_head = lm_head
        self.config: Any = self.model.config
        self.final_logit_softcapping: float | None = getattr(self.config, "final_logit_softcapping", None)

    @property
    def embed_tokens(self) -> nn.Module:
        found: nn.Module = self.model.get_input_embeddings()
        return found

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self)

    def set_attn_implementation(self, name: str) -> None:
        self.model.set_attn_implementation(name)


def load_language(model_dir: str | Path, dtype: torch.dtype) -> LanguagePart:
    """The text model and its head, on the CPU. No vision tensor is read or allocated.

    Raises InvalidArgument for a model without vision or a checkpoint that lacks tensors.
    """
    with LOADING:
        whole = _layout(model_dir, dtype)
        name = _text_model(whole)
        prefix = f"model.{name}."
        text = getattr(whole.model, name)
        stored = _read(Path(model_dir), whole, dtype, lambda key: key.startswith(prefix) or key == _HEAD)
        embedding = prefix + next(key for key, value in text.named_parameters() if value is text.embed_tokens.weight)
        _tie(whole.config, stored, embedding)
        head = stored.get(_HEAD)
        part = LanguagePart(text, whole.lm_head)
        tensors = {"model." + key.removeprefix(prefix): value for key, value in stored.items() if key != _HEAD}
        if head is not None:
            tensors[_HEAD] = head
        _assign(part, tensors)
        _rebuild_buffers(text)
        return part.eval()


def load_vision(model_dir: str | Path, dtype: torch.dtype) -> nn.Module:
    """The model's body without its text model, on the CPU: call its get_image_features.

    Raises InvalidArgument for a model without vision or a checkpoint that lacks tensors.
    """
    with LOADING:
        whole = _layout(model_dir, dtype)
        name = _text_model(whole)
        stored = _read(Path(model_dir), whole, dtype, lambda key: key != _HEAD and not key.startswith(f"model.{name}."))
        body: nn.Module = whole.model
        delattr(body, name)
        _assign(body, {key.removeprefix("model."): value for key, value in stored.items()})
        _rebuild_buffers(body)
        return body.eval()


def weight_bytes(module: nn.Module) -> int:
    """Memory of a module's tensors, each counted once."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum({tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}.values())


def _layout(model_dir: str | Path, dtype: torch.dtype) -> Any:
    """The whole model without memory."""
    config = AutoConfig.from_pretrained(str(model_dir), local_files_only=True, trust_remote_code=False)
    architecture = next(iter(config.architectures or ["none named"]))
    if architecture not in VISION_ARCHITECTURES:
        raise InvalidArgument(f"architecture {architecture} has no vision part that can be split", field="model_dir")
    for each in (config, *(getattr(config, name) for name in config.sub_configs)):
        each.dtype = dtype
    with _default_dtype(dtype), torch.device("meta"):
        return getattr(transformers, architecture)(config)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Some buffers take torch's default, as they do when transformers loads a model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _text_model(whole: Any) -> str:
    return next(name for name in _TEXT_MODELS if hasattr(whole.model, name))


def _read(root: Path, whole: Any, dtype: torch.dtype, wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """The wanted tensors by the names that modules have; on disk they have those of whoever saved them."""
    names = set(whole.state_dict())
    renamings = [each for each in get_model_conversion_mapping(whole) if isinstance(each, WeightRenaming)]
    known = dict.fromkeys(names, True)
    found: dict[str, torch.Tensor] = {}
    for path in _weight_files(root):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  (not a mapping)
                name, _ = rename_source_key(key, renamings, [], whole.base_model_prefix, known)
                if name in names and wanted(name):
                    tensor = file.get_tensor(key)
                    # A copy: get_tensor maps the file, which another process may replace.
                    found[name] = tensor.to(dtype, copy=True) if tensor.is_floating_point() else tensor.clone()
    return found


def _weight_files(root: Path) -> list[Path]:
    index = root / "model.safetensors.index.json"
    if index.is_file():
        return [root / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
    single = root / "model.safetensors"
    return [single] if single.is_file() else sorted(root.glob("*.safetensors"))


def _tie(config: Any, stored: dict[str, torch.Tensor], embedding: str) -> None:
    """One tensor for embedding and head where the config says so, unless the file holds two that differ."""
    if not config.tie_word_embeddings:
        return
    first, head = stored.get(embedding), stored.get(_HEAD)
    if first is None and head is not None:
        stored[embedding] = head
    elif first is not None and (head is None or torch.equal(first, head)):
        stored[_HEAD] = first


def _assign(part: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Parameters that share a tensor share it afterwards, too."""
    shared: dict[int, nn.Parameter] = {}
    missing: list[str] = []
    for name, value in part.state_dict(keep_vars=True).items():
        tensor = tensors.get(name)
        if tensor is None or tensor.shape != value.shape:
            missing.append(name)
            continue
        owner, _, leaf = name.rpartition(".")
        if isinstance(value, nn.Parameter):
            found = shared.setdefault(id(tensor), nn.Parameter(tensor, requires_grad=False))
            setattr(part.get_submodule(owner), leaf, found)
        else:
            part.get_submodule(owner).register_buffer(leaf, tensor)
    if missing:
        raise InvalidArgument(
            f"the checkpoint lacks {len(missing)} tensors of this part or holds them in another shape, "
            f"first {missing[0]}",
            field="model_dir",
        )


def _rebuild_buffers(part: Any) -> None:
    """Buffers that no file holds, such as rotary frequencies, made by the model's own initialisation."""
    for module in part.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                module.register_buffer(name, torch.empty_like(buffer, device="cpu"), persistent=False)
            else:
                buffer._is_hf_initialized = True  # initialisation leaves these alone
    for parameter in part.parameters():
        parameter._is_hf_initialized = True
    with torch.no_grad(), guard_torch_init_functions():
        part.initialize_weights()
