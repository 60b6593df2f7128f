"""LoRA adapters on a model's linear layers: each row of a step gets what its own adapter adds, in one batch."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.utils.hooks import RemovableHandle

from common.engine.executor import Row
from common.errors import InvalidArgument
from common.models.lora import FIELD, TARGETS, WEIGHTS, LoraFiles, Place


@dataclass(slots=True)
class _Group:
    """Rows of a step's hidden states that one adapter changes; None: all."""

    pairs: dict[Place, tuple[torch.Tensor, torch.Tensor]]
    rows: torch.Tensor | None


class LoraLayers:
    """y += (x Aᵀ) (s·B)ᵀ by forward hooks on the layers that some adapter changes; the model's weights stay as they
    are.

    layers: of the text model; each has self_attn and mlp with separate projections, as all architectures here do.
    """

    def __init__(self, layers: Any) -> None:
        self._modules: dict[Place, torch.nn.Module] = {
            (number, name): getattr(getattr(layer, part), name)
            for number, layer in enumerate(layers)
            for name, part in TARGETS.items()
        }
        self._num_layers = len(layers)
        self._adapters: dict[str, dict[Place, tuple[torch.Tensor, torch.Tensor]]] = {}
        self._hooks: dict[Place, RemovableHandle] = {}
        self._groups: list[_Group] = []

    @torch.inference_mode()
    def load(self, files: LoraFiles) -> int:
        """Bytes that it takes. Raises InvalidArgument for what does not fit the model; then nothing has changed."""
        pairs = {}
        try:
            with safe_open(f"{files.path}/{WEIGHTS}", framework="pt") as tensors:
                for place, (a, b) in files.names.items():
                    pairs[place] = self._pair(place, tensors.get_tensor(a), tensors.get_tensor(b), files.scale)
        except (SafetensorError, OSError):
            raise _refuse(f"{WEIGHTS} is damaged") from None
        self._adapters[files.checksum] = pairs
        for place in pairs:
            if place not in self._hooks:
                hook = functools.partial(self._add, place)
                self._hooks[place] = self._modules[place].register_forward_hook(hook)
        return sum(tensor.numel() * tensor.element_size() for pair in pairs.values() for tensor in pair)

    def drop(self, adapter: str) -> None:
        self._adapters.pop(adapter, None)
        for place in self._hooks.keys() - {place for pairs in self._adapters.values() for place in pairs}:
            self._hooks.pop(place).remove()

    def begin(self, rows: list[Row]) -> None:
        """The rows of the step that is computed next."""
        self._groups = []
        if not self._adapters:
            return
        positions: dict[str, list[int]] = {}
        end = 0
        for row in rows:
            begin, end = end, end + row.end - row.start
            if adapter := row.choice.sequence.adapter:
                positions.setdefault(adapter, []).extend(range(begin, end))
        for adapter, mine in positions.items():
            whole = len(mine) == end
            pairs = self._adapters[adapter]
            device = next(iter(pairs.values()))[0].device
            self._groups.append(_Group(pairs, None if whole else torch.tensor(mine, device=device)))

    def _pair(self, place: Place, a: torch.Tensor, b: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """A and s·B as the model computes: in its dtype, on its device."""
        layer, name = place
        if place not in self._modules:
            raise _refuse(f"it has a layer {layer}; the model has {self._num_layers}")
        weight: Any = self._modules[place].weight
        if (b.shape[0], a.shape[1]) != tuple(weight.shape):
            raise _refuse(
                f"layer {layer} {name} is {weight.shape[0]} × {weight.shape[1]} in the model, "
                f"{b.shape[0]} × {a.shape[1]} in the adapter"
            )
        made = tuple(each.to(device=weight.device, dtype=weight.dtype) for each in (a, b.float() * scale))
        if not all(bool(each.isfinite().all()) for each in made):
            raise _refuse(f"layer {layer} {name} has values that are not finite")
        return made[0], made[1]

    def _add(self, place: Place, module: torch.nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        """x [1, T, in], out [1, T, out]."""
        for group in self._groups:
            if (pair := group.pairs.get(place)) is None:
                continue
            a, b = pair
            if group.rows is None:
                out += args[0] @ a.T @ b.T
            else:
                out[0].index_add_(0, group.rows, args[0][0, group.rows] @ a.T @ b.T)


def _refuse(message: str) -> InvalidArgument:
    return InvalidArgument(f"the adapter cannot be used: {message}", field=FIELD)
