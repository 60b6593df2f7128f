"""The OpenAI edge over a real socket; cases C3, C7, C8, C11, C14, A12, A16."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from common.errors import InvalidArgument, Overloaded
from epd.v1 import trace_pb2, trace_pb2_grpc
from services.gateway.http_server import HttpServer
from tests.fakes import EOS, MODEL, spell
from tests.unit.gateway.conftest import Mesh

JSON = {"content-type": "application/json"}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4} | fields


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hi", "max_tokens": 4} | fields


async def events(http: httpx.AsyncClient, path: str, body: dict[str, Any], **options: Any) -> list[Any]:
    """Data of every event; the last "[DONE]" stays a string."""
    found = []
    async with http.stream("POST", path, json=body | {"stream": True}, **options) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line:
                data = line.removeprefix("data: ")
                assert data != line
                found.append(data if data == "[DONE]" else json.loads(data))
    if found[-1] == "[DONE]":
        check_chunks(found[:-1])
    return found


def check_chunks(chunks: list[Any]) -> None:
    """As OpenAI streams: one choice a chunk (none beside usage or timing, at the end); each choice ends once, last."""
    if not chunks[-1]["choices"]:
        assert chunks[-1].get("usage") or chunks[-1].get("epd")
        chunks = chunks[:-1]
    ended: set[int] = set()
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert choice["index"] not in ended
        if choice["finish_reason"] is not None:
            ended.add(choice["index"])
            assert choice.get("delta", {}) == {}  # of a chat the end says nothing else
    assert ended == {chunk["choices"][0]["index"] for chunk in chunks}


async def test_chat(mesh: Mesh, http: httpx.AsyncClient) -> None:
    p, _ = await mesh.pair()
    response = await http.post("/v1/chat/completions", json=chat(), headers={"x-request-id": "mine"})
    body = response.json()
    assert response.headers["x-request-id"] == "mine"
    assert (body["object"], body["model"]) == ("chat.completion", MODEL)
    message = {"role": "assistant", "content": "abcd", "refusal": None}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
    prompt = len(p.calls[0][1].prompt_token_ids)
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 4,
        "total_tokens": prompt + 4,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert "epd" not in body


async def test_chat_stream(mesh: Mesh, http: httpx.AsyncClient) -> None:
    await mesh.pair(script=spell("안녕 🙂"))
    found = await events(http, "/v1/chat/completions", chat(max_tokens=50))
    assert found.pop() == "[DONE]"
    assert found[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in found[1:])
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in found) == "안녕 🙂"
    reasons = [choice["finish_reason"] for chunk in found for choice in chunk["choices"]]
    assert reasons[-1] == "stop"
    assert set(reasons[:-1]) <= {None}
    assert len({chunk["id"] for chunk in found}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in found)


@pytest.mark.parametrize("max_tokens", [1, 4])
async def test_one_choice_a_chunk(mesh: Mesh, http: httpx.AsyncClient, max_tokens: int) -> None:
    """Also of several choices, and when the first message is the last: who reads choices[0] misses nothing."""
    await mesh.pair()
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", completion)):
        for n in (1, 3):
            chunks = (await events(http, path, body(n=n, max_tokens=max_tokens)))[:-1]  # checks them
            texts = dict.fromkeys(range(n), "")
            reasons: dict[int, list[str]] = {i: [] for i in range(n)}
            for chunk in chunks:
                choice = chunk["choices"][0]
                texts[choice["index"]] += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
                reasons[choice["index"]] += [choice["finish_reason"]] if choice["finish_reason"] else []
            assert texts == {i: "abcdef"[i : i + max_tokens] for i in range(n)}
            assert reasons == {i: ["length"] for i in range(n)}


@pytest.mark.parametrize(
    ("options", "usage"),
    [(None, False), ({}, False), ({"include_usage": False}, False), ({"include_usage": True}, True)],
)
async def test_c7_usage_in_streams(mesh: Mesh, http: httpx.AsyncClient, options: Any, usage: bool) -> None:
    await mesh.pair()
    for path, body in (("/v1/chat/completions", chat()), ("/v1/completions", completion())):
        found = await events(http, path, body | {"stream_options": options})
        assert found.pop() == "[DONE]"
        if usage:
            last = found.pop()
            assert last["choices"] == []
            assert last["usage"]["completion_tokens"] == 4
            assert all(chunk["usage"] is None for chunk in found)
        else:
            assert all("usage" not in chunk for chunk in found)
        assert all(chunk["choices"] for chunk in found)


async def test_timing_only_when_asked(mesh: Mesh, http: httpx.AsyncClient) -> None:
    await mesh.pair()
    headers = {"x-epd-timing": "1"}
    body = (await http.post("/v1/chat/completions", json=chat(), headers=headers)).json()
    hops = body["epd"]["total_hops"]
    assert sum(hop["seconds"] for hop in hops) == pytest.approx(body["epd"]["total_seconds"], abs=1e-6)
    found = await events(http, "/v1/completions", completion(), headers=headers)
    assert found[-2]["epd"]["attempts"] == 1


async def test_c8_logprobs_equal_in_stream_and_whole(mesh: Mesh, http: httpx.AsyncClient) -> None:
    for worker in await mesh.pair():
        worker.logprobs = True
    wanted = chat(logprobs=True, top_logprobs=2)
    whole = (await http.post("/v1/chat/completions", json=wanted)).json()["choices"][0]["logprobs"]["content"]
    streamed = [
        entry
        for chunk in (await events(http, "/v1/chat/completions", wanted))[:-1]
        for choice in chunk["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert whole == streamed
    assert [entry["token"] for entry in whole] == list("abcd")
    assert whole[0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "b", "logprob": -1.5, "bytes": [98]},
        ],
    }
    wanted = completion(logprobs=2)
    one = (await http.post("/v1/completions", json=wanted)).json()["choices"][0]["logprobs"]
    assert one["tokens"] == list("abcd")
    assert one["text_offset"] == [0, 1, 2, 3]
    assert one["top_logprobs"][1] == {"b": -0.5, "c": -1.5}
    merged: dict[str, list[Any]] = {name: [] for name in one}
    for chunk in (await events(http, "/v1/completions", wanted))[:-1]:
        for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
            merged[name] += values
    assert merged == one


async def test_completions_prompts(mesh: Mesh, http: httpx.AsyncClient) -> None:
    p, _ = await mesh.pair()
    for prompt, expected in (
        ("hi", [[104, 105]]),
        ([104, 105], [[104, 105]]),
        (["a", "bc"], [[97], [98, 99]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ):
        p.calls.clear()
        body = (await http.post("/v1/completions", json=completion(prompt=prompt, n=2))).json()
        assert sorted(list(request.prompt_token_ids) for _, request in p.calls) == expected
        assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(expected)))
        assert [choice["text"] for choice in body["choices"]] == ["abcd", "bcde"] * len(expected)
        assert body["usage"]["prompt_tokens"] == sum(map(len, expected))
        found = await events(http, "/v1/completions", completion(prompt=prompt, n=2))
        texts: dict[int, str] = {}
        for chunk in found[:-1]:
            for choice in chunk["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        assert texts == {i: ["abcd", "bcde"][i % 2] for i in range(2 * len(expected))}


@pytest.mark.parametrize("stop", ["cd", ["x", "cd"], ["1", "2", "3", "4", "cd"]])
async def test_c3_stop_forms(mesh: Mesh, http: httpx.AsyncClient, stop: Any) -> None:
    await mesh.pair()
    choice = (await http.post("/v1/completions", json=completion(stop=stop, max_tokens=9))).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")


async def test_null_means_absent(mesh: Mesh, http: httpx.AsyncClient) -> None:
    p, _ = await mesh.pair(script=spell("ok"))
    nothing = dict.fromkeys(("max_tokens", "temperature", "top_p", "n", "stop", "seed", "logit_bias", "user", "top_k"))
    response = await http.post("/v1/chat/completions", json=chat(**nothing, stream_options=None, logprobs=None))
    assert response.json()["choices"][0]["message"]["content"] == "ok"
    assert not p.calls[0][1].sampling.HasField("max_tokens")


async def test_extensions_reach_the_workers(mesh: Mesh, http: httpx.AsyncClient) -> None:
    p, _ = await mesh.pair()
    extras = {"top_k": 5, "min_p": 0.25, "repetition_penalty": 1.5, "min_tokens": 1, "ignore_eos": True}
    extras |= {"stop_token_ids": [200], "seed": -1, "logit_bias": {"97": 5}}
    assert (await http.post("/v1/chat/completions", json=chat(**extras))).status_code == 200
    sampling = p.calls[0][1].sampling
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (5, 0.25, 1.5)
    assert (sampling.min_tokens, sampling.ignore_eos, list(sampling.stop_token_ids)) == (1, True, [200])
    assert (sampling.seed, dict(sampling.logit_bias)) == (2**64 - 1, {97: 5.0})
    await http.post("/v1/chat/completions", json=chat(max_tokens=None, max_completion_tokens=2))
    assert p.calls[1][1].sampling.max_tokens == 2


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("temperature", {"temperature": -1}),
        ("top_p", {"top_p": 2}),
        ("n", {"n": 0}),
        ("n", {"n": 99}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": -5}),
        ("max_tokens", {"max_tokens": "many"}),
        ("nonsense", {"nonsense": 1}),
        ("tools", {"tools": [{}]}),
        ("messages", {"messages": []}),
        (
            "messages[0].content[0]",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        ),
        ("top_logprobs", {"top_logprobs": 3}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 30}),
        ("response_format", {"response_format": {"type": "xml"}}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("stop", {"stop": [""]}),
    ],
)
async def test_c14_invalid_parameters(mesh: Mesh, http: httpx.AsyncClient, param: str, fields: dict[str, Any]) -> None:
    p, _ = await mesh.pair()
    response = await http.post("/v1/chat/completions", json=chat(**fields))
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert param in error["message"]
    assert error["code"]
    assert not p.calls


LONG = b"9" * 5000  # more digits than Python makes a number of


@pytest.mark.parametrize(
    ("param", "field"),
    [
        ("logit_bias", b'"logit_bias": {"%s": 1}' % LONG),
        ("logit_bias", b'"logit_bias": {"5": %s}' % LONG),
        ("logit_bias", '"logit_bias": {"٣": 1}'.encode()),
        ("max_tokens", b'"max_tokens": %s' % LONG),
        ("max_tokens", b'"max_tokens": %s' % LONG[:4000]),
        ("n", b'"n": -%s' % LONG),
        ("seed", b'"seed": %s' % LONG),
        ("temperature", b'"temperature": %s' % LONG),
        ("stop_token_ids", b'"stop_token_ids": [%s]' % LONG),
        ("prompt", b'"prompt": [%s]' % LONG),
        ("prompt", b'"prompt": [[%s]]' % LONG),
    ],
)
async def test_numbers_of_any_length_are_refused_by_name(
    mesh: Mesh, http: httpx.AsyncClient, param: str, field: bytes
) -> None:
    p, _ = await mesh.pair()
    body = b'{"model": "%s", %s%s}' % (MODEL.encode(), field, b"" if param == "prompt" else b', "prompt": "hi"')
    response = await http.post("/v1/completions", content=body, headers=JSON)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error["message"][:200]
    assert len(error["message"]) < 300
    assert not p.calls


@pytest.mark.parametrize("bind", ["127.0.0.1:70000", "127.0.0.1:http", "127.0.0.1"])
async def test_an_address_that_is_none(bind: str) -> None:
    with pytest.raises(InvalidArgument, match=bind):
        await HttpServer(None).start(bind)


async def test_errors_have_openais_shape(mesh: Mesh, http: httpx.AsyncClient) -> None:
    p, _ = await mesh.pair()
    response = await http.post("/v1/chat/completions", content=b"{", headers=JSON)
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")
    response = await http.post("/v1/chat/completions", json=chat(model="other"))
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    p.prefill_errors = [Overloaded("full", retry_after_seconds=3) for _ in range(9)]
    response = await http.post("/v1/chat/completions", json=chat(stream=True))  # before the first event: a status
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert (await http.get("/v1/nothing")).json()["error"]["message"]
    assert (await http.get("/v1/completions")).status_code == 405


async def test_c11_an_error_in_mid_stream_is_one_event_and_no_done(mesh: Mesh, http: httpx.AsyncClient) -> None:
    _, d = await mesh.pair()
    d.decode_errors = [(2, InvalidArgument("no more", field="prompt"))]
    found = await events(http, "/v1/completions", completion(max_tokens=9))
    assert "[DONE]" not in found
    assert found[-1] == {
        "error": {
            "message": "no more",
            "type": "invalid_request_error",
            "param": "prompt",
            "code": "invalid_argument",
        }
    }
    assert "".join(chunk["choices"][0]["text"] for chunk in found[:-1]) == "abc"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in found[:-1])


async def test_a12_duplicate_request_id(mesh: Mesh, http: httpx.AsyncClient) -> None:
    p, _ = await mesh.pair()
    p.prefill_gate.clear()
    headers = {"x-request-id": "same"}
    first = asyncio.create_task(http.post("/v1/completions", json=completion(), headers=headers))
    await p.until(lambda: bool(p.calls))
    assert (await http.post("/v1/completions", json=completion(), headers=headers)).status_code == 409
    p.prefill_gate.set()
    assert (await first).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after_first", [False, True])
async def test_a16_disconnect_cancels(mesh: Mesh, http: httpx.AsyncClient, stream: bool, after_first: bool) -> None:
    p, d = await mesh.pair()
    d.decode_gate.clear()
    if not after_first:
        p.prefill_gate.clear()
    request = asyncio.create_task(http.post("/v1/completions", json=completion(stream=stream)))
    await d.until(lambda: bool(d.calls))
    await p.until(lambda: bool(p.calls) and (not after_first or not p.running))
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await p.until(lambda: not p.running)
    await d.until(lambda: not d.running)
    assert len(d.cancelled) == 1
    async with asyncio.timeout(10):
        await mesh.gateway.admission.idle()


async def test_models_health_ready_metrics_trace(mesh: Mesh, http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).status_code == 200
    assert (await http.get("/ready")).status_code == 503
    assert (await http.get("/v1/models")).json() == {"object": "list", "data": []}
    await mesh.pair()
    assert (await http.get("/ready")).status_code == 200
    (model,) = (await http.get("/v1/models")).json()["data"]
    assert (model["id"], model["object"]) == (MODEL, "model")
    assert (await http.get(f"/v1/models/{MODEL}")).json() == model
    assert (await http.get("/v1/models/other")).status_code == 404
    await http.post("/v1/completions", json=completion(), headers={"x-request-id": "traced"})
    spans = (await http.get("/debug/trace/traced")).json()["spans"]
    assert "gateway.generate" in {span["name"] for span in spans}
    assert (await http.get(f"/debug/trace/{spans[0]['trace_id']}")).status_code == 200
    assert (await http.get("/debug/trace/nobody")).status_code == 404
    metrics = (await http.get("/metrics")).text
    assert 'epd_output_tokens_total{model="fake",tenant="default"} 4.0' in metrics
    # By the id that the answer itself has, too; of several prompts that is the first one's.
    for path, body in (
        ("chat/completions", chat()),
        ("completions", completion()),
        ("completions", completion(prompt=["a", "b"])),
    ):
        shown = (await http.post(f"/v1/{path}", json=body)).json()["id"]
        label = shown.partition("-")[2]
        known = mesh.gateway.store.trace_of_request(label) or mesh.gateway.store.trace_of_request(f"{label}-0")
        found = (await http.get(f"/debug/trace/{shown}")).json()["spans"]
        assert {span["trace_id"] for span in found} == {known}
        answer = await trace_pb2_grpc.TraceServiceStub(mesh.channel).GetTrace(
            trace_pb2.GetTraceRequest(request_id=f"req-{label}")
        )
        assert {span.trace_id for span in answer.spans} == {known}
    await mesh.gateway.drain()
    assert [(await http.get(path)).status_code for path in ("/health", "/ready", "/live")] == [503, 503, 200]
    refused = await http.post("/v1/completions", json=completion())
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")


async def test_traceparent_is_honoured(mesh: Mesh, http: httpx.AsyncClient) -> None:
    await mesh.pair()
    trace_id, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    for flags, kept in (("01", True), ("00", False)):
        ident = trace_id[:-2] + flags
        headers = {"traceparent": f"00-{ident}-{parent}-{flags}", "x-epd-timing": "1"}
        body = (await http.post("/v1/completions", json=completion(), headers=headers)).json()
        assert body["epd"]["trace_id"] == ident
        spans = mesh.gateway.store.trace(ident)
        assert bool(spans) == kept  # an unsampled parent leaves nothing
        if kept:
            assert next(span for span in spans if span.name == "gateway.generate").parent_span_id == parent


async def test_the_openai_client(mesh: Mesh) -> None:
    await mesh.pair(script=lambda choice, position: EOS if position == 3 else ord("a") + position)
    async with openai.AsyncOpenAI(base_url=f"http://{mesh.gateway.http_address}/v1", api_key="none") as client:
        answer = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
        assert answer.choices[0].message.content == "abc"
        assert answer.choices[0].finish_reason == "stop"
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "abc"
        assert chunks[-1].usage.completion_tokens == 4
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model=MODEL, prompt="", max_tokens=1)
        assert caught.value.param == "prompt"
        assert [model.id async for model in client.models.list()] == [MODEL]
