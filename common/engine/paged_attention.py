"""Attention over a paged KV pool, called by transformers' own modelling code through its AttentionInterface."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from common.engine.executor import Batch

NAME = "epd_paged"


@dataclass(slots=True)
class _Decodes:
    """Decode rows of a step, padded to the longest: blocks int64 [rows × width], mask bool [rows, 1, 1, width ×
    block_size]."""

    blocks: torch.Tensor
    mask: torch.Tensor


@dataclass(slots=True)
class _Chunk:
    """Rows [begin, end) of the step are positions [start, stop) of one sequence; blocks int64 [n] hold its tokens [0,
    stop). whole: positions [first, last) of images that the chunk has part of and that attend to all of themselves."""

    begin: int
    end: int
    start: int
    stop: int
    blocks: torch.Tensor
    whole: list[tuple[int, int]]


@dataclass(slots=True)
class PagedStep:
    """What attention needs to know of one step.

    kv: [layer, block, k|v, kv_head, block_size, head_dim]. block_ids, offsets: int64 [T], where each row's K/V go.
    layer_written(n) is called after the K/V of layers [0, n) of all rows are in kv.
    """

    kv: torch.Tensor
    block_ids: torch.Tensor
    offsets: torch.Tensor
    tables: list[list[int]]  # blocks of every decode row
    lengths: list[int]  # tokens of every decode row, its own included
    chunks: list[_Chunk]
    layer_written: Callable[[int], None] | None
    decodes: dict[int | None, _Decodes] = field(default_factory=dict)

    @classmethod
    def of(cls, kv: torch.Tensor, batch: Batch, layer_written: Callable[[int], None] | None) -> "PagedStep":
        size, device = kv.shape[4], kv.device
        block_ids: list[int] = []
        offsets: list[int] = []
        chunks: list[_Chunk] = []
        for number, row in enumerate(batch.rows):
            blocks, begin = row.choice.blocks, len(offsets)
            for position in range(row.start, row.end):
                block_ids.append(blocks[position // size])
                offsets.append(position % size)
            if number >= batch.decodes:
                held = torch.tensor(blocks[: -(-row.end // size)], device=device)
                media = row.choice.sequence.media
                whole = media.whole_within(row.start, row.end) if media is not None else []
                chunks.append(_Chunk(begin, len(offsets), row.start, row.end, held, whole))
        decodes = batch.rows[: batch.decodes]
        return cls(
            kv=kv,
            block_ids=torch.tensor(block_ids, device=device),
            offsets=torch.tensor(offsets, device=device),
            tables=[row.choice.blocks[: -(-row.end // size)] for row in decodes],
            lengths=[row.end for row in decodes],
            chunks=chunks,
            layer_written=layer_written,
        )

    def decode_table(self, window: int | None) -> _Decodes:
        """The padded block table; with a sliding window only of the blocks that it still sees."""
        found = self.decodes.get(window)
        if found is None:
            found = self.decodes[window] = self._decode_table(window)
        return found

    def _decode_table(self, window: int | None) -> _Decodes:
        size, device = self.kv.shape[4], self.kv.device
        firsts = [0 if window is None else max(0, length - window) // size for length in self.lengths]
        tables = [table[first:] for table, first in zip(self.tables, firsts, strict=True)]
        width = max(map(len, tables))
        # Padding repeats a block of the row itself: another sequence's could hold NaN, which no mask stops in 0 · V.
        padded = [table + table[:1] * (width - len(table)) for table in tables]
        base = torch.tensor(firsts, device=device)[:, None] * size
        positions = base + torch.arange(width * size, device=device)
        ends = torch.tensor(self.lengths, device=device)[:, None]
        mask = positions < ends
        if window is not None:
            mask &= positions >= ends - window
        return _Decodes(torch.tensor(padded, device=device).flatten(), mask[:, None, None, :])


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: PagedStep,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, T, D], key and value [1, Hkv, T, D] after rotary embedding → ([1, T, H, D], None).

    attention_mask is None: no mask function is registered under our name, so the model builds none.
    """
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    pages = paged.kv[layer]
    pages[:, 0][paged.block_ids, :, paged.offsets] = key[0].transpose(0, 1)
    pages[:, 1][paged.block_ids, :, paged.offsets] = value[0].transpose(0, 1)
    if paged.layer_written is not None:
        paged.layer_written(layer + 1)
    parts: list[torch.Tensor] = []
    if paged.lengths:
        parts.append(_attend_decodes(pages, query[0, :, : len(paged.lengths)], paged, scaling, sliding_window))
    for chunk in paged.chunks:
        parts.append(_attend_chunk(pages, query[:, :, chunk.begin : chunk.end], chunk, scaling, sliding_window))
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


def _attend_decodes(
    pages: torch.Tensor, query: torch.Tensor, paged: PagedStep, scaling: float | None, window: int | None
) -> torch.Tensor:
    """query [H, rows, D] → [rows, H, D]: one batch, the heads that share a KV head laid out as its queries."""
    table = paged.decode_table(window)
    heads, rows, dim = query.shape
    kv_heads, size = pages.shape[2], pages.shape[3]
    keys, values = (_gather(pages, which, table.blocks, kv_heads, rows, dim) for which in (0, 1))
    assert keys.shape[2] % size == 0
    packed = query.transpose(0, 1).reshape(rows, kv_heads, heads // kv_heads, dim)
    out = F.scaled_dot_product_attention(packed, keys, values, attn_mask=table.mask, scale=scaling)
    return out.reshape(rows, heads, dim)


def _attend_chunk(
    pages: torch.Tensor, query: torch.Tensor, chunk: _Chunk, scaling: float | None, window: int | None
) -> torch.Tensor:
    """query [1, H, n, D] → [n, H, D], over the sequence's blocks as far as the window reaches back."""
    kv_heads, size, dim = pages.shape[2], pages.shape[3], pages.shape[4]
    first = 0 if window is None else max(0, chunk.start - window + 1) // size
    base = first * size
    blocks = chunk.blocks[first:]
    keys, values = (_gather(pages, which, blocks, kv_heads, 1, dim)[:, :, : chunk.stop - base] for which in (0, 1))
    if chunk.start == 0 and (window is None or chunk.stop <= window) and not chunk.whole:
        out = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling, enable_gqa=True)
    else:
        rows = torch.arange(chunk.start, chunk.stop, device=query.device)[:, None]
        distance = rows - torch.arange(base, chunk.stop, device=query.device)
        mask = distance >= 0
        for first_token, last_token in chunk.whole:
            # As transformers' Gemma3: causal or of one image, and for both the window.
            mask[
                max(0, first_token - chunk.start) : last_token - chunk.start,
                max(0, first_token - base) : last_token - base,
            ] = True
        if window is not None:
            mask &= distance < window
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling, enable_gqa=True)
    return out[0].transpose(0, 1)


def _gather(pages: torch.Tensor, which: int, blocks: torch.Tensor, kv_heads: int, rows: int, dim: int) -> torch.Tensor:
    """K or V of blocks [rows × width] as [rows, kv_heads, width × block_size, dim], in one copy."""
    picked = pages[:, which].transpose(0, 1).index_select(1, blocks)
    return picked.view(kv_heads, rows, -1, dim).transpose(0, 1)


AttentionInterface.register(NAME, paged_attention)

__all__: Sequence[str] = ("NAME", "PagedStep", "paged_attention")
