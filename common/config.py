"""Settings of a role from, in rising order: its defaults, a TOML file, the environment, the options of its command."""

import os
import re
import tomllib
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from common.errors import InvalidArgument

T = TypeVar("T", bound=msgspec.Struct)
SECTIONS = ("worker", "gateway")  # of a file
# Begin as a section's variables do and are others': the etcd server's program, and what Kubernetes sets for a service.
_FOREIGN = re.compile(
    r"(EPD_ETCD_BINARY|EPD_\w+_SERVICE_(HOST|PORT\w*)|EPD_\w+_PORT_\d+_(TCP|UDP)\w*)=.*|EPD_\w+_PORT=(tcp|udp):.*",
    re.DOTALL,
)


def load(
    kind: type[T],
    section: str,
    *,
    file: str = "",
    options: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> T:
    """An instance of the settings struct `kind`.

    file: TOML whose table [section] names fields, nested structs as tables below it.
    environ: EPD_<SECTION>_<FIELD>, nested fields joined by "_"; lists are comma-separated, tables JSON.
    options: fields by name, nested ones as "engine.num_blocks"; None counts as not given.
    Raises InvalidArgument naming the source and the field, also for what is no setting.
    """
    known = dict(_fields(kind))
    values: dict[str, Any] = {}
    source_of: dict[str, str] = {}
    for source, found in (
        (file, _flat(_read_section(file, section), known) if file else {}),
        ("the environment", _from_environ(section, known, environ)),
        ("the options", {name: value for name, value in (options or {}).items() if value is not None}),
    ):
        for name in found:
            if name not in known:
                raise InvalidArgument(f"{source}: [{section}] has no setting {name!r}", field=name)
        values |= found
        source_of |= dict.fromkeys(found, source)
    try:
        return msgspec.convert(_nest(values), kind, strict=False)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`").partition("[")[0]
        where = f"{source_of.get(name, 'settings')}: [{section}] {name}".rstrip()
        raise InvalidArgument(f"{where}: {message}", field=name) from None


def variable_of(section: str, name: str) -> str:
    """The environment's name of a setting, given its dotted one."""
    return f"EPD_{section}_{name.replace('.', '_')}".upper()


def _fields(kind: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, type) of every leaf; a nested struct is walked, a union with None as what it holds."""
    hints = get_type_hints(kind)
    for name in kind.__struct_fields__:
        inner = _struct_of(hints[name])
        if inner is None:
            yield prefix + name, hints[name]
        else:
            yield from _fields(inner, f"{prefix}{name}.")


def _struct_of(hint: Any) -> Any:
    candidates = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, msgspec.Struct):
            return candidate
    return None


def _read_section(file: str, section: str) -> dict[str, Any]:
    try:
        tables = tomllib.loads(Path(file).read_text())
    except OSError as error:
        raise InvalidArgument(f"{file} cannot be read: {error.strerror}", field="config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{file} is not valid TOML: {error}", field="config") from None
    for name in tables:
        if name not in SECTIONS:
            raise InvalidArgument(f"{file}: there is no table [{name}]; there are {', '.join(SECTIONS)}", field=name)
    found = tables.get(section, {})
    if not isinstance(found, dict):
        raise InvalidArgument(f"{file}: [{section}] must be a table", field="config")
    return found


def _flat(table: Mapping[str, Any], known: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in table.items():
        dotted = prefix + name
        if isinstance(value, dict) and dotted not in known:
            found |= _flat(value, known, f"{dotted}.")
        else:
            found[dotted] = value
    return found


def _from_environ(section: str, known: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    named = {variable_of(section, name): name for name in known}
    for variable, text in environ.items():
        if not variable.startswith(variable_of(section, "")) or _FOREIGN.fullmatch(f"{variable}={text}"):
            continue
        if variable not in named:
            raise InvalidArgument(f"the environment: {variable} is no setting of [{section}]", field=variable)
        name = named[variable]
        hint = known[name]
        origin = get_origin(hint)
        if origin in (tuple, list):
            found[name] = [part.strip() for part in text.split(",") if part.strip()]
        elif origin is dict:
            try:
                found[name] = msgspec.json.decode(text)
            except msgspec.DecodeError:
                raise InvalidArgument(f"{variable} must be a JSON object", field=name) from None
        else:
            found[name] = text
    return found


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *path, leaf = name.split(".")
        table = nested
        for part in path:
            table = table.setdefault(part, {})
        table[leaf] = value
    return nested
