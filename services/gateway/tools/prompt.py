"""Tools and their calls in a chat's messages, for templates that know of them and for those that do not."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from common.models.tokenizer import Tokenizer
from epd.v1 import generation_pb2
from services.gateway.tools.formats import HERMES, knows_tools
from services.gateway.tools.schema import arguments_of

Message = dict[str, Any]
_TOLD = """You can call functions. Each line between <tools> and </tools> is one, its parameters as a JSON schema:
<tools>
{tools}
</tools>
To call a function, answer with its name and its arguments as one JSON object between <tool_call> and </tool_call>:
<tool_call>
{{"name": "the function", "arguments": {{"a parameter": "its value"}}}}
</tool_call>"""


def fields(message: generation_pb2.ChatMessage) -> Message:
    """What a message has beside role and content, as templates take it. Raises InvalidArgument."""
    found: Message = {}
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments_of(call)}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    if message.name:
        found["name"] = message.name
    return found


def with_tools(
    messages: Sequence[Message], told: Sequence[Mapping[str, Any]], tokenizer: Tokenizer
) -> tuple[list[Message], list[Mapping[str, Any]] | None]:
    """Messages and tools for the template. One that knows no tools gets them in a system message, and calls and their
    results in the text of messages."""
    if knows_tools(tokenizer):
        return list(messages), list(told) or None
    plain: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls", ())
        if message["role"] == "tool":
            text = _result(message["content"])
            if plain and plain[-1]["role"] == "user" and plain[-1].get("results"):
                plain[-1]["content"] = _append(plain[-1]["content"], "\n" + text)
            else:
                plain.append({"role": "user", "content": _append(_empty(message["content"]), text), "results": True})
        elif calls:
            before = "\n" if message["content"] else ""
            text = before + "\n".join(_call(call["function"]) for call in calls)
            plain.append({"role": message["role"], "content": _append(message["content"], text)})
        else:
            plain.append(message)
    for message in plain:
        message.pop("results", None)
    if told:
        text = _TOLD.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in told))
        if plain and plain[0]["role"] == "system":
            plain[0] = {**plain[0], "content": _append(plain[0]["content"], "\n\n" + text)}
        else:
            content = plain[0]["content"] if plain else ""
            plain.insert(0, {"role": "system", "content": _append(_empty(content), text)})
    return plain, None


def _call(function: Mapping[str, Any]) -> str:
    body = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
    return f"{HERMES.begin}\n{body}\n{HERMES.end}"


def _result(content: Any) -> str:
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    return f"<tool_response>\n{text}\n</tool_response>"


def _empty(content: Any) -> Any:
    return "" if isinstance(content, str) else []


def _append(content: Any, text: str) -> Any:
    """To a string, or to a list of parts."""
    if isinstance(content, str):
        return content + text
    return [*(part for part in content if part.get("text") != ""), {"type": "text", "text": text}]
