"""Write the projector as it is now, also while training goes on: `python -m training.export [--out FILE]`."""

import argparse
from pathlib import Path

import torch

from common.models.catalog import DEFAULT_MODEL
from common.models.fetch import get_model
from common.models.vlm_assemble import PROJECTOR
from training.codes import Codes
from training.language import LanguageModel
from training.projector import Projector, compose
from training.run import PERCEPTION


def main() -> None:
    parser = argparse.ArgumentParser(prog="training.export", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("training/work"))
    parser.add_argument("--out", type=Path, default=PROJECTOR)
    options = parser.parse_args()
    tuned = options.work / "projector.pt"
    if tuned.exists():
        projector = Projector()
        state = torch.load(tuned, weights_only=True)
        projector.load_state_dict(state["module"])
        for parameter, smooth in zip(projector.parameters(), state["smooth"], strict=True):
            parameter.data.copy_(smooth)
        print(f"after {state['step']} steps through the language model")
    else:
        codes = Codes(LanguageModel(get_model(DEFAULT_MODEL)))
        state = torch.load(options.work / "codes.pt", weights_only=True)
        codes.load_state_dict(state["module"])
        projector = compose(options.work / PERCEPTION, codes)
        print(f"codes after {state['step']} steps through the language model")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    projector.export(options.out)


if __name__ == "__main__":
    main()
