"""transformers' own `generate` as the reference: fp32, greedy, unpadded, batch of one, near ties refused."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from PIL import Image
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
)

MIN_GAP = 1e-3  # between the best and the second logit at every step; below it, rounding could choose


class NearTie(Exception):
    """The prompt is no good as a test: pick another."""


class OutputPenalties(LogitsProcessor):
    """presence · [seen] + frequency · count over the output, subtracted."""

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self.prompt_length, self.presence, self.frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for token, count in zip(*input_ids[0, self.prompt_length :].unique(return_counts=True), strict=True):
            scores[0, token] -= self.presence + self.frequency * float(count)
        return scores


@cache
def reference_model(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def generate(
    checkpoint: Path,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    eos: int | None = None,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
) -> list[int]:
    """Greedy tokens, the end token included. eos None: never ends early. Raises NearTie."""
    model = reference_model(checkpoint)
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=eos,
        pad_token_id=0,
        repetition_penalty=repetition_penalty,
        return_dict_in_generate=True,
        output_scores=True,
    )
    # Replaces what the checkpoint brings along, instead of being merged with it.
    model.generation_config = config
    processors = LogitsProcessorList()
    if presence_penalty or frequency_penalty:
        processors.append(OutputPenalties(len(prompt), presence_penalty, frequency_penalty))
    with torch.inference_mode():
        out = model.generate(torch.tensor([list(prompt)]), generation_config=config, logits_processor=processors)
    return _clear_tokens(out, len(prompt))


def logits(checkpoint: Path, ids: Sequence[int]) -> torch.Tensor:
    """Of every position, float32 [len(ids), vocab_size]."""
    with torch.inference_mode():
        found: torch.Tensor = reference_model(checkpoint)(torch.tensor([list(ids)])).logits[0]
    return found


def _clear_tokens(out: Any, prompt_length: int) -> list[int]:
    for scores in out.scores:
        best = scores[0].topk(2).values
        if best[0] - best[1] < MIN_GAP:
            raise NearTie
    tokens: list[int] = out.sequences[0, prompt_length:].tolist()
    return tokens


def generate_with_images(
    checkpoint: Path, prompt: str | Sequence[int], images: Sequence[Image.Image], max_tokens: int
) -> list[int]:
    """Greedy tokens of the whole stock model with its own image processing; never ends early. Raises NearTie.

    prompt: text with one marker an image, as a chat template renders it (no special tokens are added), or token ids in
    which the images are expanded already. images: RGB.
    """
    ids = expanded_ids(checkpoint, prompt, images) if isinstance(prompt, str) else list(prompt)
    model, inputs = reference_vlm(checkpoint), model_inputs(checkpoint, ids, images)
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    model.generation_config = config
    with torch.inference_mode():
        return _clear_tokens(model.generate(**inputs, generation_config=config), len(ids))


def model_inputs(checkpoint: Path, ids: Sequence[int], images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
    """What the whole model takes of a prompt in which the images are expanded."""
    tokens, config = torch.tensor([list(ids)]), reference_vlm(checkpoint).config
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if images:
        stock = image_inputs(checkpoint, images)
        names = ("pixel_values", "pixel_attention_mask", "image_grid_thw")
        inputs |= {name: stock[name] for name in names if name in stock}
    kinds = (tokens == config.image_token_id).long()
    if config.model_type == "gemma3":
        inputs["token_type_ids"] = kinds
    elif "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = kinds
    return inputs


@cache
def reference_vlm(checkpoint: Path) -> Any:
    kind = getattr(transformers, _architecture(checkpoint))
    return kind.from_pretrained(checkpoint, dtype=torch.float32).eval()


def image_inputs(checkpoint: Path, images: Sequence[Image.Image]) -> Any:
    """What the checkpoint's image processor (its Pillow form) makes of them, called as its Processor calls it."""
    _, processor, options = _processing(checkpoint)
    return processor(list(images), return_tensors="pt", **options)


def image_texts(checkpoint: Path, images: Sequence[Image.Image]) -> list[str]:
    """What the stock Processor puts into the text for each image: its own method over its own attributes.

    Not over a whole Processor, because Qwen's and InternVL's need torchvision for videos.
    """
    kind, processor, options = _processing(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    fields = json.loads((checkpoint / "processor_config.json").read_bytes())
    fields = {name: value for name, value in fields.items() if name not in ("processor_class", "image_processor")}
    if kind.__name__ in ("LlavaProcessor", "Idefics3Processor", "Gemma3Processor"):
        whole = kind(processor, tokenizer, **fields)
    elif kind.__name__ == "InternVLProcessor":
        whole = SimpleNamespace(
            image_token=tokenizer.context_image_token,
            start_image_token=tokenizer.start_image_token,
            end_image_token=tokenizer.end_image_token,
            **fields,
        )
    else:
        whole = SimpleNamespace(image_token="<|image_pad|>", image_processor=processor)
    inputs = processor(list(images), return_tensors="np", **options)
    return [kind.replace_image_token(whole, inputs, number) for number in range(len(images))]


def expanded_ids(checkpoint: Path, text: str, images: Sequence[Image.Image]) -> list[int]:
    """Token ids of a rendered text with its images' tokens, put in by the stock Processor's method."""
    kind, _, _ = _processing(checkpoint)
    marker = {
        "InternVLProcessor": "<IMG_CONTEXT>",
        "Gemma3Processor": "<start_of_image>",
        "LlavaProcessor": "<image>",
        "Idefics3Processor": "<image>",
    }.get(kind.__name__, "<|image_pad|>")
    first, *rest = text.split(marker)
    pieces = zip(image_texts(checkpoint, images) if images else [], rest, strict=True)
    text = first + "".join(image + piece for image, piece in pieces)
    ids: list[int] = AutoTokenizer.from_pretrained(checkpoint)(text, add_special_tokens=False)["input_ids"]
    return ids


@cache
def _processing(checkpoint: Path) -> tuple[Any, Any, dict[str, Any]]:
    """The Processor's class, the image processor, and what the former tells the latter."""
    kind = getattr(transformers, _architecture(checkpoint).replace("ForConditionalGeneration", "Processor"))
    nested = json.loads((checkpoint / "processor_config.json").read_bytes()).get("image_processor")
    fields = nested or json.loads((checkpoint / "preprocessor_config.json").read_bytes())
    name = fields["image_processor_type"].removesuffix("Pil")
    processor = getattr(transformers, f"{name}Pil").from_pretrained(checkpoint)
    return kind, processor, dict(getattr(kind, "images_kwargs", None) or {})


def _architecture(checkpoint: Path) -> str:
    name: str = json.loads((checkpoint / "config.json").read_bytes())["architectures"][0]
    return name
