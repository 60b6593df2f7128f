"""Failures, retries, cancellation and liveness; cases A15, A16, A18, B3, B4, C11."""

import asyncio
from pathlib import Path

import grpc
import pytest

from common.errors import (
    Draining,
    EngineFailed,
    EpdError,
    InvalidArgument,
    NeverFits,
    Overloaded,
    Preempted,
    TransferFailed,
)
from tests.fakes import FakeWorker
from tests.unit.gateway.conftest import Mesh, ask, generate, refusal


def letters(start: int, count: int) -> str:
    return "".join(chr(ord("a") + (start + i) % 26) for i in range(count))


async def two_pairs(mesh: Mesh) -> list[FakeWorker]:
    roles = {"p0": ["prefill"], "p1": ["prefill"], "d0": ["decode"], "d1": ["decode"]}
    return [await mesh.add(worker_id, role) for worker_id, role in roles.items()]


def calls(workers: list[FakeWorker], method: str) -> list[tuple[FakeWorker, object]]:
    found = [(worker, request) for worker in workers for name, request in worker.calls if name == method]
    return sorted(found, key=lambda pair: (pair[1].key.attempt, pair[1].key.leg))


@pytest.mark.parametrize("error", [EngineFailed("broke"), Overloaded("full"), Preempted("no room")])
async def test_prefill_fails_before_the_first_token(mesh: Mesh, error: EpdError) -> None:
    workers = await two_pairs(mesh)
    for worker in workers[:2]:
        worker.prefill_errors = [error]
    # Whichever is asked first fails once; the second attempt may meet the other one's failure.
    result = await generate(mesh, ask(max_tokens=6))
    assert result.texts == {0: letters(0, 6)}
    assert result.accounting.attempts in (2, 3)
    keys = [request.key for _, request in calls(workers, "prefill")]
    assert [(key.leg, key.attempt) for key in keys] == [(0, i + 1) for i in range(len(keys))]
    tickets = {request.publication.ticket for _, request in calls(workers, "prefill")}
    assert len(tickets) == len(keys)


async def test_draining_worker_is_left_alone(mesh: Mesh) -> None:
    workers = await two_pairs(mesh)
    workers[0].prefill_errors = [Draining("bye") for _ in range(9)]
    for i in range(6):
        assert (await generate(mesh, ask(max_tokens=2, session_id=f"s{i}"))).texts == {0: "ab"}
    assert len(workers[0].calls) <= 1
    assert not mesh.gateway.fleet.get("p0").routable or not workers[0].calls


async def test_decode_fails_after_tokens_one_choice(mesh: Mesh) -> None:
    workers = await two_pairs(mesh)
    for worker in workers[2:]:
        worker.decode_errors = [(3, EngineFailed("broke"))]
    result = await generate(mesh, ask(max_tokens=20))
    assert result.token_ids == {0: [ord(c) for c in letters(0, 20)]}
    assert result.usage.completion_tokens == 20
    tries = calls(workers, "prefill")
    assert [(request.key.leg, request.key.attempt) for _, request in tries] == [(0, 1), (1, 2), (1, 3)]
    # Everything received goes along, apart from the prompt: 1 of prefill and 3 of decode, then as many more.
    assert [bytes(request.output_token_ids).decode() for _, request in tries] == ["", letters(0, 4), letters(0, 8)]
    assert all(bytes(request.prompt_token_ids) == b"hello" for _, request in tries)
    assert {worker.record.worker_id for worker, _ in tries} == {tries[0][0].record.worker_id}  # the old prefill worker
    assert {worker.record.worker_id for worker, _ in calls(workers, "decode")} == {"d0", "d1"}


async def test_decode_fails_after_tokens_three_choices(mesh: Mesh) -> None:
    workers = await two_pairs(mesh)
    for worker in workers[2:]:
        worker.decode_errors = [(4, TransferFailed("broke"))]
    result = await generate(mesh, ask(max_tokens=15, n=3, stop=["cde"]))
    # choice 0 spells abcde, so the stop ends it before the failure; the others go on as legs of their own.
    assert result.texts[0] == "ab"
    assert result.texts[1] == "b"
    assert result.texts[2] == ""
    result = await generate(mesh, ask(max_tokens=15, n=3))
    assert result.texts == {i: letters(i, 15) for i in range(3)}


async def test_every_unfinished_choice_resumes_as_a_leg(mesh: Mesh) -> None:
    workers = await two_pairs(mesh)
    for worker in workers[2:]:
        worker.decode_errors = [(2, EngineFailed("broke"))]
    result = await generate(mesh, ask(max_tokens=15, n=3))
    assert result.token_ids == {i: [ord(c) for c in letters(i, 15)] for i in range(3)}
    assert result.usage.completion_tokens == 45
    resumed = [request for _, request in calls(workers, "prefill") if request.key.attempt > 1]
    assert {request.key.leg for request in resumed} == {1, 2, 3}
    for request in resumed:
        assert list(request.choices) == [request.key.leg - 1]
        assert len(request.output_token_ids) >= 3


async def test_aggregated_worker_fails_in_mid_stream(mesh: Mesh) -> None:
    workers = [await mesh.add(f"b{i}", ["prefill", "decode"]) for i in range(2)]
    for worker in workers:
        worker.decode_errors = [(5, EngineFailed("broke"))]
    result = await generate(mesh, ask(max_tokens=20))
    assert result.texts == {0: letters(0, 20)}
    outputs = [len(request.output_token_ids) for _, request in calls(workers, "decode")]
    assert outputs == [0, 5, 10]


async def test_b3_killed_worker_is_marked_down_and_replaced(mesh: Mesh) -> None:
    workers = await two_pairs(mesh)
    for worker in workers[2:]:
        worker.decode_gate.clear()
    task = asyncio.create_task(generate(mesh, ask(max_tokens=10)))
    chosen = workers[2]
    async with asyncio.timeout(10):
        while not (busy := [worker for worker in workers[2:] if worker.running]):
            await asyncio.sleep(0)
        chosen = busy[0]
    await chosen.kill()
    for worker in workers[2:]:
        worker.decode_gate.set()
    assert (await task).texts == {0: letters(0, 10)}
    fleet = mesh.gateway.fleet
    assert not fleet.get(chosen.record.worker_id).up
    assert {view.worker_id for view in fleet.snapshot("fake")} == {
        w.record.worker_id for w in workers if w is not chosen
    }
    assert (await generate(mesh, ask(max_tokens=5))).accounting.attempts == 1


async def test_down_is_not_for_good(mesh: Mesh) -> None:
    _p, d = await mesh.pair()
    address = d.record.address
    await d.kill()
    fleet = mesh.gateway.fleet
    async with asyncio.timeout(10):
        while fleet.get("d0").up:
            await fleet.changed()
    await d.start(address)
    async with asyncio.timeout(10):
        while not fleet.get("d0").up:
            await fleet.changed()
    assert (await generate(mesh, ask(max_tokens=3))).texts == {0: "abc"}


async def test_b4_worker_gone_between_choice_and_call(model_dir: Path) -> None:
    mesh = Mesh(model_dir)
    await mesh.start(first_byte_seconds=0.5)
    try:
        await hung_worker(mesh)
    finally:
        await mesh.stop()


async def hung_worker(mesh: Mesh) -> None:
    workers = await two_pairs(mesh)
    for worker in workers[:2]:
        worker.accept.clear()  # hangs: connected, but accepts nothing
    task = asyncio.create_task(generate(mesh, ask(max_tokens=4)))
    async with asyncio.timeout(10):
        while not (hung := [worker for worker in workers[:2] if worker.calls]):
            await asyncio.sleep(0)
    other = workers[1] if hung[0] is workers[0] else workers[0]
    other.accept.set()
    result = await task
    assert result.texts == {0: "abcd"}
    assert result.accounting.attempts >= 2
    assert result.accounting.prefill_worker == other.record.worker_id


async def test_a18_restarted_worker_on_the_same_port(mesh: Mesh) -> None:
    _p, d = await mesh.pair()
    reborn = FakeWorker(mesh.network, "d0", ["decode"], incarnation="2")
    address = d.record.address
    await d.kill()
    await reborn.start(address)
    mesh.workers["d0"] = reborn
    task = asyncio.create_task(generate(mesh, ask(max_tokens=3)))  # the registry still names the old life
    await asyncio.sleep(0)
    await mesh.publish()
    assert (await task).texts == {0: "abc"}
    assert {request.target.incarnation for _, request in reborn.calls[-1:]} == {"2"}


async def test_attempts_are_bounded_and_the_error_arrives(mesh: Mesh) -> None:
    p, _d = await mesh.pair()
    p.prefill_errors = [Overloaded("the queue is full", retry_after_seconds=3.0) for _ in range(50)]
    code, metadata, _ = await refusal(mesh, ask(max_tokens=3))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert metadata["retry-after-ms"] == "3000"
    assert len(p.calls) == mesh.gateway.settings.max_attempts


@pytest.mark.parametrize("error", [InvalidArgument("bad", field="top_k"), NeverFits("too large", field="prompt")])
async def test_what_no_retry_can_mend_is_not_retried(mesh: Mesh, error: EpdError) -> None:
    p, _d = await mesh.pair()
    p.prefill_errors = [error]
    code, metadata, details = await refusal(mesh, ask(max_tokens=3))
    assert (code, metadata["epd-reason"], details) == (error.status, error.reason, error.message)
    assert metadata["epd-field"] == error.field
    assert len(p.calls) == 1


async def test_a15_decode_is_cancelled_at_once_when_prefill_fails(mesh: Mesh) -> None:
    p, d = await mesh.pair()
    p.prefill_errors = [InvalidArgument("bad")]
    await refusal(mesh, ask(max_tokens=3))
    await d.until(lambda: not d.running)
    assert [method for method, _ in d.cancelled] == ["decode"] * len(d.calls)


@pytest.mark.parametrize("when", ["before the first token", "after it", "deadline"])
async def test_a16_cancel_reaches_both_workers(mesh: Mesh, when: str) -> None:
    p, d = await mesh.pair()
    d.decode_gate.clear()
    if when != "after it":
        p.prefill_gate.clear()
    call = mesh.stub.Generate(ask(max_tokens=50), timeout=2.0 if when == "deadline" else None)
    reading = asyncio.create_task(call.read())
    await d.until(lambda: d.running == 1)
    await p.until(lambda: bool(p.calls))
    if when == "deadline":
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reading
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    else:
        if when == "after it":
            await reading
        call.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    await p.until(lambda: not p.running)
    await d.until(lambda: not d.running)
    assert len(d.cancelled) == 1
    assert len(p.cancelled) == (0 if when == "after it" else 1)
    assert len(p.calls) == len(d.calls) == 1
    async with asyncio.timeout(10):
        await mesh.gateway.admission.idle()
        while mesh.gateway.telemetry.open_spans:
            await asyncio.sleep(0)
    # The next request is not held up.
    p.prefill_gate.set()
    d.decode_gate.set()
    assert (await generate(mesh, ask(max_tokens=2))).texts == {0: "ab"}


async def test_c11_error_in_mid_stream_is_a_status(mesh: Mesh) -> None:
    _p, d = await mesh.pair()
    d.decode_errors = [(2, InvalidArgument("no more")) for _ in range(9)]
    texts = []

    async def read() -> None:
        async for response in mesh.stub.Generate(ask(max_tokens=9)):
            assert not response.HasField("usage")
            texts.extend(choice.text for choice in response.choices)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read()
    assert "".join(texts) == "abc"
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_worker_turns_up_while_a_request_waits(mesh: Mesh) -> None:
    await mesh.add("p0", ["prefill"])
    task = asyncio.create_task(generate(mesh, ask(max_tokens=3)))
    await asyncio.sleep(0)
    await mesh.add("d0", ["decode"])
    assert (await task).texts == {0: "abc"}


async def test_no_worker_turns_up(model_dir: Path) -> None:
    mesh = Mesh(model_dir)
    await mesh.start(route_wait_seconds=0.05)
    try:
        code, metadata, _ = await refusal(mesh, ask())
        assert (code, metadata["epd-reason"]) == (grpc.StatusCode.UNAVAILABLE, "NO_WORKERS")
        assert int(metadata["retry-after-ms"]) > 0
    finally:
        await mesh.stop()


async def test_retry_shows_in_trace_and_metrics(mesh: Mesh) -> None:
    _p, d = await mesh.pair()
    d.decode_errors = [(2, EngineFailed("broke"))]
    result = await generate(mesh, ask(max_tokens=6, request_id="label"))
    spans = mesh.gateway.store.trace(result.accounting.trace_id)
    names = [span.name for span in spans]
    assert names.count("gateway.retry") == 1
    assert names.count("gateway.route") == 2
    assert mesh.gateway.telemetry.metrics.retries.labels("fake", "ENGINE_FAILED")._value.get() == 1
    root = next(span for span in spans if span.name == "gateway.generate")
    assert root.parent_span_id == ""
    ids = {span.span_id for span in spans}
    assert all(span.parent_span_id in ids for span in spans if span is not root)
    hops = {hop.name for hop in result.accounting.total_hops}
    assert "gateway.retry" in hops
