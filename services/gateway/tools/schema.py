"""Tools as a request names them, checked."""

import json
import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from common.errors import InvalidArgument
from epd.v1 import generation_pb2

MAX_TOOLS = 128
_NAME = re.compile("[a-zA-Z0-9_-]{1,64}")
ToolChoice = generation_pb2.ToolChoice


class Function(msgspec.Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """Other keys are left as they are: the chat template reads the whole."""

    type: Literal["function"]
    function: Function


class Offer(msgspec.Struct, frozen=True):
    """The tools that an answer may or must call; none: an answer is text.

    told: as the chat template takes them, keys in the client's order. forced: those of which the answer must call one.
    """

    told: tuple[dict[str, Any], ...] = ()
    functions: tuple[Function, ...] = ()
    forced: tuple[Function, ...] = ()
    parallel: bool = True


def offer(chat: generation_pb2.Chat) -> Offer:
    """Raises InvalidArgument with the field "tools" or "tool_choice"."""
    choice = chat.tool_choice
    told = [_loads(text) for text in chat.tools]
    if len(told) > MAX_TOOLS:
        raise InvalidArgument(f"tools has {len(told)} entries; at most {MAX_TOOLS}", field="tools")
    functions = [check(each, number) for number, each in enumerate(told)]
    names = [function.name for function in functions]
    if len(set(names)) != len(names):
        raise InvalidArgument("tools: two functions have one name", field="tools")
    forced: Sequence[Function] = ()
    if choice.WhichOneof("kind") == "function":
        forced = [function for function in functions if function.name == choice.function]
        if not forced:
            raise InvalidArgument("tool_choice names a function that is not among the tools", field="tool_choice")
    elif choice.mode == ToolChoice.MODE_REQUIRED:
        if not functions:
            raise InvalidArgument("tool_choice needs tools", field="tool_choice")
        forced = functions
    elif choice.mode == ToolChoice.MODE_NONE:
        return Offer()
    elif choice.mode != ToolChoice.MODE_UNSPECIFIED:
        raise InvalidArgument("tool_choice is of a mode that is not known", field="tool_choice")
    single = choice.WhichOneof("kind") == "function"
    parallel = not single and (chat.parallel_tool_calls or not chat.HasField("parallel_tool_calls"))
    return Offer(tuple(told), tuple(functions), tuple(forced), parallel)


def check(tool: Any, number: int) -> Function:
    try:
        function = msgspec.convert(tool, Tool).function
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"tools[{number}]: {str(error).partition(' - at')[0][:200]}", field="tools") from None
    if not _NAME.fullmatch(function.name):
        raise InvalidArgument(
            f"tools[{number}]: a function's name has 1 to 64 letters, digits, '_' and '-'", field="tools"
        )
    return function


def arguments_of(call: generation_pb2.ToolCall) -> dict[str, Any]:
    """Of a call in a request's messages, as templates take them. Raises InvalidArgument."""
    try:
        found = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InvalidArgument("messages: a tool call's arguments must be the JSON text of an object", field="messages")
    return found


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidArgument("tools: each must be a JSON text", field="tools") from None
