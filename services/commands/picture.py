"""A picture in a terminal: two pixels a character, one above the other."""

from PIL import Image
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

COLUMNS = 32


def show_picture(image: Image.Image, console: Console, columns: int = COLUMNS) -> None:
    """Prints an RGB image, `columns` characters wide; nothing where colours cannot be shown."""
    if not console.is_terminal or console.color_system is None:
        return
    rows = max(2, round(columns * image.height / image.width) // 2 * 2)
    small = image.convert("RGB").resize((columns, rows), Image.Resampling.BOX)
    text = Text()
    for y in range(0, rows, 2):
        for x in range(columns):
            upper, lower = (Color.from_rgb(*_rgb(small, x, y + half)) for half in (0, 1))
            text.append("▀", Style(color=upper, bgcolor=lower))
        text.append("\n")
    console.print(text, end="")


def _rgb(image: Image.Image, x: int, y: int) -> tuple[int, int, int]:
    red, green, blue = image.getpixel((x, y))  # type: ignore[misc]
    return red, green, blue
