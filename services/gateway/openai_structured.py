"""What an answer has to look like, in OpenAI's words and in vLLM's."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from common.errors import EpdError, InvalidArgument
from common.grammar.grammar import JSON_OBJECT, Grammar, choice, json_schema

_INNER = "grammar"  # what errors call it where nobody knows the client's word


class JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """strict changes nothing: the schema is always kept to."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's; one of these."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class SamplingBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all endpoints take that generate."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    # beyond OpenAI's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    stream_interval: int | None = None
    session_id: str | None = None
    priority: int | None = None
    include_stop_str_in_output: bool | None = None


class StructuredBody(SamplingBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of a body that say so; one of them."""

    response_format: ResponseFormat | None = None
    # beyond OpenAI's
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


def grammar_of(body: StructuredBody) -> Grammar | None:
    """None for an answer of any form. Raises InvalidArgument for several, naming one."""
    found = _found(body)
    if len(found) > 1:
        fields = ", ".join(field for field, _ in found)
        raise InvalidArgument(f"only one of these can be asked for: {fields}", field=found[-1][0])
    for field, grammar in found:
        try:
            grammar.validate()
        except InvalidArgument as error:
            raise InvalidArgument(error.message, field=field) from None
    return found[0][1] if found else None


def named(error: EpdError, body: object) -> EpdError:
    """An error about a request's grammar with the client's own word for it."""
    if error.field != _INNER or not isinstance(body, StructuredBody) or not (found := _found(body)):
        return error
    return InvalidArgument(error.message, field=found[0][0])


def _found(body: StructuredBody) -> Sequence[tuple[str, Grammar]]:
    given: list[tuple[str, Grammar | None]] = [("response_format", _of_format(body.response_format))]
    given += _of_parts("guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
    if (outputs := body.structured_outputs) is not None:
        inner = _of_parts("structured_outputs.", outputs.json, outputs.regex, outputs.choice, outputs.grammar)
        if outputs.json_object:
            inner.append(("structured_outputs.json_object", JSON_OBJECT))
        if not any(grammar for _, grammar in inner):
            raise InvalidArgument("structured_outputs asks for nothing", field="structured_outputs")
        given += inner
    return [(field, grammar) for field, grammar in given if grammar is not None]


def _of_format(wanted: ResponseFormat | None) -> Grammar | None:
    match wanted:
        case ResponseFormat(type="json_object"):
            return JSON_OBJECT
        case ResponseFormat(type="json_schema", json_schema=None):
            raise InvalidArgument("response_format: json_schema is required", field="response_format")
        case ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=schema)):
            return json_schema(schema)
    return None


def _of_parts(
    prefix: str,
    schema: dict[str, Any] | str | None,
    regex: str | None,
    strings: Sequence[str] | None,
    grammar: str | None,
) -> list[tuple[str, Grammar | None]]:
    return [
        (f"{prefix}json", None if schema is None else json_schema(schema)),
        (f"{prefix}regex", None if regex is None else Grammar("regex", regex)),
        (f"{prefix}choice", None if strings is None else choice(strings)),
        (f"{prefix}grammar", None if grammar is None else Grammar("lark", grammar)),
    ]
