"""What is refused before any worker is called; cases C4, C5, C6, C14."""

import asyncio
import re
from typing import Any

import grpc
import pytest

from epd.v1 import generation_pb2
from tests.unit.gateway.conftest import Mesh, ask, generate, refusal

INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("temperature", ask(temperature=-1)),
        ("temperature", ask(temperature=2.1)),
        ("temperature", ask(temperature=float("nan"))),
        ("top_p", ask(top_p=2)),
        ("top_p", ask(top_p=0)),
        ("top_k", ask(top_k=301)),
        ("min_p", ask(min_p=-0.1)),
        ("repetition_penalty", ask(repetition_penalty=0)),
        ("presence_penalty", ask(presence_penalty=3)),
        ("frequency_penalty", ask(frequency_penalty=-3)),
        ("n", ask(n=0)),
        ("n", ask(n=17)),
        ("max_tokens", ask(max_tokens=0)),
        ("min_tokens", ask(min_tokens=5, max_tokens=4)),
        ("top_logprobs", ask(top_logprobs=21)),
        ("stop_token_ids", ask(stop_token_ids=[300])),
        ("stop", ask(stop=["x"] * 17)),
        ("stop", ask(stop=[""])),
        ("stop", ask(stop=["x" * 257])),
        ("stream_interval", ask(stream_interval=2000)),
        ("request_id", ask(request_id="x" * 257)),
        ("prompt", ask("")),
        ("prompt", generation_pb2.GenerateRequest()),
        ("prompt", generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[300]))),
        ("messages", generation_pb2.GenerateRequest(chat=generation_pb2.Chat())),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_c5_c14_invalid_parameters(mesh: Mesh, field: str, request_: Any) -> None:
    p, d = await mesh.pair()
    code, metadata, details = await refusal(mesh, request_)
    assert (code, metadata["epd-field"]) == (INVALID, field)
    assert field == "prompt" or field.split("_")[0] in details
    assert not p.calls
    assert not d.calls


async def test_limits_themselves_are_allowed(mesh: Mesh) -> None:
    await mesh.pair()
    fine = ask(temperature=2, top_p=1, n=16, max_tokens=1, stop=["x" * 256] * 16, top_k=300, top_logprobs=20)
    assert len((await generate(mesh, fine)).texts) == 16


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "numbers"),
    [(65, None, ("65", "64")), (64, None, ("64",)), (60, 5, ("60", "5", "64")), (70, 1, ("70", "64"))],
)
async def test_c4_context(mesh: Mesh, tokens: int, max_tokens: int | None, numbers: tuple[str, ...]) -> None:
    p, _ = await mesh.pair(max_context=64)
    code, metadata, details = await refusal(mesh, ask("x" * tokens, max_tokens=max_tokens))
    assert (code, metadata["epd-reason"]) == (INVALID, "CONTEXT_TOO_LONG")
    assert set(numbers) <= set(re.findall(r"\d+", details))
    assert not p.calls


async def test_c4_what_just_fits_and_no_limit(mesh: Mesh) -> None:
    p, _ = await mesh.pair(max_context=64, script=lambda choice, position: 256 if position == 7 else 97)
    assert (await generate(mesh, ask("x" * 60, max_tokens=4))).texts == {0: "aaaa"}
    assert (await generate(mesh, ask("x" * 63, max_tokens=1))).texts == {0: "a"}
    assert (await generate(mesh, ask("x" * 50))).texts == {0: "a" * 7}  # until the end of text
    assert not p.calls[-1][1].sampling.HasField("max_tokens")


@pytest.mark.parametrize("request_", [ask("x" * 161), ask("x" * 120, n=4), ask("x", max_tokens=200, ignore_eos=True)])
async def test_c6_never_fits(mesh: Mesh, request_: Any) -> None:
    p, _ = await mesh.pair(num_blocks=10)
    code, metadata, details = await refusal(mesh, request_)
    assert (code, metadata["epd-reason"]) == (INVALID, "NEVER_FITS")
    assert "10" in details
    assert not p.calls


async def test_unknown_model(mesh: Mesh) -> None:
    await mesh.pair()
    code, metadata, _ = await refusal(mesh, ask(model="other"))
    assert (code, metadata["epd-reason"]) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")


async def test_overload_is_refused_with_a_hint(model_dir) -> None:
    mesh = Mesh(model_dir)
    await mesh.start(max_in_flight=2, max_per_tenant=1)
    try:
        p, _ = await mesh.pair()
        p.prefill_gate.clear()
        mine = asyncio.create_task(generate(mesh, ask(max_tokens=1)))
        await p.until(lambda: len(p.calls) == 1)
        code, metadata, _ = await refusal(mesh, ask(max_tokens=1))
        assert (code, metadata["retry-after-ms"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "1000")
        others = asyncio.create_task(generate(mesh, ask(max_tokens=1), metadata=(("x-epd-tenant", "o"),)))
        await p.until(lambda: len(p.calls) == 2)
        code, _, _ = await refusal(mesh, ask(max_tokens=1), metadata=(("x-epd-tenant", "third"),))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        p.prefill_gate.set()
        assert (await mine).texts == (await others).texts == {0: "a"}
        assert (await generate(mesh, ask(max_tokens=1))).texts == {0: "a"}
    finally:
        await mesh.stop()


async def test_draining_gateway_finishes_what_runs_and_takes_nothing_new(mesh: Mesh) -> None:
    _p, d = await mesh.pair()
    d.decode_gate.clear()
    running = asyncio.create_task(generate(mesh, ask(max_tokens=4)))
    await d.until(lambda: bool(d.calls))
    draining = asyncio.create_task(mesh.gateway.drain())
    async with asyncio.timeout(10):
        while not mesh.gateway.admission.draining:
            await asyncio.sleep(0)
    code, metadata, _ = await refusal(mesh, ask(max_tokens=1))
    assert (code, metadata["epd-reason"]) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert int(metadata["retry-after-ms"]) > 0
    assert not draining.done()
    d.decode_gate.set()
    assert (await running).texts == {0: "abcd"}
    await draining


async def test_tenants_have_salts_of_their_own(model_dir) -> None:
    mesh = Mesh(model_dir)
    await mesh.start(salt_secret="secret")
    try:
        p, _ = await mesh.pair()
        for tenant in ("a", "b", "a"):
            await generate(mesh, ask(max_tokens=1), metadata=(("x-epd-tenant", tenant),))
        salts = [request.salt for _, request in p.calls]
        assert salts[0] == salts[2] != salts[1]
        assert len(salts[0]) == 32
    finally:
        await mesh.stop()
