"""How the next token is chosen and when a choice ends, through the whole mesh: the same in every form of it."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
import torch

from epd.v1 import types_pb2
from tests import oracle
from tests.e2e.conftest import Meshes
from tests.mesh import MODEL, PATIENCE_SECONDS, Answer, LocalMesh

session = pytest.mark.asyncio(loop_scope="session")

BLOCK = 16
CONTEXT = 512  # of the tiny checkpoints
STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH
FORMS: dict[str, dict[str, Any]] = {
    "aggregated": {"roles": ("prefill,decode",)},
    "shm": {"roles": ("prefill", "decode")},
    "grpc": {"roles": ("prefill", "decode"), "channels": ("grpc",)},
    "chunk 7": {"roles": ("prefill", "decode"), "token_budget": 7},
}
SHAPES = {
    "filters": {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "min_p": 0.02},
    "penalties": {
        "temperature": 1.2,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.3,
        "logit_bias": {33: 4.0, 44: -6.0},
    },
}
PROMPT = [20 + 7 * i % 400 for i in range(37)]


def outputs(answer: Answer) -> dict[int, list[int]]:
    return {index: choice.tokens for index, choice in answer.choices.items()}


async def refused(mesh: LocalMesh, prompt: Any, **options: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await mesh.generate(prompt, **options)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return error.value


@session
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
async def test_c09_same_seed_same_tokens(shape: str, form: str, meshes: Meshes) -> None:
    """Alone and cold on one worker, as everywhere else: chunked, moved, cached, among eight others."""
    options: dict[str, Any] = {"n": 3, "seed": 4711, "max_tokens": 16, "ignore_eos": True, **SHAPES[shape]}
    prompt = [*PROMPT, len(shape)]
    one = await meshes.get(**FORMS["aggregated"], prefix_cache=False)
    expected = outputs(await one.generate(prompt, **options))
    assert len(set(map(tuple, expected.values()))) == 3

    mesh = await meshes.get(**FORMS[form])
    for _ in range(2):
        assert outputs(await mesh.generate(prompt, **options)) == expected
    others = [mesh.generate(prompt[i:], temperature=1.0, seed=i, max_tokens=12) for i in range(1, 9)]
    answer, *_ = await asyncio.gather(mesh.generate(prompt, **options), *others)
    assert outputs(answer) == expected
    # One choice of them asked for alone has the same noise.
    assert outputs(await mesh.generate(prompt, **options | {"n": 1})) == {0: expected[0]}
    await mesh.settled()


@session
async def test_without_a_seed_calls_differ(meshes: Meshes) -> None:
    mesh = await meshes.get()
    options: dict[str, Any] = {"temperature": 1.5, "max_tokens": 16, "ignore_eos": True}
    answers = [await mesh.generate(PROMPT, **options) for _ in range(3)]
    assert len({tuple(answer.tokens) for answer in answers}) == 3
    seeded = [(await mesh.generate(PROMPT, seed=seed, **options)).tokens for seed in (0, 0, 1)]
    assert seeded[0] == seeded[1] != seeded[2]


@session
@pytest.mark.parametrize("form", ["aggregated", "shm"])
async def test_c08_logprobs_equal_the_models(form: str, meshes: Meshes, checkpoint: Any) -> None:
    """From raw logits, whatever penalties chose; one entry a token, over the hand-off too."""
    mesh = await meshes.get(**FORMS[form])
    answer = await mesh.generate(
        PROMPT, max_tokens=10, ignore_eos=True, temperature=0.9, seed=5, presence_penalty=1.5, top_logprobs=4
    )
    entries = answer.choices[0].logprobs
    assert [entry.token_id for entry in entries] == answer.tokens
    with torch.inference_mode():
        logits = oracle.reference_model(checkpoint("llama"))(torch.tensor([PROMPT + answer.tokens])).logits[0]
    rows = logits[len(PROMPT) - 1 : -1].log_softmax(-1)
    for entry, row in zip(entries, rows, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        best = row.topk(4)
        assert [top.token_id for top in entry.top] == best.indices.tolist()
        assert [top.logprob for top in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@session
async def test_c08_only_the_chosen_tokens_or_none(meshes: Meshes) -> None:
    mesh = await meshes.get()
    chosen = (await mesh.generate(PROMPT, max_tokens=6, ignore_eos=True, top_logprobs=0)).choices[0]
    assert [entry.token_id for entry in chosen.logprobs] == chosen.tokens
    assert not any(entry.top for entry in chosen.logprobs)
    assert not (await mesh.generate(PROMPT, max_tokens=6, ignore_eos=True)).choices[0].logprobs


async def events(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    async with client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


@session
@pytest.mark.parametrize("shape", ["chat", "completion"])
async def test_c08_both_http_shapes_streamed_and_not(shape: str, meshes: Meshes) -> None:
    mesh = await meshes.get()
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    if shape == "chat":
        path = "/v1/chat/completions"
        body |= {"messages": [{"role": "user", "content": "one two"}], "logprobs": True, "top_logprobs": 3}
    else:
        path = "/v1/completions"
        body |= {"prompt": PROMPT, "logprobs": 3}
    async with httpx.AsyncClient(base_url=f"http://{mesh.gateway.http_address}", timeout=PATIENCE_SECONDS) as client:
        whole = (await client.post(path, json=body)).json()["choices"][0]["logprobs"]
        parts = [
            choice["logprobs"]
            async for event in events(client, path, body)
            for choice in event["choices"]
            if choice["logprobs"]
        ]
    if shape == "chat":
        assert len(whole["content"]) == 8
        assert [entry for part in parts for entry in part["content"]] == whole["content"]
        for entry in whole["content"]:
            assert len(entry["top_logprobs"]) == 3
            assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]  # greedy
            assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]
        return
    for name, values in whole.items():
        assert len(values) == 8, name
        assert [value for part in parts for value in part[name]] == values
    answer = await mesh.generate(PROMPT, max_tokens=8, ignore_eos=True, top_logprobs=3)
    assert whole["token_logprobs"] == pytest.approx([entry.logprob for entry in answer.choices[0].logprobs], abs=1e-5)


def transferred(mesh: LocalMesh) -> float:
    """Bytes pulled by the mesh's workers so far."""
    families = [family for w in mesh.workers for family in w.telemetry.metrics.transfer_bytes.collect()]
    return sum(sample.value for family in families for sample in family.samples if sample.name.endswith("_total"))


@session
@pytest.mark.parametrize("form", ["aggregated", "shm", "grpc"])
async def test_a06_first_token_is_stop(form: str, meshes: Meshes) -> None:
    mesh = await meshes.get(**FORMS[form])
    first = (await mesh.generate(PROMPT, max_tokens=1)).tokens
    await mesh.settled()
    answer = await mesh.generate(PROMPT, max_tokens=50, stop_token_ids=first)
    assert answer.tokens == first
    assert answer.choices[0].finish_reason == STOP
    assert answer.choices[0].text == ""
    assert answer.usage.completion_tokens == 1
    await mesh.settled()


@session
@pytest.mark.parametrize("form", ["aggregated", "shm"])
async def test_a07_one_token_never_reaches_decode(form: str, meshes: Meshes) -> None:
    mesh = await meshes.get(**FORMS[form])
    before = transferred(mesh)
    answer = await mesh.generate(PROMPT, max_tokens=1, ignore_eos=True, n=2)
    assert [len(choice.tokens) for choice in answer.choices.values()] == [1, 1]
    assert {choice.finish_reason for choice in answer.choices.values()} == {LENGTH}
    assert transferred(mesh) == before
    assert answer.accounting.decode_worker == ""
    spans = [span.name for w in mesh.workers for span in w.store.trace(answer.accounting.trace_id)]
    assert "prefill.run" in spans
    assert not [name for name in spans if name.startswith(("decode.", "transfer."))]
    await mesh.settled()


@session
@pytest.mark.parametrize("form", FORMS)
async def test_a08_min_tokens_over_the_hand_off(form: str, meshes: Meshes) -> None:
    """A stop token that always wants to come comes right after min_tokens others."""
    mesh = await meshes.get(**FORMS[form])
    stop = 99
    free = await mesh.generate(PROMPT, max_tokens=5, ignore_eos=True, logit_bias={stop: -100.0})
    answer = await mesh.generate(
        PROMPT, min_tokens=5, max_tokens=50, ignore_eos=True, stop_token_ids=[stop], logit_bias={stop: 100.0}
    )
    assert answer.tokens == [*free.tokens, stop]
    assert answer.choices[0].finish_reason == STOP
    prefill = [s for s in mesh.workers[0].store.trace(answer.accounting.trace_id) if s.name == "prefill.run"]
    assert len(prefill) == (form != "aggregated")
    await mesh.settled()


@session
@pytest.mark.parametrize("form", FORMS)
async def test_a09_prompt_shorter_than_a_block(form: str, meshes: Meshes, checkpoint: Any) -> None:
    mesh = await meshes.get(**FORMS[form])
    for length in (1, 5, BLOCK - 1):
        prompt = [31 + 11 * i for i in range(length)]
        expected = oracle.generate(checkpoint("llama"), prompt, 8)
        for _ in range(2):
            answer = await mesh.generate(prompt, max_tokens=8, ignore_eos=True)
            assert answer.tokens == expected
            assert answer.usage.cached_tokens == 0


@session
@pytest.mark.parametrize("form", FORMS)
async def test_a10_exactly_k_blocks_twice(form: str, meshes: Meshes, checkpoint: Any) -> None:
    mesh = await meshes.get(**FORMS[form])
    for blocks in (1, 3):
        prompt = [200 + 13 * i % 250 + blocks for i in range(blocks * BLOCK)]
        expected = oracle.generate(checkpoint("llama"), prompt, 20)
        cold, warm = [await mesh.generate(prompt, max_tokens=20, ignore_eos=True) for _ in range(2)]
        assert cold.tokens == warm.tokens == expected
        assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, (blocks - 1) * BLOCK)
    await mesh.settled()


@session
@pytest.mark.parametrize("form", ["aggregated", "shm"])
async def test_a11_each_choice_has_its_own_end(form: str, meshes: Meshes) -> None:
    mesh = await meshes.get(**FORMS[form])
    options: dict[str, Any] = {"n": 3, "temperature": 1.4, "seed": 8, "max_tokens": 14, "ignore_eos": True}
    free = outputs(await mesh.generate(PROMPT, **options))
    taken = {token for index in (0, 2) for token in free[index]}
    place = next(i for i, token in enumerate(free[1]) if i >= 2 and token not in {*taken, *free[1][:i]})
    answer = await mesh.generate(PROMPT, stop_token_ids=[free[1][place]], **options)
    assert outputs(answer) == free | {1: free[1][: place + 1]}
    assert {index: choice.finish_reason for index, choice in answer.choices.items()} == {0: LENGTH, 1: STOP, 2: LENGTH}
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens == 14 + place + 1 + 14
    await mesh.settled()


@session
@pytest.mark.parametrize("form", ["aggregated", "shm"])
async def test_c04_context_limits(form: str, meshes: Meshes) -> None:
    mesh = await meshes.get(**FORMS[form])
    for length in (CONTEXT, CONTEXT + 1):
        error = await refused(mesh, [5] * length)
        assert str(length) in error.details()
        assert str(CONTEXT) in error.details()
    error = await refused(mesh, [5] * 500, max_tokens=13)
    assert all(number in error.details() for number in ("500", "13", str(CONTEXT)))
    # As much as fits: by max_tokens, and without it until the context's end.
    prompt = [20 + i % 450 for i in range(480)]
    for options in ({"max_tokens": 32}, {}):
        answer = await mesh.generate(prompt, ignore_eos=True, **options)
        assert len(answer.tokens) == CONTEXT - 480
        assert answer.choices[0].finish_reason == LENGTH
    assert len((await mesh.generate([20 + i % 450 for i in range(CONTEXT - 1)], ignore_eos=True)).tokens) == 1
    await mesh.settled()


@session
async def test_c04_omitted_max_tokens_ends_with_the_text(meshes: Meshes) -> None:
    mesh = await meshes.get()
    eos = 2
    answer = await mesh.generate(PROMPT, logit_bias={eos: 100.0}, min_tokens=3)
    assert len(answer.tokens) == 4
    assert answer.tokens[-1] == eos
    assert answer.choices[0].finish_reason == STOP
    ignored = await mesh.generate(PROMPT, logit_bias={eos: 100.0}, ignore_eos=True, max_tokens=5)
    assert ignored.tokens == [eos] * 5
    assert ignored.choices[0].finish_reason == LENGTH


@session
async def test_c05_empty_prompt_and_no_tokens(meshes: Meshes) -> None:
    mesh = await meshes.get()
    assert "prompt" in (await refused(mesh, [])).details()
    assert "prompt" in (await refused(mesh, "")).details()
    assert "max_tokens" in (await refused(mesh, PROMPT, max_tokens=0)).details()
    assert "vocabulary" in (await refused(mesh, [5, 512])).details()
    assert len((await mesh.generate(PROMPT, max_tokens=3, ignore_eos=True)).tokens) == 3  # the engines live
    await mesh.settled()


@session
async def test_c06_what_can_never_fit_fails_fast(meshes: Meshes) -> None:
    mesh = await meshes.get(num_blocks=6)
    error = await refused(mesh, [5] * 100, max_tokens=4)
    assert "6 blocks" in error.details()
    assert dict(error.trailing_metadata())["epd-reason"] == "NEVER_FITS"
    # Sure to outgrow the pool later, too.
    await refused(mesh, [5] * 60, min_tokens=60, max_tokens=80)
    assert len((await mesh.generate([20 + i for i in range(60)], max_tokens=8, ignore_eos=True)).tokens) == 8
    await mesh.settled()


@session
@pytest.mark.parametrize("form", FORMS)
async def test_c10_cold_then_warm_four_times(form: str, meshes: Meshes, checkpoint: Any) -> None:
    mesh = await meshes.get(**FORMS[form])
    prompt = [450 - i * 3 for i in range(70)]
    expected = oracle.generate(checkpoint("llama"), prompt, 24)
    answers = [await mesh.generate(prompt, max_tokens=24, ignore_eos=True) for _ in range(4)]
    assert [answer.tokens for answer in answers] == [expected] * 4
    assert len({answer.choices[0].text for answer in answers}) == 1
    # c13: nothing of it was there before, then all whole blocks but the last token's.
    assert [answer.usage.cached_tokens for answer in answers] == [0, 64, 64, 64]


@session
@pytest.mark.parametrize("form", ["aggregated", "shm"])
async def test_c12_stop_string_before_min_tokens(form: str, meshes: Meshes) -> None:
    mesh = await meshes.get(**FORMS[form])
    options: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True, "logit_bias": {37: 100.0}}
    free = await mesh.generate(PROMPT, **options)
    assert free.tokens == [37] * 16
    letter = free.choices[0].text[0]
    at_once = await mesh.generate(PROMPT, stop=[letter], **options)
    assert (at_once.choices[0].text, at_once.choices[0].stop_string) == ("", letter)
    later = await mesh.generate(PROMPT, stop=[letter], min_tokens=6, **options)
    assert later.choices[0].text == letter * 6
    assert len(later.tokens) == 7
    assert later.choices[0].finish_reason == STOP
    await mesh.settled()


@session
@pytest.mark.parametrize("form", FORMS)
async def test_c13_cached_tokens_cold_and_warm(form: str, meshes: Meshes) -> None:
    mesh = await meshes.get(**FORMS[form])
    base = [300 + i % 90 for i in range(100)]
    cold = await mesh.generate(base, max_tokens=2, ignore_eos=True)
    assert cold.usage.cached_tokens == 0
    warm = await mesh.generate([*base[:64], 9, 8, 7], max_tokens=2, ignore_eos=True)
    assert warm.usage.cached_tokens == 64
    other = await mesh.generate([9, *base], max_tokens=2, ignore_eos=True)
    assert other.usage.cached_tokens == 0


@session
@pytest.mark.parametrize("form", FORMS)
async def test_b07_repeated_tokens(form: str, meshes: Meshes, checkpoint: Any) -> None:
    """Blocks of equal tokens are different blocks: they differ by what is before them."""
    mesh = await meshes.get(**FORMS[form])
    for length in (3 * BLOCK, 5 * BLOCK + 3, 2 * BLOCK):
        prompt = [77] * length
        expected = oracle.generate(checkpoint("llama"), prompt, 8)
        for _ in range(2):
            assert (await mesh.generate(prompt, max_tokens=8, ignore_eos=True)).tokens == expected
    await mesh.settled()
