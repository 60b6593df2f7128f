"""OpenAI's own client: answers by a JSON schema, by a pydantic class, and tool calls, whole and streamed.

    pip install openai
    python examples/openai_structured.py

A grammar keeps the answer to its form, whatever the model would rather say. docs/structured.md: what a schema may hold.
OPENAI_BASE_URL: by default http://127.0.0.1:8000/v1.
"""

import json
import os
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "-"),
)
model = os.environ.get("MODEL") or client.models.list().data[0].id

# A JSON schema.
schema = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "is_capital": {"type": "boolean"}},
    "required": ["city", "is_capital"],
    "additionalProperties": False,
}
answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    temperature=0,
    max_tokens=48,
    response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}},
)
found = json.loads(answer.choices[0].message.content)
print(found["city"], found["is_capital"])


# A class, which the client makes a schema of and reads the answer into.
class Weather(BaseModel):
    sky: Literal["sunny", "cloudy"]
    degrees: Literal[10, 20, 30]


parsed = client.chat.completions.parse(
    model=model,
    messages=[{"role": "user", "content": "A nice day in June: how is the weather?"}],
    temperature=0,
    max_tokens=48,
    response_format=Weather,
)
print(repr(parsed.choices[0].message.parsed))

# A tool: the model calls it, we run it, the model reads the result.
tool = {
    "type": "function",
    "function": {
        "name": "temperature",
        "description": "The temperature in a city",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
    },
}
messages = [{"role": "user", "content": "How warm is it in Rome?"}]
options = {"model": model, "tools": [tool], "parallel_tool_calls": False, "temperature": 0, "max_tokens": 48}
answer = client.chat.completions.create(messages=messages, tool_choice="required", **options)
(call,) = answer.choices[0].message.tool_calls
print(f"{answer.choices[0].finish_reason}: {call.function.name}({json.loads(call.function.arguments)})")
messages += [answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "24 degrees"}]
print(client.chat.completions.create(messages=messages, tool_choice="none", **options).choices[0].message.content)

# The same streamed: id and name come first, then the arguments in pieces.
arguments = ""
forced = {"type": "function", "function": {"name": "temperature"}}
for chunk in client.chat.completions.create(messages=messages[:1], tool_choice=forced, stream=True, **options):
    for part in chunk.choices[0].delta.tool_calls or ():
        if part.function.name:
            print(f"call {part.function.name}: ", end="")
        arguments += part.function.arguments or ""
print(json.loads(arguments))
