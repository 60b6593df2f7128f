"""What an image may be. No Pillow here: whatever only reads settings or makes keys imports this."""

import msgspec

from common.errors import InvalidArgument

MIB = 1024 * 1024


class MediaLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a request's images, the same in gateways and encode workers. Every refusal names the bound."""

    max_images: int = 16  # a request
    max_file_bytes: int = 20 * MIB  # an image, as OpenAI has it
    max_request_bytes: int = 48 * MIB  # all images of a request
    # 8192 × 8192, so 192 MiB of RGB: more than any camera phone's default, less than Pillow's own warning (89 million).
    max_pixels: int = 64 * MIB
    min_side: int = 4  # image processors take a side of 1 or 3 for colour channels
    max_aspect: float = 200.0  # longer side to shorter one; Qwen's processors refuse more

    @property
    def message_bytes(self) -> int:
        """Largest message that carries images as base64, with room for everything else."""
        return self.max_request_bytes * 4 // 3 + 8 * MIB

    def check_count(self, count: int, field: str) -> None:
        """Raises InvalidArgument."""
        if count > self.max_images:
            raise InvalidArgument(f"the request has {count} images; at most {self.max_images}", field=field)

    def check_file(self, size: int, field: str) -> None:
        """size: in bytes. Raises InvalidArgument."""
        if size > self.max_file_bytes:
            raise InvalidArgument(f"{field}: the image has {size} bytes; at most {self.max_file_bytes}", field=field)

    def check_total(self, size: int, field: str) -> None:
        """size: of all images of a request, in bytes. Raises InvalidArgument."""
        if size > self.max_request_bytes:
            raise InvalidArgument(
                f"the request's images have {size} bytes together; at most {self.max_request_bytes}", field=field
            )

    def check_size(self, width: int, height: int, field: str) -> None:
        """width, height: in pixels. Raises InvalidArgument."""
        if width <= 0 or height <= 0:
            raise InvalidArgument(f"{field}: the image is {width} × {height} pixels: it is empty", field=field)
        if width * height > self.max_pixels:
            raise InvalidArgument(
                f"{field}: the image is {width} × {height} pixels, {width * height} in all; at most {self.max_pixels}",
                field=field,
            )
        if min(width, height) < self.min_side:
            raise InvalidArgument(
                f"{field}: the image is {width} × {height} pixels; each side must have at least {self.min_side}",
                field=field,
            )
        if max(width, height) > self.max_aspect * min(width, height):
            raise InvalidArgument(
                f"{field}: the image is {width} × {height} pixels; the longer side may be {self.max_aspect:g} times "
                "the shorter one at most",
                field=field,
            )
