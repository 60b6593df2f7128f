"""The images of one prompt: which of its tokens take which rows of the embedding pool."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from common.cache.keys import MediaSpan
from common.engine.messages import Media
from common.errors import InvalidArgument
from common.models.vision.mrope import mrope_positions


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRules:
    """What a model and its worker do with images.

    token_id: the model's image token; None: any token of a span may be one (`timed`). mrope: positions come from each
    image's grid. bidirectional: tokens of an image attend to the later ones of it, too. block_rows, num_blocks: of the
    embedding pool; no blocks where prompts with images are not computed.
    """

    token_id: int | None = None
    mrope: bool = False
    bidirectional: bool = False
    block_rows: int = 16
    num_blocks: int = 0


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PromptMedia:
    """Checked images of a prompt.

    tokens: int64 [n], positions of all image tokens, ascending. rows: int64 [n], each one's row in the embedding pool
    (block · block_rows + place in it); empty where nothing is computed from them. whole: [start, end) of the image
    tokens that no chunk may part, in order. mrope: int64 [3, prompt], time, height and width position of every token;
    None where they are all one. delta: tokens after the prompt are at their number + delta.
    """

    spans: tuple[MediaSpan, ...]
    tokens: np.ndarray
    rows: np.ndarray
    whole: tuple[tuple[int, int], ...] = ()
    mrope: np.ndarray | None = None
    delta: int = 0

    def chunk_end(self, end: int) -> int:
        """Where a chunk that was to end at `end` does: after the image that it would part."""
        return next((stop for start, stop in self.whole if start < end < stop), end)

    def whole_within(self, start: int, end: int) -> list[tuple[int, int]]:
        """Those of `whole` that have tokens in [start, end)."""
        return [run for run in self.whole if run[0] < end and run[1] > start]

    def positions(self, start: int, end: int) -> np.ndarray:
        """int64 [3, end - start]: M-RoPE positions of tokens [start, end), those after the prompt too."""
        assert self.mrope is not None
        after = np.arange(max(start, self.mrope.shape[1]), end) + self.delta
        return np.concatenate([self.mrope[:, start:end], np.broadcast_to(after, (3, len(after)))], axis=1)

    def within(self, start: int, end: int) -> slice:
        """Which of `tokens` are at positions [start, end)."""
        return slice(*map(int, np.searchsorted(self.tokens, (start, end))))


def read_media(
    rules: ImageRules | None, prompt: Sequence[int], media: Sequence[Media], *, compute: bool
) -> PromptMedia | None:
    """None for a prompt without images. compute: the embeddings are read here, so they must be in the pool.

    prompt: checked token ids. Raises InvalidArgument for images that do not agree with prompt, model or pool.
    """
    if rules is None:
        if media:
            raise _refuse("this model takes no images")
        return None
    placeholders = None if rules.token_id is None else np.flatnonzero(np.asarray(prompt) == rules.token_id)
    if not media:
        if placeholders is not None and len(placeholders):
            raise _refuse(f"the prompt has {len(placeholders)} image tokens and no image")
        return None
    if compute and not rules.num_blocks:
        raise _refuse("this worker computes no prompts with images")
    end = 0
    for number, item in enumerate(media):
        if item.length <= 0 or item.rows <= 0 or item.start < end or item.start + item.length > len(prompt):
            raise _refuse(
                f"image {number} at tokens [{item.start}, {item.start + item.length}) is empty, beyond the prompt's "
                f"{len(prompt)} tokens, or before the end of another"
            )
        end = item.start + item.length
        _check(rules, number, item, compute)
    if placeholders is None:
        nothing = np.empty(0, np.int64)
        return PromptMedia(_spans(media), nothing, nothing)
    places = list(_places(rules, placeholders, media))
    uncovered = len(placeholders) - sum(map(len, places))
    if uncovered:
        raise _refuse(f"{uncovered} image tokens of the prompt belong to none of its {len(media)} images")
    rows = [_pool_rows(item, rules.block_rows) for item in media] if compute else []
    mrope, delta = mrope_positions(len(prompt), media) if rules.mrope else (None, 0)
    return PromptMedia(
        spans=_spans(media),
        tokens=np.concatenate(places),
        rows=np.concatenate(rows) if rows else np.empty(0, np.int64),
        whole=tuple(_whole(places)) if rules.bidirectional else (),
        mrope=mrope,
        delta=delta,
    )


def _check(rules: ImageRules, number: int, item: Media, compute: bool) -> None:
    if item.rows > item.length:
        raise _refuse(f"image {number} has {item.rows} rows for {item.length} tokens")
    if rules.mrope and (len(item.grid) != 3 or min(item.grid) <= 0 or int(np.prod(item.grid)) != item.rows):
        raise _refuse(f"image {number}: a grid of three numbers must multiply to its {item.rows} rows")
    if not compute:
        return
    needed = -(-item.rows // rules.block_rows)
    if len(item.blocks) < needed:
        raise _refuse(f"image {number} needs {needed} embedding blocks and has {len(item.blocks)}")
    if min(item.blocks) < 0 or max(item.blocks) >= rules.num_blocks:
        raise _refuse(f"image {number}: embedding blocks must be in [0, {rules.num_blocks})")


def _places(rules: ImageRules, placeholders: np.ndarray, media: Sequence[Media]) -> Iterator[np.ndarray]:
    """Positions of each image's tokens."""
    for number, item in enumerate(media):
        first, last = np.searchsorted(placeholders, (item.start, item.start + item.length))
        if last - first != item.rows:
            raise _refuse(f"image {number} has {item.rows} rows and {last - first} image tokens")
        if rules.mrope and (
            placeholders[first] != item.start or placeholders[last - 1] - placeholders[first] != last - first - 1
        ):
            raise _refuse(f"image {number}: its tokens must be one run from its start on")
        yield placeholders[first:last]


def _whole(places: Sequence[np.ndarray]) -> Iterator[tuple[int, int]]:
    """Runs of image tokens, each of one image: the model would see two that touch as one, and the keys of the first's
    blocks would not tell what they were computed with."""
    before = -1
    for number, place in enumerate(places):
        breaks = np.flatnonzero(np.diff(place) > 1) + 1
        for run in np.split(place, breaks):
            yield int(run[0]), int(run[-1]) + 1
        if place[0] == before:
            raise _refuse(f"images {number - 1} and {number} need a token between them")
        before = int(place[-1]) + 1


def _pool_rows(item: Media, block_rows: int) -> np.ndarray:
    blocks = np.asarray(item.blocks, np.int64)[:, None] * block_rows
    return (blocks + np.arange(block_rows)).reshape(-1)[: item.rows]


def _spans(media: Sequence[Media]) -> tuple[MediaSpan, ...]:
    return tuple(MediaSpan(item.key, item.start, item.length) for item in media)


def _refuse(message: str) -> InvalidArgument:
    return InvalidArgument(message, field="media")
