"""Workers, gateway and etcd that hang, leave, die under load or come back: requests go on."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from common.rpc.channel import connect
from common.rpc.errors import reason_of
from epd.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2
from tests import oracle
from tests.e2e.running import (
    MAX_TOKENS,
    SEEDED,
    Missed,
    Running,
    at_stage,
    over,
    prompts,
    struck,
    struck_at,
    undisturbed,
)
from tests.mesh import Answer
from tests.processes import ProcessMesh, Role, process_mesh

session = pytest.mark.asyncio(loop_scope="session")

PROMPT_TOKENS = 400
BYTES_PER_SECOND = 300_000
CONFIG = {"max_context": 1024}
# A peer that has stopped is noticed within four seconds.
KEEPALIVE = {"keepalive_seconds": 3.0}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ProcessMesh]:
    async with process_mesh(
        checkpoint("llama", **CONFIG),
        tmp_path_factory.mktemp("failures"),
        roles=("prefill", "prefill", "decode", "decode"),
        token_budget=32,
        worker=KEEPALIVE,
        gateway={**KEEPALIVE, "route_wait_seconds": 30.0, "max_in_flight": 64},
        by_role={"decode": {"throttle_bytes_per_second": BYTES_PER_SECOND}},
    ) as made:
        yield made


@pytest.fixture(scope="module")
def path(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama", **CONFIG)


async def start(
    mesh: ProcessMesh,
    path: Path,
    seed: str,
    *options: dict[str, Any],
    length: int = PROMPT_TOKENS,
    max_tokens: int = MAX_TOKENS,
) -> list[Running]:
    await mesh.whole()
    asked = prompts(path, len(options), length, seed, max_tokens)
    return [Running(mesh, prompt, each, max_tokens) for prompt, each in zip(asked, options, strict=True)]


async def hang(victim: Role) -> None:
    victim.hang()


@session
async def test_a_decode_worker_hangs(mesh: ProcessMesh, path: Path) -> None:
    """Stopped while it decodes: its requests go on elsewhere, and when it wakes it gives everything back."""

    async def begin(attempt: int) -> list[Running]:
        # Many tokens: they are still being made when the worker that was seen decoding is stopped.
        return await start(mesh, path, f"decode hangs {attempt}", {"n": 1}, {"n": 3, **SEEDED}, max_tokens=300)

    async def decoding(running: list[Running], worker: Role) -> bool:
        return bool((await mesh.status(worker)).load.running)

    await struck_at(mesh, path, begin, "decode", decoding, hang, Role.wake)


@session
async def test_a_prefill_worker_hangs_while_it_is_pulled_from(mesh: ProcessMesh, path: Path) -> None:
    """Stopped in the midst of the prompt, of which some is on its way already."""

    async def begin(attempt: int) -> list[Running]:
        return await start(mesh, path, f"prefill hangs {attempt}", {"n": 3}, {"n": 1, **SEEDED}, length=960)

    async def half_done(running: list[Running], worker: Role) -> bool:
        return 200 <= (await mesh.status(worker)).load.pending_prefill_tokens <= 800

    await struck_at(mesh, path, begin, "prefill", half_done, hang, Role.wake)


@session
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_drained_under_load(role: str, mesh: ProcessMesh, path: Path) -> None:
    """SIGTERM: what runs there is finished there, what comes goes elsewhere, and the process ends well."""
    running = await start(mesh, path, f"drain {role}", {"n": 1}, {"n": 3}, {"n": 1, **SEEDED}, {"n": 3, **SEEDED})

    async def busy(worker: Role) -> bool:
        # With its first token each has been taken by both of its workers, so none meets one that has begun to leave.
        status = await mesh.status(worker)
        busy_with = status.open_publications if role == "prefill" else status.open_pulls + status.load.running
        return all(each.tokens for each in running) and busy_with > 0

    leaving = await at_stage(mesh.of(role), busy)
    leaving.signal(signal.SIGTERM)
    late = prompts(path, 2, PROMPT_TOKENS, f"drain {role} late")
    running += [Running(mesh, prompt, {"n": 1}) for prompt in late]
    answers = await undisturbed(mesh, path, running)
    assert await leaving.ended() == 0
    assert not leaving.left()
    for answer in answers[-2:]:
        assert leaving.name not in (answer.accounting.prefill_worker, answer.accounting.decode_worker)
    assert [answer.accounting.attempts for answer in answers[:4]] == [1] * 4
    await mesh.settled()


@session
async def test_b03_killed_under_load(mesh: ProcessMesh, path: Path) -> None:
    """Case B3: of twenty requests those on the dead worker are retried elsewhere."""
    options: list[dict[str, Any]] = [{"n": 1}, {"n": 1, **SEEDED}]
    killed: list[Role] = []

    async def begin(attempt: int) -> list[Running]:
        return await start(mesh, path, f"B3 {attempt}", *options * 10)

    async def busy(running: list[Running], worker: Role) -> bool:
        return (await mesh.status(worker)).load.running >= 2

    async def kill(victim: Role) -> None:
        await victim.kill()
        killed.append(victim)

    await struck_at(mesh, path, begin, "decode", busy, kill)
    async with asyncio.timeout(10):
        while killed[-1].left():  # its engine ends with it
            await asyncio.sleep(0.05)


@session
async def test_a18_restarted_on_the_same_port(mesh: ProcessMesh, path: Path) -> None:
    """Case A18: another incarnation, which refuses what was meant for the dead one."""
    await mesh.whole()
    worker = mesh.workers["prefill-0"]
    before = await mesh.status(worker)
    await worker.kill()
    await worker.start()
    await mesh.whole()
    after = await mesh.status(worker)
    assert after.identity.worker_id == before.identity.worker_id
    assert after.identity.incarnation != before.identity.incarnation
    key = types_pb2.RequestKey(request_id=bytes(16), attempt=1)
    stale = {"key": key, "target": before.identity, "prompt_token_ids": [5, 6], "choices": [0]}
    decoder = mesh.workers["decode-0"]
    other = {**stale, "target": types_pb2.WorkerIdentity(worker_id=decoder.name, incarnation="0" * 16)}
    async with connect(worker.address) as channel, connect(decoder.address) as to_decode:
        calls = [
            prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(prefill_pb2.PrefillRequest(**stale)),
            decode_pb2_grpc.DecodeServiceStub(to_decode).Decode(decode_pb2.DecodeRequest(**other)),
        ]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call.read()
            assert reason_of(raised.value.trailing_metadata()) == "WRONG_INCARNATION"
    # A pull by a decode worker that knew the dead one has to shake hands anew.
    await undisturbed(mesh, path, await start(mesh, path, "A18", {"n": 1}, {"n": 1}))
    await mesh.settled()


@session
async def test_b01_etcd_pauses_for_longer_than_the_leases(mesh: ProcessMesh, path: Path) -> None:
    """Case B1."""
    running = await start(mesh, path, "B1", {"n": 1}, {"n": 3, **SEEDED})
    ttl = max(worker.settings["lease_ttl_seconds"] for worker in mesh.workers.values())
    incarnations = [(await mesh.status(worker)).identity.incarnation for worker in mesh.workers.values()]
    mesh.etcd.pause()
    paused = asyncio.get_running_loop().time()
    try:
        await undisturbed(mesh, path, running)
        number = 0
        while asyncio.get_running_loop().time() < paused + 1.5 * ttl:  # requests all the while
            (prompt,) = prompts(path, 1, 30, f"B1 {number}")
            answer = await mesh.generate(prompt, max_tokens=MAX_TOKENS, ignore_eos=True)
            assert answer.tokens == oracle.generate(path, prompt, MAX_TOKENS)
            number += 1
    finally:
        mesh.etcd.resume()
    for number in range(5):
        (prompt,) = prompts(path, 1, 30, f"B1 after {number}")
        answer = await mesh.generate(prompt, max_tokens=MAX_TOKENS, ignore_eos=True)
        assert answer.tokens == oracle.generate(path, prompt, MAX_TOKENS)
    await mesh.whole()
    # The same lives, registered again.
    assert [(await mesh.status(worker)).identity.incarnation for worker in mesh.workers.values()] == incarnations
    await mesh.settled()


@session
async def test_b06_b08_the_gateway_dies(mesh: ProcessMesh, path: Path) -> None:
    """Cases B8, B6: workers give back what its requests held; the next gateway finds them and what they cached."""

    async def busy(worker: Role) -> bool:
        return bool((await mesh.status(worker)).load.active_blocks)

    async def disturb(attempt: int) -> list[Answer]:
        # Many tokens: they are still being made when the gateway dies.
        options: list[dict[str, Any]] = [{"n": 1}, {"n": 3, **SEEDED}, {"n": 1}, {"n": 1}]
        running = await start(mesh, path, f"B8 {attempt}", *options, max_tokens=300)
        try:
            await at_stage(mesh.of("prefill"), busy, over(running))
            await at_stage(mesh.of("decode"), busy, over(running))
            await mesh.gateway.kill()
        finally:
            ends = await asyncio.gather(*(each.answer for each in running), return_exceptions=True)
        if not all(isinstance(end, grpc.aio.AioRpcError) for end in ends):
            raise Missed("some were done")
        return []

    await struck(disturb, hit=lambda answers: True)
    await mesh.settled()
    for worker in mesh.workers.values():
        load = (await mesh.status(worker)).load
        assert (load.running, load.waiting, load.pending_prefill_tokens, load.active_blocks) == (0, 0, 0, 0)

    await mesh.whole()
    rng = random.Random("B6")
    prompts_ = [[rng.randrange(10, 500) for _ in range(PROMPT_TOKENS)] for _ in range(4)]
    cold = [await mesh.generate(prompt, max_tokens=2, ignore_eos=True) for prompt in prompts_]
    assert [answer.usage.cached_tokens for answer in cold] == [0] * 4
    await mesh.settled()
    await mesh.gateway.kill()
    await mesh.whole()
    # Listed means that the index of each worker is there.
    for prompt, before in zip(prompts_, cold, strict=True):
        warm = await mesh.generate(prompt, max_tokens=2, ignore_eos=True)
        assert warm.accounting.prefill_worker == before.accounting.prefill_worker
        assert warm.usage.cached_tokens == (PROMPT_TOKENS - 1) // 16 * 16
        assert warm.tokens == before.tokens
    await mesh.settled()


@session
async def test_b03_the_only_decode_worker_is_killed(
    checkpoint: Callable[..., Path], tmp_path: Path, path: Path
) -> None:
    """Nobody else can go on with its requests: they wait until it is back, and the client sees one unbroken stream."""
    async with process_mesh(path, tmp_path, roles=("prefill", "decode")) as mesh:

        async def begin(attempt: int) -> list[Running]:
            options: list[dict[str, Any]] = [{"n": 1}, {"n": 3, **SEEDED}]
            return await start(mesh, path, f"only one {attempt}", *options, length=40, max_tokens=300)

        async def decoding(running: list[Running], worker: Role) -> bool:
            return all(each.tokens > 3 for each in running) and not any(each.answer.done() for each in running)

        async def killed(victim: Role) -> None:
            await victim.kill()
            await mesh.whole()

        answers = await struck_at(mesh, path, begin, "decode", decoding, killed)
        assert min(answer.accounting.attempts for answer in answers) >= 2
