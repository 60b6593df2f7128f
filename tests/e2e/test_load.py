"""Many requests at once: all answered with the right tokens while the bounds allow it, the rest refused with a hint."""

import asyncio
import random
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest

from common.engine.settings import TimedModel
from common.engine.timed_executor import TimedExecutor
from common.policies.silence import SilencePolicy
from epd.v1 import generation_pb2_grpc
from services.gateway import generation
from tests import oracle
from tests.e2e.conftest import Meshes
from tests.mesh import MODEL, PATIENCE_SECONDS, LocalMesh, request

session = pytest.mark.asyncio(loop_scope="session")

MANY = 200
BOUND = 50
MAX_TOKENS = 8
PROMPT = list(range(20))
FORMS: dict[str, dict[str, Any]] = {
    "aggregated": {"roles": ("prefill,decode",)},
    "disaggregated": {"roles": ("prefill", "decode")},
}
TIMED: dict[str, Any] = {
    "executor": "timed",
    "timed": TimedModel(num_layers=3, vocab_size=512, max_context=4096),
    "num_blocks": 1024,
}
# An engine that is held looks like one that hangs.
PATIENT = {"silence": SilencePolicy(suspect_seconds=600.0, stuck_seconds=600.0)}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Cleared, it holds every timed engine inside its step: a burst is there before any of it can end."""
    opened = threading.Event()
    opened.set()
    execute = TimedExecutor.execute

    def held(self: TimedExecutor, *args: Any) -> Any:
        opened.wait(PATIENCE_SECONDS)
        return execute(self, *args)

    monkeypatch.setattr(TimedExecutor, "execute", held)
    yield opened
    opened.set()


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await asyncio.sleep(0.01)


def prompts(checkpoint: Any, count: int = 6) -> list[tuple[list[int], list[int]]]:
    """A handful of prompts of different lengths, with the reference's tokens."""
    rng, found = random.Random(11), []
    while len(found) < count:
        prompt = [rng.randrange(10, 500) for _ in range(3 + 9 * len(found))]
        try:
            found.append((prompt, oracle.generate(checkpoint("llama"), prompt, MAX_TOKENS)))
        except oracle.NearTie:
            continue
    return found


def tasks() -> set[str]:
    """Names of the tasks that requests leave nothing of."""
    return {
        task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith(("generation", "publication"))
    }


async def attempt(mesh: LocalMesh, prompt: list[int], **options: Any) -> Any:
    """The answer, or the error."""
    try:
        return await mesh.generate(prompt, **options)
    except grpc.aio.AioRpcError as error:
        return error


async def settled(mesh: LocalMesh) -> None:
    await mesh.settled()
    assert mesh.gateway.admission.in_flight == 0
    assert tasks() == set()
    assert all(
        not worker.view().pending_prefill_tokens for worker in mesh.gateway.fleet.all() if not worker.load.waiting
    )


@session
@pytest.mark.parametrize("form", FORMS)
async def test_all_are_answered_within_the_bounds(form: str, meshes: Meshes, checkpoint: Any) -> None:
    mesh = await meshes.get(num_blocks=1024, **FORMS[form])
    known = prompts(checkpoint)
    asked = [known[i % len(known)] for i in range(MANY)]
    answers = await asyncio.gather(
        *(mesh.generate(prompt, max_tokens=MAX_TOKENS, ignore_eos=True) for prompt, _ in asked)
    )
    assert [answer.tokens for answer in answers] == [tokens for _, tokens in asked]
    await settled(mesh)


@session
async def test_a_small_pool_only_makes_them_wait(meshes: Meshes, checkpoint: Any) -> None:
    """200 requests over a pool that holds a few: waiting, preemption and eviction change no token."""
    patient = {"refuse_by": "never", "hold_seconds": PATIENCE_SECONDS}
    mesh = await meshes.get(num_blocks=24, gateway=patient, **FORMS["disaggregated"])
    known = prompts(checkpoint)
    asked = [known[i % len(known)] for i in range(MANY)]
    answers = await asyncio.gather(
        *(mesh.generate(prompt, max_tokens=MAX_TOKENS, ignore_eos=True) for prompt, _ in asked)
    )
    assert [answer.tokens for answer in answers] == [tokens for _, tokens in asked]
    await settled(mesh)


@session
async def test_beyond_the_gateways_bound_they_are_refused_with_a_hint(meshes: Meshes, gate: threading.Event) -> None:
    mesh = await meshes.get(gateway={"max_in_flight": BOUND, **PATIENT}, **TIMED)
    alone = (await mesh.generate(PROMPT, max_tokens=10, ignore_eos=True)).tokens
    gate.clear()
    calls = [asyncio.create_task(attempt(mesh, PROMPT, max_tokens=10, ignore_eos=True)) for _ in range(MANY)]
    await until(lambda: sum(call.done() for call in calls) == MANY - BOUND)
    refused = [call.result() for call in calls if call.done()]
    for error in refused:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        metadata = dict(error.trailing_metadata())
        assert metadata["epd-reason"] == "OVERLOADED"
        assert int(metadata["retry-after-ms"]) > 0
        assert str(BOUND) in error.details()
    # The other edge shares the bound.
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 10}
    async with httpx.AsyncClient(base_url=f"http://{mesh.gateway.http_address}", timeout=PATIENCE_SECONDS) as client:
        for stream in (False, True):
            answer = await client.post("/v1/completions", json=body | {"stream": stream})
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["type"] == "rate_limit_error"
            assert answer.json()["error"]["code"] == "overloaded"
    gate.set()
    answered = [each for each in await asyncio.gather(*calls) if not isinstance(each, grpc.aio.AioRpcError)]
    assert len(answered) == BOUND
    assert all(each.tokens == alone for each in answered)
    await settled(mesh)
    # The bound is one of requests at once, not of requests ever.
    assert (await mesh.generate(PROMPT, max_tokens=10, ignore_eos=True)).tokens == alone


@session
@pytest.mark.parametrize("form", FORMS)
async def test_beyond_the_workers_bound_they_are_refused_with_a_hint(
    form: str, meshes: Meshes, gate: threading.Event
) -> None:
    """The engine's own queue is full, and no other worker is there."""
    options = {"gateway": {"max_in_flight": 1000, "max_attempts": 1, **PATIENT}, "max_waiting": BOUND, "max_running": 4}
    mesh = await meshes.get(**TIMED, **FORMS[form], **options)
    gate.clear()
    calls = [asyncio.create_task(attempt(mesh, [i] * 20, max_tokens=4, ignore_eos=True)) for i in range(MANY)]
    await until(lambda: mesh.workers[0].context.running_requests == MANY)
    gate.set()
    found = await asyncio.gather(*calls)
    refused = [each for each in found if isinstance(each, grpc.aio.AioRpcError)]
    answered = [each for each in found if not isinstance(each, grpc.aio.AioRpcError)]
    # Those in the queue, and those that were in the step that was held.
    assert BOUND <= len(answered) <= BOUND + 8
    for error in refused:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error.details()
        assert int(dict(error.trailing_metadata())["retry-after-ms"]) > 0
    assert all(len(each.tokens) == 4 for each in answered)
    await settled(mesh)


@session
async def test_a_full_worker_is_tried_again(meshes: Meshes, gate: threading.Event) -> None:
    """A short burst over a worker's bound is no error for anybody."""
    mesh = await meshes.get(**TIMED, gateway=PATIENT, max_waiting=4, max_running=4)
    gate.clear()
    calls = [asyncio.create_task(attempt(mesh, [i] * 20, max_tokens=4, ignore_eos=True)) for i in range(12)]
    await until(lambda: mesh.workers[0].context.running_requests == 12)
    gate.set()
    found = await asyncio.gather(*calls)
    assert not [each.details() for each in found if isinstance(each, grpc.aio.AioRpcError)]
    assert max(each.accounting.attempts for each in found) > 1
    await settled(mesh)


class SlowReader:
    """A client that has sent its request and does not read the answer."""

    def __init__(self, mesh: LocalMesh, **sampling: Any) -> None:
        # The smallest flow-control window there is, and a connection of its own.
        options = (
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", 1024),
            ("grpc.use_local_subchannel_pool", 1),
        )
        self.tokens = 0
        self._channel = grpc.aio.insecure_channel(mesh.gateway.grpc_address, options=options)
        self.call = generation_pb2_grpc.GenerationServiceStub(self._channel).Generate(
            request(PROMPT, ignore_eos=True, **sampling)
        )

    async def __aenter__(self) -> "SlowReader":
        await self.read()
        return self

    async def read(self) -> bool:
        """One message; False at the end."""
        message = await self.call.read()
        if message is grpc.aio.EOF:
            return False
        self.tokens += sum(len(choice.token_ids) for choice in message.choices)
        return True

    async def __aexit__(self, *_: object) -> None:
        self.call.cancel()
        await self._channel.close()


@session
async def test_slow_clients_stop_nobody_and_fill_no_memory(meshes: Meshes, monkeypatch: pytest.MonkeyPatch) -> None:
    outboxes: list[Any] = []

    class Watched(generation.Outbox):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.most = 0
            outboxes.append(self)

        def notify(self) -> None:
            self.most = max(self.most, sum(choice.pending_tokens for choice in self._choices))
            super().notify()

    fast = TimedModel(base_seconds=0.0, seconds_per_decode=0.0, num_layers=1, vocab_size=512, max_context=1 << 20)
    bound = 64
    mesh = await meshes.get(
        executor="timed", timed=fast, num_blocks=8192, gateway={"buffered_tokens": bound}, roles=("prefill", "decode")
    )
    monkeypatch.setattr(generation, "Outbox", Watched)
    async with (
        SlowReader(mesh, max_tokens=12_000, top_logprobs=0) as one,
        SlowReader(mesh, max_tokens=12_000, top_logprobs=0),
    ):
        slow = list(outboxes)
        assert len(slow) == 2
        # Both run full: from then on the workers' streams are read no further.
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not all(outbox.full for outbox in slow):
                await asyncio.sleep(0.01)
        # Others go on meanwhile.
        for _ in range(5):
            answer = await mesh.generate(range(30), max_tokens=20, ignore_eos=True)
            assert len(answer.tokens) == 20
        # A message of the worker may be larger than a step once its stream was not read; that, too, is bounded.
        assert all(outbox.most <= bound + 4096 for outbox in slow), [outbox.most for outbox in slow]
        # And a slow client that goes on reading has lost nothing.
        while await one.read():
            pass
        assert one.tokens == 12_000
    await settled(mesh)
