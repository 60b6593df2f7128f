"""Requests under way whose workers a test disturbs."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from tests import oracle
from tests.mesh import Answer, collect
from tests.processes import ProcessMesh, Role

MAX_TOKENS = 24
SEEDED = {"temperature": 0.8, "seed": 7}


class Running:
    """One request under way, with what its client has seen so far."""

    def __init__(
        self, mesh: ProcessMesh, prompt: list[int], options: dict[str, Any], max_tokens: int = MAX_TOKENS
    ) -> None:
        self.prompt, self.max_tokens = prompt, max_tokens
        self.options = {"ignore_eos": True, **options}
        self.tokens = 0
        self._stream = mesh.open(prompt, max_tokens=max_tokens, **self.options)
        self.answer: asyncio.Task[Answer] = asyncio.create_task(collect(self._counted()))

    async def _counted(self) -> AsyncIterator[Any]:
        async for message in self._stream:
            self.tokens += sum(len(choice.token_ids) for choice in message.choices)
            yield message


def prompts(path: Path, count: int, length: int, seed: str, max_tokens: int = MAX_TOKENS) -> list[list[int]]:
    """Prompts whose greedy tokens are clear."""
    rng = random.Random(seed)
    found: list[list[int]] = []
    while len(found) < count:
        prompt = [rng.randrange(10, 500) for _ in range(length)]
        try:
            oracle.generate(path, prompt, max_tokens)
        except oracle.NearTie:
            continue
        found.append(prompt)
    return found


class Missed(AssertionError):
    """The machine was too busy to look in time."""


async def at_stage(
    workers: list[Role], stage: Callable[[Role], Awaitable[bool]], over: Callable[[], bool] = lambda: False
) -> Role:
    """The first worker that is seen there; `Missed` if it is over before one was seen."""
    async with asyncio.timeout(120):
        while not over():
            for worker in workers:
                if await stage(worker):
                    return worker
            await asyncio.sleep(0)
    raise Missed("no worker was seen at the stage before it was past")


def over(running: list[Running]) -> Callable[[], bool]:
    return lambda: all(each.answer.done() for each in running)


async def undisturbed(mesh: ProcessMesh, path: Path, running: list[Running]) -> list[Answer]:
    """Waits for all answers and compares each with a run that nobody disturbs: `generate`'s when it is greedy."""
    answers = [await each.answer for each in running]
    expected = await asyncio.gather(*(_expected(mesh, path, each) for each in running))
    for each, answer, tokens in zip(running, answers, expected, strict=True):
        assert set(answer.choices) == set(range(each.options.get("n", 1)))
        assert {index: choice.tokens for index, choice in answer.choices.items()} == tokens
    return answers


async def _expected(mesh: ProcessMesh, path: Path, running: Running) -> dict[int, list[int]]:
    if "seed" in running.options:
        again = await mesh.generate(running.prompt, max_tokens=running.max_tokens, **running.options)
        assert again.accounting.attempts == 1
        return {index: choice.tokens for index, choice in again.choices.items()}
    tokens = oracle.generate(path, running.prompt, running.max_tokens)
    return dict.fromkeys(range(running.options.get("n", 1)), tokens)


ATTEMPTS = 5


def retried(answers: list[Answer]) -> bool:
    return max(answer.accounting.attempts for answer in answers) >= 2


async def struck(
    disturb: Callable[[int], Awaitable[list[Answer]]], hit: Callable[[list[Answer]], bool] = retried
) -> list[Answer]:
    """The answers of the first attempt, by number, in which the disturbance came in time to hit a request."""
    for attempt in range(ATTEMPTS):
        with contextlib.suppress(Missed):
            answers = await disturb(attempt)
            if hit(answers):
                return answers
    raise Missed(f"not one of {ATTEMPTS} attempts hit")


async def struck_at(
    mesh: ProcessMesh,
    path: Path,
    begin: Callable[[int], Awaitable[list[Running]]],
    role: str,
    stage: Callable[[list[Running], Role], Awaitable[bool]],
    strike: Callable[[Role], Awaitable[None]],
    mend: Callable[[Role], None] = lambda victim: None,
) -> list[Answer]:
    """Requests that one worker of the role is struck under, at the stage; begun anew when it came too late to hit one.

    begin: the requests of an attempt, by number. mend: once the answers are there.
    """

    async def disturb(attempt: int) -> list[Answer]:
        running = await begin(attempt)
        try:
            victim = await at_stage(mesh.of(role), lambda worker: stage(running, worker), over(running))
            await strike(victim)
            try:
                await asyncio.gather(*(each.answer for each in running))
            finally:
                mend(victim)
        finally:
            answers = await undisturbed(mesh, path, running)
            await mesh.settled()
        return answers

    return await struck(disturb)
