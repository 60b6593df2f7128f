"""Write the projector as it is now, also while training goes on: `python -m training.export [--out FILE]`."""

import argparse
from pathlib import Path

import torch

from common.models.vlm_assemble import PROJECTOR
from training.projector import Projector


def main() -> None:
    parser = argparse.ArgumentParser(prog="training.export", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("training/work"))
    parser.add_argument("--out", type=Path, default=PROJECTOR)
    options = parser.parse_args()
    projector = Projector()
    tuned = options.work / "projector.pt"
    if tuned.exists():
        state = torch.load(tuned, weights_only=True)
        projector.load_state_dict(state["module"])
        print(f"after {state['step']} steps through the language model")
    else:
        projector.load_state_dict(torch.load(options.work / "aligned.pt", weights_only=True))
        print("trained on codes only")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    projector.export(options.out)


if __name__ == "__main__":
    main()
