"""Arithmetic of sizes that image processors do before they touch a pixel. Sizes in pixels.

The float operations and roundings are those of transformers' processors, in their order: another order gives another
count for some picture.
"""

import math
from functools import lru_cache

from common.errors import InvalidArgument

MAX_ASPECT = 200  # Qwen2-VL's processor refuses longer pictures
_IDEFICS3_LARGEST = 4096


def smart_resize(width: int, height: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """(height, width): multiples of `factor` whose product is between least and most, aspect about kept (Qwen2-VL).

    Raises InvalidArgument for an aspect beyond MAX_ASPECT.
    """
    if max(width, height) / min(width, height) > MAX_ASPECT:
        raise InvalidArgument(
            f"an image of {width} × {height} pixels is too narrow; its aspect may be at most {MAX_ASPECT}",
            field="messages",
        )
    tall, wide = round(height / factor) * factor, round(width / factor) * factor
    if tall * wide > most:
        shrink = math.sqrt((height * width) / most)
        tall = max(factor, math.floor(height / shrink / factor) * factor)
        wide = max(factor, math.floor(width / shrink / factor) * factor)
    elif tall * wide < least:
        grow = math.sqrt(least / (height * width))
        tall, wide = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return tall, wide


def idefics3_tiles(width: int, height: int, longest: int, tile: int, fixed: tuple[int, int] | None) -> tuple[int, int]:
    """(rows, columns) of tiles, or (0, 0) for a picture that is one tile (Idefics3).

    longest: side that the longer edge is brought to; fixed: (height, width) to resize to instead.
    """
    if fixed is not None:
        height, width = fixed
    else:
        height, width = _longest_edge(width, height, longest)
    aspect = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / aspect) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * aspect) / tile) * tile
    if height <= tile and width <= tile:
        return 0, 0
    return height // tile, width // tile


def _longest_edge(width: int, height: int, longest: int) -> tuple[int, int]:
    """(height, width) with the longer edge brought to `longest`, the other made even, then below 4096."""
    aspect = width / height
    if width >= height:
        width, height = longest, int(longest / aspect)
        height += height % 2
    else:
        height, width = longest, int(longest * aspect)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    aspect = width / height
    if width >= height and width > _IDEFICS3_LARGEST:
        width, height = _IDEFICS3_LARGEST, int(_IDEFICS3_LARGEST / aspect)
    elif height > width and height > _IDEFICS3_LARGEST:
        height, width = _IDEFICS3_LARGEST, int(_IDEFICS3_LARGEST * aspect)
    return max(height, 1), max(width, 1)


@lru_cache(maxsize=16)
def _tilings(least: int, most: int) -> list[tuple[int, int]]:
    """(columns, rows) with least to most tiles, fewest tiles first, then fewest columns."""
    found = [(x, y) for x in range(1, most + 1) for y in range(1, most + 1) if least <= x * y <= most]
    return sorted(found, key=math.prod)


def best_tiling(width: int, height: int, tile: tuple[int, int], least: int, most: int) -> tuple[int, int]:
    """(columns, rows) of tiles (height, width) nearest in aspect (InternVL).

    Of equally near ones the larger, as long as it covers less than twice the picture.
    """
    aspect, area = width / height, width * height
    best, nearest = (1, 1), math.inf
    for columns, rows in _tilings(least, most):
        distance = abs(aspect - columns / rows)
        if distance < nearest:
            best, nearest = (columns, rows), distance
        elif distance == nearest and area > 0.5 * tile[0] * tile[1] * columns * rows:
            best = (columns, rows)
    return best
