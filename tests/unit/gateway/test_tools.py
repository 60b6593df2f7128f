"""Tools through the gateway: what the prompt says of them, what comes back, and as which parts of a stream."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from common.models.tokenizer import Tokenizer
from epd.v1 import generation_pb2, types_pb2
from services.gateway.openai_schema import ChatBody, chat_request, parse
from services.gateway.prompt import prompt_ids
from services.gateway.tools.formats import HERMES, LLAMA, MISTRAL, format_of
from tests import tool_templates
from tests.fakes import MODEL, spell
from tests.tokenizer_files import byte_tokenizer
from tests.unit.gateway.conftest import Mesh, generate

PARAMETERS = {"type": "object", "required": ["z"], "properties": {"z": {"type": "integer"}, "a": {"type": "string"}}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "it's ü & <b>", "parameters": PARAMETERS}},
    {"function": {"strict": True, "name": "now"}, "type": "function"},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"z": 3, "a": "x</tool_call>"}}\n</tool_call>'
QUESTION: list[Any] = [{"role": "user", "content": "hi"}]
HISTORY: list[Any] = [
    *QUESTION,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "abcdefgh1", "type": "function", "function": {"name": "weather", "arguments": '{"z": 1, "a": "ü"}'}},
            {"id": "abcdefgh2", "type": "function", "function": {"name": "now", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "abcdefgh1", "name": "weather", "content": "sun"},
    {"role": "tool", "tool_call_id": "abcdefgh2", "content": [{"type": "text", "text": "12:00"}]},
]
TEMPLATES = {"hermes": tool_templates.HERMES, "mistral": tool_templates.MISTRAL, "llama": tool_templates.LLAMA}


@pytest.fixture
async def client(mesh: Mesh) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"http://{mesh.gateway.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=20) as made:
        yield made


async def asked(mesh: Mesh, client: openai.AsyncOpenAI, said: str, **options: Any) -> tuple[Any, Any]:
    """(the whole answer's choice, the same put together from a stream by its own rules) of a worker that says this."""
    for worker in mesh.workers.values():
        worker.script = spell(said)
    if not mesh.workers:
        await mesh.pair(script=spell(said))
    options = {"model": MODEL, "messages": QUESTION, "tools": TOOLS, "max_tokens": 400} | options
    whole = (await client.chat.completions.create(**options)).choices[0]
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    reason = None
    async for chunk in await client.chat.completions.create(stream=True, **options):
        (choice,) = chunk.choices
        message["content"] += choice.delta.content or ""
        for part in choice.delta.tool_calls or ():
            if part.id:
                assert (part.index, part.type) == (len(message["tool_calls"]), "function")
                message["tool_calls"].append([part.function.name, part.function.arguments])
            else:
                message["tool_calls"][part.index][1] += part.function.arguments
        reason = choice.finish_reason or reason
    assert reason == whole.finish_reason
    assert message["content"] == (whole.message.content or "")
    calls = [[call.function.name, call.function.arguments] for call in whole.message.tool_calls or ()]
    assert message["tool_calls"] == calls
    return whole, calls


async def test_calls_streamed_and_whole(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    whole, calls = await asked(mesh, client, f"I look.\n{CALL}\n{CALL}")
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content == "I look."
    assert calls == [["weather", '{"z": 3, "a": "x</tool_call>"}']] * 2
    assert len({call.id for call in whole.message.tool_calls}) == 2
    whole, calls = await asked(mesh, client, f"{CALL}\n{CALL}", parallel_tool_calls=False)
    assert (whole.finish_reason, whole.message.content, len(calls)) == ("tool_calls", None, 1)
    whole, calls = await asked(mesh, client, "no call", n=1)
    assert (whole.finish_reason, whole.message.content, calls) == ("stop", "no call", [])
    # Without tools, and with none, text is text.
    for options in ({"tools": []}, {"tool_choice": "none"}):
        whole, calls = await asked(mesh, client, CALL, **options)
        assert (whole.finish_reason, whole.message.content, calls) == ("stop", CALL, [])


async def test_one_call_ends_the_choice_at_its_worker(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    await mesh.pair(script=spell(CALL + "." * 1000, eos=False))
    await asked(mesh, client, CALL + "." * 1000, parallel_tool_calls=False, max_tokens=2000)
    await mesh.workers["d0"].until(lambda: mesh.workers["d0"].running == 0)


async def test_a_cut_never_leaks_markup(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    for most in range(1, len(CALL), 5):
        whole, calls = await asked(mesh, client, f"ok {CALL}", max_tokens=most)
        assert whole.finish_reason == "length"
        assert (whole.message.content or "") in ("", "o", "ok")
        assert all(name == "weather" and '{"z": 3, "a": "x</tool_call>"}'.startswith(text) for name, text in calls)
    whole, calls = await asked(mesh, client, f"ok {CALL}", stop='"a"')
    assert (whole.finish_reason, whole.message.content, calls) == ("tool_calls", "ok", [["weather", '{"z": 3, ']])


async def test_over_grpc(mesh: Mesh) -> None:
    await mesh.pair(script=spell(f"a{CALL}"))
    request = generation_pb2.GenerateRequest()
    request.chat.messages.add(role="user").content.add(text="hi")
    request.chat.tools.extend(json.dumps(tool) for tool in TOOLS)
    request.sampling.max_tokens = 400
    result = await generate(mesh, request)
    assert result.texts[0] == "a"
    assert result.deltas[0].finish_reason == 3
    parts = [part for response in result.responses for choice in response.choices for part in choice.tool_calls]
    assert "".join(part.arguments for part in parts) == '{"z": 3, "a": "x</tool_call>"}'


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools"),
        ({"tools": [{"type": "web"}]}, "tools"),
        ({"tools": [TOOLS[0]] * 2}, "tools"),
        ({"tools": [TOOLS[0]] * 129}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": TOOLS, "extra_body": {"guided_regex": "a"}}, "tools"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {"type": "object"}}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
async def test_what_is_wrong_is_refused(mesh: Mesh, client: openai.AsyncOpenAI, options: Any, field: str) -> None:
    await mesh.pair()
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model=MODEL, messages=QUESTION, **options)
    assert refused.value.param == field


async def test_arguments_in_messages_must_be_an_object(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    await mesh.pair()
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "[1"}}
    history: Any = [*QUESTION, {"role": "assistant", "tool_calls": [call]}]
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model=MODEL, messages=history)
    assert refused.value.param == "messages"


async def test_forced_calls_come_with_a_grammar(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    prefill, decode = await mesh.pair(script=spell(CALL))
    named = {"type": "function", "function": {"name": "weather"}}
    for choice, says, not_says in (("required", "now", "\x00"), (named, "weather", "now")):
        await asked(mesh, client, CALL, tool_choice=choice)
        for worker in (prefill, decode):
            grammar = worker.calls[-1][1].sampling.grammar.lark
            assert f'\\"{says}\\"' in grammar
            assert not_says not in grammar
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    await asked(mesh, client, CALL, response_format=schema)
    assert "otherwise" in decode.calls[-1][1].sampling.grammar.lark
    await asked(mesh, client, CALL)
    assert not decode.calls[-1][1].sampling.HasField("grammar")


def rendered(directory: Path, messages: Any, tools: Any, body: Any = None) -> str:
    """The prompt that a body makes, all the way from its JSON."""

    request = chat_request(parse(json.dumps({"messages": messages, "tools": tools}).encode(), ChatBody))
    tokenizer = Tokenizer(directory)
    return tokenizer.decode(prompt_ids(request, tokenizer, None, ()), skip_special_tokens=False)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS, TOOLS[1:]], ids=["without", "both", "one"])
@pytest.mark.parametrize("messages", [QUESTION, HISTORY], ids=["question", "history"])
def test_prompts_as_transformers_renders_them(name: str, tools: Any, messages: Any, tmp_path: Path) -> None:
    """Keys in the client's order, apostrophes, arguments as objects, ids and names of results."""
    from transformers import AutoTokenizer

    directory = byte_tokenizer(tmp_path / "m", TEMPLATES[name])
    theirs = AutoTokenizer.from_pretrained(directory)
    chat = json.loads(json.dumps(messages))
    for message in chat:
        message["content"] = (
            "".join(part["text"] for part in message["content"])
            if isinstance(message["content"], list)
            else message["content"] or ""
        )
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
    expected = theirs.apply_chat_template(chat, tools=tools, tokenize=False, add_generation_prompt=True)
    assert rendered(directory, messages, tools) == expected
    assert format_of(Tokenizer(directory)) is {"hermes": HERMES, "mistral": MISTRAL, "llama": LLAMA}[name]


def test_a_template_without_tools_is_told_of_them(tmp_path: Path) -> None:
    directory = byte_tokenizer(tmp_path / "m")
    text = rendered(directory, [{"role": "system", "content": "Be kind."}, *HISTORY], TOOLS)
    head, _, rest = text.partition("<|end|>\n")
    assert head.startswith("<|start|>system\nBe kind.\n\n")
    assert all(json.dumps(tool, ensure_ascii=False) in head for tool in TOOLS)
    assert '<|start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"z": 1, "a": "ü"}}\n</tool_call>' in rest
    assert (
        "<|start|>user\n<tool_response>\nsun\n</tool_response>\n<tool_response>\n12:00\n</tool_response><|end|>" in rest
    )
    assert rendered(directory, QUESTION, TOOLS).startswith("<|start|>system\n")
    assert "tool" not in rendered(directory, QUESTION, None)


async def test_a_result_goes_back(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    """As agents do it: the message of the answer is sent again as it came."""
    whole, calls = await asked(mesh, client, CALL)
    (call,) = whole.message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
    again, calls = await asked(mesh, client, "It is sunny.", messages=[*QUESTION, whole.message, result])
    assert (again.message.content, calls) == ("It is sunny.", [])


@pytest.mark.parametrize(
    ("field", "body", "grammar"),
    [
        ("response_format", {"response_format": {"type": "json_object"}}, {"json_schema": '{"type":"object"}'}),
        (
            "response_format",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"z": 1, "a": 2}}}},
            {"json_schema": '{"z": 1, "a": 2}'},
        ),
        ("guided_regex", {"guided_regex": "a+"}, {"regex": "a+"}),
        ("guided_choice", {"guided_choice": ["a", "b"]}, {"choice": {"strings": ["a", "b"]}}),
        ("guided_json", {"guided_json": '{"type": "null"}'}, {"json_schema": '{"type": "null"}'}),
        ("guided_grammar", {"guided_grammar": 'root ::= "a" [b]'}, None),
        ("structured_outputs.regex", {"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ("structured_outputs.grammar", {"structured_outputs": {"grammar": 'start: "a"'}}, {"lark": 'start: "a"'}),
    ],
)
async def test_structured_output_reaches_both_workers(mesh: Mesh, field: str, body: Any, grammar: Any) -> None:
    workers = await mesh.pair()
    async with httpx.AsyncClient(base_url=f"http://{mesh.gateway.http_address}", timeout=20) as http:
        for path, prompt in (("chat/completions", {"messages": QUESTION}), ("completions", {"prompt": "hi"})):
            answer = await http.post(f"/v1/{path}", json={**prompt, **body, "max_tokens": 3})
            assert answer.status_code == 200, answer.text
            for worker in workers:
                found = worker.calls[-1][1].sampling.grammar
                if grammar is None:
                    assert found.lark.startswith("start:") or "\nstart:" in found.lark
                else:
                    assert found == types_pb2.Grammar(**grammar)


@pytest.mark.parametrize(
    ("field", "body"),
    [
        (
            "response_format",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}},
        ),
        ("response_format", {"response_format": {"type": "json_schema"}}),
        ("response_format", {"response_format": {"type": "xml"}}),
        ("guided_regex", {"guided_regex": "("}),
        ("guided_choice", {"guided_choice": []}),
        ("guided_grammar", {"guided_grammar": "start: a"}),
        ("guided_grammar", {"guided_grammar": "root ::= ("}),
        ("structured_outputs.json", {"structured_outputs": {"json": {"type": "x"}}}),
        ("structured_outputs", {"structured_outputs": {}}),
        ("guided_regex", {"guided_regex": "a", "response_format": {"type": "json_object"}}),
    ],
)
async def test_a_bad_grammar_is_refused_by_its_field(mesh: Mesh, field: str, body: Any) -> None:
    workers = await mesh.pair()
    async with httpx.AsyncClient(base_url=f"http://{mesh.gateway.http_address}", timeout=20) as http:
        answer = await http.post("/v1/chat/completions", json={"messages": QUESTION, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field
    assert not any(worker.calls for worker in workers)
