"""Prompts with pictures, the stock model's tokens for them, and its embeddings for the engine's pool."""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoTokenizer

import common.engine.messages as msg
from common.models.vision.spec import VisionSpec
from tests.oracle import NearTie, generate_with_images, image_inputs, reference_vlm
from tests.unit.engine.media import MediaHarness

TEXTS = ("<|user|>What is in", " and what is beside", ", compared with", " in a few words?<|assistant|>")
SIZES = ((70, 90), (56, 120), (64, 64), (120, 60))


class Prompt:
    """Token ids in which the images are expanded, and the images."""

    def __init__(self, ids: list[int], images: Sequence[Image.Image], media: Sequence[msg.Media]) -> None:
        self.ids, self.images, self.media = ids, list(images), list(media)


class Gallery:
    """One checkpoint's pictures and prompts. The model in the oracle is whole; the engine loads its text model only."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        spec = VisionSpec.read(checkpoint)
        assert spec is not None
        self.spec = spec
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self._embeddings: dict[bytes, np.ndarray] = {}
        self._tokens: dict[Any, list[int]] = {}

    def picture(self, seed: int) -> Image.Image:
        """Noise; the size follows the seed."""
        width, height = SIZES[seed % len(SIZES)]
        return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))

    def prompt(self, *parts: str | Image.Image) -> Prompt:
        images = [part for part in parts if not isinstance(part, str)]
        sizes = [image.size for image in images]
        text = "".join(part if isinstance(part, str) else self._around for part in parts)
        ids = self._tokenizer(self.spec.expand_text(text, sizes), add_special_tokens=False)["input_ids"]
        media = [
            msg.Media(key=_key(image), start=each.start, length=each.length, rows=each.rows, grid=each.grid)
            for image, each in zip(images, self.spec.place(ids, sizes), strict=True)
        ]
        return Prompt(ids, images, media)

    @cached_property
    def _around(self) -> str:
        """What the chat template writes for an image."""
        content = [{"type": "image"}]
        rendered = self._tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        return rendered.removeprefix("<|user|>")

    def tokens(self, prompt: Prompt, max_tokens: int = 12) -> list[int]:
        """Raises NearTie."""
        key = (tuple(prompt.ids), tuple(map(_key, prompt.images)), max_tokens)
        if key not in self._tokens:
            self._tokens[key] = generate_with_images(self.checkpoint, prompt.ids, prompt.images, max_tokens)
        return self._tokens[key]

    def clear(self, make: Any, max_tokens: int = 12) -> Any:
        """make(seed)'s prompts (one or a tuple) of the first seed at which the reference has no near tie."""
        for seed in range(0, 400, 10):
            made = make(seed)
            try:
                for prompt in made if isinstance(made, tuple) else (made,):
                    self.tokens(prompt, max_tokens)
            except NearTie:
                continue
            return made
        raise AssertionError("near ties everywhere")

    def embedding(self, image: Image.Image) -> np.ndarray:
        """uint8 [levels, rows, bytes], by the whole stock model."""
        key = _key(image)
        if key not in self._embeddings:
            inputs = image_inputs(self.checkpoint, [image])
            names = ("pixel_values", "pixel_attention_mask", "image_grid_thw")
            with torch.inference_mode():
                out = reference_vlm(self.checkpoint).get_image_features(
                    **{name: inputs[name] for name in names if name in inputs}, return_dict=True
                )
            levels = [out.pooler_output, *(getattr(out, "deepstack_features", None) or ())]
            flat = [torch.cat(list(level)) if isinstance(level, list | tuple) else level for level in levels]
            rows = torch.stack([level.reshape(-1, level.shape[-1]) for level in flat])
            self._embeddings[key] = rows.contiguous().numpy().view(np.uint8)
        return self._embeddings[key]

    def engine(self, **settings: Any) -> MediaHarness:
        engine = MediaHarness.modules(self.checkpoint, num_blocks=128, **settings)
        assert isinstance(engine, MediaHarness)
        return engine

    def submit(self, engine: MediaHarness, seq: str, prompt: Prompt, **options: Any) -> None:
        media = engine.place(seq, prompt.media, [self.embedding(image) for image in prompt.images])
        engine.submit(seq, prompt.ids, media=media, **{"max_tokens": 12, "ignore_eos": True, **options})

    def run(self, engine: MediaHarness, prompt: Prompt, **options: Any) -> list[int]:
        """The tokens of one request, alone."""
        seq = f"run-{len(engine.done)}"
        self.submit(engine, seq, prompt, **options)
        engine.run()
        assert seq not in engine.failed, engine.failed[seq]
        return engine.tokens[seq][0]


def _key(image: Image.Image) -> bytes:
    return hashlib.sha256(repr(image.size).encode() + image.tobytes()).digest()
