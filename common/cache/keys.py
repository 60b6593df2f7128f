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


def block_keys(root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Keys of the complete blocks of a token sequence, chained: each includes its whole prefix."""
    keys: list[bytes] = []
    parent = root
    tokens = _token_bytes(token_ids)
    width = 4 * block_size
    for start in range(0, len(tokens) - width + 1, width):
        parent = _hash((b"parent", parent), (b"tokens", tokens[start : start + width]))
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
