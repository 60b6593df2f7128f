"""OpenAI's request bodies: parsed strictly, and turned into one GenerateRequest for each prompt.

A null counts as absent. An unknown field is refused by its name. Fields of OpenAI's that ask for nothing we do not do
anyway (`user`, `store: false`, ...) are taken; those that ask for more are refused.
"""

import re
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec

from common.errors import InvalidArgument
from common.rpc import wire
from common.sampling import MAX_CHOICES, MAX_TOP_LOGPROBS
from epd.v1 import generation_pb2
from services.gateway.openai_structured import SamplingBody, StructuredBody, grammar_of
from services.gateway.preprocess import MAX_LABEL
from services.gateway.tools.openai import Call, Choice, fill_message, fill_tools

MAX_PROMPTS = 64
_MAX_UINT32 = 2**32 - 1
_TOKEN_ID = re.compile("[0-9]{1,10}")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_MISSING = re.compile(r"required field `([^`]*)`")
_LONG_VALUE = re.compile(r" '.{33,}'", re.DOTALL)  # could be anything that a client has put in the wrong place
_PART = re.compile(r"at `\$\.(messages\[\d+\]\.content\[\d+\])")
_PATH = re.compile(r"at `\$\.?([^`\[.]*)")


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Common(StructuredBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat completions take."""

    max_tokens: int | None = None
    n: int | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = None  # beyond OpenAI's


Body = TypeVar("Body", bound=msgspec.Struct)


class CompletionBody(_Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str


class ImageUrl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str
    # Accepted and without effect: the model's own processor decides on the size.
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="image_url"):
    image_url: ImageUrl


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: str
    content: str | list[TextPart | ImagePart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None


class ChatBody(_Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    # OpenAI's that change nothing here, or only at the value that they have anyway
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: list[Literal["text"]] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None  # as session_id, which wins
    # beyond OpenAI's
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


def parse(body: bytes, kind: type[Body]) -> Body:
    """Raises InvalidArgument naming the field, never quoting a value of a prompt."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        message = _LONG_VALUE.sub("", str(error))
        part = _PART.search(message)
        where = part[1] if part else ""
        if found := _UNKNOWN.search(message):
            told = f"{where}: unknown parameter {found[1]!r}" if where else f"unknown parameter {found[1]!r}"
            raise InvalidArgument(told, field=where or found[1]) from None
        if found := _MISSING.search(message):
            told = f"{where}: {found[1]} is required" if where else f"{found[1]} is required"
            raise InvalidArgument(told, field=where or found[1]) from None
        found = _PATH.search(message)
        field = where or (found[1] if found else "")
        raise InvalidArgument(f"{field or 'body'}: {message.partition(' - at')[0]}", field=field) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidArgument("the body is not valid JSON", field="") from None
    except RecursionError:
        raise InvalidArgument("the body is nested too deeply", field="") from None


def chat_request(body: ChatBody) -> generation_pb2.GenerateRequest:
    """Raises InvalidArgument for what the wire cannot carry; ranges are checked where gRPC requests are."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidArgument("top_logprobs needs logprobs: true", field="top_logprobs")
    top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    limit = body.max_completion_tokens
    if limit is None:
        limit = body.max_tokens
    elif body.max_tokens not in (None, limit):
        raise InvalidArgument("max_tokens and max_completion_tokens contradict each other", field="max_tokens")
    field = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    request = _common_request(body, limit, top_logprobs, limit_field=field, logprobs_field="top_logprobs")
    request.session_id = session(body.session_id, body.prompt_cache_key)
    if body.add_generation_prompt is not None:
        request.chat.add_generation_prompt = body.add_generation_prompt
    request.chat.continue_final_message = bool(body.continue_final_message)
    fill_chat(request.chat, body.messages)
    fill_tools(request.chat, body.tools or (), body.tool_choice, body.parallel_tool_calls)
    return request


def fill_chat(chat: generation_pb2.Chat, messages: Sequence[Message]) -> None:
    """Raises InvalidArgument as chat_request does."""
    if not messages:
        raise InvalidArgument("messages must not be empty", field="messages")
    for message in messages:
        added = chat.messages.add(role=message.role)
        fill_message(added, message.tool_calls, message.tool_call_id, message.name)
        if message.content is None and not message.tool_calls:
            raise InvalidArgument("messages: content is required", field="messages")
        for part in [TextPart(message.content)] if isinstance(message.content, str) else message.content or ():
            if isinstance(part, TextPart):
                added.content.add(text=unicode(part.text, "messages"))
            else:
                added.content.add().image.url = unicode(part.image_url.url, "messages")


def completion_requests(body: CompletionBody) -> list[generation_pb2.GenerateRequest]:
    """One for each prompt. Raises InvalidArgument as chat_request does."""
    if body.suffix:
        raise InvalidArgument("suffix is not supported", field="suffix")
    if body.best_of not in (None, body.n or 1):
        raise InvalidArgument("best_of is supported only when equal to n", field="best_of")
    requests = []
    for prompt in _prompts(body.prompt):
        request = _common_request(body, body.max_tokens, body.logprobs, echo=bool(body.echo))
        if isinstance(prompt, str):
            request.text = unicode(prompt, "prompt")
            if body.add_special_tokens is not None:
                request.add_special_tokens = body.add_special_tokens
        else:
            request.token_ids.ids.extend(uint32(token_id, "prompt") for token_id in prompt)
        requests.append(request)
    return requests


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """A string, strings, token ids, or lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(isinstance(item, int) for item in prompt):
        return [[item for item in prompt if isinstance(item, int)]]
    found = [item for item in prompt if not isinstance(item, int)]
    if not found or len(found) != len(prompt) or len({type(item) for item in found}) > 1:
        raise InvalidArgument("prompt must be a string, strings, token ids, or lists of token ids", field="prompt")
    if len(found) > MAX_PROMPTS:
        raise InvalidArgument(f"prompt has {len(found)} entries; at most {MAX_PROMPTS}", field="prompt")
    return found


def session(*names: str | None) -> str:
    """The first that is given. Raises InvalidArgument when it is too long."""
    found = next((name for name in names if name), "")
    if len(found) > MAX_LABEL:
        told = f"session_id and prompt_cache_key must have at most {MAX_LABEL} characters"
        raise InvalidArgument(told, field="session_id")
    return found


def _common_request(
    body: _Common,
    max_tokens: int | None,
    top_logprobs: int | None,
    *,
    limit_field: str = "max_tokens",
    logprobs_field: str = "logprobs",
    echo: bool = False,
) -> generation_pb2.GenerateRequest:
    wants_prompt = echo or body.prompt_logprobs is not None
    request = sampling_request(
        body,
        max_tokens,
        top_logprobs,
        limit_field=limit_field,
        logprobs_field=logprobs_field,
        least_tokens=0 if wants_prompt else 1,
    )
    request.echo = echo
    if body.prompt_logprobs is not None:
        if body.stream:
            raise InvalidArgument("prompt_logprobs is not allowed with stream: true", field="prompt_logprobs")
        count = uint32(body.prompt_logprobs, "prompt_logprobs", 0, MAX_TOP_LOGPROBS)
        request.sampling.prompt_logprobs = count
    if echo and top_logprobs is not None:
        request.sampling.prompt_logprobs = max(top_logprobs, body.prompt_logprobs or 0)
    if (grammar := grammar_of(body)) is not None:
        request.sampling.grammar.CopyFrom(wire.grammar_to_proto(grammar))
    if body.n is not None:
        request.n = uint32(body.n, "n", 1, MAX_CHOICES)
    if body.stream_options is not None and not body.stream:
        raise InvalidArgument("stream_options is allowed only with stream: true", field="stream_options")
    return request


def sampling_request(
    body: SamplingBody,
    max_tokens: int | None,
    top_logprobs: int | None,
    *,
    limit_field: str = "max_tokens",
    logprobs_field: str = "logprobs",
    least_tokens: int = 1,
) -> generation_pb2.GenerateRequest:
    """Everything but the prompt."""
    request = generation_pb2.GenerateRequest(model=body.model or "", session_id=body.session_id or "")
    sampling = request.sampling
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        if (value := getattr(body, name)) is not None:
            setattr(sampling, name, value)
    if body.top_k is not None:
        sampling.top_k = max(0, uint32(body.top_k, "top_k", low=-1))  # -1: off, as others have it
    if max_tokens is not None:
        sampling.max_tokens = uint32(max_tokens, limit_field, least_tokens)
    if body.min_tokens is not None:
        sampling.min_tokens = uint32(body.min_tokens, "min_tokens")
    if top_logprobs is not None:
        sampling.top_logprobs = uint32(top_logprobs, logprobs_field, 0, MAX_TOP_LOGPROBS)
    if body.ignore_eos is not None:
        sampling.ignore_eos = body.ignore_eos
    if body.seed is not None:
        if not -(2**63) <= body.seed < 2**64:
            raise InvalidArgument("seed must fit 64 bits", field="seed")
        sampling.seed = body.seed % 2**64
    sampling.stop_token_ids.extend(uint32(token_id, "stop_token_ids") for token_id in body.stop_token_ids or ())
    for token, bias in (body.logit_bias or {}).items():
        if not _TOKEN_ID.fullmatch(token):
            raise InvalidArgument("logit_bias must map token ids to numbers", field="logit_bias")
        sampling.logit_bias[uint32(int(token), "logit_bias")] = bias
    request.stop.extend([body.stop] if isinstance(body.stop, str) else body.stop or ())
    if body.priority is not None:
        if not -(2**31) <= body.priority < 2**31:
            raise InvalidArgument("priority must fit 32 bits", field="priority")
        request.priority = body.priority
    if body.skip_special_tokens is not None:
        request.skip_special_tokens = body.skip_special_tokens
    if body.stream_interval is not None:
        request.stream_interval = uint32(body.stream_interval, "stream_interval")
    request.include_stop_in_output = bool(body.include_stop_str_in_output)
    return request


def uint32(value: int, field: str, low: int = 0, high: int = _MAX_UINT32) -> int:
    """Ranges that are finer than the wire's are checked where gRPC requests are, too."""
    if not low <= value <= high:
        got = f", got {value}" if abs(value) < 2**64 else ""
        raise InvalidArgument(f"{field} must be at least {low} and at most {high}{got}", field=field)
    return value


def unicode(text: str, field: str) -> str:
    """JSON can hold half a surrogate pair, which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{field} must be valid Unicode", field=field) from None
    return text
