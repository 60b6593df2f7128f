"""The prompt in the answer: echo, its log probabilities, max_tokens 0; over both edges and after a retry."""

from typing import Any

import grpc
import httpx
import pytest

from common.errors import EngineFailed
from common.sampling import MAX_PROMPT_LOGPROBS
from tests.fakes import EOS, MODEL, spell
from tests.unit.gateway.conftest import Mesh, ask, generate, refusal
from tests.unit.gateway.test_http import chat, completion, events


async def test_grpc(mesh: Mesh) -> None:
    p, _ = await mesh.pair()
    result = await generate(mesh, ask("hi!", max_tokens=3, n=2, echo=True, prompt_logprobs=1))
    told = [response.prompt for response in result.responses if response.HasField("prompt")]
    assert len(told) == 1
    assert result.responses[0].HasField("prompt")
    assert (told[0].text, list(told[0].token_ids)) == ("hi!", list(b"hi!"))
    assert [(entry.token_id, entry.logprob, entry.rank) for entry in told[0].logprobs] == [
        (ord("i"), -1.5, 2),
        (ord("!"), -1.5, 2),
    ]
    assert [[top.token_id for top in entry.top] for entry in told[0].logprobs] == [[ord("j")], [ord('"')]]
    assert result.texts == {0: "abc", 1: "bcd"}  # the text is the answer's alone
    assert p.calls[0][1].sampling.prompt_logprobs == 1
    assert not any(response.HasField("prompt") for response in (await generate(mesh, ask(max_tokens=2))).responses)


@pytest.mark.parametrize("roles", [["prefill,decode"], ["prefill", "decode"]])
async def test_grpc_prompt_alone(mesh: Mesh, roles: list[str]) -> None:
    workers = [await mesh.add(each, each.split(","), script=spell("")) for each in roles]
    result = await generate(mesh, ask("hello", max_tokens=0, prompt_logprobs=0, min_tokens=0))
    assert result.texts == {0: ""}
    assert (result.token_ids, result.reasons) == ({0: []}, {0: "length"})  # whatever the token would have been
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (5, 0)
    assert len(result.responses[0].prompt.logprobs) == 4
    assert result.responses[0].prompt.text == ""  # not asked for
    assert workers[0].calls[0][1].sampling.max_tokens == 1
    assert (await generate(mesh, ask("h", max_tokens=0, prompt_logprobs=3))).responses[0].HasField("prompt")
    code, _, details = await refusal(mesh, ask("hello", max_tokens=0))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "max_tokens" in details


async def test_a_retry_asks_again_a_resume_does_not(mesh: Mesh) -> None:
    p, d = await mesh.pair()
    p.prefill_errors = [EngineFailed("x")]
    d.decode_errors = [(-1, EngineFailed("x")), (1, EngineFailed("x"))]  # the first call is cancelled before it fails
    bias = {97: 5.0}
    request = ask("hi", max_tokens=6, prompt_logprobs=0, echo=True)
    request.sampling.logit_bias.update(bias)
    result = await generate(mesh, request)
    assert result.texts == {0: "abcdef"}
    assert sum(response.HasField("prompt") for response in result.responses) == 1
    asked = [request for method, request in p.calls if method == "prefill"]
    assert [each.sampling.HasField("prompt_logprobs") for each in asked] == [True, True, False]
    assert [bool(each.output_token_ids) for each in asked] == [False, False, True]
    assert [dict(each.sampling.logit_bias) for each in asked] == [bias] * 3
    assert len({each.sampling.seed for each in asked}) == 1


async def test_a_worker_that_does_not_know_it_fails_the_attempt(mesh: Mesh) -> None:
    """One of an older version: an answer without them would be no answer."""
    old, _ = await mesh.pair()
    old.scores = False
    new = await mesh.add("p1", ["prefill"])
    for _ in range(3):
        result = await generate(mesh, ask("hello", max_tokens=2, prompt_logprobs=0))
        assert len(result.responses[0].prompt.logprobs) == 4
    assert new.calls


async def test_routing_believes_in_no_cached_block(mesh: Mesh) -> None:
    p, _ = await mesh.pair()
    text = "x" * 64
    prepared = [
        await mesh.gateway.generator.preprocessor.prepare(request, "default")
        for request in (ask(text), ask(text, prompt_logprobs=0))
    ]
    asked = [
        each.route_request(output_tokens=0, choices=1, exclude=frozenset(), prefer_prefill="") for each in prepared
    ]
    assert any(asked[0].block_keys.values())
    assert not any(asked[1].block_keys.values())
    assert not p.calls


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_as_lm_eval_harness_asks(mesh: Mesh, http: httpx.AsyncClient, max_tokens: int) -> None:
    """The local-completions task: token ids, echo, logprobs 1; sums over [context:-1] of what comes back."""
    for worker in await mesh.pair():
        worker.logprobs = True
    prompts = [list(b"abc"), list(b"defgh")]
    body = {"model": MODEL, "prompt": prompts, "temperature": 0, "max_tokens": max_tokens, "logprobs": 1}
    answer = (await http.post("/v1/completions", json=body | {"seed": 1234, "echo": True})).json()
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        told = choice["logprobs"]
        text = bytes(prompt).decode() + "a" * max_tokens
        assert choice["text"] == text
        assert told["tokens"] == list(text)
        assert told["token_logprobs"] == [None, *[-1.5] * (len(prompt) - 1), *[-0.5] * max_tokens]
        assert told["text_offset"] == list(range(len(text)))
        assert told["top_logprobs"][0] is None
        second = chr(prompt[1])
        assert told["top_logprobs"][1] == {chr(prompt[1] + 1): -0.5, second: -1.5}  # the token's own is there, too
        assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 2 * max_tokens
    assert answer["usage"]["prompt_tokens"] == 8


async def test_echo_in_a_stream(mesh: Mesh, http: httpx.AsyncClient) -> None:
    for worker in await mesh.pair():
        worker.logprobs = True
    for fields in ({"logprobs": 1, "n": 2}, {"n": 2}, {"max_tokens": 0, "logprobs": 1}):
        body = completion(prompt=["hé", "xy"], echo=True) | fields
        whole = (await http.post("/v1/completions", json=body)).json()["choices"]
        chunks = (await events(http, "/v1/completions", body))[:-1]
        texts: dict[int, str] = {}
        logprobs: dict[int, dict[str, list[Any]]] = {}
        for chunk in chunks:
            (choice,) = chunk["choices"]
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                logprobs.setdefault(choice["index"], {}).setdefault(name, []).extend(values)
        assert texts == {choice["index"]: choice["text"] for choice in whole}
        assert texts[0].startswith("hé")
        if "logprobs" in fields:
            assert logprobs == {choice["index"]: choice["logprobs"] for choice in whole}


async def test_echo_of_special_tokens(mesh: Mesh, http: httpx.AsyncClient) -> None:
    """Text as it was sent; decoded ids without special tokens, unless they are wanted. Offsets fit the text."""
    for worker in await mesh.pair():
        worker.logprobs = True
    ids = [EOS, *b"ab"]
    for prompt, fields, text, offsets in (
        ("<|end|>ab", {}, "<|end|>ab", [0, 7, 8]),
        (ids, {}, "ab", [0, 0, 1]),
        (ids, {"skip_special_tokens": False}, "<|end|>ab", [0, 7, 8]),
    ):
        body = completion(prompt=prompt, echo=True, logprobs=0, max_tokens=0) | fields
        (choice,) = (await http.post("/v1/completions", json=body)).json()["choices"]
        assert choice["text"] == text
        assert choice["logprobs"]["text_offset"] == offsets
        assert choice["logprobs"]["tokens"] == ["<|end|>", "a", "b"]


async def test_prompt_logprobs_in_vllms_shape(mesh: Mesh, http: httpx.AsyncClient) -> None:
    await mesh.pair()
    (choice,) = (await http.post("/v1/completions", json=completion(prompt="ab", prompt_logprobs=2))).json()["choices"]
    own = {"logprob": -1.5, "rank": 2, "decoded_token": "b"}
    expected = [None, {"98": own, "99": {"logprob": -0.5, "rank": 1, "decoded_token": "c"}}]
    assert choice["prompt_logprobs"] == expected
    assert choice["logprobs"] is None
    assert choice["text"] == "abcd"
    (choice,) = (await http.post("/v1/completions", json=completion(prompt="ab", prompt_logprobs=0))).json()["choices"]
    assert choice["prompt_logprobs"] == [None, {"98": own}]
    # Each with as many as it was asked for.
    body = completion(prompt="ab", prompt_logprobs=2, echo=True, logprobs=1)
    (choice,) = (await http.post("/v1/completions", json=body)).json()["choices"]
    assert choice["prompt_logprobs"] == expected
    assert choice["logprobs"]["top_logprobs"][1] == {"c": -0.5, "b": -1.5}
    answer = (await http.post("/v1/chat/completions", json=chat(prompt_logprobs=0, n=2))).json()
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in answer["choices"][0]


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("prompt_logprobs", {"prompt_logprobs": -1}),
        ("prompt_logprobs", {"prompt_logprobs": 21}),
        ("prompt_logprobs", {"prompt_logprobs": "1"}),
        ("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
        ("prompt_logprobs", {"prompt_logprobs": 20, "prompt": [97] * (MAX_PROMPT_LOGPROBS // 21 + 1)}),
        ("logprobs", {"logprobs": 21, "echo": True}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": -1, "echo": True}),
        ("echo", {"echo": "yes"}),
    ],
)
async def test_c14_what_is_refused(mesh: Mesh, http: httpx.AsyncClient, param: str, fields: dict[str, Any]) -> None:
    p, _ = await mesh.pair(max_context=100_000, num_blocks=10_000)
    response = await http.post("/v1/completions", json=completion(**fields))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert param in error["message"]
    assert not p.calls
