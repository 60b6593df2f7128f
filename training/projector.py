"""The projector: vision features → image tokens of the language model, and its first training, on facts."""

from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from safetensors.torch import save_file
from torch import Tensor, nn

from common.models.pictures import draw
from training.codes import FACTS, Codes, facts
from training.features import CHUNK, chunk_path
from training.language import IMAGE_TOKENS

FEATURES, WIDTH = 1152, 576
WHOLE_WEIGHT = 8.0  # of the class token's error among those of 64 patches


class Projector(nn.Module):
    """Two linear layers with GELU between, as Llava's, over features standardised per channel."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("deviation", torch.ones(FEATURES))
        self.linear_1 = nn.Linear(FEATURES, WIDTH)
        self.linear_2 = nn.Linear(WIDTH, width)

    def forward(self, features: Tensor) -> Tensor:
        """[..., 1152] → [..., 576]"""
        standard = (features - self.mean) / self.deviation
        tokens: Tensor = self.linear_2(nn.functional.gelu(self.linear_1(standard)))
        return tokens

    def export(self, path: Path) -> None:
        """Write the parameters, float16, under Llava's names, the standardisation folded into the first layer."""
        first = self.linear_1.weight / self.deviation
        parameters = {
            "linear_1.weight": first,
            "linear_1.bias": self.linear_1.bias - first @ self.mean,
            "linear_2.weight": self.linear_2.weight,
            "linear_2.bias": self.linear_2.bias,
        }
        save_file({name: value.detach().half().contiguous() for name, value in parameters.items()}, path)


class FeatureStore:
    """The chunks that `features.compute` wrote, mapped into memory."""

    def __init__(self, work: Path, pictures: int) -> None:
        self._work, self.pictures = work, pictures
        self._chunks: dict[int, np.ndarray] = {}

    def read(self, numbers: list[int]) -> Tensor:
        """[N, 65, 1152] float32"""
        rows = []
        for number in numbers:
            chunk, at = divmod(number, CHUNK)
            if chunk not in self._chunks:
                self._chunks[chunk] = np.load(chunk_path(self._work, chunk), mmap_mode="r")
            rows.append(self._chunks[chunk][at])
        return torch.from_numpy(np.stack(rows)).float()


def perceive(store: FeatureStore, path: Path, *, steps: int, batch: int = 32, rate: float = 2e-3) -> None:
    """Train a projector whose second layer gives facts instead of tokens, and keep it at `path`."""
    perception = Projector(FACTS)
    some = store.read(list(range(0, store.pictures, max(1, store.pictures // 250))))
    perception.mean.copy_(some.mean((0, 1)))
    perception.deviation.copy_(some.std((0, 1)) + 1e-3)
    optimizer = torch.optim.AdamW(perception.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    weights = torch.ones(IMAGE_TOKENS, 1)
    weights[0] = WHOLE_WEIGHT
    average = torch.zeros(2)
    for step in track(range(steps), description="facts from vision features"):
        numbers = [number % store.pictures for number in range(step * batch, (step + 1) * batch)]
        wanted = torch.stack([facts(draw(number)) for number in numbers])
        error = (perception(store.read(numbers)) - wanted).square().mean((0, 2))  # [65]
        loss = (error.unsqueeze(1) * weights).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        average += (torch.stack([error[0], error[1:].mean()]).detach() - average) / min(step + 1, 50)
        if step % 50 == 49:
            first, patches = average.tolist()
            print(
                f"step {step + 1}: squared error {first:.5f} of the first token, {patches:.5f} of patches", flush=True
            )
    scratch = path.with_suffix(".part")
    torch.save(perception.state_dict(), scratch)
    scratch.rename(path)


def compose(perception: Path, codes: Codes) -> Projector:
    """The projector that gives the codes of the facts that are perceived: both are linear after the first layer."""
    state = torch.load(perception, weights_only=True)
    tables = codes.tables().detach()
    state["linear_2.weight"] = tables.T @ state["linear_2.weight"]
    state["linear_2.bias"] = tables.T @ state["linear_2.bias"]
    projector = Projector()
    projector.load_state_dict(state)
    return projector
