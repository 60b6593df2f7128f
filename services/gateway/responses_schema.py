"""OpenAI's /v1/responses: text and images in, text out; nothing is stored and no tool is called.

Parsed as strictly as openai_schema.py does: fields that ask for what we do not do are refused by name.
"""

from typing import Any, Literal

import msgspec

from common.errors import InvalidArgument
from common.sampling import MAX_TOP_LOGPROBS
from epd.v1 import generation_pb2
from services.gateway.openai_schema import sampling_request, session, uint32, unicode
from services.gateway.openai_structured import SamplingBody

LOGPROBS = "message.output_text.logprobs"  # what `include` may ask for


class InputText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="input_text"):
    text: str


class InputImage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="input_image"):
    image_url: str
    # Accepted and without effect: the model's own processor decides on the size.
    detail: Literal["auto", "low", "high"] | None = None


class OutputText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="output_text"):
    """Of an earlier answer, given back as it came."""

    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="refusal"):
    refusal: str


Part = InputText | InputImage | OutputText | Refusal


class InputMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    type: Literal["message"] | None = None
    # of an earlier answer
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: str | None = None


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


class ResponsesBody(SamplingBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    input: str | list[InputMessage]
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    prompt_cache_key: str | None = None  # as session_id, which wins
    stream_options: ResponsesStreamOptions | None = None
    metadata: dict[str, str] | None = None  # told back
    # OpenAI's that change nothing here, or only at the value that they have anyway
    text: TextOptions | None = None
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    parallel_tool_calls: bool | None = None


def responses_request(body: ResponsesBody) -> generation_pb2.GenerateRequest:
    """Raises InvalidArgument for what the wire cannot carry; ranges are checked where gRPC requests are."""
    if body.stream_options is not None and not body.stream:
        raise InvalidArgument("stream_options is allowed only with stream: true", field="stream_options")
    wants = bool(body.include)
    if body.top_logprobs is not None and not wants:
        raise InvalidArgument(f"top_logprobs needs {LOGPROBS!r} in include", field="top_logprobs")
    top = uint32(body.top_logprobs or 0, "top_logprobs", 0, MAX_TOP_LOGPROBS) if wants else None
    request = sampling_request(
        body, body.max_output_tokens, top, limit_field="max_output_tokens", logprobs_field="top_logprobs"
    )
    request.session_id = session(body.session_id, body.prompt_cache_key)
    if body.instructions is not None:
        _add(request.chat, "system", body.instructions, "instructions")
    if isinstance(body.input, str):
        _add(request.chat, "user", body.input, "input")
        return request
    if not body.input:
        raise InvalidArgument("input must not be empty", field="input")
    for message in body.input:
        # What OpenAI calls the developer's is the system's message of every chat template.
        role = "system" if message.role == "developer" else message.role
        if isinstance(message.content, str):
            _add(request.chat, role, message.content, "input")
            continue
        added = request.chat.messages.add(role=role)
        for part in message.content:
            match part:
                case InputImage(image_url=url):
                    added.content.add().image.url = unicode(url, "input")
                case InputText(text=text) | OutputText(text=text) | Refusal(refusal=text):
                    added.content.add(text=unicode(text, "input"))
    return request


def _add(chat: generation_pb2.Chat, role: str, text: str, field: str) -> None:
    chat.messages.add(role=role).content.add(text=unicode(text, field))
