"""Structured output and tools down to real engines: prefill and decode follow one grammar, also when the decode worker
dies in mid-object."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import openai
import pytest
import pytest_asyncio

from epd.v1 import types_pb2
from tests.e2e.conftest import Meshes
from tests.e2e.running import Running, struck_at
from tests.mesh import MODEL, PATIENCE_SECONDS, LocalMesh
from tests.processes import Role, process_mesh
from tests.schemas import random_schema

session = pytest.mark.asyncio(loop_scope="session")

CONFIG = {"max_context": 4096}
QUESTION: Any = [{"role": "user", "content": "one two three"}]
LONG = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 150, "maxLength": 200}, "n": {"enum": [1, 2, 3]}},
    "required": ["text", "n"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": random_schema(1)}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest_asyncio.fixture(loop_scope="session")
async def mesh(meshes: Meshes) -> LocalMesh:
    return await meshes.get(config=CONFIG)


@pytest_asyncio.fixture(loop_scope="session")
async def client(mesh: LocalMesh) -> Any:
    url = f"http://{mesh.gateway.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_SECONDS) as made:
        yield made


def structured(schema: Any, seed: int) -> dict[str, Any]:
    grammar = types_pb2.Grammar(json_schema=json.dumps(schema))
    return {"grammar": grammar, "temperature": 1.0, "seed": seed, "ignore_eos": False}


@session
async def test_json_schemas_by_openai(client: Any, mesh: LocalMesh) -> None:
    for seed in range(12):
        schema = random_schema(500 + seed)
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
            max_tokens=1500,
            seed=seed,
            n=2,
        )
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            jsonschema_rs.validate(schema, json.loads(choice.message.content))
    answer = await client.completions.create(
        model=MODEL, prompt="one", max_tokens=100, extra_body={"guided_regex": "[0-9]{3}-x"}, temperature=0
    )
    assert re.fullmatch("[0-9]{3}-x", answer.choices[0].text)
    await mesh.settled()


@session
async def test_a_decode_worker_is_killed_in_mid_object(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """What came before travels to another worker, which goes on in the same object, on the same seed."""
    path = checkpoint("llama", **CONFIG)
    schemas = [LONG, *(random_schema(900 + number) for number in range(4)), LONG]
    async with process_mesh(path, tmp_path, roles=("prefill", "decode", "decode")) as mesh:

        async def begin(attempt: int) -> list[Running]:
            await mesh.whole()
            return [
                Running(mesh, [20 + attempt, *range(30, 50)], {**structured(schema, number), "n": 2}, 1500)
                for number, schema in enumerate(schemas)
            ]

        async def in_mid_object(running: list[Running], worker: Role) -> bool:
            started = all(each.tokens > 40 or each.answer.done() for each in running)
            return started and bool((await mesh.status(worker)).load.running)

        answers = await struck_at(mesh, path, begin, "decode", in_mid_object, Role.kill)
        for schema, answer in zip(schemas, answers, strict=True):
            for choice in answer.choices.values():
                jsonschema_rs.validate(schema, json.loads(choice.text))


@session
async def test_required_tools_are_called(client: Any, mesh: LocalMesh) -> None:
    """By a model that knows no tools: the grammar sees to it. Streamed parts add up to the whole."""
    options: Any = {"model": MODEL, "tools": TOOLS, "max_tokens": 1500, "temperature": 1.0}
    names: set[str] = set()
    for seed in range(30):
        if seed >= 6 and len(names) == 2:
            break
        options["messages"] = [{"role": "user", "content": f"one {seed} two"}]  # the model has its likings by prompt
        whole = await client.chat.completions.create(**options, seed=seed, tool_choice="required")
        choice = whole.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        calls: dict[int, list[str]] = {}
        async for chunk in await client.chat.completions.create(
            **options, seed=seed, tool_choice="required", stream=True
        ):
            assert not chunk.choices[0].delta.content
            for part in chunk.choices[0].delta.tool_calls or ():
                calls.setdefault(part.index, ["", ""])
                calls[part.index][0] += part.function.name or ""
                calls[part.index][1] += part.function.arguments or ""
        assert list(calls.values()) == [[c.function.name, c.function.arguments] for c in choice.message.tool_calls]
        for name, arguments in calls.values():
            names.add(name)
            jsonschema_rs.validate(
                random_schema(1) if name == "weather" else {"maxProperties": 0}, json.loads(arguments)
            )
    assert names == {"weather", "now"}
    named = {"type": "function", "function": {"name": "weather"}}
    answer = await client.chat.completions.create(**options, seed=1, tool_choice=named)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    for most in (1, 3, 9, 15, 30):  # cut off: nothing of it is text
        answer = await client.chat.completions.create(**{**options, "max_tokens": most}, seed=1, tool_choice=named)
        assert (answer.choices[0].finish_reason, answer.choices[0].message.content or "") == ("length", "")
    await mesh.settled()


@session
async def test_a_bad_schema_is_refused_before_any_worker(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}},
        )
    assert refused.value.param == "response_format"
