"""Codes: image tokens made from a picture's facts alone, so that the language model can be taught without vision.

A token's code is a sum of rows of small tables, one a fact. The tables start from word embeddings and are trained
through the frozen language model; then the projector learns to produce the codes from vision features, which needs no
language model, and is tuned through it at last. Sums generalise to combinations that training never showed, and so few
parameters are soon trained: every picture teaches most of them.
"""

import random

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


class Codes(nn.Module):
    def __init__(self, language: LanguageModel) -> None:
        super().__init__()

        def table(words: tuple[str, ...]) -> nn.Parameter:
            rows = [language.words[language.ids(" " + word)].mean(0) for word in words]
            return nn.Parameter(torch.stack(rows) * START)

        self.plain = table(NAMES)  # a patch of the background, by its colour
        self.colour, self.shape, self.place = table(NAMES), table(SHAPES), table(PLACES)  # a patch of an object
        self.whole, self.count = table(NAMES), table(COUNTS)  # the first token: the background, how many objects
        self.base = nn.Parameter(torch.zeros(3, self.plain.shape[1]))  # the first token, background, object

    def forward(self, pictures: list[Picture]) -> Tensor:
        """[B, 65, 576]"""
        return torch.stack([self._code(picture) for picture in pictures])

    def _code(self, picture: Picture) -> Tensor:
        background = NAMES.index(picture.background)
        whole = self.base[0] + self.whole[background] + self.count[len(picture.things)]
        owner = owners(picture)
        patches = (self.base[1] + self.plain[background]).expand(GRID * GRID, -1)
        for number, thing in enumerate(picture.things):
            colour, shape, place = NAMES.index(thing.colour), SHAPES.index(thing.shape), PLACES.index(thing.place)
            code = self.base[2] + self.colour[colour] + self.shape[shape] + self.place[place]
            patches = torch.where((owner == number).unsqueeze(1), code, patches)
        return torch.cat([whole.unsqueeze(0), patches])


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
