"""Random JSON schemas whose every value is finite and short."""

import random
from typing import Any

WORDS = ("name", "size", "tags", "on", "id", "kind", "näme", 'quo"te', "a b", "parts")


def random_schema(seed: int) -> dict[str, Any]:
    """An object, of all kinds of parts."""
    rng = random.Random(seed)
    schema = _object(rng, 3)
    if rng.random() < 0.3:
        schema["$defs"] = {"leaf": _leaf(rng)}
        schema["properties"]["ref"] = {"$ref": "#/$defs/leaf"}
        schema["required"].append("ref")
    return schema


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    if depth == 0 or rng.random() < 0.4:
        return _leaf(rng)
    kind = rng.choice(("object", "array", "anyOf"))
    if kind == "object":
        return _object(rng, depth - 1)
    if kind == "array":
        least = rng.randrange(3)
        return {
            "type": "array",
            "items": _schema(rng, depth - 1),
            "minItems": least,
            "maxItems": least + rng.randrange(3),
        }
    return {"anyOf": [_schema(rng, depth - 1) for _ in range(2)]}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randrange(1, 4))
    return {
        "type": "object",
        "properties": {name: _schema(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _leaf(rng: random.Random) -> dict[str, Any]:
    low = rng.randrange(-1000, 1000)
    return rng.choice(
        (
            {"type": "string", "maxLength": rng.randrange(12)},
            {"type": "string", "minLength": 2, "maxLength": 5},
            {"type": "string", "pattern": "^[a-z]{1,3}-[0-9]{2}$"},
            {"type": "string", "format": "date"},
            {"enum": ["red", "gr\u00fcn", 3, None, True]},
            {"const": {"fixed": [1, "two"]}},
            {"type": "integer", "minimum": low, "maximum": low + rng.randrange(1, 5000)},
            {"type": "number", "minimum": low, "maximum": low + 1},
            {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 500},
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["boolean", "null"]},
        )
    )
