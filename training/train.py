"""One stage of training through the frozen language model, by two processes that add their gradients.

Resumable: the state is written every SAVE_SECONDS, and picture numbers follow from the step. The learning rate is flat
and falls over the last part of the minutes given, which count across interruptions and may be changed between them.
"""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from common.models.pictures import KINDS, Picture, Question, draw
from training.language import IMAGE_TOKENS, LanguageModel

SAVE_SECONDS = 60.0
WARM_UP = 20  # steps
FALL = 0.3  # last part of the time, in which the learning rate falls
LAST_RATE = 0.03  # of the learning rate, at the end
SELDOM = 0.35  # how often a question of a kind is asked at least
SMOOTH = 0.99  # of the averaged parameters, kept at a step
REMEMBER = 0.95  # running averages
ASK = {"place": 0.1, "describe": 0.05}  # how often a question of a kind is asked at most; others always

# Pictures' numbers → image tokens [B, 65, 576], to which gradients flow.
Embed = Callable[[list[int], list[Picture]], Tensor]


class Stage:
    """A module under training, its optimiser, and where both are kept."""

    def __init__(self, path: Path, module: nn.Module, rate: float) -> None:
        self.path, self.module, self.rate = path, module, rate
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
        self.step, self.seconds, self.averages = 0, 0.0, torch.zeros(1 + len(KINDS))
        if path.exists():
            state = torch.load(path, weights_only=True)
            module.load_state_dict(state["module"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.seconds, self.averages = state["step"], state["seconds"], state["averages"]
        # What is exported: parameters averaged over the last steps, as good as after a fall of the learning rate.
        self.smooth = [parameter.detach().clone() for parameter in module.parameters()]
        if path.exists() and "smooth" in state:
            self.smooth = state["smooth"]

    def save(self) -> None:
        scratch = self.path.with_suffix(f".{os.getpid()}")
        state = {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict(), "smooth": self.smooth}
        torch.save(state | {"step": self.step, "seconds": self.seconds, "averages": self.averages}, scratch)
        scratch.rename(self.path)

    def rate_at(self, seconds: float, budget: float) -> float:
        left = max(0.0, 1 - seconds / budget) / FALL
        return self.rate * min(1.0, (self.step + 1) / WARM_UP) * max(LAST_RATE, min(1.0, left))


def choose(picture: Picture, rng: random.Random, averages: Tensor) -> list[Question]:
    """Questions of a picture, fewer of the kinds that are mostly answered right already. averages: [1 + kinds]."""
    chosen = []
    questions = picture.questions()
    for question in questions:
        known = averages[1 + KINDS.index(question.kind)].item()
        if rng.random() < min(ASK.get(question.kind, 1.0), max(SELDOM, 2 * (1 - known))):
            chosen.append(question)
    return chosen or [rng.choice(questions)]


# Pictures, and whether the learning rate falls → places [B, K] of the image tokens that are shown, ascending.
Keep = Callable[[list[Picture], random.Random, bool], Tensor]


def keep_many(pictures: list[Picture], rng: random.Random, falling: bool) -> Tensor:
    """The class token and at least half of the patches, at last all: fewer tokens are faster."""
    patches = IMAGE_TOKENS - 1 if falling else rng.randrange(IMAGE_TOKENS // 2, IMAGE_TOKENS)
    return torch.tensor([[0, *sorted(rng.sample(range(1, IMAGE_TOKENS), patches))] for _ in pictures])


def train(
    stage: Stage, language: LanguageModel, embed: Embed, *, minutes: float, batch: int, pictures: int, keep: Keep
) -> None:
    """Runs until `minutes` of training lie behind the stage, in each of the processes of the default group."""
    rank, processes = dist.get_rank(), dist.get_world_size()
    parameters = list(stage.module.parameters())
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    saved = started = time.monotonic()
    before, budget, parent = stage.seconds, minutes * 60, os.getppid()
    with Progress(*columns, disable=rank != 0) as bar:
        task = bar.add_task(stage.path.stem, total=budget, completed=int(before))
        while True:
            clock = torch.tensor([before + time.monotonic() - started])
            dist.broadcast(clock, 0)  # all stop at the same step
            stage.seconds = clock.item()
            if stage.seconds >= budget:
                break
            if os.getppid() != parent:
                raise SystemExit("whoever started this has ended")
            first = (stage.step * processes + rank) * batch
            numbers = [number % pictures for number in range(first, first + batch)]
            drawn = [draw(number) for number in numbers]
            rng = random.Random(first)
            kept = keep(drawn, rng, stage.seconds > budget * (1 - FALL))
            images = embed(numbers, drawn)
            images = images.gather(1, kept.unsqueeze(2).expand(-1, -1, images.shape[2]))
            scores = language.score(images, kept, [choose(picture, rng, stage.averages) for picture in drawn])
            for parameter in parameters:  # not None: a fact that no picture of a process shows has a gradient, too
                parameter.grad = torch.zeros_like(parameter)
            scores.loss.backward()
            flat = torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])
            figures = torch.cat([scores.loss.detach().view(1), scores.right, scores.asked])
            dist.all_reduce(flat)
            dist.all_reduce(figures)
            flat /= processes
            flat *= min(1.0, 1.0 / (flat.norm().item() + 1e-9))
            at = 0
            for parameter in parameters:
                parameter.grad = flat[at : at + parameter.numel()].view_as(parameter)
                at += parameter.numel()
            for group in stage.optimizer.param_groups:
                group["lr"] = stage.rate_at(stage.seconds, budget)
            stage.optimizer.step()
            stage.step += 1
            torch._foreach_lerp_(stage.smooth, [parameter.detach() for parameter in parameters], 1 - SMOOTH)
            _average(stage, figures, processes)
            if rank == 0:
                bar.update(task, completed=stage.seconds, description=describe(stage))
                if stage.step % 10 == 0:
                    bar.console.print(
                        f"{stage.seconds / 60:.1f} min, {stage.step * batch * processes} pictures, {describe(stage)}"
                    )
                if time.monotonic() - saved > SAVE_SECONDS:
                    stage.save()
                    saved = time.monotonic()
    if rank == 0:
        stage.save()


def describe(stage: Stage) -> str:
    loss, *right = stage.averages.tolist()
    shares = " ".join(f"{kind} {share:.2f}" for kind, share in zip(KINDS, right, strict=True))
    return f"{stage.path.stem} step {stage.step} loss {loss:.3f} {shares}"


def _average(stage: Stage, figures: Tensor, processes: int) -> None:
    loss, right, asked = figures[0] / processes, figures[1 : 1 + len(KINDS)], figures[1 + len(KINDS) :]
    fresh = torch.cat([loss.view(1), right / asked.clamp(min=1)])
    seen = torch.cat([torch.ones(1), asked]) > 0
    weight = max(1 - REMEMBER, 1 / stage.step)
    stage.averages = torch.where(seen, stage.averages + weight * (fresh - stage.averages), stage.averages)
