"""Processes that stop without closing a connection, with nothing but silence to tell it: tokens go on, none twice.

Keep-alives and every other limit are far beyond the patience of these tests.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from tests import oracle
from tests.e2e.running import ATTEMPTS, MAX_TOKENS, SEEDED, Running, prompts, struck_at, undisturbed
from tests.processes import ProcessMesh, Role, process_mesh

session = pytest.mark.asyncio(loop_scope="session")

CONFIG = {"max_context": 1024}
FAR = {"keepalive_seconds": 600.0}
PATIENCE_SECONDS = 90.0
BYTES_PER_SECOND = 300_000


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ProcessMesh]:
    far = {**FAR, "first_byte_seconds": 600.0, "stall_seconds": 600.0, "route_wait_seconds": 60.0}
    async with process_mesh(
        checkpoint("llama", **CONFIG),
        tmp_path_factory.mktemp("silence"),
        roles=("prefill", "prefill", "decode", "decode"),
        token_budget=32,
        worker={**FAR, "hang_seconds": 1.0},
        gateway=far,
        by_role={"decode": {"throttle_bytes_per_second": BYTES_PER_SECOND}},
    ) as made:
        yield made


@pytest.fixture(scope="module")
def path(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama", **CONFIG)


def whole_worker(victim: Role, number: int) -> None:
    os.killpg(victim.pid, number)


def engine_only(victim: Role, number: int) -> None:
    """The service goes on and answers whoever asks."""
    for child in psutil.Process(victim.pid).children(recursive=True):
        child.send_signal(number)


@session
@pytest.mark.parametrize("stop", [whole_worker, engine_only])
async def test_a_decode_worker_stops_in_mid_stream(
    stop: Callable[[Role, int], None], mesh: ProcessMesh, path: Path
) -> None:
    async def decoding(running: list[Running], worker: Role) -> bool:
        return bool((await mesh.status(worker)).load.running)

    options: list[dict[str, Any]] = [{"n": 1}, {"n": 3, **SEEDED}]
    await stopped(mesh, path, stop, "decode", decoding, options, 100, 300)


@session
@pytest.mark.parametrize("stop", [whole_worker, engine_only])
async def test_a_prefill_worker_stops_before_the_first_token(
    stop: Callable[[Role, int], None], mesh: ProcessMesh, path: Path
) -> None:
    async def half_done(running: list[Running], worker: Role) -> bool:
        return 200 <= (await mesh.status(worker)).load.pending_prefill_tokens <= 800

    options: list[dict[str, Any]] = [{"n": 3}, {"n": 1, **SEEDED}]
    await stopped(mesh, path, stop, "prefill", half_done, options, 960, MAX_TOKENS)


async def stopped(
    mesh: ProcessMesh,
    path: Path,
    stop: Callable[[Role, int], None],
    role: str,
    stage: Callable[[list[Running], Role], Awaitable[bool]],
    options: list[dict[str, Any]],
    length: int,
    max_tokens: int,
) -> None:
    async def begin(attempt: int) -> list[Running]:
        await mesh.whole()
        asked = prompts(path, len(options), length, f"{role} {stop.__name__} {attempt}", max_tokens)
        return [Running(mesh, prompt, each, max_tokens) for prompt, each in zip(asked, options, strict=True)]

    async def strike(victim: Role) -> None:
        stop(victim, signal.SIGSTOP)

    async with asyncio.timeout(ATTEMPTS * PATIENCE_SECONDS):
        await struck_at(mesh, path, begin, role, stage, strike, lambda victim: stop(victim, signal.SIGCONT))


@session
async def test_b01_etcd_comes_back_empty(mesh: ProcessMesh, path: Path) -> None:
    """Case B1: away for three lease times, and then without its data. Streams notice nothing, workers are the same
    lives and registered again, what they have cached is known."""
    await mesh.whole()
    incarnations = [(await mesh.status(worker)).identity.incarnation for worker in mesh.workers.values()]
    asked = prompts(path, 2, 100, "wiped", 600)
    running = [Running(mesh, prompt, {"n": 1}, 600) for prompt in asked]
    (shared,) = prompts(path, 1, 200, "cached")
    before = await mesh.generate(shared, max_tokens=MAX_TOKENS, ignore_eos=True)
    await mesh.etcd.kill()
    ttl = max(worker.settings["lease_ttl_seconds"] for worker in mesh.workers.values())
    gone = asyncio.get_running_loop().time()
    number = 0
    while asyncio.get_running_loop().time() < gone + 3 * ttl:  # requests all the while
        (prompt,) = prompts(path, 1, 30, f"without {number}")
        answer = await mesh.generate(prompt, max_tokens=MAX_TOKENS, ignore_eos=True)
        assert answer.tokens == oracle.generate(path, prompt, MAX_TOKENS)
        number += 1
    await mesh.etcd.start(wipe=True)
    answers = await undisturbed(mesh, path, running)
    assert [answer.accounting.attempts for answer in answers] == [1, 1]
    prefix = mesh.workers["prefill-0"].settings["etcd"]["prefix"]
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            listed = await mesh.etcd.ctl("get", "--prefix", "--keys-only", prefix)
            if all(name in listed for name in mesh.workers):
                break
            await asyncio.sleep(0.1)
    await mesh.whole()
    assert [(await mesh.status(worker)).identity.incarnation for worker in mesh.workers.values()] == incarnations
    # A gateway that starts now knows only what is in there, and from the workers what they have cached.
    await mesh.gateway.kill()
    await mesh.whole()
    warm = await mesh.generate(shared, max_tokens=MAX_TOKENS, ignore_eos=True)
    assert warm.accounting.prefill_worker == before.accounting.prefill_worker
    assert warm.usage.cached_tokens == (200 - 1) // 16 * 16
    assert warm.tokens == before.tokens == oracle.generate(path, shared, MAX_TOKENS)
    await mesh.settled()
