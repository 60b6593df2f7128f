"""Settings of a service: flags before environment before file before defaults, as one frozen struct."""

import difflib
import json
import logging
import os
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from common.errors import InvalidArgument

_log = logging.getLogger(__name__)
_Settings = TypeVar("_Settings", bound=msgspec.Struct)
ENV_PREFIX = "EPD_"


def load(
    kind: type[_Settings],
    *,
    flags: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    file: Path | None = None,
    section: str = "",
    env_prefix: str = ENV_PREFIX,
) -> _Settings:
    """Builds settings of a type whose fields may be structs themselves.

    flags: field name or dotted path ("etcd.endpoints") to a value; None means not given.
    env: default os.environ; the path in capitals after the prefix: EPD_ETCD_ENDPOINTS. Lists are comma-separated, dicts
    JSON. A variable that looks like a mistyped one is named in a warning: other programs may own it.
    file: TOML; `section` picks a table of a file that several services share.

    Raises InvalidArgument naming the setting and where it came from: unknown in flags or file, or of a wrong type.
    """
    known = dict(_leaves(kind))
    given: dict[str, tuple[Any, str]] = {}  # path -> value, origin
    for path, value in _flatten(_read(file, section), known):
        given[path] = (value, f"{file}")
    environment = os.environ if env is None else env
    for path, leaf in known.items():
        name = env_prefix + path.replace(".", "_").upper()
        if name in environment:
            given[path] = (_parse(environment[name], leaf, name), name)
    _warn_of_mistyped(environment, known, env_prefix)
    for path, value in (flags or {}).items():
        if value is not None:
            given[path] = (value, f"--{path.replace('.', '-').replace('_', '-')}")

    nested: dict[str, Any] = {}
    for path, (value, origin) in given.items():
        if path not in known:
            near = difflib.get_close_matches(path, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidArgument(f"unknown setting {path!r} from {origin}{hint}", field=path)
        *parents, last = path.split(".")
        table = nested
        for parent in parents:
            table = table.setdefault(parent, {})
        try:
            # Checked one by one, so that the origin can be named.
            table[last] = msgspec.convert(value, known[path], strict=False)
        except msgspec.ValidationError as error:
            raise InvalidArgument(f"setting {path!r} from {origin}: {error}", field=path) from None
    try:
        return msgspec.convert(nested, kind, strict=False)
    except msgspec.ValidationError as error:  # a required field that nobody gave
        raise InvalidArgument(f"settings: {error}") from None


def _leaves(kind: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and type of every field that is not a struct."""
    for field in msgspec.structs.fields(kind):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from _leaves(field.type, f"{prefix}{field.encode_name}.")
        else:
            yield prefix + field.encode_name, field.type


def _flatten(table: Mapping[str, Any], known: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        path = prefix + key
        if isinstance(value, dict) and path not in known:
            yield from _flatten(value, known, f"{path}.")
        else:
            yield path, value


def _read(file: Path | None, section: str) -> Mapping[str, Any]:
    if file is None:
        return {}
    try:
        found = tomllib.loads(file.read_text())
    except OSError as error:
        raise InvalidArgument(f"settings file cannot be read: {error.strerror}: {file}", field="file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"settings file {file}: {error}", field="file") from None
    if not section:
        return found
    table = found.get(section, {})
    if not isinstance(table, dict):
        raise InvalidArgument(f"settings file {file}: {section!r} must be a table", field="file")
    return table


def _parse(text: str, kind: Any, name: str) -> Any:
    """A variable's text as something msgspec can convert."""
    origins = {typing.get_origin(kind) or kind}
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        origins = {typing.get_origin(arm) or arm for arm in typing.get_args(kind)}
    if origins & {tuple, list, set, frozenset}:
        return [part.strip() for part in text.split(",") if part.strip()]
    if dict in origins:
        try:
            return json.loads(text)
        except ValueError:
            raise InvalidArgument(f"{name} must be a JSON object", field=name) from None
    return text


def _warn_of_mistyped(environment: Mapping[str, str], known: Mapping[str, Any], prefix: str) -> None:
    names = {prefix + path.replace(".", "_").upper() for path in known}
    for name in environment:
        if name.startswith(prefix) and name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.9)
            if near:
                _log.warning("%s is not a setting; did you mean %s?", name, near[0])
