"""A vision-language model as a gateway sees it: tokenizer, template and processor files, and no weights to speak of."""

import json
import struct
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from tests.tokenizer_files import byte_tokenizer

MARKER = "<|image_pad|>"
IMAGE = 258  # its token id; those below are the byte tokenizer's
FACTOR = 28  # pixels of an image token's side
PARTS_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n"
    "{% for part in message.content %}{% if part.type == 'image' %}<|image_pad|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def qwen_files(directory: Path, template: str | None = PARTS_TEMPLATE) -> Path:
    """Qwen2-VL: a picture of w × h pixels, multiples of 28, takes w/28 · h/28 tokens."""
    byte_tokenizer(directory, template)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(MARKER, special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write(
        directory / "config.json",
        {"architectures": ["Qwen2VLForConditionalGeneration"], "image_token_id": IMAGE, "vision_config": {}},
    )
    _write(
        directory / "preprocessor_config.json",
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": 14,
            "merge_size": 2,
            "min_pixels": FACTOR**2,
            "max_pixels": 64 * FACTOR**2,
        },
    )
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    return directory


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))
