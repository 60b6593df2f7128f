"""Synthetic pictures with questions and answers: what the default vision-language model is trained on and judged by.

A picture is a plain background with up to three objects. Everything about it follows from its seed, on every machine.
"""

import colorsys
import io
import math
import random
from functools import cached_property
from typing import Literal

import msgspec
from PIL import Image, ImageDraw

SIZE = 112  # pixels a side
_SCALE = 2  # drawn larger, then averaged down: smooth edges

COLOURS = {
    "red": (214, 32, 38),
    "green": (32, 150, 52),
    "blue": (36, 72, 208),
    "yellow": (244, 222, 42),
    "orange": (246, 134, 22),
    "purple": (132, 40, 160),
    "black": (18, 18, 18),
    "white": (242, 242, 242),
}
SHAPES = ("circle", "square", "triangle")
PLACES = ("top left", "top right", "bottom left", "bottom right")  # reading order
COUNTS = ("none", "one", "two", "three")
KINDS = ("background", "colour", "shape", "count", "place", "describe")

_STRETCH = {"circle": 1.0, "square": 1.15, "triangle": 1.25}  # so that areas are more alike
_HELDOUT_SEED = 1 << 40  # pictures of a test have seeds from here on
_NAMES = tuple(COLOURS)

Split = Literal["train", "heldout"]


class Question(msgspec.Struct, frozen=True):
    """One question in its fixed wording, and the only answer that counts as right."""

    kind: str
    text: str
    answer: str

    def messages(self) -> list[dict[str, object]]:
        """The chat that asks it, with the picture in front, as chat templates of vision-language models take it."""
        return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": self.text}]}]


class Thing(msgspec.Struct, frozen=True):
    """An object in a picture. Lengths in pixels of the finished picture, angle in degrees."""

    shape: str
    colour: str
    place: str
    centre: tuple[float, float]
    radius: float
    angle: float
    rgb: tuple[int, int, int]


class Picture(msgspec.Struct, frozen=True, dict=True):
    """A picture's facts; `image` draws them. `things` are in the reading order of their places."""

    seed: int
    background: str
    background_rgb: tuple[int, int, int]
    things: tuple[Thing, ...]

    @cached_property
    def image(self) -> Image.Image:
        """RGB, SIZE × SIZE."""
        large = Image.new("RGB", (SIZE * _SCALE, SIZE * _SCALE), self.background_rgb)
        canvas = ImageDraw.Draw(large)
        for thing in self.things:
            _draw_thing(canvas, thing)
        return large.resize((SIZE, SIZE), Image.Resampling.BOX)

    def png(self) -> bytes:
        buffer = io.BytesIO()
        self.image.save(buffer, "PNG")
        return buffer.getvalue()

    def triples(self) -> set[tuple[str, str, str]]:
        """(shape, colour, background) of every object."""
        return {(thing.shape, thing.colour, self.background) for thing in self.things}

    def questions(self) -> list[Question]:
        """Every question that has one right answer. A shape that occurs twice is not asked for its colour.

        Answers that tell one thing of an object from another name it first: so small a language model finds what
        belongs together only right behind its name.
        """
        found = [Question("background", "What colour is the background?", self.background)]
        found.append(Question("count", "How many objects are there?", COUNTS[len(self.things)]))
        shapes = [thing.shape for thing in self.things]
        for thing in self.things:
            if shapes.count(thing.shape) == 1:
                said = f"The {thing.shape} is {thing.colour}."
                found.append(Question("colour", f"What colour is the {thing.shape}?", said))
            said = f"The {thing.colour} object is a {thing.shape}."
            found.append(Question("shape", f"What shape is the {thing.colour} object?", said))
            found.append(Question("place", f"Where is the {thing.colour} object?", thing.place))
        listed = " and ".join(f"a {thing.colour} {thing.shape}" for thing in self.things)
        found.append(Question("describe", "What is in the picture?", listed or "nothing"))
        return found


def is_heldout(shape: str, colour: str, background: str) -> bool:
    """Whether no training picture shows this combination.

    About a fifth of the combinations: for every background and colour at most one shape, so that each pair of
    the three facts is seen in training.
    """
    shape_at, colour_at, background_at = SHAPES.index(shape), _NAMES.index(colour), _NAMES.index(background)
    mixed = colour_at + 3 * background_at
    return mixed % 5 < 3 and shape_at == (colour_at + 2 * background_at + mixed // 5) % 3


def draw(seed: int, split: Split = "train") -> Picture:
    """The picture of a seed. In "heldout" there are one to three objects, each a combination never trained on."""
    rng = random.Random(seed)
    background = rng.choice(_NAMES)
    count = rng.choices((0, 1, 2, 3), (0 if split == "heldout" else 4, 32, 32, 32))[0]
    wanted = split == "heldout"
    allowed = {
        colour: shapes
        for colour in _NAMES
        if colour != background
        and (shapes := [shape for shape in SHAPES if is_heldout(shape, colour, background) == wanted])
    }
    colours = rng.sample(sorted(allowed), count)
    places = sorted(rng.sample(PLACES, count), key=PLACES.index)
    things = tuple(
        _thing(rng, rng.choice(allowed[colour]), colour, place) for colour, place in zip(colours, places, strict=True)
    )
    return Picture(seed, background, _jitter(rng, background), things)


def heldout(n: int, seed: int = 0) -> list[Picture]:
    """`n` pictures of combinations that training never showed; another seed gives others."""
    first = _HELDOUT_SEED + seed * (1 << 20)
    return [draw(first + number, "heldout") for number in range(n)]


def blank(picture: Picture) -> Image.Image:
    """An image of the same size that says nothing about the picture: middle grey."""
    return Image.new("RGB", picture.image.size, (128, 128, 128))


def _thing(rng: random.Random, shape: str, colour: str, place: str) -> Thing:
    """An object wholly inside its quarter of the picture."""
    quarter = SIZE / 2
    radius = rng.uniform(16, 21) * _STRETCH[shape]
    room = quarter - 2 * radius - 2
    row, column = divmod(PLACES.index(place), 2)
    x = column * quarter + radius + 1 + rng.uniform(0, room)
    y = row * quarter + radius + 1 + rng.uniform(0, room)
    return Thing(shape, colour, place, (x, y), radius, rng.uniform(-10, 10), _jitter(rng, colour))


def _jitter(rng: random.Random, colour: str) -> tuple[int, int, int]:
    """A shade of a colour: hue by up to 3 degrees, saturation and value by up to a twelfth."""
    hue, saturation, value = colorsys.rgb_to_hsv(*(channel / 255 for channel in COLOURS[colour]))
    hue = (hue + rng.uniform(-3, 3) / 360) % 1
    saturation = min(1.0, saturation * rng.uniform(11 / 12, 13 / 12))
    value = min(1.0, value * rng.uniform(11 / 12, 13 / 12))
    red, green, blue = colorsys.hsv_to_rgb(hue, saturation, value)
    return round(red * 255), round(green * 255), round(blue * 255)


def _draw_thing(canvas: ImageDraw.ImageDraw, thing: Thing) -> None:
    x, y, radius = thing.centre[0] * _SCALE, thing.centre[1] * _SCALE, thing.radius * _SCALE
    if thing.shape == "circle":
        canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=thing.rgb)
        return
    corners, first = (4, 45) if thing.shape == "square" else (3, -90)
    angles = [math.radians(first + thing.angle + 360 * corner / corners) for corner in range(corners)]
    canvas.polygon([(x + radius * math.cos(a), y + radius * math.sin(a)) for a in angles], fill=thing.rgb)
