"""Given up by its client at every stage and in every way: the work stops, everything is free, nobody is held up."""

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import httpx
import pytest
import pytest_asyncio

from common.policies.handoff.terms import HandoffLimits
from common.policies.routing import RoutingPolicy
from services.worker import Worker
from tests import oracle
from tests.e2e.conftest import Meshes
from tests.mesh import MODEL, PATIENCE_SECONDS, Answer, LocalMesh, collect

session = pytest.mark.asyncio(loop_scope="session")

BLOCKS = 64
LONG = 600  # prompt tokens that 300 steps of two tokens compute
HUGE = 980  # that take all blocks but one
SHORT = 160  # whose KV, 123 kB, takes a dozen seconds to move
TINY = 9
BYTES_PER_SECOND = 10_000
MOST_STEPS = 2  # after the cancel has reached a worker
LETTER = 37  # "A" in the test tokenizer


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(meshes: Meshes) -> AsyncIterator[LocalMesh]:
    patient = HandoffLimits(stall_seconds=60.0, room_seconds=60.0)
    async with meshes.make(
        config={"max_context": 1024},
        token_budget=2,
        oldest_share=1.0,  # a short prompt queues behind a long one
        num_blocks=BLOCKS,
        gateway={"routing": RoutingPolicy(hold=False)},  # so that they queue at the decode worker, too
        worker={"throttle_bytes_per_second": BYTES_PER_SECOND, "handoff": patient},
    ) as made:
        yield made


class Client:
    """A streaming request that can be given up. `tokens`: what has come."""

    def __init__(self) -> None:
        self.tokens = 0
        self.task: asyncio.Task[None]

    async def give_up(self) -> None:
        raise NotImplementedError


class GrpcClient(Client):
    def __init__(self, mesh: LocalMesh, prompt: list[int], max_tokens: int, *, timeout: float) -> None:
        super().__init__()
        self.call = mesh.open(prompt, max_tokens=max_tokens, ignore_eos=True, timeout=timeout)
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self.call:
            self.tokens += sum(len(choice.token_ids) for choice in message.choices)

    async def give_up(self) -> None:
        self.call.cancel()
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await self.task


class DeadlineClient(GrpcClient):
    async def give_up(self) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await self.task
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


class HttpClient(Client):
    def __init__(self, mesh: LocalMesh, prompt: list[int], max_tokens: int, *, timeout: float) -> None:
        super().__init__()
        self._url = f"http://{mesh.gateway.http_address}/v1/completions"
        self._body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        self._body["logit_bias"] = {str(LETTER): 100}  # every token is text of its own, so an event of its own
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        body = {**self._body, "stream": True}
        async with (
            httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client,
            client.stream("POST", self._url, json=body) as response,
        ):
            assert response.status_code == 200
            async for line in response.aiter_lines():
                self.tokens += line.startswith("data: {")

    async def give_up(self) -> None:
        """The connection is closed."""
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


WAYS: dict[str, type[Client]] = {"cancel": GrpcClient, "deadline": DeadlineClient, "disconnect": HttpClient}
Look = Callable[[LocalMesh, Client], Awaitable[bool]]


class Stage:
    """prompt, max_tokens: of the request that is given up. hog: (prompt tokens, max_tokens) of one that is there
    before, and in the way."""

    def __init__(self, look: Look, prompt: int, max_tokens: int, hog: tuple[int, int] | None = None) -> None:
        self.look, self.prompt, self.max_tokens, self.hog = look, prompt, max_tokens, hog


async def _queued(mesh: LocalMesh, client: Client) -> bool:
    load = (await mesh.status(mesh.workers[0])).load
    return load.running == 1 and load.waiting == 1


async def _prefilling(mesh: LocalMesh, client: Client) -> bool:
    return (await mesh.status(mesh.workers[0])).load.running == 1


async def _pulling(mesh: LocalMesh, client: Client) -> bool:
    status = await mesh.status(mesh.workers[1])
    return status.open_pulls == 1 and status.load.held_blocks > 0 and client.tokens == 0


async def _first_token(mesh: LocalMesh, client: Client) -> bool:
    return client.tokens == 1 and (await mesh.status(mesh.workers[1])).open_pulls == 1


async def _waiting_for_room(mesh: LocalMesh, client: Client) -> bool:
    load = (await mesh.status(mesh.workers[1])).load
    return load.running == 1 and load.waiting == 1


async def _decoding(mesh: LocalMesh, client: Client) -> bool:
    return client.tokens >= 5


STAGES = {
    "queued": Stage(_queued, SHORT, 5, hog=(LONG, 1)),
    "prefilling": Stage(_prefilling, LONG, 5),
    "pulling": Stage(_pulling, SHORT, 5),
    "first token": Stage(_first_token, SHORT, 5),
    "waiting for room": Stage(_waiting_for_room, HUGE, 5, hog=(TINY, 1000)),
    "decoding": Stage(_decoding, TINY, 1000),
}
_numbers = itertools.count()


def _fresh_prompt(length: int) -> list[int]:
    """One that nobody has sent yet, so that nothing of it is cached."""
    rng = random.Random(next(_numbers))
    return [rng.randrange(10, 500) for _ in range(length)]


async def _start_hog(mesh: LocalMesh, length: int, count: int) -> asyncio.Task[Answer]:
    """Returns once it computes; its answer is the token 300, again and again."""
    hog = mesh.open(_fresh_prompt(length), max_tokens=count, ignore_eos=True, logit_bias={300: 100.0})
    answer = asyncio.create_task(collect(hog))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (await mesh.status(mesh.workers[1 if count > 1 else 0])).load.running:
            await asyncio.sleep(0)
    return answer


async def _at_stage(mesh: LocalMesh, stage: Stage, way: str, timeout: float) -> Client | None:
    """The request, seen at its stage; None when its time was over before."""
    client = WAYS[way](mesh, _fresh_prompt(stage.prompt), stage.max_tokens, timeout=timeout)  # type: ignore[call-arg]
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await stage.look(mesh, client):
            if client.task.done():
                assert way == "deadline"
                await client.give_up()
                return None
            await asyncio.sleep(0)
    return client


def _prompt(path: Path, name: str, length: int, max_tokens: int) -> list[int]:
    for seed in range(30):
        rng = random.Random(f"{name} {seed}")
        prompt = [rng.randrange(10, 500) for _ in range(length)]
        with contextlib.suppress(oracle.NearTie):
            oracle.generate(path, prompt, max_tokens)
            return prompt
    raise AssertionError("no prompt without near ties")


async def _steps_after(worker: Worker) -> int:
    """Engine steps from now, when the calls have just ended here, until the engine is idle."""
    await worker.context.idle()
    before, _ = worker.engine.pool.progress()
    while (await worker.engine.inspect()).load.running:
        await asyncio.sleep(0)
    return worker.engine.pool.progress()[0] - before


@session
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", STAGES)
async def test_given_up(name: str, way: str, mesh: LocalMesh, checkpoint: Callable[..., Path]) -> None:
    """Cases A4, A14, A16."""
    path, stage = checkpoint("llama", max_context=1024), STAGES[name]
    hog: asyncio.Task[Answer] | None = None
    # A deadline ends the request at the stage if it is long enough to get there; the stages last much longer than that.
    for timeout in (0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8) if way == "deadline" else (PATIENCE_SECONDS,):
        if stage.hog and (hog is None or hog.done()):
            hog = await _start_hog(mesh, *stage.hog)
        client = await _at_stage(mesh, stage, way, timeout)
        if client is not None:
            break
    assert client is not None
    given_up = asyncio.create_task(client.give_up())
    if hog is None:
        for steps in await asyncio.gather(*(_steps_after(worker) for worker in mesh.workers)):
            assert steps <= MOST_STEPS
    await given_up
    if hog is None:
        await mesh.settled()
    next_prompt = _prompt(path, name, TINY, 4)
    answer = await mesh.generate(next_prompt, max_tokens=4, ignore_eos=True)
    assert answer.tokens == oracle.generate(path, next_prompt, 4)
    if hog is not None:
        assert stage.hog
        assert (await hog).tokens == [300] * stage.hog[1]
    await mesh.settled()
