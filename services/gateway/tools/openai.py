"""Tools in OpenAI's bodies: of requests, parsed strictly, and of answers."""

import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from common.errors import InvalidArgument
from epd.v1 import generation_pb2
from services.gateway.tools.schema import MAX_TOOLS, check

Json = dict[str, Any]


class CalledFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """index is what clients that put streams together may leave in it."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None


class NamedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: NamedFunction


Choice = Literal["none", "auto", "required"] | NamedTool


def fill_tools(chat: generation_pb2.Chat, tools: Sequence[Json], choice: Choice | None, parallel: bool | None) -> None:
    """tools: as they came, since templates read them. Raises InvalidArgument naming the field."""
    if len(tools) > MAX_TOOLS:
        raise InvalidArgument(f"tools has {len(tools)} entries; at most {MAX_TOOLS}", field="tools")
    for number, tool in enumerate(tools):
        check(tool, number)
        chat.tools.append(_text(json.dumps(tool, ensure_ascii=False), "tools"))
    match choice:
        case NamedTool(function=NamedFunction(name=name)):
            chat.tool_choice.function = _text(name, "tool_choice")
        case "required":
            chat.tool_choice.mode = generation_pb2.ToolChoice.MODE_REQUIRED
        case "none":
            chat.tool_choice.mode = generation_pb2.ToolChoice.MODE_NONE
    if parallel is not None:
        chat.parallel_tool_calls = parallel


def fill_message(
    message: generation_pb2.ChatMessage, calls: Iterable[Call] | None, call_id: str | None, name: str | None
) -> None:
    """What a message has beside role and content. Raises InvalidArgument."""
    for index, call in enumerate(calls or ()):
        message.tool_calls.add(
            index=index,
            id=_text(call.id, "messages"),
            name=_text(call.function.name, "messages"),
            arguments=_text(call.function.arguments, "messages"),
        )
    message.tool_call_id = _text(call_id or "", "messages")
    message.name = _text(name or "", "messages")


class Calls:
    """The calls of one choice, put together from the parts of its stream."""

    def __init__(self) -> None:
        self._calls: dict[int, generation_pb2.ToolCall] = {}

    def add(self, parts: Iterable[generation_pb2.ToolCall]) -> None:
        for part in parts:
            call = self._calls.setdefault(part.index, generation_pb2.ToolCall())
            call.id, call.name = call.id or part.id, call.name or part.name
            call.arguments += part.arguments

    def put_into(self, message: Json) -> None:
        """Leaves a message without calls as it is; one with calls alone has no content."""
        if self._calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for _, call in sorted(self._calls.items())
            ]


def deltas(parts: Iterable[generation_pb2.ToolCall]) -> list[Json]:
    """Of one chunk: id, type and name with a call's first part."""
    found = []
    for part in parts:
        function = {"name": part.name, "arguments": part.arguments} if part.name else {"arguments": part.arguments}
        head = {"id": part.id, "type": "function"} if part.id else {}
        found.append({"index": part.index, **head, "function": function})
    return found


def _text(text: str, field: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{field} must be valid Unicode", field=field) from None
    return text
