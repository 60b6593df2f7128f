"""A picture in the terminal, and files that images are read from."""

import io
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from common.errors import InvalidArgument
from services.commands.ask import Message, Question, read_images
from services.commands.picture import show_picture


def test_two_pixels_a_character() -> None:
    image = Image.new("RGB", (4, 4), (255, 0, 0))
    image.paste((0, 0, 255), (0, 2, 4, 4))
    out = io.StringIO()
    show_picture(image, Console(file=out, force_terminal=True, color_system="truecolor", width=80), columns=4)
    red, blue = "38;2;255;0;0;48;2;255;0;0", "38;2;0;0;255;48;2;0;0;255"
    lines = out.getvalue().splitlines()
    assert [line.count("▀") for line in lines] == [4, 4]
    assert red in lines[0]
    assert blue in lines[1]


def test_nothing_where_no_colours_are() -> None:
    out = io.StringIO()
    show_picture(Image.new("RGB", (4, 4)), Console(file=out, force_terminal=False))
    assert out.getvalue() == ""


def test_images_go_before_the_text_of_their_message(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"file")
    request = Question(model="m").request([Message("system", "s"), Message("user", "what?", read_images([path]))])
    kinds = [[part.WhichOneof("part") for part in message.content] for message in request.chat.messages]
    assert kinds == [["text"], ["image", "text"]]
    assert request.chat.messages[1].content[0].image.data == b"file"
    raw = Question(model="m", raw=True).request([Message("user", "<image> what?", (b"file",))])
    assert (raw.text, [image.data for image in raw.images]) == ("<image> what?", [b"file"])


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"nothing\.png"):
        read_images([tmp_path / "nothing.png"])
