"""What a worker says of itself in the registry: membership only, load and blocks go by WorkerService.Watch."""

from typing import Annotated, Any, Protocol, TypeVar, overload

import msgspec

from common.cache.keys import EmbeddingLayout, KvLayout
from common.errors import InvalidArgument

PROTOCOL_VERSION = 1
MAX_RECORD_BYTES = 64 * 1024
R = TypeVar("R", bound="Record")
ADAPTERS = "adapters"  # their folder
ADAPTER_NAME = "^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$"
AdapterName = Annotated[str, msgspec.Meta(pattern=ADAPTER_NAME)]


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One life of one worker, stored as JSON under /epd/workers/<worker_id> with the worker's lease."""

    protocol_version: int = PROTOCOL_VERSION
    worker_id: str
    incarnation: str
    roles: tuple[str, ...]  # "encode", "prefill", "decode"
    address: str  # host:port that gateways and other workers can reach
    model: str  # the name it is served under
    aliases: tuple[str, ...] = ()  # further names of it: the text model whose weights its language part has
    layout: KvLayout
    max_context: int  # tokens, prompt and output together
    vocab_size: int
    num_blocks: int
    executor: str
    draining: bool = False
    embedding_layout: EmbeddingLayout | None = None  # of workers that encode images
    embedding_rows: int = 0  # of their pool
    prompt_rows: int = 0  # of embeddings that one prompt may have here, where prompts with images are computed

    @property
    def entry_id(self) -> str:
        return self.worker_id

    @property
    def names(self) -> tuple[str, ...]:
        """Every model name that it takes requests for."""
        return (self.model, *self.aliases)

    @property
    def compat_id(self) -> str:
        return self.layout.compat_id


class GatewayRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One life of one gateway, under /epd/gateways/<gateway_id> with its lease. For other gateways only."""

    protocol_version: int = PROTOCOL_VERSION
    gateway_id: str
    incarnation: str
    address: str  # host:port of its QuotaService

    @property
    def entry_id(self) -> str:
        return self.gateway_id


class AdapterRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A LoRA adapter that was loaded by a gateway's API, under /epd/adapters/<name>, until it is unloaded: what workers
    that start later have to load."""

    protocol_version: int = PROTOCOL_VERSION
    name: AdapterName
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]  # the base model's name
    path: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]  # below the workers' lora.directory
    checksum: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]

    @property
    def entry_id(self) -> str:
        return self.name


class Record(Protocol):
    """What can be an entry of the registry: a strict struct with a protocol version, under its name."""

    @property
    def entry_id(self) -> str: ...


class Member(Record, Protocol):
    """An entry that hangs on a lease."""

    @property
    def incarnation(self) -> str: ...


class BadRecord(ValueError):
    """A value that is no record of this protocol; `cause` is one of size, schema, version, key."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


class _Version(msgspec.Struct):
    protocol_version: int


_VERSION_DECODER = msgspec.json.Decoder(_Version)


def encode(record: Record) -> bytes:
    """JSON. Raises InvalidArgument when it is too large or its id cannot be part of a key."""
    if not record.entry_id or "/" in record.entry_id:
        raise InvalidArgument("the id of an entry must not be empty nor contain a slash", field="worker_id")
    value = msgspec.json.encode(record)
    if len(value) > MAX_RECORD_BYTES:
        raise InvalidArgument(f"a record is at most {MAX_RECORD_BYTES} bytes, not {len(value)}", field="record")
    return value


@overload
def decode(value: bytes) -> WorkerRecord: ...
@overload
def decode(value: bytes, kind: type[R]) -> R: ...
def decode(value: bytes, kind: Any = WorkerRecord) -> Any:
    """Raises BadRecord: too large, another protocol version, unknown, missing or wrong fields."""
    if len(value) > MAX_RECORD_BYTES:
        raise BadRecord("size")
    try:
        if _VERSION_DECODER.decode(value).protocol_version != PROTOCOL_VERSION:
            raise BadRecord("version")
        return msgspec.json.decode(value, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # the last: brackets within brackets
        raise BadRecord("schema") from None
