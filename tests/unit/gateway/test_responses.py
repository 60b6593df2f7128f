"""/v1/responses over a real socket: its shapes, the events of a stream, images, and what is refused by name."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from common.errors import EngineFailed
from epd.v1 import trace_pb2, trace_pb2_grpc
from tests.fakes import MODEL, spell
from tests.unit.gateway.conftest import Mesh
from tests.unit.media.files import data_uri, encoded
from tests.vlm_files import IMAGE, qwen_files

PATH = "/v1/responses"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hi", "max_output_tokens": 4} | fields


async def events(http: httpx.AsyncClient, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a stream, each named twice, numbered without a gap."""
    found: list[dict[str, Any]] = []
    async with http.stream("POST", PATH, json=asked | {"stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        name = ""
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line:
                found.append(json.loads(line.removeprefix("data: ")))
                assert found[-1]["type"] == name
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


async def test_a_whole_response(mesh: Mesh, http: httpx.AsyncClient) -> None:
    p, _ = await mesh.pair()
    p.cached_tokens = 16
    response = await http.post(PATH, json=body(instructions="be brief", metadata={"a": "b"}, top_p=0.5, temperature=1))
    found = response.json()
    prompt = bytes(i for i in p.calls[0][1].prompt_token_ids if i < 256).decode()
    assert prompt == "system\nbe brief\nuser\nhi\nassistant\n"
    told = {"type": "output_text", "text": "abcd", "annotations": [], "logprobs": []}
    (item,) = found["output"]
    assert item.pop("id").startswith("msg_")
    assert item == {"type": "message", "role": "assistant", "status": "incomplete", "content": [told]}
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (found["object"], found["model"], found["error"], found["store"]) == ("response", MODEL, None, False)
    assert (found["instructions"], found["metadata"], found["top_p"]) == ("be brief", {"a": "b"}, 0.5)
    tokens = len(p.calls[0][1].prompt_token_ids)
    assert found["usage"] == {
        "input_tokens": tokens,
        "input_tokens_details": {"cached_tokens": 16},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tokens + 4,
    }
    stub = trace_pb2_grpc.TraceServiceStub(mesh.channel)
    assert (await stub.GetTrace(trace_pb2.GetTraceRequest(request_id=found["id"]))).spans


async def test_the_events_of_a_stream(mesh: Mesh, http: httpx.AsyncClient) -> None:
    await mesh.pair(script=spell("안녕 🙂"))
    found = await events(http, body(max_output_tokens=None))
    kinds = [event["type"] for event in found]
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert 1 <= len(deltas) <= 4  # a character each, or several that came together
    assert "".join(event["delta"] for event in deltas) == "안녕 🙂"
    assert {event["item_id"] for event in deltas} == {found[-1]["response"]["output"][0]["id"]}
    assert found[0]["response"] | {"status": "completed", "output": 0, "usage": 0} == found[-1]["response"] | {
        "output": 0,
        "usage": 0,
    }
    assert found[0]["response"]["usage"] is None
    assert found[-1]["response"]["output"] == [found[-2]["item"]]
    assert found[-2]["item"]["content"] == [found[-3]["part"]]
    assert found[-3]["part"]["text"] == found[-4]["text"] == "안녕 🙂"
    assert (await events(http, body()))[-1]["type"] == "response.incomplete"


async def test_log_probabilities(mesh: Mesh, http: httpx.AsyncClient) -> None:
    for worker in await mesh.pair():
        worker.logprobs = True
    asked = body(include=["message.output_text.logprobs"], top_logprobs=2)
    whole = (await http.post(PATH, json=asked)).json()["output"][0]["content"][0]["logprobs"]
    assert whole[0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "b", "logprob": -1.5, "bytes": [98]},
        ],
    }
    found = await events(http, asked)
    assert whole == [entry for event in found if event["type"].endswith("text.delta") for entry in event["logprobs"]]
    assert whole == found[-1]["response"]["output"][0]["content"][0]["logprobs"]


async def test_a_conversation_that_is_given_back(mesh: Mesh, http: httpx.AsyncClient) -> None:
    """As a client has it who keeps the items himself."""
    p, _ = await mesh.pair()
    first = (await http.post(PATH, json=body())).json()
    turns = [
        {"role": "developer", "content": "brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        *first["output"],
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": "b"},
    ]
    assert (await http.post(PATH, json=body(input=turns))).status_code == 200
    prompt = bytes(i for i in p.calls[1][1].prompt_token_ids if i < 256).decode()
    assert prompt == "system\nbrief\nuser\na\nassistant\nabcd\nassistant\nno\nuser\nb\nassistant\n"


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("conversation", {"conversation": "c"}),
        ("tools", {"tools": [{"type": "web_search"}]}),
        ("tool_choice", {"tool_choice": "auto"}),
        ("reasoning", {"reasoning": {"effort": "low"}}),
        ("prompt", {"prompt": {"id": "x"}}),
        ("max_tokens", {"max_tokens": 3}),
        ("n", {"n": 2}),
        ("store", {"store": True}),
        ("background", {"background": True}),
        ("truncation", {"truncation": "auto"}),
        ("text", {"text": {"format": {"type": "json_object"}}}),
        ("include", {"include": ["reasoning.encrypted_content"]}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("top_logprobs", {"top_logprobs": 3}),
        ("top_logprobs", {"top_logprobs": 21, "include": ["message.output_text.logprobs"]}),
        ("temperature", {"temperature": 3}),
        ("stream_options", {"stream_options": {}}),
        ("input", {"input": []}),
        ("input", {"input": [{"role": "robot", "content": "x"}]}),
        ("input", {"input": [{"type": "item_reference", "id": "x"}]}),
        ("input", {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}),
        ("input", {"input": None}),
    ],
)
async def test_c14_what_is_refused(mesh: Mesh, http: httpx.AsyncClient, param: str, fields: dict[str, Any]) -> None:
    p, _ = await mesh.pair()
    response = await http.post(PATH, json=body(**fields))
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"].startswith(param)
    assert param in error["message"]
    assert not p.calls


async def test_failures(mesh: Mesh, http: httpx.AsyncClient) -> None:
    """Before the stream has begun a status tells, afterwards an event."""
    p, d = await mesh.pair()
    p.prefill_errors = [EngineFailed("broke")] * 5
    response = await http.post(PATH, json=body(stream=True))
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "engine_failed"
    d.decode_errors = [(1, EngineFailed("broke"))] * 5
    found = await events(http, body(max_output_tokens=60))
    assert found[-1]["type"] == "response.failed"
    assert found[-1]["response"]["status"] == "failed"
    assert found[-1]["response"]["error"]["code"] == "server_error"


async def test_as_the_openai_package_reads_it(mesh: Mesh) -> None:
    await mesh.pair(script=spell("hello"))
    url = f"http://{mesh.gateway.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=20) as client:
        response = await client.responses.create(model=MODEL, input="hi")
        assert (response.output_text, response.status) == ("hello", "completed")
        assert response.usage is not None
        assert response.usage.output_tokens == 6
        async with client.responses.stream(model=MODEL, input=[{"role": "user", "content": "hi"}]) as stream:
            text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
            assert text == (await stream.get_final_response()).output_text == "hello"
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await client.responses.create(model=MODEL, input="hi", previous_response_id="resp_1")


# --- images ---------------------------------------------------------------------------------------------------------


@pytest.fixture
async def images(tmp_path: Path) -> AsyncIterator[Mesh]:
    found = Mesh(qwen_files(tmp_path / "vlm"))
    await found.start()
    await found.pair()
    await found.add("e0", ["encode"])
    yield found
    await found.stop()


async def test_an_image(images: Mesh) -> None:
    url = data_uri(encoded())
    parts = [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": url, "detail": "auto"}]
    async with httpx.AsyncClient(base_url=f"http://{images.gateway.http_address}", timeout=20) as http:
        found = await http.post(PATH, json=body(input=[{"role": "user", "content": parts}]))
        assert found.json()["output"][0]["content"][0]["text"] == "abcd"
        prompt = next(request for method, request in images.workers["p0"].calls if method == "prefill").prompt_token_ids
        assert IMAGE in prompt
        parts[1]["image_url"] = "data:image/png;base64,AAAA"
        refused = await http.post(PATH, json=body(input=[{"role": "user", "content": parts}]))
        assert refused.status_code == 400
        # The same prompt's tokens, image and all.
        content = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}}]
        tokens = (await http.post("/tokenize", json={"messages": [{"role": "user", "content": content}]})).json()
        assert tokens["tokens"] == list(prompt)
