"""What a vision-language model's text model is given for a step: embeddings with images in their places, positions."""

from typing import Any

import numpy as np
import torch

from common.engine.embedding_pool import EmbeddingRows
from common.engine.executor import Batch


class ImageInputs:
    """rows: the pulled embeddings, None where only decodes run. mrope: positions are three-fold."""

    def __init__(self, embed_tokens: torch.nn.Module, rows: EmbeddingRows | None, *, mrope: bool) -> None:
        self._embed_tokens, self._rows, self._mrope = embed_tokens, rows, mrope

    def of(self, batch: Batch, token_ids: torch.Tensor, positions: torch.Tensor) -> dict[str, Any]:
        """Arguments of the text model's forward. token_ids, positions: int64 [1, T], as a text model would take them.

        inputs_embeds [1, T, hidden_size]; position_ids [1, T], with M-RoPE [3, 1, T]; for Qwen3-VL, in a step with
        image tokens, visual_pos_masks bool [1, T] and deepstack_visual_embeds, a [image tokens, hidden_size] a level.
        """
        embeds = self._embed_tokens(token_ids)
        if self._mrope:
            positions = torch.from_numpy(_mrope_positions(batch))[:, None].to(positions.device)
        inputs: dict[str, Any] = {"inputs_embeds": embeds, "position_ids": positions}
        places, rows = _image_tokens(batch)
        if len(places):
            where = torch.from_numpy(places).to(embeds.device)
            first, *deepstack = self._levels(rows, embeds)
            embeds[0, where] = first
            if deepstack:
                visual = torch.zeros(token_ids.shape, dtype=torch.bool, device=embeds.device)
                visual[0, where] = True
                inputs |= {"visual_pos_masks": visual, "deepstack_visual_embeds": deepstack}
        return inputs

    def _levels(self, rows: np.ndarray, like: torch.Tensor) -> list[torch.Tensor]:
        """[len(rows), hidden_size] of every level, in the dtype and on the device of `like`."""
        assert self._rows is not None
        read = [torch.from_numpy(self._rows.read(level, rows)) for level in range(self._rows.levels)]
        return [level.view(like.dtype).to(like.device) for level in read]


def _mrope_positions(batch: Batch) -> np.ndarray:
    """int64 [3, T]."""
    parts: list[np.ndarray] = []
    for row in batch.rows:
        media = row.choice.sequence.media
        if media is None:
            parts.append(np.broadcast_to(np.arange(row.start, row.end), (3, row.end - row.start)))
        else:
            parts.append(media.positions(row.start, row.end))
    return np.concatenate(parts, axis=1)


def _image_tokens(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """(places in the step, ascending; rows of the embedding pool), int64 [n] each."""
    places: list[np.ndarray] = [np.empty(0, np.int64)]
    rows: list[np.ndarray] = [np.empty(0, np.int64)]
    begin = 0
    for row in batch.rows:
        media = row.choice.sequence.media
        if media is not None:
            inside = media.within(row.start, row.end)
            places.append(media.tokens[inside] + (begin - row.start))
            rows.append(media.rows[inside])
        begin += row.end - row.start
    return np.concatenate(places), np.concatenate(rows)
