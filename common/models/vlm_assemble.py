"""The default vision-language model, put together: a vision tower from an ONNX file, the projector that ships with this
package, and a text model's weights as they are → a Hugging Face directory for stock `LlavaForConditionalGeneration`.

Run as `python -m common.models.vlm_assemble ONNX TEXT_MODEL DIRECTORY NAME`, in a process of its own like the GGUF
converter and with the same lines on stdout. How the projector was trained: docs/models/picture-vlm.md.
"""

import json
import sys
from pathlib import Path
from typing import Any

from common.models.info import ModelInfo, write_info

ASSEMBLER = "vlm-llava-1"
PROJECTOR = Path(__file__).parent / "data" / "picture_vlm_projector.safetensors"
STAGES = ("loading libraries", "vision tower", "language weights", "tokenizer and processor")

IMAGE_TOKEN, IMAGE_TOKEN_ID = "<image>", 16  # a reserved token of the text model, renamed: no new row of embeddings
FEATURE_LAYERS = [4, 8, 12]
IMAGE_TOKENS = 65  # 8 × 8 patches and the class token
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
_FILES = {"vision_tower": "vision.safetensors", "language_model": "language.safetensors"}
_PROJECTOR_FILE = "projector.safetensors"

# No system prompt; the parts of a message in order, an image as its marker.
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}
{{- message['content'] }}
{%- else %}
{%- for part in message['content'] %}
{%- if part['type'] in ('image', 'image_url') %}
{{- '<image>' }}
{%- elif part['type'] == 'text' %}
{{- part['text'] }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def assemble(onnx: Path, text_model: Path, directory: Path, name: str, projector: Path = PROJECTOR) -> None:
    """Write the model into the existing empty `directory`. The language tensors equal the text model's bit for bit."""
    _stage(0)
    import torch
    from safetensors.torch import load_file, save_file

    from common.models.vision_tower import read_vision_tower

    weight_map: dict[str, str] = {}
    size = 0

    def write(file: str, part: str, tensors: dict[str, torch.Tensor]) -> None:
        nonlocal size
        named = {f"model.{part}.{tensor}": value for tensor, value in tensors.items()}
        save_file(named, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(named, file))
        size += sum(value.numel() * value.element_size() for value in named.values())

    _stage(1)
    tower = read_vision_tower(onnx)
    tower["embeddings.mask_token"] = torch.zeros(1, tower["embeddings.cls_token"].shape[-1])  # of its training only
    write(_FILES["vision_tower"], "vision_tower", tower)
    write(_PROJECTOR_FILE, "multi_modal_projector", load_file(projector))

    _stage(2)
    language: dict[str, torch.Tensor] = {}
    for path in sorted(text_model.glob("*.safetensors")):
        language.update(load_file(path))
    write(
        _FILES["language_model"],
        "language_model",
        {tensor.removeprefix("model."): value for tensor, value in language.items() if tensor != "lm_head.weight"},
    )
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(directory / "model.safetensors.index.json", index)

    _stage(3)
    _write_json(directory / "config.json", _config(json.loads((text_model / "config.json").read_text()), name))
    (directory / "generation_config.json").write_bytes((text_model / "generation_config.json").read_bytes())
    write_info(directory, ModelInfo(text_model=text_model.name))
    _write_tokenizer(text_model, directory)
    _write_json(directory / "processor_config.json", _processor_config())


def _config(text: dict[str, Any], name: str) -> dict[str, Any]:
    from common.models.vision_tower import CONFIG

    text = {key: value for key, value in text.items() if not key.startswith("_") and key != "transformers_version"}
    return {
        "_name_or_path": name,
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "dtype": text["dtype"],
        "image_seq_length": IMAGE_TOKENS,
        "image_token_index": IMAGE_TOKEN_ID,
        "multimodal_projector_bias": True,
        "projector_hidden_act": "gelu",
        "text_config": text,
        "tie_word_embeddings": True,
        "vision_config": CONFIG,
        "vision_feature_layer": FEATURE_LAYERS,
        "vision_feature_select_strategy": "full",
    }


def _write_tokenizer(text_model: Path, directory: Path) -> None:
    tokenizer = json.loads((text_model / "tokenizer.json").read_text())
    reserved = next(token for token in tokenizer["added_tokens"] if token["id"] == IMAGE_TOKEN_ID)
    old, reserved["content"] = reserved["content"], IMAGE_TOKEN
    vocabulary = tokenizer["model"]["vocab"]
    if vocabulary.pop(old, None) is not None:
        vocabulary[IMAGE_TOKEN] = IMAGE_TOKEN_ID
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    config = json.loads((text_model / "tokenizer_config.json").read_text().replace(json.dumps(old), f'"{IMAGE_TOKEN}"'))
    _write_json(directory / "tokenizer_config.json", config | {"image_token": IMAGE_TOKEN})
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _processor_config() -> dict[str, Any]:
    from common.models.vision_tower import IMAGE_SIZE, PATCH

    return {
        "processor_class": "LlavaProcessor",
        "image_token": IMAGE_TOKEN,
        "num_additional_image_tokens": 1,
        "patch_size": PATCH,
        "vision_feature_select_strategy": "full",
        "image_processor": {
            "image_processor_type": "CLIPImageProcessorPil",
            "do_center_crop": False,
            "do_convert_rgb": True,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": MEAN,
            "image_std": STD,
            "resample": 3,
            "rescale_factor": 1 / 255,
            "size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        },
    }


def _stage(number: int) -> None:
    print("stage", number, len(STAGES), STAGES[number], flush=True)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def main() -> None:
    onnx, text_model, directory, name = sys.argv[1:]
    assemble(Path(onnx), Path(text_model), Path(directory), name)


if __name__ == "__main__":
    main()
