"""A request's way through prefill and decode, without failures; cases A6 to A8, A11, A12, C5, C8, C12, C13."""

import asyncio

import grpc
import pytest

from common.rpc import wire
from epd.v1 import generation_pb2
from tests.fakes import EOS, spell
from tests.unit.gateway.conftest import Mesh, ask, generate, refusal


async def test_disaggregated(mesh: Mesh) -> None:
    p, d = await mesh.pair()
    result = await generate(mesh, ask("hello", max_tokens=5))
    assert result.texts == {0: "abcde"}
    assert result.token_ids == {0: list(b"abcde")}
    assert result.reasons == {0: "length"}
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (5, 5)
    ((method, prefill),) = p.calls
    ((_, decode),) = d.calls
    assert method == "prefill"
    assert list(prefill.prompt_token_ids) == list(b"hello")
    assert prefill.key == decode.key
    assert (prefill.key.leg, prefill.key.attempt, len(prefill.key.request_id)) == (0, 1, 16)
    assert prefill.publication.ticket == decode.source.ticket
    assert len(decode.source.ticket) == 16
    assert decode.source.address == p.record.address
    assert decode.source.owner.worker_id == "p0"
    assert prefill.publication.puller.worker_id == "d0"
    assert (result.accounting.prefill_worker, result.accounting.decode_worker) == ("p0", "d0")
    assert result.accounting.attempts == 1


async def test_both_workers_are_called_before_either_has_answered(mesh: Mesh) -> None:
    p, d = await mesh.pair()
    p.prefill_gate.clear()
    task = asyncio.create_task(generate(mesh, ask(max_tokens=3)))
    await p.until(lambda: bool(p.calls))
    await d.until(lambda: bool(d.calls))
    p.prefill_gate.set()
    assert (await task).texts == {0: "abc"}


async def test_the_first_token_does_not_wait_for_decode(mesh: Mesh) -> None:
    _, d = await mesh.pair()
    d.decode_gate.clear()
    async with asyncio.timeout(10):
        texts = []
        async for response in mesh.stub.Generate(ask(max_tokens=4)):
            texts += [choice.text for choice in response.choices]
            if texts == ["a"]:
                d.decode_gate.set()
    assert texts[0] == "a"
    assert "".join(texts) == "abcd"


async def test_decode_tokens_that_overtake_the_first_token_come_after_it(mesh: Mesh) -> None:
    p, d = await mesh.pair()
    p.prefill_gate.clear()
    task = asyncio.create_task(generate(mesh, ask(max_tokens=4)))
    await d.until(lambda: bool(d.calls))
    key = d.calls[0][1].key
    mesh.network.first(wire.key_from_proto(key)).set_result(None)  # decode has pulled, prefill's answer is on its way
    await d.until(lambda: not d.running)
    p.prefill_gate.set()
    assert (await task).token_ids == {0: list(b"abcd")}


async def test_aggregated(mesh: Mesh) -> None:
    both = await mesh.add("b0", ["prefill", "decode"])
    both.cached_tokens = 0
    result = await generate(mesh, ask(max_tokens=4, n=2))
    assert result.texts == {0: "abcd", 1: "bcde"}
    ((method, decode),) = both.calls
    assert method == "decode"
    assert not decode.HasField("source")
    assert result.accounting.prefill_worker == ""


async def test_a6_first_token_ends_the_request(mesh: Mesh) -> None:
    p, d = await mesh.pair(script=spell(""))
    d.decode_gate.clear()
    result = await generate(mesh, ask(max_tokens=50))
    assert result.texts == {0: ""}
    assert result.token_ids == {0: [EOS]}
    assert result.reasons == {0: "stop"}
    assert result.deltas[0].stop_token_id == EOS
    await d.until(lambda: len(d.cancelled) == 1 and not d.running)
    assert not p.cancelled


async def test_a7_one_token_never_reaches_decode(mesh: Mesh) -> None:
    p, d = await mesh.pair()
    result = await generate(mesh, ask(max_tokens=1))
    assert result.texts == {0: "a"}
    assert result.reasons == {0: "length"}
    assert not d.calls
    assert not p.calls[0][1].HasField("publication")


async def test_a8_min_tokens_goes_to_both_legs(mesh: Mesh) -> None:
    p, d = await mesh.pair(script=spell("ab"))
    result = await generate(mesh, ask(min_tokens=5, max_tokens=50))
    assert result.texts == {0: "ab___"}
    assert result.usage.completion_tokens == 6  # with the end of text
    for _, request in (*p.calls, *d.calls):
        assert (request.sampling.min_tokens, request.sampling.max_tokens) == (5, 50)


async def test_a11_three_choices(mesh: Mesh) -> None:
    await mesh.pair(script=lambda choice, position: EOS if position == choice else ord("x"))
    result = await generate(mesh, ask(max_tokens=2, n=3))
    assert result.texts == {0: "", 1: "x", 2: "xx"}
    assert result.reasons == {0: "stop", 1: "stop", 2: "length"}
    assert result.usage.completion_tokens == 1 + 2 + 2


async def test_a12_duplicate_id(mesh: Mesh) -> None:
    p, _ = await mesh.pair()
    p.prefill_gate.clear()
    task = asyncio.create_task(generate(mesh, ask(max_tokens=2, request_id="same")))
    await p.until(lambda: bool(p.calls))
    code, metadata, _ = await refusal(mesh, ask(max_tokens=2, request_id="same"))
    assert code is grpc.StatusCode.ALREADY_EXISTS
    assert metadata["epd-reason"] == "DUPLICATE_REQUEST"
    other = asyncio.create_task(
        generate(mesh, ask(max_tokens=2, request_id="same"), metadata=(("x-epd-tenant", "other"),))
    )
    await p.until(lambda: len(p.calls) == 2)
    p.prefill_gate.set()
    assert (await task).texts == (await other).texts == {0: "ab"}
    assert p.calls[0][1].key.request_id != p.calls[1][1].key.request_id
    assert b"same" not in p.calls[0][1].SerializeToString()
    assert (await generate(mesh, ask(max_tokens=2, request_id="same"))).texts == {0: "ab"}  # free again


async def test_c8_one_logprob_a_token(mesh: Mesh) -> None:
    for worker in await mesh.pair():
        worker.logprobs = True
    result = await generate(mesh, ask(max_tokens=4, top_logprobs=2))
    assert [entry.token_id for entry in result.logprobs[0]] == result.token_ids[0]
    assert all(len(entry.top) == 2 for entry in result.logprobs[0])


async def test_c12_stops_before_min_tokens_are_ignored(mesh: Mesh) -> None:
    await mesh.pair()
    result = await generate(mesh, ask(max_tokens=26, min_tokens=5, stop=["bc", "gh"]))
    assert result.texts == {0: "abcdef"}
    assert result.deltas[0].stop_string == "gh"
    assert result.usage.completion_tokens == 8


@pytest.mark.parametrize("cached", [0, 16, 4096])
async def test_c13_cached_tokens(mesh: Mesh, cached: int) -> None:
    p, d = await mesh.pair()
    p.cached_tokens, d.cached_tokens = cached, 7
    result = await generate(mesh, ask("x" * 40, max_tokens=3))
    assert result.usage.cached_tokens == min(cached, 40)


async def test_stop_string_of_one_choice_ends_only_that(mesh: Mesh) -> None:
    _, d = await mesh.pair()
    d.decode_gate.clear()
    task = asyncio.create_task(generate(mesh, ask(max_tokens=12, n=2, stop=["de"])))
    await d.until(lambda: bool(d.calls))
    d.decode_gate.set()
    result = await task
    assert result.texts == {0: "abc", 1: "bc"}
    assert {index: delta.stop_string for index, delta in result.deltas.items()} == {0: "de", 1: "de"}
    assert sorted(choice for call in d.finish_calls for choice in call.choices) == [0, 1]
    assert d.finish_calls[0].key == d.calls[0][1].key
    assert result.usage.completion_tokens == 5 + 4


async def test_seed_is_drawn_when_absent_and_kept_when_given(mesh: Mesh) -> None:
    p, _ = await mesh.pair()
    for seed in (None, None, 7):
        await generate(mesh, ask(max_tokens=1, **({} if seed is None else {"seed": seed})))
    seeds = [request.sampling.seed for _, request in p.calls]
    assert seeds[0] != seeds[1]
    assert seeds[2] == 7


async def test_stream_interval_coalesces(mesh: Mesh) -> None:
    await mesh.pair()
    result = await generate(mesh, ask(max_tokens=14, stream_interval=5))
    sizes = [len(response.choices[0].token_ids) for response in result.responses if response.choices]
    assert sizes[0] < 5
    assert all(size >= 5 for size in sizes[1:-1])
    assert sum(sizes) == 14
    assert result.texts == {0: "abcdefghijklmn"}


async def test_a_slow_client_gets_what_is_pending_in_one_message(model_dir) -> None:
    mesh = Mesh(model_dir)
    await mesh.start(buffered_tokens=64)
    try:
        _, d = await mesh.pair()
        responses = mesh.gateway.generator.generate(ask(max_tokens=400), tenant="t", timeout_seconds=20)
        first = await anext(responses)
        assert [len(choice.token_ids) for choice in first.choices] == [1]
        # Nobody reads: the gateway takes what its bound lets in, and then no more from the worker's stream.
        await d.until(lambda: not d.running)
        second = await anext(responses)
        assert 64 < len(second.choices[0].token_ids) < 70
        ids = [i for r in (first, second) for i in r.choices[0].token_ids]
        async for response in responses:
            ids += [i for choice in response.choices for i in choice.token_ids]
        assert ids == [ord("a") + i % 26 for i in range(400)]
    finally:
        await mesh.stop()


async def test_tokens_in_and_text_untouched(mesh: Mesh) -> None:
    await mesh.pair()
    request = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[104, 105]))
    request.sampling.max_tokens = 2
    assert (await generate(mesh, request)).usage.prompt_tokens == 2


async def test_chat_is_rendered_by_the_template(mesh: Mesh) -> None:
    p, _ = await mesh.pair()
    request = generation_pb2.GenerateRequest()
    message = request.chat.messages.add(role="user")
    message.content.add(text="h")
    message.content.add(text="i")
    request.sampling.max_tokens = 2
    await generate(mesh, request)
    expected = [257, *b"user\nhi", 256, *b"\n", 257, *b"assistant\n"]
    assert list(p.calls[0][1].prompt_token_ids) == expected


async def test_nothing_of_a_request_is_kept(mesh: Mesh) -> None:
    await mesh.pair()
    await generate(mesh, ask(max_tokens=5))
    await refusal(mesh, ask(""))
    gateway = mesh.gateway
    assert gateway.admission.in_flight == 0
    assert gateway.telemetry.open_spans == 0
    assert all(not worker._charges for worker in gateway.fleet.all())
