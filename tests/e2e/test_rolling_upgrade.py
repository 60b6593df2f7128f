"""Every worker replaced by a new one beside it, as a rolling upgrade does, under requests that never stop."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import oracle
from tests.e2e.running import prompts
from tests.mesh import Answer
from tests.processes import process_mesh

MAX_TOKENS = 24


@pytest.mark.asyncio(loop_scope="session")
async def test_rolling_upgrade(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """No request fails, one that meets a worker which begins to leave goes to the next; then only new ones answer."""
    path = checkpoint("llama")
    async with process_mesh(path, tmp_path, roles=("prefill", "decode")) as mesh:
        old = dict(mesh.workers)
        asked = prompts(path, 2, 60, "rolling", MAX_TOKENS)
        answers: list[tuple[list[int], Answer]] = []
        over = asyncio.Event()

        async def client(number: int) -> None:
            while not over.is_set():
                prompt = asked[number]
                answers.append((prompt, await mesh.generate(prompt, max_tokens=MAX_TOKENS, ignore_eos=True)))

        async with asyncio.TaskGroup() as group:
            for number in range(len(asked)):
                group.create_task(client(number))
            try:
                for name, worker in old.items():
                    mesh.add(f"{name}-new", worker)
                    await mesh.whole()
                    worker.signal(signal.SIGTERM)
                    assert await worker.ended(60) == 0
                    del mesh.workers[name]
                    before = len(answers)
                    async with asyncio.timeout(60):
                        while len(answers) < before + len(asked):
                            await asyncio.sleep(0.05)
            finally:
                over.set()
        for prompt, answer in answers:
            assert answer.tokens == oracle.generate(path, prompt, MAX_TOKENS)
            assert answer.accounting.attempts <= 2
        last = await mesh.generate(asked[0], max_tokens=MAX_TOKENS, ignore_eos=True)
        assert (last.accounting.prefill_worker, last.accounting.decode_worker) == ("prefill-0-new", "decode-0-new")
        seen: set[str] = {answer.accounting.prefill_worker for _, answer in answers}
        assert seen == {"prefill-0", "prefill-0-new"}
        await mesh.settled()
