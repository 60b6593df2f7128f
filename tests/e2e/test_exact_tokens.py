"""The mesh's greedy tokens equal `generate`'s, whatever the form, chunking, cache, company and prompt."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import oracle
from tests.checkpoints import ARCHITECTURES, SLIDING_WINDOW
from tests.covering import pairwise
from tests.e2e.conftest import Meshes

session = pytest.mark.asyncio(loop_scope="session")

BLOCK = 16
MAX_TOKENS = 12
OTHERS = 8
LENGTHS = {"shorter than a block": 9, "three blocks": 3 * BLOCK, "beyond the window": SLIDING_WINDOW + 37, "odd": 29}
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4}
FORMS: dict[str, dict[str, Any]] = {
    "aggregated": {"roles": ("prefill,decode",)},
    "shm": {"roles": ("prefill", "decode")},
    "grpc": {"roles": ("prefill", "decode"), "channels": ("grpc",)},
}
FACTORS: dict[str, list[Any]] = {
    "architecture": list(ARCHITECTURES),
    "budget": [7, 512],
    "cache": ["cold", "same twice", "shared prefix"],
    "form": list(FORMS),
    "company": ["alone", "among others"],
    "length": list(LENGTHS),
    "asked": ["plain", "n=3", "penalties"],
}
CASES = pairwise(FACTORS)


def prompt_and_reference(
    checkpoint: Path, rng: random.Random, length: int, prefix: list[int], penalties: dict[str, float]
) -> tuple[list[int], list[int]]:
    """A random prompt without near ties, and its tokens."""
    for _ in range(30):
        prompt = (prefix + [rng.randrange(10, 500) for _ in range(length)])[: max(length, len(prefix) + 1)]
        try:
            return prompt, oracle.generate(checkpoint, prompt, MAX_TOKENS, **penalties)
        except oracle.NearTie:
            continue
    raise AssertionError("no prompt without near ties")


@session
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(str(level) for level in case.values()))
async def test_tokens_equal_generate(case: dict[str, Any], meshes: Meshes, checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint(case["architecture"])
    mesh = await meshes.get(case["architecture"], token_budget=case["budget"], **FORMS[case["form"]])
    rng = random.Random(str(case))
    penalties = PENALTIES if case["asked"] == "penalties" else {}
    length = LENGTHS[case["length"]]
    prompt, expected = prompt_and_reference(path, rng, length, [], penalties)
    warm = case["cache"] != "cold" and length > BLOCK
    if case["cache"] == "same twice":
        await mesh.generate(prompt, max_tokens=2)
    elif case["cache"] == "shared prefix":
        await mesh.generate([*prompt[: length - length // 4], *range(10, 20)], max_tokens=2)

    asked = [(prompt, expected)]
    if case["company"] == "among others":
        for _ in range(OTHERS):
            asked.append(prompt_and_reference(path, rng, rng.randrange(3, 60), [], penalties))
    n = 3 if case["asked"] == "n=3" else 1
    answers = await asyncio.gather(
        *(mesh.generate(each, n=n, max_tokens=MAX_TOKENS, ignore_eos=True, **penalties) for each, _ in asked)
    )

    for answer, (each, tokens) in zip(answers, asked, strict=True):
        assert {index: choice.tokens for index, choice in answer.choices.items()} == dict.fromkeys(range(n), tokens)
        assert answer.usage.prompt_tokens == len(each)
        assert answer.usage.completion_tokens == n * MAX_TOKENS
        assert answer.accounting.attempts == 1
    cached = answers[0].usage.cached_tokens
    assert cached % BLOCK == 0
    assert (cached > 0) == warm
    assert cached < len(prompt)
    await mesh.settled()


def test_the_array_covers_every_pair() -> None:
    assert len(CASES) <= 60
    for a in FACTORS:
        for b in FACTORS:
            if a < b:
                assert len({(case[a], case[b]) for case in CASES}) == len(FACTORS[a]) * len(FACTORS[b])
