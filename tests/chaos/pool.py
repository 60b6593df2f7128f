"""Requests whose right answers are known before anything is broken.

Each is asked of a quiet mesh. A greedy answer is confirmed by transformers' own model: if at every position the token
is the clear best of its logits, `generate` makes the same tokens. A seeded one is asked twice, of both gateways.
"""

import asyncio
import base64
import io
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from PIL import Image

from epd.v1 import generation_pb2, types_pb2
from tests import oracle
from tests.e2e.test_vlm_exact import picture, words
from tests.mesh import MODEL, Answer, request

SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "top_k": 40}
COUNTS = {  # of each kind, in a pool of size 1
    **{"short": 2, "long answer": 3, "long prompt": 2, "shared prefix": 3, "seeded": 2, "three greedy": 1},
    **{"three seeded": 1, "one image": 3, "two images": 1, "three images": 1, "image seeded": 1},
}
_TRIES = 40


class Known(msgspec.Struct, kw_only=True):
    """One request, in all its ways, and its right answer by choice."""

    name: str
    prompt: list[int] = []  # or parts: text and image files in turn
    parts: list[str | bytes] = []
    options: dict[str, Any] = {}  # of sampling, and n
    tokens: dict[int, list[int]] = {}
    texts: dict[int, str] = {}

    @property
    def greedy(self) -> bool:
        return "seed" not in self.options

    def message(self) -> generation_pb2.GenerateRequest:
        made: generation_pb2.GenerateRequest = request(self.prompt, ignore_eos=True, **self.options)
        if self.parts:
            message = types_message(self.parts)
            made.chat.messages.append(message)
        return made

    def http(self) -> tuple[str, dict[str, Any]]:
        """Path and body."""
        body: dict[str, Any] = {"model": MODEL, "stream": True, "ignore_eos": True, "temperature": 0.0, **self.options}
        if not self.parts:
            return "/v1/completions", body | {"prompt": self.prompt}
        content = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(part).decode()}"}}
            for part in self.parts
        ]
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": content}]}

    def ids(self, checkpoint: Path) -> list[int]:
        """The prompt's tokens, images expanded by the stock processor."""
        if not self.parts:
            return self.prompt
        inner = "".join(part if isinstance(part, str) else "<image>\n" for part in self.parts)
        return oracle.expanded_ids(checkpoint, f"<|user|>{inner}<|assistant|>", self.images())

    def confirm(self, checkpoint: Path) -> None:
        """See `confirm` below."""
        ids = self.ids(checkpoint)
        for tokens in {tuple(tokens) for tokens in self.tokens.values()}:
            confirm(checkpoint, ids, self.images(), tokens)

    def images(self) -> list[Image.Image]:
        return [Image.open(io.BytesIO(part)).convert("RGB") for part in self.parts if isinstance(part, bytes)]


def types_message(parts: Sequence[str | bytes]) -> generation_pb2.ChatMessage:
    message = generation_pb2.ChatMessage(role="user")
    for part in parts:
        if isinstance(part, str):
            message.content.add(text=part)
        else:
            message.content.add(image=generation_pb2.Image(data=part))
    return message


Ask = Callable[[Known], Awaitable[Answer]]


async def make_pool(
    checkpoint: Path, seed: int, size: int, ask: Sequence[Ask], report: Callable[[], None]
) -> list[Known]:
    """size times COUNTS of them. ask: of a quiet mesh, one for each gateway. report: called for each made.

    Raises AssertionError when the quiet mesh is wrong.
    """
    rng = random.Random(f"pool {seed}")
    prefixes = [_random_ids(rng, 112) for _ in range(2)]
    pool: list[Known] = []
    for _ in range(size):
        for kind, count in COUNTS.items():
            for _ in range(count):
                pool.append(await _clear(checkpoint, kind, rng, prefixes, ask))
                report()
    return pool


async def _clear(
    checkpoint: Path, kind: str, rng: random.Random, prefixes: list[list[int]], ask: Sequence[Ask]
) -> Known:
    for _ in range(_TRIES):
        known = _draw(kind, rng, prefixes)
        answers = [await each(known) for each in (ask if not known.greedy else ask[:1])]
        known.tokens = {index: choice.tokens for index, choice in answers[0].choices.items()}
        known.texts = {index: choice.text for index, choice in answers[0].choices.items()}
        assert set(known.tokens) == set(range(known.options.get("n", 1)))
        for again in answers[1:]:
            assert {index: choice.tokens for index, choice in again.choices.items()} == known.tokens, kind
        lengths = {len(tokens) for tokens in known.tokens.values()}
        assert lengths == {known.options["max_tokens"]}, f"{kind}: {lengths} tokens of {known.options['max_tokens']}"
        if any(choice.finish_reason != types_pb2.FINISH_REASON_LENGTH for choice in answers[0].choices.values()):
            raise AssertionError(f"{kind}: ended early")
        try:
            if known.greedy:
                await asyncio.to_thread(known.confirm, checkpoint)
            return known
        except oracle.NearTie:
            continue
    raise AssertionError(f"{kind}: no prompt without near ties in {_TRIES}")


def confirm(checkpoint: Path, ids: Sequence[int], images: Sequence[Image.Image], tokens: Sequence[int]) -> None:
    """Raises AssertionError when the stock model would choose another token, NearTie when it hardly decides."""
    if images and oracle.reference_vlm(checkpoint).config.image_token_id in tokens:
        raise oracle.NearTie  # read at once, an image's token in the answer would stand for an image
    inputs = oracle.model_inputs(checkpoint, [*ids, *tokens[:-1]], images)
    with torch.inference_mode():
        logits = oracle.reference_vlm(checkpoint)(**inputs).logits[0, len(ids) - 1 :]
    best = logits.topk(2)
    wrong = (best.indices[:, 0] != torch.tensor(tokens)).nonzero().flatten().tolist()
    close = (best.values[:, 0] - best.values[:, 1] < oracle.MIN_GAP).nonzero().flatten().tolist()
    if close and (not wrong or close[0] <= wrong[0]):
        raise oracle.NearTie
    assert not wrong, f"the quiet mesh differs from the stock model at token {wrong[0]}"


def _draw(kind: str, rng: random.Random, prefixes: list[list[int]]) -> Known:
    made = Known(name=kind, options={"max_tokens": rng.randrange(16, 64)})
    match kind:
        case "long answer":
            made.prompt, made.options = _random_ids(rng, rng.randrange(30, 90)), {"max_tokens": rng.randrange(160, 320)}
        case "long prompt":
            made.prompt = _random_ids(rng, rng.randrange(400, 800))
        case "shared prefix":
            made.prompt = rng.choice(prefixes) + _random_ids(rng, rng.randrange(8, 40))
            made.options = {"max_tokens": rng.randrange(40, 120)}
        case "one image" | "image seeded":
            made.parts = _parts(rng, 1)
        case "two images":
            made.parts = _parts(rng, 2)
        case "three images":
            made.parts = _parts(rng, 3)
        case _:
            made.prompt = _random_ids(rng, rng.randrange(5, 60))
    if "three " in kind and not made.parts:
        made.options |= {"n": 3, "max_tokens": rng.randrange(40, 100)}
    if "image" in kind:
        made.options |= {"max_tokens": rng.randrange(24, 100)}
    if "seeded" in kind:
        made.options |= {**SAMPLED, "seed": rng.randrange(1 << 31)}
    return made


def _random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(40, 250) for _ in range(count)]


def _parts(rng: random.Random, count: int) -> list[str | bytes]:
    parts: list[str | bytes] = [words(rng, 8)]
    for _ in range(count):
        parts += [picture(rng.randrange(10_000)), words(rng, 5)]
    return parts
