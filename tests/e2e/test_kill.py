"""kill -9 of a worker at every stage of its requests: no client error, and the tokens of an undisturbed run."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.running import SEEDED, Running, at_stage, prompts, retried, struck, undisturbed
from tests.mesh import Answer
from tests.processes import ProcessMesh, Role, process_mesh

session = pytest.mark.asyncio(loop_scope="session")

Stage = Callable[[ProcessMesh, list[Running], Role], Awaitable[bool]]

PROMPT_TOKENS = 600  # 38 blocks
PREFILL_BUDGET = 2  # 300 steps a prompt: the last is sent, and looked at, before the first is done
DECODE_BLOCKS = 64  # one such request at a time: a second one waits for room
BYTES_PER_SECOND = 300_000  # a prompt's KV, 461 kB, takes longer to move than to compute
# In the order of sending: of two neighbours each goes to another pair of workers, so each pair gets both kinds.
ASKED: list[dict[str, Any]] = [{"n": 1}, {"n": 3}, {"n": 1, **SEEDED}, {"n": 3, **SEEDED}]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ProcessMesh]:
    """Two prefill and two decode workers; whole again before each test."""
    async with process_mesh(
        checkpoint("llama", max_context=1024),
        tmp_path_factory.mktemp("kill"),
        roles=("prefill", "prefill", "decode", "decode"),
        token_budget=7,
        gateway={"routing": {"hold": False}},  # so that they queue at the workers, which is what is tested
        by_role={
            "prefill": {"engine": {"token_budget": PREFILL_BUDGET}},
            "decode": {"throttle_bytes_per_second": BYTES_PER_SECOND, "engine": {"num_blocks": DECODE_BLOCKS}},
        },
    ) as made:
        yield made


async def disturbed(
    mesh: ProcessMesh,
    path: Path,
    role: str,
    stage: Stage,
    hit: Callable[[list[Answer]], bool] = retried,
) -> None:
    """The four requests, one worker of the role killed at the stage; checked against a run that nobody disturbs."""

    async def disturb(attempt: int) -> list[Answer]:
        await mesh.whole()
        running: list[Running] = []
        asked = prompts(path, len(ASKED), PROMPT_TOKENS, f"{role} {stage.__name__} {attempt}")
        for prompt, options in zip(asked, ASKED, strict=True):
            running.append(Running(mesh, prompt, options))
            await _arrived(mesh, running)
        return await _killed(mesh, path, running, role, stage)

    await struck(disturb, hit)


async def _killed(mesh: ProcessMesh, path: Path, running: list[Running], role: str, stage: Stage) -> list[Answer]:
    """Raises Missed when the requests were over before a worker was seen at the stage."""
    try:
        victim = await at_stage(
            mesh.of(role),
            lambda worker: stage(mesh, running, worker),
            over=lambda: all(each.answer.done() for each in running),
        )
        await victim.kill()
    finally:
        answers = await undisturbed(mesh, path, running)
        await mesh.settled()
    return answers


async def _arrived(mesh: ProcessMesh, running: list[Running]) -> None:
    """So many are at the prefill workers: the next one is routed after them."""
    async with asyncio.timeout(30):
        while not any(each.tokens for each in running):
            loads = [(await mesh.status(worker)).load for worker in mesh.of("prefill")]
            if sum(load.running + load.waiting for load in loads) >= len(running):
                return
            await asyncio.sleep(0.01)


async def computing_and_queued(mesh: ProcessMesh, running: list[Running], worker: Role) -> bool:
    """One prompt is being computed, another waits for its turn, and what is ready is being pulled."""
    load = (await mesh.status(worker)).load
    return load.running >= 2 or (load.running == 1 and load.waiting >= 1)


async def pulled(mesh: ProcessMesh, running: list[Running], worker: Role) -> bool:
    """Prefill has answered, its blocks are still being pulled."""
    return bool((await mesh.status(worker)).load.held_blocks) and any(each.tokens for each in running)


async def waiting_for_prefill(mesh: ProcessMesh, running: list[Running], worker: Role) -> bool:
    status = await mesh.status(worker)
    return status.open_pulls >= 1 and not any(each.tokens for each in running)


async def pulling(mesh: ProcessMesh, running: list[Running], worker: Role) -> bool:
    """Room is taken, no client has a token yet."""
    status = await mesh.status(worker)
    return bool(status.open_pulls and status.load.held_blocks) and not any(each.tokens for each in running)


async def first_token_sent(mesh: ProcessMesh, running: list[Running], worker: Role) -> bool:
    """A client has its first token, the pull goes on."""
    status = await mesh.status(worker)
    return bool(status.open_pulls and status.load.held_blocks) and any(each.tokens for each in running)


async def decoding(mesh: ProcessMesh, running: list[Running], worker: Role) -> bool:
    """Some tokens are out, and a second request waits for room."""
    load = (await mesh.status(worker)).load
    return load.running >= 1 and any(each.tokens >= 5 * each.options["n"] for each in running)


@session
@pytest.mark.parametrize("stage", [computing_and_queued, pulled])
async def test_prefill_killed(stage: Any, mesh: ProcessMesh, checkpoint: Callable[..., Path]) -> None:
    await disturbed(mesh, checkpoint("llama", max_context=1024), "prefill", stage)


@session
@pytest.mark.parametrize("stage", [waiting_for_prefill, pulling, first_token_sent, decoding])
async def test_decode_killed(stage: Any, mesh: ProcessMesh, checkpoint: Callable[..., Path]) -> None:
    """Each worker has a greedy request and a seeded one: whichever dies, both kinds are hit."""

    def hit(answers: list[Answer]) -> bool:
        return retried(answers[:2]) and retried(answers[2:])

    await disturbed(mesh, checkpoint("llama", max_context=1024), "decode", stage, hit)


@session
async def test_aggregated_killed(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """The other form: one of two workers that do both, in the midst of decoding."""
    path = checkpoint("llama", max_context=1024)
    roles = ("prefill,decode", "prefill,decode")
    async with process_mesh(path, tmp_path, roles=roles, token_budget=32) as mesh:

        async def disturb(attempt: int) -> list[Answer]:
            await mesh.whole()
            asked = prompts(path, len(ASKED), 100, f"aggregated {attempt}")
            running = [Running(mesh, prompt, options) for prompt, options in zip(asked, ASKED, strict=True)]
            return await _killed(mesh, path, running, "decode", decoding)

        await struck(disturb)
