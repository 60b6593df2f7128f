"""Identity of cached content: what makes two blocks the same block."""

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np

_VERSION = b"epd-block-1"
INDEX_KEY_BYTES = 16  # keys are cut to 128 bits where they only guide routing


def _hash(*fields: tuple[bytes, bytes]) -> bytes:
    """sha256 over tagged, length-prefixed fields, so that no two lists of fields read alike."""
    digest = hashlib.sha256()
    for tag, value in fields:
        digest.update(len(tag).to_bytes(2, "little") + tag + len(value).to_bytes(8, "little") + value)
    return digest.digest()


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, dtype="<u4").tobytes()


def root_key(model: str, revision: str, salt: bytes = b"", adapter: str = "") -> bytes:
    """Parent of every first block of one model, revision, tenant salt and adapter."""
    return _hash(
        (b"version", _VERSION),
        (b"model", model.encode()),
        (b"revision", revision.encode()),
        (b"salt", salt),
        (b"adapter", adapter.encode()),
    )


class MediaSpan(msgspec.Struct, frozen=True):
    """An image in a prompt: its placeholders are among tokens [start, start + length)."""

    key: bytes  # media_key
    start: int
    length: int


def media_key(data: bytes, options: bytes, salt: bytes) -> bytes:
    """Names the embedding of an image file (design §3): its bytes, what turns them into an embedding (model, revision,
    processor options, conversion version: `options`) and the tenant's salt. Never a name that a client gave."""
    return _hash((b"version", _VERSION), (b"options", options), (b"salt", salt), (b"data", data))


def block_keys(
    root: bytes, token_ids: Sequence[int], block_size: int, *, media: Sequence[MediaSpan] = (), start: int = 0
) -> list[bytes]:
    """Keys of the complete blocks of a token sequence, chained: each includes its whole prefix.

    start: number of the first token in its sequence, `root` then being the key of the block before it. media: of the
    whole sequence; placeholders are all alike, so an image enters every block that it overlaps.
    """
    keys: list[bytes] = []
    parent = root
    tokens = _token_bytes(token_ids)
    for begin in range(0, len(token_ids) - block_size + 1, block_size):
        first, end = start + begin, start + begin + block_size
        images = [
            (b"media", (item.start - first).to_bytes(8, "little", signed=True) + item.key)
            for item in media
            if item.start < end and item.start + item.length > first
        ]
        parent = _hash((b"parent", parent), (b"tokens", tokens[4 * begin : 4 * (begin + block_size)]), *images)
        keys.append(parent)
    return keys


def hit_limit(token_count: int, block_size: int) -> int:
    """Most blocks a prompt may take from the cache: one token at least is computed anew (design §3)."""
    return max(0, (token_count - 1) // block_size)


def token_hash(token_ids: Sequence[int]) -> bytes:
    """sha256 over the token ids whose KV a transfer carries."""
    return _hash((b"tokens", _token_bytes(token_ids)))


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a KV pool in canonical form [layer][block][k|v][kv_head][block_size][head_dim]."""

    model: str
    revision: str
    dtype: str  # float32 | bfloat16 | float16
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def unit_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return 2 * self.num_kv_heads * self.block_size * self.head_dim * self.itemsize

    @property
    def block_bytes(self) -> int:
        return self.unit_bytes * self.num_layers

    @property
    def compat_id(self) -> str:
        """Equal for pools that can exchange blocks."""
        return _hash((b"version", _VERSION), (b"layout", msgspec.json.encode(self))).hex()[:32]

    def __str__(self) -> str:
        return (
            f"{self.model}@{self.revision} {self.dtype}, {self.num_layers} layers × {self.num_kv_heads} KV heads × "
            f"{self.head_dim}, block size {self.block_size}"
        )


class EmbeddingLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of an embedding pool [level][block][block_rows][hidden_size]. An image takes whole blocks.

    Level 0 replaces the placeholders' token embeddings, further ones are Qwen3-VL's deepstack features.
    """

    model: str
    revision: str
    dtype: str  # float32 | bfloat16 | float16
    levels: int
    hidden_size: int
    block_rows: int = 16

    @property
    def num_layers(self) -> int:
        """As the transfer counts: what it moves is [layer][block]."""
        return self.levels

    @property
    def block_size(self) -> int:
        return self.block_rows

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def unit_bytes(self) -> int:
        """Bytes of one block in one level."""
        return self.block_rows * self.hidden_size * self.itemsize

    def blocks(self, rows: int) -> int:
        return -(-rows // self.block_rows)

    @property
    def compat_id(self) -> str:
        """Equal for pools that can exchange blocks."""
        return _hash((b"version", _VERSION), (b"embedding", msgspec.json.encode(self))).hex()[:32]

    def __str__(self) -> str:
        return f"embeddings of {self.model}@{self.revision} {self.dtype}, {self.levels} levels × {self.hidden_size}"


def embedding_hash(media: Sequence[tuple[bytes, int]]) -> bytes:
    """What a transfer of embeddings carries: (media key, rows) of each image, in order."""
    return _hash(*((b"media", rows.to_bytes(4, "little") + key) for key, rows in media))
