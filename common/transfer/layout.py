"""What a transfer needs to know of a pool, whether it holds KV or embeddings."""

from typing import Protocol

from common.cache.keys import EmbeddingLayout, KvLayout
from common.rpc import wire
from epd.v1 import transfer_pb2 as pb


class PoolLayout(Protocol):
    """Shape of a pool [layer][block][unit]. KvLayout and EmbeddingLayout are such."""

    @property
    def num_layers(self) -> int: ...

    @property
    def block_size(self) -> int:
        """Tokens, or rows, of one block."""
        ...

    @property
    def unit_bytes(self) -> int:
        """Bytes of one block in one layer."""
        ...

    @property
    def compat_id(self) -> str:
        """Equal for pools that can exchange blocks."""
        ...


def show_layout(opening: pb.PullOpen, layout: PoolLayout) -> None:
    """The puller says what its pool is like."""
    opening.compat_id = layout.compat_id
    if isinstance(layout, EmbeddingLayout):
        opening.embedding_layout.CopyFrom(wire.embedding_layout_to_proto(layout))
    elif isinstance(layout, KvLayout):
        opening.layout.CopyFrom(wire.layout_to_proto(layout))


def shown_layout(opening: pb.PullOpen) -> PoolLayout:
    """What the puller says its pool is like."""
    if opening.HasField("embedding_layout"):
        return wire.embedding_layout_from_proto(opening.embedding_layout)
    return wire.layout_from_proto(opening.layout)
