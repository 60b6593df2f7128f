"""Tiny random vision-language checkpoints of every supported architecture, with tokenizer and image processor."""

import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    Dinov2Config,
    Gemma3Config,
    Gemma3ImageProcessorPil,
    GotOcr2ImageProcessorPil,
    Idefics3Config,
    Idefics3ImageProcessorPil,
    InternVLConfig,
    LlamaConfig,
    LlavaConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
)

from tests.tokenizer import SPECIAL, save_tokenizer

# The default model's kind beside the seven architectures: LLaVA with a tower that hands out several layers.
VLM_ARCHITECTURES = ("llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "internvl", "gemma3")
VLM_CHECKPOINTS = (*VLM_ARCHITECTURES, "llava_dinov2")

_TOKENS = (
    *("<image>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *("<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
)
_IDS = {token: number for number, token in enumerate((*SPECIAL, *_TOKENS))}
_NAMED = {
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
    "gemma3": {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
}
_MARKERS = {
    "llava": "<image>\\n",
    "llava_dinov2": "<image>",
    "idefics3": "<image>",
    "internvl": "<IMG_CONTEXT>\\n",
    "gemma3": "<start_of_image>",
}
_QWEN_MARKER = "<|vision_start|><|image_pad|><|vision_end|>"
_TEXT: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
_QWEN_IDS = {
    "image_token_id": _IDS["<|image_pad|>"],
    "video_token_id": _IDS["<|video_pad|>"],
    "vision_start_token_id": _IDS["<|vision_start|>"],
    "vision_end_token_id": _IDS["<|vision_end|>"],
}
_MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}


def vlm_checkpoint(architecture: str, root: Path) -> Path:
    """The checkpoint `root/architecture`, made when it is not there yet; processes may share root. See VLM_CHECKPOINTS.

    hidden size 64, 3 layers, vocabulary 512, 2048 tokens. Images take 4 to 20 tokens; Qwen's 2 to 16.
    """
    directory, done = root / architecture, root / f"{architecture}.done"
    root.mkdir(parents=True, exist_ok=True)
    with (root / f"{architecture}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.is_file():
            _make(architecture, directory)
            done.touch()
    return directory


def _make(architecture: str, directory: Path) -> None:
    config, pictures, processor = _PARTS[architecture]()
    torch.manual_seed(7)
    model = getattr(transformers, type(config).__name__.replace("Config", "ForConditionalGeneration"))(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            _draw(name, weight)
    model.save_pretrained(directory)
    save_tokenizer(directory, special=_TOKENS, named=_NAMED.get(architecture), template=_template(architecture))
    pictures.save_pretrained(directory)
    (directory / "processor_config.json").write_text(json.dumps(processor))


def _draw(name: str, weight: torch.Tensor) -> None:
    """Wide enough that attention matters and another picture gives other tokens."""
    if "norm" in name and weight.dim() == 1:
        weight.add_(0.1 * torch.randn_like(weight))
    elif weight.dim() == 1:
        weight.normal_(0.0, 0.1)
    elif "lm_head" in name or "embed_tokens" in name:
        weight.normal_(0.0, 1.0)
    elif "position" in name or "pos_embed" in name or "token" in name:
        weight.normal_(0.0, 0.5)
    else:
        weight.normal_(0.0, 2.0 * weight[0].numel() ** -0.5)


def _template(architecture: str) -> str:
    """Of content that is a string or a list of parts."""
    marker = _MARKERS.get(architecture, _QWEN_MARKER)
    return (
        "{% for message in messages %}<|{{ message['role'] }}|>"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}{{ '" + marker + "' }}{% else %}{{ part['text'] }}{% endif %}"
        "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


Parts = tuple[PreTrainedConfig, Any, dict[str, Any]]  # config, image processor, processor_config.json


def _llava() -> Parts:
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(projection_dim=32, **_VISION),
        text_config=LlamaConfig(**_TEXT),
        image_token_index=_IDS["<image>"],
        image_seq_length=16,
        vision_feature_layer=-2,
    )
    pictures = CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    return config, pictures, _llava_processor("default")


def _llava_dinov2() -> Parts:
    config = LlavaConfig(
        vision_config=Dinov2Config(**{**_VISION, "num_hidden_layers": 4}, mlp_ratio=2),
        text_config=LlamaConfig(**{**_TEXT, "tie_word_embeddings": True}),
        image_token_index=_IDS["<image>"],
        image_seq_length=17,
        vision_feature_layer=[1, 2, 4],
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
    )
    pictures = CLIPImageProcessorPil(size={"height": 56, "width": 56}, do_center_crop=False)
    return config, pictures, _llava_processor("full")


def _llava_processor(strategy: str) -> dict[str, Any]:
    return {
        "patch_size": 14,
        "vision_feature_select_strategy": strategy,
        "num_additional_image_tokens": 1,
        "image_token": "<image>",
        "processor_class": "LlavaProcessor",
    }


def _qwen_pictures(patch: int = 14) -> Qwen2VLImageProcessorPil:
    side = 2 * patch
    return Qwen2VLImageProcessorPil(min_pixels=side * side * 2, max_pixels=side * side * 16, patch_size=patch)


def _qwen2_vl() -> Parts:
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14}
    config = Qwen2VLConfig(text_config=_TEXT | {"rope_parameters": _MROPE}, vision_config=vision, **_QWEN_IDS)
    return config, _qwen_pictures(), {}


def _qwen2_5_vl() -> Parts:
    vision = {
        **{"depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64},
        **{"fullatt_block_indexes": [1], "window_size": 56, "patch_size": 14},
    }
    config = Qwen2_5_VLConfig(text_config=_TEXT | {"rope_parameters": _MROPE}, vision_config=vision, **_QWEN_IDS)
    return config, _qwen_pictures(), {}


def _qwen3_vl() -> Parts:
    vision = {
        **{"depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64},
        **{"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
    }
    text = _TEXT | {"head_dim": 16, "rope_parameters": _MROPE | {"mrope_interleaved": True}}
    return Qwen3VLConfig(text_config=text, vision_config=vision, **_QWEN_IDS), _qwen_pictures(16), {}


def _idefics3() -> Parts:
    config = Idefics3Config(
        vision_config=dict(_VISION),
        text_config=LlamaConfig(**_TEXT),
        image_token_id=_IDS["<image>"],
        scale_factor=2,
        pad_token_id=0,
    )
    pictures = Idefics3ImageProcessorPil(size={"longest_edge": 112}, max_image_size={"longest_edge": 56})
    return config, pictures, {"image_seq_len": 4, "processor_class": "Idefics3Processor"}


def _internvl() -> Parts:
    config = InternVLConfig(
        vision_config={**_VISION, "image_size": [56, 56], "patch_size": [14, 14]},
        text_config=Qwen2Config(**_TEXT),
        image_token_id=_IDS["<IMG_CONTEXT>"],
        image_seq_length=4,
        downsample_ratio=0.5,
        tie_word_embeddings=False,
    )
    pictures = GotOcr2ImageProcessorPil(size={"height": 56, "width": 56}, min_patches=1, max_patches=4)
    return config, pictures, {"image_seq_length": 4, "processor_class": "InternVLProcessor"}


def _gemma3() -> Parts:
    text = _TEXT | {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }
    config = Gemma3Config(
        text_config=text,
        vision_config={**_VISION, "image_size": 112},
        mm_tokens_per_image=16,
        image_token_index=_IDS["<image_soft_token>"],
        boi_token_index=_IDS["<start_of_image>"],
        eoi_token_index=_IDS["<end_of_image>"],
        tie_word_embeddings=False,
    )
    pictures = Gemma3ImageProcessorPil(size={"height": 112, "width": 112})
    return config, pictures, {"image_seq_length": 16, "processor_class": "Gemma3Processor"}


_PARTS: dict[str, Callable[[], Parts]] = {
    "llava": _llava,
    "llava_dinov2": _llava_dinov2,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "gemma3": _gemma3,
}
