"""Decode workers short of blocks: requests are preempted, computed again, taken elsewhere or wait; the tokens stay."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests import oracle
from tests.e2e.conftest import Meshes
from tests.mesh import PATIENCE_SECONDS, Answer, LocalMesh

session = pytest.mark.asyncio(loop_scope="session")

BLOCKS = 24
PROMPT_TOKENS = 100  # 7 blocks, and one more for each choice
# Never the end token, though nobody knows beforehand: nothing is refused for what it will need.
END = 2
ENDLESS: dict[str, Any] = {"logit_bias": {END: -100.0}}
MANY_TOKENS = 220  # 20 blocks in the end: none of the others fits beside it
MAX_TOKENS = 140  # 15 blocks in the end: one such request is more than half of a pool


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(meshes: Meshes) -> AsyncIterator[LocalMesh]:
    async with meshes.make(roles=("prefill", "decode"), num_blocks=BLOCKS) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def two_decoders(meshes: Meshes) -> AsyncIterator[LocalMesh]:
    async with meshes.make(roles=("prefill", "decode", "decode"), num_blocks=BLOCKS) as made:
        yield made


def asked(path: Path, count: int, max_tokens: int, seed: str) -> list[tuple[list[int], list[int]]]:
    """Prompts without near ties or an early end, and their tokens."""
    rng = random.Random(seed)
    found: list[tuple[list[int], list[int]]] = []
    while len(found) < count:
        prompt = [rng.randrange(10, 500) for _ in range(PROMPT_TOKENS)]
        try:
            tokens = oracle.generate(path, prompt, max_tokens)
        except oracle.NearTie:
            continue
        if END not in tokens:
            found.append((prompt, tokens))
    return found


async def answers(mesh: LocalMesh, prompts: list[list[int]], **options: Any) -> list[Answer]:
    return await asyncio.gather(
        *(mesh.generate(prompt, **{"max_tokens": MAX_TOKENS, **ENDLESS, **options}) for prompt in prompts)
    )


async def state(mesh: LocalMesh, running: list[asyncio.Future[Any]], *wanted: int) -> None:
    """Returns when so many are running and waiting on the decode worker."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            load = (await mesh.status(mesh.workers[1])).load
            if (load.running, load.waiting) == wanted:
                return
            assert not any(each.done() for each in running)


@session
async def test_a_preempted_sequence_goes_on_with_the_same_tokens(
    mesh: LocalMesh, checkpoint: Callable[..., Path]
) -> None:
    """Case A13, on the worker itself: two grow until one gives up its blocks and computes them again later."""
    prompts = asked(checkpoint("llama"), 2, MAX_TOKENS, "preempted")
    running = [asyncio.ensure_future(answers(mesh, [prompt])) for prompt, _ in prompts]
    await state(mesh, running, 2, 0)
    await state(mesh, running, 1, 1)  # both had been admitted, so the one that waits has been preempted
    for answer, (_, tokens) in zip(itertools.chain(*await asyncio.gather(*running)), prompts, strict=True):
        assert answer.tokens == tokens
        assert answer.accounting.attempts == 1
        assert answer.usage.completion_tokens == MAX_TOKENS
    await mesh.settled()


@session
async def test_given_up_by_the_worker_and_resumed_by_the_gateway(
    mesh: LocalMesh, checkpoint: Callable[..., Path]
) -> None:
    """Case A13, PREEMPTED: one loses its blocks to more important ones more often than a worker makes good for."""
    path = checkpoint("llama")
    ((low, low_tokens),) = asked(path, 1, MANY_TOKENS, "given up")
    high = asked(path, 2, MAX_TOKENS, "more important")
    victim = asyncio.ensure_future(mesh.generate(low, max_tokens=MANY_TOKENS, priority=-1, **ENDLESS))
    others = []
    for prompt, _ in high:
        await state(mesh, [victim], 1, 0)  # it is running, the second time because it is back
        others.append(asyncio.ensure_future(mesh.generate(prompt, max_tokens=MAX_TOKENS, **ENDLESS)))
        if len(others) < len(high):
            await state(mesh, [victim, *others], 1, 1)  # it has been driven out
    done = await asyncio.gather(victim, *others)
    assert [answer.tokens for answer in done] == [low_tokens, *(tokens for _, tokens in high)]
    assert [answer.accounting.attempts for answer in done] == [2, 1, 1]
    await mesh.settled()


@session
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 11}], ids=["greedy", "seeded"])
async def test_choices_of_one_request_that_do_not_all_fit(
    sampling: dict[str, Any], mesh: LocalMesh, checkpoint: Callable[..., Path]
) -> None:
    """Four choices share the prompt's blocks and need 4 · 9 of their own."""
    ((prompt, tokens),) = asked(checkpoint("llama"), 1, MAX_TOKENS, "choices")
    (answer,) = await answers(mesh, [prompt], n=4, **sampling)
    if sampling:
        found = [answer.choices[index].tokens for index in range(4)]
        ample = [each.tokens for each in await answers(mesh, [prompt], **sampling)]
        assert found[:1] == ample
        assert len({tuple(each) for each in found}) == 4
        assert all(len(each) == MAX_TOKENS for each in found)
    else:
        assert {index: choice.tokens for index, choice in answer.choices.items()} == dict.fromkeys(range(4), tokens)
    await mesh.settled()


@session
async def test_all_decoders_full(two_decoders: LocalMesh, checkpoint: Callable[..., Path]) -> None:
    """What does not fit waits, bounded, and completes."""
    mesh = two_decoders
    prompts = asked(checkpoint("llama"), 8, 40, "full")
    done = await answers(mesh, [prompt for prompt, _ in prompts], max_tokens=40)
    for answer, (_, tokens) in zip(done, prompts, strict=True):
        assert answer.tokens == tokens
    assert {answer.accounting.decode_worker for answer in done} == {"decode-1", "decode-2"}
    await mesh.settled()
