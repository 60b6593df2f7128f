"""What a gateway must know of a vision-language model: where images go in a prompt and how many tokens each takes.

Neither torch nor transformers is imported: counts follow from a picture's width and height.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from common.errors import InvalidArgument
from common.models.config import checkpoint_revision
from common.models.text_config import image_token_id
from common.models.vision.families import FAMILIES, Family
from common.models.vision.files import VisionFiles, read_files

# Of the way from a file to an embedding: decoding, conversion to RGB, batching. Raise it when embeddings change.
CONVERSION_VERSION = 1

Size = tuple[int, int]  # width, height in pixels, after the EXIF orientation is applied


class Placement(msgspec.Struct, frozen=True):
    """An image in a prompt: its `rows` image tokens are among tokens [start, start + length).

    grid: (time, height, width) in image tokens for M-RoPE, else ().
    """

    start: int
    length: int
    rows: int
    grid: tuple[int, ...]


class VisionSpec:
    """marker: what the chat template writes for an image, once each. image_token_id: the token that takes one row.

    options: everything but the file that its embedding depends on, for media keys; equal on every machine. splittable:
    a chunk of the prompt may end inside an image. Immutable, so safe in threads.
    """

    def __init__(self, files: VisionFiles, revision: str) -> None:
        self._family: Family = FAMILIES[files.architecture](files)
        self.marker = self._family.marker
        self.image_token = self._family.image_token
        self.splittable = self._family.splittable
        self.image_token_id = image_token_id(files.config, files.architecture)
        self.options = _canonical(
            {
                "conversion": CONVERSION_VERSION,
                "architecture": files.architecture,
                "revision": revision,
                "image_processor": files.image,
                "processor": files.processor,
            }
        )

    @classmethod
    def read(cls, model_dir: str | Path, *, revision: str = "") -> "VisionSpec | None":
        """None for a text model. revision: of the checkpoint, computed from its files when empty.

        Raises ModelNotFound or InvalidArgument (field model_dir) for a directory that cannot be served.
        """
        files = read_files(model_dir)
        if files is None:
            return None
        return cls(files, revision or checkpoint_revision(Path(model_dir)))

    def rows(self, size: Size) -> int:
        """Rows of the embedding, and image tokens, of a picture. Raises InvalidArgument for one that has none."""
        rows = self._family.rows(*size)
        if rows < 1:
            raise InvalidArgument(f"an image of {size[0]} × {size[1]} pixels is too small", field="messages")
        return rows

    def expand_text(self, text: str, sizes: Sequence[Size], *, field: str = "messages") -> str:
        """Replaces each marker by what stands for its image. Raises InvalidArgument unless both are as many."""
        first, *rest = text.split(self.marker)
        self._check_counts(len(rest), len(sizes), field)
        pieces = [self._family.expansion(*size) + piece for size, piece in zip(sizes, rest, strict=True)]
        return first + "".join(pieces)

    def expand_ids(
        self,
        ids: Sequence[int],
        sizes: Sequence[Size],
        encode: Callable[[str], list[int]],
        *,
        field: str = "prompt",
    ) -> list[int]:
        """The same for a prompt of token ids with one marker token an image. encode: must add no special tokens."""
        marker = encode(self.marker)
        if len(marker) != 1:
            raise InvalidArgument("the model's image marker is not one token; send text instead", field=field)
        self._check_counts(sum(token == marker[0] for token in ids), len(sizes), field)
        expanded: list[int] = []
        images = iter(sizes)
        for token in ids:
            expanded += encode(self._family.expansion(*next(images))) if token == marker[0] else [token]
        return expanded

    def place(self, token_ids: Sequence[int], sizes: Sequence[Size], *, field: str = "messages") -> list[Placement]:
        """Where the images of an expanded prompt are, in order. Raises InvalidArgument when the prompt does not hold
        exactly their image tokens (a text may contain the token's name)."""
        found = [position for position, token in enumerate(token_ids) if token == self.image_token_id]
        rows = [self.rows(size) for size in sizes]
        if len(found) != sum(rows):
            raise InvalidArgument(
                f"the prompt has {len(found)} image tokens, its {len(sizes)} images take {sum(rows)}", field=field
            )
        placements: list[Placement] = []
        begin = 0
        for size, count in zip(sizes, rows, strict=True):
            start, last = found[begin], found[begin + count - 1]
            placements.append(Placement(start, last - start + 1, count, self._family.grid(*size)))
            begin += count
        return placements

    def _check_counts(self, markers: int, images: int, field: str) -> None:
        if markers != images:
            raise InvalidArgument(f"the prompt has {markers} image markers, the request {images} images", field=field)


def _canonical(value: object) -> bytes:
    """One form for equal values, whatever order or spacing a file has."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
