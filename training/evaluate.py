"""How a projector does on held-out pictures, by question kind: as they are, with another picture's image, and blank.

`python -m training.evaluate [--projector FILE] [--pictures N]`. An answer is right when every token of it, its end
among them, is the likeliest: what greedy generation would say.
"""

import argparse
from collections import Counter
from pathlib import Path

import torch
from rich.progress import track
from safetensors.torch import load_file
from torch import Tensor

from common.models.catalog import DEFAULT_MODEL
from common.models.fetch import get_model
from common.models.pictures import KINDS, Picture, blank, heldout
from common.models.vlm_assemble import PROJECTOR
from training import features
from training.language import IMAGE_TOKENS, LanguageModel
from training.projector import Projector
from training.run import fetch_onnx

BATCH = 4


def load_projector(path: Path) -> Projector:
    projector = Projector()
    parameters = {name: value.float() for name, value in load_file(path).items()}
    projector.load_state_dict(parameters, strict=False)  # the standardisation is in them
    return projector.eval()


@torch.inference_mode()
def accuracy(language: LanguageModel, tokens: Tensor, pictures: list[Picture], what: str) -> dict[str, float]:
    """tokens: [N, 65, 576], the image tokens beside each picture's questions."""
    right, asked = torch.zeros(len(KINDS)), torch.zeros(len(KINDS))
    for first in track(range(0, len(pictures), BATCH), description=what):
        some = pictures[first : first + BATCH]
        kept = torch.arange(IMAGE_TOKENS).expand(len(some), -1)
        scores = language.score(tokens[first : first + BATCH], kept, [picture.questions() for picture in some])
        right += scores.right
        asked += scores.asked
    return dict(zip(KINDS, (right / asked).tolist(), strict=True))


def majority(pictures: list[Picture]) -> dict[str, float]:
    """The share of the commonest answer to each wording, by kind: the best without seeing."""
    answers: dict[str, dict[str, Counter[str]]] = {kind: {} for kind in KINDS}
    for picture in pictures:
        for question in picture.questions():
            answers[question.kind].setdefault(question.text, Counter())[question.answer] += 1
    return {
        kind: sum(max(found.values()) for found in texts.values()) / sum(found.total() for found in texts.values())
        for kind, texts in answers.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="training.evaluate", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("training/work"))
    parser.add_argument("--projector", type=Path, default=PROJECTOR)
    parser.add_argument("--pictures", type=int, default=500)
    parser.add_argument("--real-only", action="store_true")
    options = parser.parse_args()
    pictures = heldout(options.pictures)
    tower, projector = features.load_tower(fetch_onnx(options.work)), load_projector(options.projector)
    with torch.inference_mode():
        tokens = projector(features.features(tower, [picture.image for picture in pictures]))
        empty = projector(features.features(tower, [blank(pictures[0])])).expand(len(pictures), -1, -1)
    language = LanguageModel(get_model(DEFAULT_MODEL))
    columns = {"real": accuracy(language, tokens, pictures, "real")}
    if not options.real_only:
        columns["shuffled"] = accuracy(language, tokens.roll(1, 0), pictures, "shuffled")
        columns["blank"] = accuracy(language, empty, pictures, "blank")
    columns["majority"] = majority(pictures)
    print(f"| question | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for kind in KINDS:
        print(f"| {kind} | {' | '.join(f'{column[kind]:.2f}' for column in columns.values())} |")


if __name__ == "__main__":
    main()
