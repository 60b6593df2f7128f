"""transformers' own `generate` as the reference: fp32, greedy, unpadded, batch of one, near ties refused."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, LogitsProcessorList

MIN_GAP = 1e-3  # between the best and the second logit at every step; below it, rounding could choose


class NearTie(Exception):
    """The prompt is no good as a test: pick another."""


class OutputPenalties(LogitsProcessor):
    """presence · [seen] + frequency · count over the output, subtracted."""

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self.prompt_length, self.presence, self.frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for token, count in zip(*input_ids[0, self.prompt_length :].unique(return_counts=True), strict=True):
            scores[0, token] -= self.presence + self.frequency * float(count)
        return scores


@cache
def reference_model(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def generate(
    checkpoint: Path,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    eos: int | None = None,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
) -> list[int]:
    """Greedy tokens, the end token included. eos None: never ends early. Raises NearTie."""
    model = reference_model(checkpoint)
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=eos,
        pad_token_id=0,
        repetition_penalty=repetition_penalty,
        return_dict_in_generate=True,
        output_scores=True,
    )
    # Replaces what the checkpoint brings along, instead of being merged with it.
    model.generation_config = config
    processors = LogitsProcessorList()
    if presence_penalty or frequency_penalty:
        processors.append(OutputPenalties(len(prompt), presence_penalty, frequency_penalty))
    with torch.inference_mode():
        out = model.generate(torch.tensor([list(prompt)]), generation_config=config, logits_processor=processors)
    for scores in out.scores:
        best = scores[0].topk(2).values
        if best[0] - best[1] < MIN_GAP:
            raise NearTie
    return out.sequences[0, len(prompt) :].tolist()
