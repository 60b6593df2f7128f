"""docs/configuration.md, made of the settings structs and the comments beside their fields: `make docs`."""

import ast
import inspect
import io
import tokenize
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from common.config import variable_of
from common.policies.limits import TenantLimits
from common.policies.slo import SloTarget
from services.gateway.settings import GatewaySettings
from services.worker_settings import WorkerSettings

FILE = Path(__file__).parents[1] / "docs" / "configuration.md"
ROLES: dict[str, type[msgspec.Struct]] = {"gateway": GatewaySettings, "worker": WorkerSettings}
ENTRIES: dict[type[msgspec.Struct], str] = {
    TenantLimits: "An entry of `limits`, as in `[gateway.limits.NAME]`",
    SloTarget: "An entry of `slo_models` and `slo_tenants`, as in `[gateway.slo_models.NAME]`",
}
HEAD = """# Configuration

Where a role's settings come from, in rising order: their defaults, a TOML file (`--config FILE` or `EPD_CONFIG`),
the environment, options of the command (`epd gateway --help` and `epd worker --help` list those that there are). A name
that is no setting is refused, wherever it stands, with a message that says where. `epd up` takes the same file for all.

```toml
[gateway]
max_in_flight = 512

[gateway.slo]
ttft_seconds = 1.0

[gateway.limits.acme]
requests_per_minute = 600

[worker.engine]
num_blocks = 4096
```

A dotted name is a table in the file and joined by `_` in the environment. There, lists are separated by commas and
tables are JSON: `EPD_GATEWAY_MODELS='{"mine": "/models/mine"}'`. Durations are in seconds.

<!-- Below is made of the code: make docs -->
"""


def document() -> str:
    parts = [HEAD]
    for section, kind in ROLES.items():
        parts.append(f"## `[{section}]`\n\n| setting | type | default | variable | |\n|---|---|---|---|---|")
        for name, hint, default, words in _settings(kind):
            shown = "" if default == "" else f"`{default}`"
            parts.append(f"| `{name}` | {_type(hint)} | {shown} | `{variable_of(section, name)}` | {words} |")
        parts.append("")
    for kind, words in ENTRIES.items():
        parts.append(f"## {words}\n\n| setting | type | default | |\n|---|---|---|---|")
        for name, hint, default, comment in _settings(kind):
            parts.append(f"| `{name}` | {_type(hint)} | `{default}` | {comment} |")
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _settings(kind: type[msgspec.Struct], held: Any = None, prefix: str = "") -> Iterator[tuple[str, Any, str, str]]:
    """(dotted name, type, default, comment) of every leaf, in the order of the source. held: the defaults, if any."""
    hints, words = get_type_hints(kind), comments(kind)
    for field in msgspec.structs.fields(kind):
        if held is not None:
            default = getattr(held, field.name)
        elif field.default is not msgspec.NODEFAULT:
            default = field.default
        else:
            default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else ""
        inner = _struct(hints[field.name])
        comment = words.get(field.name, "")
        if inner is None:
            yield prefix + field.name, hints[field.name], _shown(default), comment
            continue
        first = True
        for name, hint, leaf, leaf_words in _settings(inner, default, f"{prefix}{field.name}."):
            optional = "" if default is not None else "unset: off"  # an optional table
            lead = "; ".join(filter(None, (comment, optional))) if first else ""
            told = f"(`{field.name}`: {lead})" if lead else ""  # of the whole table, at its first line
            yield name, hint, leaf, " ".join(filter(None, (leaf_words, told)))
            first = False


def _struct(hint: Any) -> type[msgspec.Struct] | None:
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return next((each for each in kinds if isinstance(each, type) and issubclass(each, msgspec.Struct)), None)


def _type(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is dict:
        return "table"
    if origin in (tuple, list):
        return "list"
    if origin in (Union, types.UnionType):
        return _type(next(each for each in inner if each is not type(None)))
    if inner:  # Literal
        return ", ".join(f"`{each}`" for each in inner)
    return {str: "text", int: "number", float: "number", bool: "true, false"}[hint]


def _shown(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case None:
            return "none"
        case tuple() | list():
            return ", ".join(map(str, value))
        case dict():
            return "{}" if not value else msgspec.json.encode(value).decode()
        case _:
            return str(value)


def comments(kind: type) -> dict[str, str]:
    """Of each field, what is said beside it, else above it."""
    source = inspect.cleandoc("\n" + inspect.getsource(kind))
    said: dict[int, str] = {}
    alone: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            said[token.start[0]] = token.string.removeprefix("#").strip()
            if token.line.strip().startswith("#"):
                alone.add(token.start[0])
    found: dict[str, str] = {}
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    for node in body.body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        beside = [said[line] for line in range(node.lineno, (node.end_lineno or node.lineno) + 1) if line in said]
        above: list[str] = []
        line = node.lineno - 1
        while line in alone:
            above.insert(0, said[line])
            line -= 1
        found[node.target.id] = " ".join([*above, *beside]).replace("|", "\\|")
    return found


if __name__ == "__main__":
    FILE.write_text(document())
