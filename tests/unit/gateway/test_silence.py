"""Workers that stop without a word: nothing new goes there, what waits there is tried elsewhere, no token twice."""

import asyncio
from pathlib import Path

from tests.unit.gateway import test_encoding
from tests.unit.gateway.conftest import Mesh, Result, ask, generate
from tests.unit.gateway.hearts import PATIENT, HeartWorker, chosen, hearts, until


def letters(count: int) -> dict[int, str]:
    return {0: "".join(chr(ord("a") + i % 26) for i in range(count))}


def hedges(mesh: Mesh, outcome: str) -> float:
    return mesh.gateway.telemetry.metrics.hedges.labels("fake", outcome)._value.get()


async def silent(mesh: Mesh, worker: HeartWorker) -> None:
    worker.heart.clear()
    await until(lambda: mesh.gateway.fleet.get(worker.record.worker_id).suspected)


def ask_it(mesh: Mesh, max_tokens: int, **fields: object) -> asyncio.Task[Result]:
    return asyncio.create_task(generate(mesh, ask(max_tokens=max_tokens, **fields)))


async def test_a_silent_worker_gets_nothing_new(model_dir: Path) -> None:
    async with hearts(model_dir, "p0 p1 d0") as (mesh, (p0, p1, _)):
        await silent(mesh, p0)
        for i in range(8):
            await generate(mesh, ask(max_tokens=2, session_id=f"s{i}"))
        assert (len(p0.calls), len(p1.calls)) == (0, 8)
        p0.heart.set()
        await until(lambda: mesh.gateway.fleet.get("p0").routable)
        for i in range(16):
            await generate(mesh, ask(max_tokens=2, session_id=f"s{i}"))
        assert p0.calls


async def test_before_the_first_token_another_worker_is_asked_as_well(model_dir: Path) -> None:
    async with hearts(model_dir, "p0 p1 d0", PATIENT) as (mesh, (p0, p1, d0)):
        p0.prefill_gate.clear()
        p1.prefill_gate.clear()
        task = ask_it(mesh, 20)
        stopped, other = await chosen([p0, p1])
        other.prefill_gate.set()
        await silent(mesh, stopped)
        result = await task
        assert result.texts == letters(20)
        assert result.accounting.attempts == 2
        assert result.accounting.prefill_worker == other.record.worker_id
        assert hedges(mesh, "won") == 1
        await until(lambda: not stopped.running and not d0.running)
        assert [method for method, _ in stopped.cancelled] == ["prefill"]
        # What it has to say when it wakes reaches nobody; then it is one of us again.
        stopped.prefill_gate.set()
        stopped.heart.set()
        await until(lambda: mesh.gateway.fleet.get(stopped.record.worker_id).routable)
        assert (await generate(mesh, ask(max_tokens=3))).texts == letters(3)
        await until(lambda: not mesh.gateway.telemetry.open_spans)


async def test_the_first_may_still_win(model_dir: Path) -> None:
    """Both in parallel at one decode worker; the one that was silent is faster in the end."""
    async with hearts(model_dir, "p0 p1 d0", PATIENT) as (mesh, (p0, p1, d0)):
        p0.prefill_gate.clear()
        p1.prefill_gate.clear()
        task = ask_it(mesh, 20)
        stopped, other = await chosen([p0, p1])
        await silent(mesh, stopped)
        await until(lambda: other.running and d0.running == 2)
        stopped.prefill_gate.set()
        result = await task
        assert result.texts == letters(20)
        assert result.accounting.attempts == 1
        assert hedges(mesh, "lost") == 1
        other.prefill_gate.set()
        await until(lambda: not other.running and not d0.running)
        keys = {(request.key.leg, request.key.attempt) for _, request in d0.calls}
        assert len(keys) == 2


async def test_both_fail_then_there_is_a_third(model_dir: Path) -> None:
    async with hearts(model_dir, "p0 p1 p2 d0", PATIENT) as (mesh, (*prefills, d0)):
        for worker in prefills:
            worker.prefill_gate.clear()
        task = ask_it(mesh, 9)
        first, *_ = await chosen(prefills)
        await silent(mesh, first)
        second = next(worker for worker in await chosen(prefills, 2) if worker.running and worker is not first)
        third = next(worker for worker in prefills if worker not in (first, second))
        third.prefill_gate.set()
        await second.kill()
        await first.kill()
        result = await task
        assert result.texts == letters(9)
        assert result.accounting.prefill_worker == third.record.worker_id
        assert result.accounting.attempts == 3
        assert hedges(mesh, "failed") == 1
        await until(lambda: not d0.running)


async def test_a_running_stream_goes_on_elsewhere(model_dir: Path) -> None:
    async with hearts(model_dir, "p0 d0 d1") as (mesh, (p0, *decodes)):
        for worker in decodes:
            worker.decode_gate.clear()
        task = ask_it(mesh, 20, n=1)
        stopped, other = await chosen(decodes)
        other.decode_gate.set()
        await silent(mesh, stopped)
        result = await task
        assert result.texts == letters(20)
        assert result.accounting.decode_worker == other.record.worker_id
        assert result.accounting.attempts == 2
        stopped.decode_gate.set()
        await until(lambda: not stopped.running)
        assert p0.calls[1][1].key.attempt == 2


async def test_what_another_pulls_from_counts_too(model_dir: Path) -> None:
    """Prefill has answered and its own call is over, but its blocks are still being pulled when it stops."""
    async with hearts(model_dir, "p0 p1 d0") as (mesh, (p0, p1, d0)):
        d0.decode_gate.clear()
        task = ask_it(mesh, 12)
        await until(lambda: d0.running and (p0.calls or p1.calls) and not p0.running and not p1.running)
        stopped, other = sorted((p0, p1), key=lambda worker: not worker.calls)
        await silent(mesh, stopped)
        await until(lambda: other.calls)
        d0.decode_gate.set()
        result = await task
        assert result.texts == letters(12)
        assert result.accounting.prefill_worker == other.record.worker_id


async def test_without_another_worker_it_is_waited_for(model_dir: Path) -> None:
    """Nobody could take over: no second attempt, the stream goes on when the worker does."""
    async with hearts(model_dir, "p0 d0") as (mesh, (_, d0)):
        d0.decode_gate.clear()
        task = ask_it(mesh, 9)
        await until(lambda: d0.running)
        await silent(mesh, d0)
        worker = mesh.gateway.fleet.get("d0")
        stuck = asyncio.Event()
        worker.on_stuck.add(stuck.set)
        heard = mesh.gateway.fleet.get("p0")
        since = worker.heard_at
        await until(lambda: heard.heard_at - since > 1.5)
        assert not stuck.is_set()
        d0.heart.set()
        d0.decode_gate.set()
        result = await task
        assert result.texts == letters(9)
        assert result.accounting.attempts == 1


async def test_all_silent_at_once_is_us(model_dir: Path) -> None:
    async with hearts(model_dir, "p0 p1 d0") as (mesh, workers):
        for worker in workers:
            worker.heart.clear()
        fleet = mesh.gateway.fleet
        last = max(worker.heard_at for worker in fleet.all())
        loop = asyncio.get_running_loop()
        await until(lambda: loop.time() - last > 1.5)
        assert all(worker.routable for worker in fleet.all())
        assert (await generate(mesh, ask(max_tokens=2))).texts == letters(2)


async def test_a_worker_that_never_beats_is_not_judged(model_dir: Path) -> None:
    """One of an older version tells nothing while it has no load to tell."""
    async with hearts(model_dir, "p1 d0") as (mesh, (p1, _)):
        await mesh.add("p0", ["prefill"])
        old, heard = mesh.gateway.fleet.get("p0"), mesh.gateway.fleet.get("p1")
        await until(lambda: heard.heard_at - old.heard_at > 1.0)
        assert old.routable
        assert p1.heart.is_set()


async def test_a_stopped_worker_loses_its_lease_too(model_dir: Path) -> None:
    """The registry forgets it before its silence has been long enough; its streams go on elsewhere all the same."""
    async with hearts(model_dir, "p0 d0 d1") as (mesh, (_, *decodes)):
        for worker in decodes:
            worker.decode_gate.clear()
        task = ask_it(mesh, 20)
        stopped, other = await chosen(decodes)
        other.decode_gate.set()
        stopped.heart.clear()
        del mesh.workers[stopped.record.worker_id]
        await mesh.publish()
        result = await task
        assert result.texts == letters(20)
        assert result.accounting.decode_worker == other.record.worker_id
        await stopped.kill()


async def test_b2_one_that_only_lost_its_lease_goes_on(model_dir: Path) -> None:
    """Forgotten by the registry, but heard: nobody takes its streams away."""
    async with hearts(model_dir, "p0 d0 d1") as (mesh, (_, *decodes)):
        for worker in decodes:
            worker.decode_gate.clear()
        task = ask_it(mesh, 20)
        forgotten, _ = await chosen(decodes)
        fleet, name = mesh.gateway.fleet, forgotten.record.worker_id
        worker = fleet.get(name)
        del mesh.workers[name]
        await mesh.publish()
        since = worker.heard_at
        await until(lambda: worker.heard_at - since > 1.5)
        assert fleet.get(name) is None
        forgotten.decode_gate.set()
        result = await task
        assert result.texts == letters(20)
        assert result.accounting.attempts == 1
        await until(lambda: worker not in fleet.in_use())
        await forgotten.kill()


async def test_case_d11_a_silent_encoder_is_overtaken(model_dir: Path) -> None:
    """Its image goes to another one long before the call counts as slow."""
    async with hearts(model_dir, "p0 e0 e1", PATIENT, encode_hedge_seconds=600.0) as (mesh, (_, *encoders)):
        for worker in encoders:
            worker.encode_gate.clear()
        encoding, record = test_encoding.stage(mesh, test_encoding.media("a"))

        async def references() -> list[str]:
            async with encoding.embeddings() as found:
                return [each.owner.worker_id for each in found]

        task = asyncio.create_task(references())
        stopped, other = await chosen(encoders)
        other.encode_gate.set()
        await silent(mesh, stopped)
        assert await task == record.encode_workers == [other.record.worker_id]
        await until(lambda: not stopped.running)
