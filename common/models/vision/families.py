"""How each family of models writes an image into a prompt: the counts of its processor, from width and height alone."""

import math
from typing import Protocol

from common.errors import InvalidArgument
from common.models.vision.files import VisionFiles, positive, sides
from common.models.vision.tiles import best_tiling, idefics3_tiles, smart_resize

Grid = tuple[int, ...]


class Family(Protocol):
    """marker: what the chat template writes for an image. image_token: text of the token that takes one row.

    splittable: a chunk of the prompt may end inside an image.
    """

    marker: str
    image_token: str
    splittable: bool

    def rows(self, width: int, height: int) -> int:
        """Image tokens of a picture of this size in pixels."""

    def grid(self, width: int, height: int) -> Grid:
        """(time, height, width) in image tokens for M-RoPE, else ()."""

    def expansion(self, width: int, height: int) -> str:
        """What replaces the marker."""


class Llava:
    """Every picture alike: processed to one size, cut into patches, with or without the tower's class token."""

    splittable = True

    def __init__(self, files: VisionFiles) -> None:
        config, processor = files.config, files.processor
        self.marker = self.image_token = files.token("image_token", str(processor.get("image_token") or "<image>"))
        patch = processor.get("patch_size") or files.vision.get("patch_size")
        self._patch = positive(patch, "patch_size", 14)
        strategy = processor.get("vision_feature_select_strategy") or config.get("vision_feature_select_strategy")
        extra = processor.get("num_additional_image_tokens")
        if extra is None:  # of the towers that LLaVA is built with only SigLIP's has no class token
            extra = 0 if str(files.vision.get("model_type", "")).startswith("siglip") else 1
        self._extra = int(extra) - (1 if strategy != "full" else 0)
        siglip = files.image_processor == "Siglip"
        self._crop = sides(files.image.get("crop_size") or 224, "crop_size")
        self._crops = files.flag("do_center_crop", not siglip)
        self._resizes = files.flag("do_resize")
        self._pads = files.image_processor == "Llava" and files.flag("do_pad", False)
        size = files.image.get("size") or ({"height": 224, "width": 224} if siglip else {"shortest_edge": 224})
        edge = size if isinstance(size, int) else size.get("shortest_edge")
        self._shortest = None if edge is None else positive(edge, "size", 0)
        self._fixed = sides(size, "size") if edge is None else (0, 0)
        if not self._crops and isinstance(size, dict) and "longest_edge" in size:
            raise InvalidArgument("image processor: size with longest_edge needs do_center_crop", field="model_dir")

    def rows(self, width: int, height: int) -> int:
        tall, wide = self._processed(width, height)
        return (tall // self._patch) * (wide // self._patch) + self._extra

    def grid(self, width: int, height: int) -> Grid:
        return ()

    def expansion(self, width: int, height: int) -> str:
        return self.image_token * self.rows(width, height)

    def _processed(self, width: int, height: int) -> tuple[int, int]:
        """(height, width) in pixels of what the tower sees."""
        if self._crops:
            return self._crop
        if self._pads:
            width = height = max(width, height)
        if not self._resizes:
            return height, width
        if self._shortest is None:
            return self._fixed
        longest = int(self._shortest * max(width, height) / min(width, height))
        return (self._shortest, longest) if height <= width else (longest, self._shortest)


class Qwen:
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL: about the picture's own size, merge_size² patches a token."""

    splittable = True

    def __init__(self, files: VisionFiles) -> None:
        self.marker = self.image_token = files.token("image_token", "<|image_pad|>")
        size = files.image.get("size") or {}
        self._patch = files.whole("patch_size", 14)
        self._merge = files.whole("merge_size", 2)
        # The older names win where a file has both, as in the processor itself.
        self._least = files.whole("min_pixels", positive(size.get("shortest_edge"), "size", 56 * 56))
        self._most = files.whole("max_pixels", positive(size.get("longest_edge"), "size", 28 * 28 * 1280))
        if not files.flag("do_resize"):
            raise InvalidArgument("image processor: do_resize must be true for this architecture", field="model_dir")

    def rows(self, width: int, height: int) -> int:
        return math.prod(self.grid(width, height))

    def grid(self, width: int, height: int) -> Grid:
        factor = self._patch * self._merge
        tall, wide = smart_resize(width, height, factor, self._least, self._most)
        return 1, tall // factor, wide // factor

    def expansion(self, width: int, height: int) -> str:
        return self.image_token * self.rows(width, height)


class Idefics3:
    """A grid of tiles, each with its place in words, and the whole picture after them."""

    marker = image_token = "<image>"
    splittable = True
    _EDGE = "<fake_token_around_image>"

    def __init__(self, files: VisionFiles) -> None:
        vision = files.vision
        scale = positive(files.config.get("scale_factor"), "scale_factor", 2)
        side = positive(vision.get("image_size"), "image_size", 224) // positive(vision.get("patch_size"), "patch", 32)
        self._tile_rows = positive(files.processor.get("image_seq_len"), "image_seq_len", (side // scale) ** 2)
        size = files.image.get("size") or {"longest_edge": 4 * 364}
        self._size = size if "longest_edge" in size else sides(size, "size")
        self._longest = positive(size.get("longest_edge"), "size", 1)
        tile = (files.image.get("max_image_size") or {}).get("longest_edge")
        self._tile = positive(tile, "max_image_size", 364)
        self._splits = files.flag("do_image_splitting")
        if not files.flag("do_resize"):
            raise InvalidArgument("image processor: do_resize must be true for this architecture", field="model_dir")

    def tiles(self, width: int, height: int) -> tuple[int, int]:
        """(rows, columns); (0, 0) when the whole picture is all there is."""
        if not self._splits:
            return 0, 0
        fixed = self._size if isinstance(self._size, tuple) else None
        return idefics3_tiles(width, height, self._longest, self._tile, fixed)

    def rows(self, width: int, height: int) -> int:
        tall, wide = self.tiles(width, height)
        return (tall * wide + 1) * self._tile_rows

    def grid(self, width: int, height: int) -> Grid:
        return ()

    def expansion(self, width: int, height: int) -> str:
        tall, wide = self.tiles(width, height)
        pixels = self.image_token * self._tile_rows
        tiles = "".join(
            "".join(f"{self._EDGE}<row_{row}_col_{column}>{pixels}" for column in range(1, wide + 1)) + "\n"
            for row in range(1, tall + 1)
        )
        newline = "\n" if tall else ""
        return f"{tiles}{newline}{self._EDGE}<global-img>{pixels}{self._EDGE}"


class InternVL:
    """Tiles of one size and, beside several, the whole picture, all in one run."""

    splittable = True

    def __init__(self, files: VisionFiles) -> None:
        self.marker = self.image_token = files.token("context_image_token", "<IMG_CONTEXT>")
        self._start = files.token("start_image_token", "<img>")
        self._end = files.token("end_image_token", "</img>")
        default = positive(files.config.get("image_seq_length"), "image_seq_length", 256)
        self._tile_rows = positive(files.processor.get("image_seq_length"), "image_seq_length", default)
        self._tile = sides(files.image.get("size") or 384, "size")
        self._least, self._most = files.whole("min_patches", 1), files.whole("max_patches", 12)

    def tiles(self, width: int, height: int) -> int:
        """The processor cuts pictures whatever its image processor's own crop_to_patches says."""
        if self._most == 1:
            return 1
        wide, tall = best_tiling(width, height, self._tile, self._least, self._most)
        return 1 if wide * tall == 1 else wide * tall + 1

    def rows(self, width: int, height: int) -> int:
        return self.tiles(width, height) * self._tile_rows

    def grid(self, width: int, height: int) -> Grid:
        return ()

    def expansion(self, width: int, height: int) -> str:
        return f"{self._start}{self.image_token * self.rows(width, height)}{self._end}"


class Gemma3:
    """Every picture alike, without pan and scan. Its tokens attend to each other both ways."""

    splittable = False

    def __init__(self, files: VisionFiles) -> None:
        self.marker = files.token("boi_token", "<start_of_image>")
        self.image_token = files.token("image_token", "<image_soft_token>")
        self._end = files.token("eoi_token", "<end_of_image>")
        default = positive(files.config.get("mm_tokens_per_image"), "mm_tokens_per_image", 256)
        self._rows = positive(files.processor.get("image_seq_length"), "image_seq_length", default)

    def rows(self, width: int, height: int) -> int:
        return self._rows

    def grid(self, width: int, height: int) -> Grid:
        return ()

    def expansion(self, width: int, height: int) -> str:
        return f"\n\n{self.marker}{self.image_token * self._rows}{self._end}\n\n"


FAMILIES: dict[str, type[Llava] | type[Qwen] | type[Idefics3] | type[InternVL] | type[Gemma3]] = {
    "LlavaForConditionalGeneration": Llava,
    "Qwen2VLForConditionalGeneration": Qwen,
    "Qwen2_5_VLForConditionalGeneration": Qwen,
    "Qwen3VLForConditionalGeneration": Qwen,
    "Idefics3ForConditionalGeneration": Idefics3,
    "InternVLForConditionalGeneration": InternVL,
    "Gemma3ForConditionalGeneration": Gemma3,
}
