"""Tiny random checkpoints of every supported architecture, made from configs: exact references without a download."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from tests.vlm_checkpoints import VLM_ARCHITECTURES, VLM_CHECKPOINTS, vlm_checkpoint

__all__ = (
    "ARCHITECTURES",
    "SLIDING_WINDOW",
    "VLM_ARCHITECTURES",
    "VLM_CHECKPOINTS",
    "tiny_checkpoint",
    "tiny_config",
    "vlm_checkpoint",
)

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "gemma3")
SLIDING_WINDOW = 40  # tokens, for mistral and gemma3: prompts beyond it are short enough for a unit test


def tiny_config(
    architecture: str, *, vocab_size: int = 512, max_context: int = 512, **changes: Any
) -> PreTrainedConfig:
    """hidden size 64, 3 layers, 4 heads over 2 KV heads of 16; EOS is token 2."""
    shape: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_context,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    sliding = {"sliding_window": SLIDING_WINDOW, "head_dim": 16}
    made: dict[str, tuple[Any, dict[str, Any]]] = {
        "llama": (LlamaConfig, {}),
        "qwen2": (Qwen2Config, {}),
        "qwen3": (Qwen3Config, {"head_dim": 16}),
        "mistral": (MistralConfig, sliding),
        "gemma3": (
            Gemma3TextConfig,
            {
                **sliding,
                "query_pre_attn_scalar": 16,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
        ),
    }
    kind, extra = made[architecture]
    config: PreTrainedConfig = kind(**{**shape, **extra, **changes})
    return config


def tiny_checkpoint(
    architecture: str, directory: Path, *, seed: int = 0, logit_width: float = 1.0, **config: Any
) -> Path:
    """Writes config.json, generation_config.json and model.safetensors (float32) into `directory` and returns it.

    The weights are drawn wide enough that attention matters and greedy tokens vary; logit_width sets how clear their
    lead is.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(architecture, **config), dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                # Twice the width that keeps the variance.
                width = logit_width if "lm_head" in name else 1.0 if "embed" in name else 2.0 * weight.shape[1] ** -0.5
                weight.normal_(0.0, width)
            elif "norm" in name:
                weight.add_(0.1 * torch.randn_like(weight))
            else:
                weight.normal_(0.0, 0.1)  # biases: zero ones would hide a forgotten addition
    model.save_pretrained(directory)
    return directory
