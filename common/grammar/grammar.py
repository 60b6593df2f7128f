"""What a request's output has to look like: a JSON schema, a regular expression, a choice of strings, or a grammar.

Only the description and its bounds; `compiler.py` makes something of it.
"""

import json
import re
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from common.errors import InvalidArgument

MAX_CHARACTERS = 128 * 1024
MAX_CHOICES = 1024  # strings
# The compiler's own bounds do not cover these: it goes down rules and references by recursion, on a thread's stack,
# and a multiple of n costs it n states. Measured with llguidance 1.9.1 on a stack of 8 MiB (docs/adr/0020).
MAX_LINES = 1000  # of a Lark grammar, a rule each
MAX_REFERENCES = 256  # "$ref"
MAX_MULTIPLE_OF = 10_000  # with the decimal point moved to the end
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
_MULTIPLE_OF = re.compile(r'"multipleOf"\s*:\s*(-?[0-9]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?)')

Kind = Literal["json_schema", "regex", "choice", "lark"]


class Grammar(msgspec.Struct, frozen=True):
    """kind "choice": source is a JSON list of strings; "json_schema": the schema's text, whose order of properties is
    kept; "lark": llguidance's variant of Lark."""

    kind: Kind
    source: str

    def validate(self) -> None:
        """The bounds alone. Raises InvalidArgument, field "grammar"."""
        if len(self.source) > MAX_CHARACTERS:
            raise invalid(f"a {self.noun} may have {MAX_CHARACTERS} characters, got {len(self.source)}")
        if self.kind == "choice" and len(self.choices()) > MAX_CHOICES:
            raise invalid(f"a choice may have {MAX_CHOICES} strings, got {len(self.choices())}")
        if self.kind == "lark" and self.source.count("\n") >= MAX_LINES:
            raise invalid(f"a grammar may have {MAX_LINES} lines")
        if self.kind in ("json_schema", "lark"):
            self._validate_schemas()

    def _validate_schemas(self) -> None:
        text = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), self.source)  # a keyword spelled by its code points
        if text.count('"$ref"') > MAX_REFERENCES:
            raise invalid(f"a {self.noun} may have {MAX_REFERENCES} references")
        for number in _MULTIPLE_OF.findall(text):
            if _digits(number) > MAX_MULTIPLE_OF:
                raise invalid(f"multipleOf may be at most {MAX_MULTIPLE_OF}, counted without its decimal point")

    def choices(self) -> list[str]:
        """Of the kind "choice". Raises InvalidArgument."""
        try:
            found = msgspec.json.decode(self.source, type=list[str])
        except msgspec.MsgspecError:
            raise invalid("a choice is a list of strings") from None
        if not found or not all(found):
            raise invalid("a choice must hold at least one string, and none that is empty")
        return found

    @property
    def noun(self) -> str:
        return {"json_schema": "JSON schema", "regex": "regular expression", "choice": "choice", "lark": "grammar"}[
            self.kind
        ]


JSON_OBJECT = Grammar("json_schema", '{"type":"object"}')


def json_schema(schema: Any) -> Grammar:
    """Of a schema as an object, or as its JSON text."""
    return Grammar("json_schema", schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False))


def choice(strings: Iterable[str]) -> Grammar:
    return Grammar("choice", msgspec.json.encode(list(strings)).decode())


def invalid(message: str) -> InvalidArgument:
    return InvalidArgument(message, field="grammar")


def _digits(number: str) -> float:
    """12.5 → 125: what the compiler counts in."""
    try:
        value = abs(float(number))
    except ValueError:
        return float("inf")
    for _ in range(20):
        if value == int(value) or value > MAX_MULTIPLE_OF:
            return value
        value = round(value * 10, 9)
    return float("inf")
