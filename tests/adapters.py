"""LoRA adapters as peft writes them, and the checkpoint with their weights merged in: the oracle's side."""

import json
import math
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def weight_name(weights: Iterable[str], layer: int, module: str) -> str:
    """Of a checkpoint's language part."""
    end = f"layers.{layer}.{'self_attn' if module in ATTENTION else 'mlp'}.{module}.weight"
    (found,) = (name for name in weights if name.endswith(end) and "visi" not in name and "visual" not in name)
    return found


def make_adapter(
    checkpoint: Path,
    directory: Path,
    *,
    seed: int,
    r: int = 4,
    modules: Sequence[str] = ALL,
    layers: Sequence[int] | None = None,
    size: float = 0.6,
    dtype: torch.dtype = torch.float32,
    tensors: dict[str, torch.Tensor] | None = None,
    **config: Any,
) -> Path:
    """A random adapter of a tiny checkpoint, strong enough that tokens change. config: of adapter_config.json.

    tensors: instead of those that belong there, by name.
    """
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(checkpoint / "model.safetensors")
    made: dict[str, torch.Tensor] = {}
    count = sum(name.endswith(".self_attn.q_proj.weight") and "visi" not in name for name in weights)
    for layer in range(count) if layers is None else layers:
        for module in modules:
            name = weight_name(weights, layer, module)
            out, inner = weights[name].shape
            key = f"base_model.model.{name.removesuffix('.weight')}"
            a = torch.randn(r, inner, generator=generator) * inner**-0.5
            b = torch.randn(out, r, generator=generator) * size * r**-0.5
            made |= {f"{key}.lora_A.weight": a.to(dtype), f"{key}.lora_B.weight": b.to(dtype)}
    save_file(tensors or made, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    written = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": f"someone/{checkpoint.name}",
        "r": r,
        "lora_alpha": 2 * r,
        "target_modules": list(modules),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        **config,
    }
    (directory / "adapter_config.json").write_text(json.dumps(written))
    return directory


def merged(checkpoint: Path, adapter: Path, directory: Path) -> Path:
    """The checkpoint with W + s·B·A in place of W, computed in float64."""
    shutil.copytree(checkpoint, directory)
    config = json.loads((adapter / "adapter_config.json").read_text())
    r, alpha = config["r"], config["lora_alpha"]
    scale = alpha / math.sqrt(r) if config["use_rslora"] else alpha / r
    weights = load_file(checkpoint / "model.safetensors")
    pairs = load_file(adapter / "adapter_model.safetensors")
    for key, a in pairs.items():
        if ".lora_A." in key:
            name = key.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
            delta = scale * pairs[key.replace("lora_A", "lora_B")].double() @ a.double()
            weights[name] = (weights[name].double() + delta).float()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
