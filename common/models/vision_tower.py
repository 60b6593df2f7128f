"""The vision tower of the default vision-language model: ViT-S/14 weights out of an ONNX file, for Dinov2Model."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PATCH = 14  # pixels
GRID = 8  # patches a side
IMAGE_SIZE = PATCH * GRID
CONFIG: dict[str, Any] = {
    "model_type": "dinov2",
    "hidden_size": 384,
    "num_attention_heads": 6,
    "num_hidden_layers": 12,
    "mlp_ratio": 4,
    "image_size": IMAGE_SIZE,
    "patch_size": PATCH,
}
_PREFIX = "backbone."
_RENAMED = {
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
}
_POSITIONS = ("Concat_6", "Reshape_1")  # the nodes that read the class position and the patch positions


def read_vision_tower(path: Path) -> dict[str, Tensor]:
    """Parameters of `Dinov2Model` by name, float32, from an exported ViT whose backbone is called `backbone`.

    Exporters name biases and norms as the module does but matrices by number and transposed: those are named after
    the node that reads them. Positions are interpolated from the file's grid to GRID × GRID here, once, as the model
    itself would at every picture.
    """
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(str(path)).graph
    stored = {tensor.name: torch.tensor(numpy_helper.to_array(tensor)) for tensor in graph.initializer}
    found = {name.removeprefix(_PREFIX): tensor for name, tensor in stored.items() if name.startswith(_PREFIX)}
    positions: dict[str, Tensor] = {}
    for node in graph.node:
        module = node.name.strip("/").replace("/", ".")
        if not module.startswith(_PREFIX):
            continue
        numbered = next((stored[name] for name in node.input if name.startswith("onnx::") and name in stored), None)
        if numbered is None:
            continue
        if node.op_type == "MatMul":
            found[module.removeprefix(_PREFIX).removesuffix(".MatMul") + ".weight"] = numbered.T.contiguous()
        elif module.rpartition(".")[2] in _POSITIONS and numbered.ndim == 3:
            positions[module.rpartition(".")[2]] = numbered
    found["embeddings.position_embeddings"] = _positions(*(positions[name] for name in _POSITIONS))
    return {_rename(name): tensor for name, tensor in found.items()}


def _positions(first: Tensor, patches: Tensor) -> Tensor:
    """[1, 1, C] and [1, n·n, C] → [1, 1 + GRID², C]."""
    side = round(patches.shape[1] ** 0.5)
    grid = patches.reshape(1, side, side, -1).permute(0, 3, 1, 2)
    grid = torch.nn.functional.interpolate(grid, size=(GRID, GRID), mode="bicubic", align_corners=False)
    return torch.cat([first, grid.permute(0, 2, 3, 1).reshape(1, GRID * GRID, -1)], dim=1)


def _rename(name: str) -> str:
    for old, new in _RENAMED.items():
        name = re.sub(re.escape(old) + r"(?=\.)", new, name)
    return name
