"""Recorded traffic: reading the trace files that people publish. Lengths and times alone; nobody's prompts are in them.

Azure LLM inference   CSV    TIMESTAMP,ContextTokens,GeneratedTokens
Splitwise's simulator CSV    ...,arrival_timestamp,...,prompt_size,token_size        (seconds)
Mooncake              JSONL  {"timestamp": ms, "input_length", "output_length", "hash_ids": one per 512 tokens}
"""

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from common.errors import InvalidArgument

MOONCAKE_BLOCK = 512  # tokens behind a hash id


class TraceEntry(msgspec.Struct, frozen=True, kw_only=True):
    at: float  # seconds, from whatever moment the trace counts
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()  # equal ids: equal blocks, with all before them
    block_tokens: int = 0


def read_trace(path: Path, limit: int | None = None) -> list[TraceEntry]:
    """The first `limit` requests, by time. Raises InvalidArgument naming what is wrong and in which line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path} cannot be read: {error}", field="trace") from None
    rows, read = _rows(path, text)
    entries = []
    for line, row in rows:
        try:
            entry = read(row)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InvalidArgument(f"{path}, line {line}: {type(error).__name__}: {error}", field="trace") from None
        if entry.prompt_tokens < 1 or entry.output_tokens < 0:
            raise InvalidArgument(f"{path}, line {line}: lengths must be above 0", field="trace")
        entries.append(entry)
        if len(entries) == limit:
            break
    if not entries:
        raise InvalidArgument(f"{path} has no requests", field="trace")
    return sorted(entries, key=lambda entry: entry.at)


Rows = Iterator[tuple[int, Mapping[str, Any]]]


def _rows(path: Path, text: str) -> tuple[Rows, Callable[[Mapping[str, Any]], TraceEntry]]:
    """Numbered rows, and who reads one, by the first line."""
    if text.lstrip()[:1] == "{":
        return _json_lines(path, text), _mooncake
    table = csv.DictReader(io.StringIO(text))
    columns = {name.strip() for name in table.fieldnames or ()}
    for needed, read in (
        ({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}, _azure),
        ({"arrival_timestamp", "prompt_size", "token_size"}, _splitwise),
    ):
        if needed <= columns:
            return enumerate(table, start=2), read
    raise InvalidArgument(f"{path} is no trace that is known here: its columns are {sorted(columns)}", field="trace")


def _json_lines(path: Path, text: str) -> Rows:
    for line, one in enumerate(text.splitlines(), start=1):
        if one.strip():
            try:
                row = json.loads(one)
            except ValueError:
                raise InvalidArgument(f"{path}, line {line} is not JSON", field="trace") from None
            if not isinstance(row, dict):
                raise InvalidArgument(f"{path}, line {line} is not an object", field="trace")
            yield line, row


def _mooncake(row: Mapping[str, Any]) -> TraceEntry:
    return TraceEntry(
        at=float(row["timestamp"]) / 1000,
        prompt_tokens=int(row["input_length"]),
        output_tokens=int(row["output_length"]),
        hash_ids=tuple(int(each) for each in row.get("hash_ids", ())),
        block_tokens=MOONCAKE_BLOCK,
    )


def _azure(row: Mapping[str, Any]) -> TraceEntry:
    return TraceEntry(
        at=_moment(row["TIMESTAMP"]),
        prompt_tokens=int(row["ContextTokens"]),
        output_tokens=int(row["GeneratedTokens"]),
    )


def _splitwise(row: Mapping[str, Any]) -> TraceEntry:
    return TraceEntry(
        at=float(row["arrival_timestamp"]), prompt_tokens=int(row["prompt_size"]), output_tokens=int(row["token_size"])
    )


def _moment(text: str) -> float:
    """ "2023-11-16 18:17:03.9799600": seven digits, one more than Python's datetime holds."""
    whole, _, fraction = text.strip().partition(".")
    digits, zone = fraction[: _digits(fraction)], fraction[_digits(fraction) :]
    moment = datetime.fromisoformat(whole + (zone or "+00:00"))
    return moment.timestamp() + (float(f"0.{digits}") if digits else 0.0)


def _digits(text: str) -> int:
    return next((i for i, each in enumerate(text) if not each.isdigit()), len(text))
