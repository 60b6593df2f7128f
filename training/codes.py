"""Codes: image tokens made from a picture's facts alone, so that the language model can be taught without vision.

A token's code is a sum of rows of small tables, one a fact. The tables start from word embeddings and are trained
through the frozen language model; then the projector learns to produce the codes from vision features, which needs no
language model, and is tuned through it at last. Sums generalise to combinations that training never showed, and so few
parameters are soon trained: every picture teaches most of them.
"""

import random
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from common.models.pictures import COLOURS, COUNTS, PLACES, SHAPES, Picture
from common.models.vision_tower import GRID, PATCH
from training.language import LanguageModel

NAMES = tuple(COLOURS)
MARGIN = 3.0  # pixels beyond an object's radius at which a patch's centre still counts as the object's
START = 4.0  # word embeddings are multiplied by it: longer tokens stay what they are through the layers
SHOWN = 3  # patches of an object, of `few` patches in all
FEW = 14


# Columns of facts, in the order of Codes.tables.
SIZES = (3, len(NAMES), len(NAMES), len(SHAPES), len(PLACES), len(NAMES), len(COUNTS))
BASE, PLAIN, COLOUR, SHAPE, PLACE, WHOLE, COUNT = (sum(SIZES[:at]) for at in range(len(SIZES)))
FACTS = sum(SIZES)


class Codes(nn.Module):
    def __init__(self, language: LanguageModel) -> None:
        super().__init__()

        def table(words: Sequence[str]) -> nn.Parameter:
            rows = [language.words[language.ids(" " + word)].mean(0) for word in words]
            return nn.Parameter(torch.stack(rows) * START)

        self.plain = table(NAMES)  # a patch of the background, by its colour
        self.colour, self.shape, self.place = table(NAMES), table(SHAPES), table(PLACES)  # a patch of an object
        self.whole, self.count = table(NAMES), table(COUNTS)  # the first token: the background, how many objects
        self.base = table(("background", "background", "object"))  # the first token, background, object

    def tables(self) -> Tensor:
        """[FACTS, 576]"""
        return torch.cat([self.base, self.plain, self.colour, self.shape, self.place, self.whole, self.count])

    def forward(self, pictures: list[Picture]) -> Tensor:
        """[B, 65, 576]"""
        return torch.stack([facts(picture) for picture in pictures]) @ self.tables()


def facts(picture: Picture) -> Tensor:
    """[65, FACTS], 0 or 1: what each image token tells."""
    background = NAMES.index(picture.background)
    owner = owners(picture)
    found = torch.zeros(1 + GRID * GRID, FACTS)
    found[0, [BASE, WHOLE + background, COUNT + len(picture.things)]] = 1
    found[1:, [BASE + 1, PLAIN + background]] = 1
    for number, thing in enumerate(picture.things):
        colour, shape, place = NAMES.index(thing.colour), SHAPES.index(thing.shape), PLACES.index(thing.place)
        row = torch.zeros(FACTS)
        row[[BASE + 2, COLOUR + colour, SHAPE + shape, PLACE + place]] = 1
        found[1:][owner == number] = row
    return found


def owners(picture: Picture) -> Tensor:
    """[64]: which object a patch belongs to, by its centre; -1: the background."""
    centre = torch.arange(GRID) * PATCH + PATCH / 2
    owner = torch.full((GRID, GRID), -1)
    for number, thing in enumerate(picture.things):
        x, y = thing.centre
        distance = ((centre.unsqueeze(1) - y) ** 2 + (centre.unsqueeze(0) - x) ** 2).sqrt()
        owner[distance < thing.radius + MARGIN] = number
    return owner.flatten()


def few(picture: Picture, rng: random.Random) -> list[int]:
    """Places of FEW image tokens that tell all: codes of one object are alike, so some of its patches will do."""
    owner = owners(picture).tolist()
    chosen = [0]
    for number in range(len(picture.things)):
        chosen += [1 + at for at in rng.sample([at for at, who in enumerate(owner) if who == number], SHOWN)]
    plain = [at for at, who in enumerate(owner) if who < 0]
    chosen += [1 + at for at in rng.sample(plain, FEW - len(chosen))]
    return sorted(chosen)
