"""Answers that must be tool calls, as a Lark grammar; perhaps with another form that an answer may have instead."""

import json
from collections.abc import Sequence
from typing import Any

from common.grammar.compiler import JSON_BLANKS, lark_string
from common.grammar.grammar import Grammar
from common.models.tokenizer import Tokenizer
from services.gateway.tools.formats import ToolFormat, special_markers
from services.gateway.tools.schema import Function

MAX_CALLS = 16  # in one answer


def calls_grammar(
    form: ToolFormat,
    functions: Sequence[Function],
    tokenizer: Tokenizer,
    *,
    parallel: bool,
    otherwise: Grammar | None = None,
) -> Grammar:
    """otherwise: a JSON schema that text which calls nothing follows."""
    special = special_markers(form, tokenizer)

    def marker(text: str) -> str:
        return f"<[{special[text]}]>" if text in special else lark_string(text)

    many = f"{{0,{MAX_CALLS - 1}}}"
    more = f" ({lark_string(form.glue)} call){many}" if parallel and form.glue else ""
    if form.array:
        calls = f"{marker(form.begin)} {lark_string(form.before + '[')} call{more} {lark_string(']')}"
        call = "object"
    elif form.begin:
        calls = f"call{more}"
        call = f"{marker(form.begin)} {lark_string(form.before)} object {lark_string(form.before)} {marker(form.end)}"
    else:
        calls, call = "call", "object"
    lines = [f"start: calls{' | otherwise' if otherwise else ''}", f"calls: {calls}", f"call: {call}"]
    lines.append("object: " + " | ".join(f"object_{number}" for number in range(len(functions))))
    for number, function in enumerate(functions):
        head = lark_string(f'{{"name": {json.dumps(function.name)}, {json.dumps(form.arguments)}: ')
        lines.append(f'object_{number}: {head} %json {_schema(function.parameters)} "}}"')
    if otherwise is not None:
        lines.append(f"otherwise: %json {_schema(json.loads(otherwise.source))}")
    return Grammar("lark", "\n".join(lines))


def _schema(schema: dict[str, Any] | None) -> str:
    """Of arguments: an object whatever the schema says of it; without one, of no properties. On one line."""
    if schema is None:
        schema = {"type": "object", "additionalProperties": False}
    elif not any(key in schema for key in ("type", "$ref", "anyOf", "oneOf", "allOf", "const", "enum")):
        schema = {"type": "object", **schema}
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": JSON_BLANKS}}, ensure_ascii=False)
