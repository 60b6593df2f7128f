"""Structured output and tools down to real engines: prefill and decode follow one grammar, also when the decode worker
dies in mid-object."""

import itertools
import json
import os
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
# Of the test that kills: all 200 take minutes, so CI runs a quarter.
REQUESTS, AT_ONCE = int(os.environ.get("EPD_TEST_SCHEMAS", "50")), 25
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


def long_before(schema: Any) -> dict[str, Any]:
    """An object that is under way for a while before the schema's own begins."""
    text = {"type": "string", "minLength": 60, "maxLength": 90}
    names = ("text", "value")
    properties = dict(zip(names, (text, schema), strict=True))
    definitions = schema.pop("$defs", None)
    found = {"type": "object", "properties": properties, "required": list(names), "additionalProperties": False}
    return found if definitions is None else {**found, "$defs": definitions}


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
    """What came before travels to another worker, which goes on in the same object, on the same seed.

    As many schemas and seeds, a worker killed under each 25 of them.
    """
    path = checkpoint("llama", **CONFIG)
    seeds = iter(range(900, 900 + REQUESTS))
    resumed = 0
    async with process_mesh(path, tmp_path, roles=("prefill", "decode", "decode")) as mesh:
        while wave := list(itertools.islice(seeds, AT_ONCE)):
            schemas = [long_before(random_schema(seed)) for seed in wave]

            async def begin(attempt: int, wave: list[int] = wave, schemas: list[Any] = schemas) -> list[Running]:
                await mesh.whole()
                return [
                    Running(mesh, [20 + attempt, seed % 400, *range(30, 50)], structured(schema, seed), 1500)
                    for seed, schema in zip(wave, schemas, strict=True)
                ]

            async def in_mid_object(running: list[Running], worker: Role) -> bool:
                started = all(each.tokens > 20 or each.answer.done() for each in running)
                return started and bool((await mesh.status(worker)).load.running)

            answers = await struck_at(mesh, path, begin, "decode", in_mid_object, Role.kill)
            for schema, answer in zip(schemas, answers, strict=True):
                assert answer.choices[0].finish_reason == types_pb2.FINISH_REASON_STOP
                jsonschema_rs.validate(schema, json.loads(answer.choices[0].text))
                resumed += answer.accounting.attempts > 1
    assert resumed >= REQUESTS / 4, resumed  # half of them, were they spread evenly


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
