"""Fields of both edges: how a prompt and a text end, the names of requests and sessions; tokens for clients."""

from typing import Any

import grpc
import httpx
import pytest

from epd.v1 import generation_pb2, types_pb2
from tests.fakes import EOS, MODEL, spell
from tests.unit.gateway.conftest import Mesh, ask, generate, refusal
from tests.unit.gateway.test_http import chat, completion, events
from tests.unit.media.files import data_uri, encoded

TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well, "}]
PICTURE = {"type": "image_url", "image_url": {"url": data_uri(encoded())}}
USER = "<|start|>user\nhi<|end|>\n"


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "well, <|end|>\n<|start|>assistant\n"),
        ({"add_generation_prompt": True}, "well, <|end|>\n<|start|>assistant\n"),
        ({"add_generation_prompt": False}, "well, <|end|>\n"),
        ({"continue_final_message": True}, "well, "),
        ({"continue_final_message": True, "add_generation_prompt": False}, "well, "),
    ],
)
async def test_where_a_chats_prompt_ends(
    mesh: Mesh, http: httpx.AsyncClient, fields: dict[str, bool], end: str
) -> None:
    p, _ = await mesh.pair()
    expected = f"{USER}<|start|>assistant\n{end}"
    tokenizer = mesh.gateway.generator.preprocessor.tokenizers[MODEL]
    assert (await http.post("/v1/chat/completions", json=chat(messages=TURNS, **fields))).status_code == 200
    request = generation_pb2.GenerateRequest(sampling=types_pb2.SamplingParams(max_tokens=1))
    for turn in TURNS:
        request.chat.messages.add(role=turn["role"]).content.add(text=turn["content"])
    for name, value in fields.items():
        setattr(request.chat, name, value)
    await generate(mesh, request)
    body = {"messages": TURNS, **fields}
    found = (await http.post("/tokenize", json=body)).json()["tokens"]
    for ids in (*(list(request.prompt_token_ids) for _, request in p.calls), found):
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected


async def test_c14_both_ends_are_refused(mesh: Mesh, http: httpx.AsyncClient) -> None:
    await mesh.pair()
    both = {"continue_final_message": True, "add_generation_prompt": True}
    for path, body in (("/v1/chat/completions", chat(**both)), ("/tokenize", {"messages": TURNS, **both})):
        response = await http.post(path, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "continue_final_message")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_stop_in_the_text(mesh: Mesh, http: httpx.AsyncClient, stream: bool) -> None:
    await mesh.pair(script=spell("xyENDz"))

    async def text(**fields: Any) -> tuple[str, str]:
        body = completion(max_tokens=50, **fields)
        if stream:
            choices = [chunk["choices"][0] for chunk in (await events(http, "/v1/completions", body))[:-1]]
            return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]
        (choice,) = (await http.post("/v1/completions", json=body)).json()["choices"]
        return choice["text"], choice["finish_reason"]

    included = {"include_stop_str_in_output": True}
    assert await text(stop=["END", "ND"]) == ("xy", "stop")
    assert await text(stop=["END", "ND"], **included) == ("xyEND", "stop")
    assert await text(stop_token_ids=[ord("N")]) == ("xyE", "stop")
    assert await text(stop_token_ids=[ord("N")], **included) == ("xyEN", "stop")
    assert await text(**included) == ("xyENDz", "stop")  # the end of text is a special token, and those are cut
    assert await text(skip_special_tokens=False, **included) == ("xyENDz<|end|>", "stop")


async def test_the_stop_in_the_text_over_grpc(mesh: Mesh) -> None:
    await mesh.pair(script=spell("xyENDz"))
    result = await generate(mesh, ask(stop=["END"], include_stop_in_output=True))
    assert result.texts == {0: "xyEND"}
    assert result.deltas[0].stop_string == "END"


# --- names ----------------------------------------------------------------------------------------------------------


async def test_x_request_id_is_on_every_answer(mesh: Mesh, http: httpx.AsyncClient) -> None:
    await mesh.pair()
    mine = {"x-request-id": "mine"}
    for method, path, body, status in (
        ("POST", "/v1/chat/completions", chat(), 200),
        ("POST", "/v1/chat/completions", chat(n=0), 400),
        ("POST", "/v1/chat/completions", chat(model="none"), 404),
        ("POST", "/v1/completions", completion(stream=True), 200),
        ("POST", "/v1/responses", {"input": "hi", "max_output_tokens": 2}, 200),
        ("POST", "/tokenize", {"prompt": "hi"}, 200),
        ("POST", "/v1/completions", {}, 400),
        ("GET", "/v1/models", None, 200),
        ("GET", "/nowhere", None, 404),
        ("GET", "/v1/completions", None, 405),
    ):
        response = await http.request(method, path, json=body, headers=mine)
        assert (path, response.status_code) == (path, status)
        assert response.headers.get_list("x-request-id") == ["mine"]
        drawn = {(await http.request(method, path, json=body)).headers["x-request-id"] for _ in range(2)}
        assert len(drawn) == 2
        assert "" not in drawn


async def test_c14_a_bad_x_request_id(mesh: Mesh, http: httpx.AsyncClient) -> None:
    p, _ = await mesh.pair()
    for bad in (b"a" * 257, "é".encode(), b"\x7f"):
        response = await http.post("/v1/completions", json=completion(), headers={"x-request-id": bad})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "x-request-id")
        assert len(response.headers["x-request-id"]) == 24  # one that was drawn instead
    assert not p.calls


async def test_sessions(mesh: Mesh, http: httpx.AsyncClient) -> None:
    """What keeps a session's requests together: its own field, OpenAI's, or a header, in this order."""
    await mesh.pair()
    seen: list[bytes] = []
    orchestrator = mesh.gateway.generator.orchestrator
    run = orchestrator.run

    async def noted(prepared: Any, *args: Any) -> None:
        seen.append(prepared.affinity)
        await run(prepared, *args)

    orchestrator.run = noted  # type: ignore[method-assign]
    header = {"x-session-id": "header"}
    for path, body in (
        ("/v1/chat/completions", chat()),
        ("/v1/chat/completions", chat(prompt_cache_key="key", user="u", safety_identifier="s")),
        ("/v1/chat/completions", chat(prompt_cache_key="key", session_id="own")),
        ("/v1/completions", completion(session_id="own")),
        ("/v1/completions", completion(user="u")),
        ("/v1/responses", {"input": "hi", "prompt_cache_key": "key", "max_output_tokens": 2}),
    ):
        assert (await http.post(path, json=body, headers=header)).status_code == 200
    assert seen == [b"header", b"key", b"own", b"own", b"header", b"key"]
    for body, headers, param in (
        (chat(), {"x-session-id": "x" * 257}, "x-session-id"),
        (chat(session_id="x" * 257), {}, "session_id"),
        (chat(prompt_cache_key="x" * 257), {}, "session_id"),
    ):
        response = await http.post("/v1/chat/completions", json=body, headers=headers)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


# --- tokens ---------------------------------------------------------------------------------------------------------


async def test_tokenize_and_detokenize(mesh: Mesh, http: httpx.AsyncClient) -> None:
    await mesh.pair(max_context=500)
    body = {"model": MODEL, "prompt": "hé<|end|>", "return_token_strs": True}
    found = (await http.post("/tokenize", json=body)).json()
    ids = [*"hé".encode(), EOS]
    strings = ["h", "\N{REPLACEMENT CHARACTER}", "\N{REPLACEMENT CHARACTER}", "<|end|>"]
    assert found == {"count": 4, "max_model_len": 500, "tokens": ids, "token_strs": strings}
    assert (await http.post("/tokenize", json={"prompt": ""})).json() == {
        "count": 0,
        "max_model_len": 500,
        "tokens": [],
        "token_strs": None,
    }
    assert (await http.post("/detokenize", json={"tokens": ids})).json() == {"prompt": "hé<|end|>"}
    told = await mesh.stub.Tokenize(generation_pb2.TokenizeRequest(text="hé<|end|>"))
    assert (told.model, list(told.token_ids), list(told.tokens)) == (MODEL, ids, strings)
    assert told.max_context_tokens == 500
    back = await mesh.stub.Detokenize(generation_pb2.DetokenizeRequest(token_ids=ids))
    assert (back.model, back.text) == (MODEL, "hé<|end|>")


async def test_tokenize_needs_no_worker(mesh: Mesh, http: httpx.AsyncClient) -> None:
    found = (await http.post("/tokenize", json={"prompt": "hi"})).json()
    assert (found["tokens"], found["max_model_len"]) == ([104, 105], 0)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": TURNS}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"messages": TURNS, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "nonsense": 1}, "nonsense"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": [PICTURE]}]},
            "messages[0].content[0]",
        ),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**40]}, "tokens"),
        ("/detokenize", {"tokens": [258]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_c14_tokens_that_are_refused(
    mesh: Mesh, http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    response = await http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert (await http.post(path, json={"model": "none", "prompt": "a", "tokens": []})).status_code in (400, 404)


async def test_tokens_of_other_models_and_in_a_drain(mesh: Mesh, http: httpx.AsyncClient) -> None:
    assert (await http.post("/tokenize", json={"model": "none", "prompt": "a"})).status_code == 404
    assert (await http.post("/detokenize", json={"model": "none", "tokens": []})).status_code == 404
    mesh.gateway.generator.admission.draining = True
    assert (await http.post("/tokenize", json={"prompt": "a"})).status_code == 503
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.stub.Detokenize(generation_pb2.DetokenizeRequest())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_c14_grpc_prompt_logprobs_range(mesh: Mesh) -> None:
    await mesh.pair()
    code, _, details = await refusal(mesh, ask("hi", max_tokens=1, prompt_logprobs=21))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "prompt_logprobs must be at least 0 and at most 20" in details
