"""Log probabilities of a prompt's own tokens, from the logits of the positions before them."""

from collections.abc import Callable, Sequence

import torch

from common.engine.executor import Row
from common.sampling import TokenLogprob, TopLogprob

_POSITIONS = 64  # at a time: float64 of a large vocabulary is a megabyte a position


def score(
    hidden: torch.Tensor, rows: Sequence[Row], logits: Callable[[torch.Tensor], torch.Tensor]
) -> dict[int, list[TokenLogprob]]:
    """For Batch.scored. hidden: [tokens, hidden_size] of all rows in order; logits: of hidden's rows."""
    found: dict[int, list[TokenLogprob]] = {}
    begin = 0
    for number, row in enumerate(rows):
        tokens = row.scored
        if tokens:
            top = row.choice.sequence.sampling.prompt_logprobs or 0
            entries = found[number] = []
            for start in range(0, len(tokens), _POSITIONS):
                part = tokens[start : start + _POSITIONS]
                first = begin + start
                entries += log_probabilities(logits(hidden[first : first + len(part)]), part, top)
        begin += row.end - row.start
    return found


def log_probabilities(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log softmax of each row at its token and at its `top` best ones. logits: [len(tokens), vocab_size], any float
    dtype, raw."""
    values = logits.double().log_softmax(dim=-1)
    own = values.gather(1, torch.tensor(tokens, device=values.device)[:, None])
    ranks = 1 + (values > own).sum(dim=-1)
    best, ids = values.topk(top, dim=-1)
    rows = zip(tokens, own[:, 0].tolist(), ranks.tolist(), ids.tolist(), best.tolist(), strict=True)
    return [
        TokenLogprob(token, logprob, tuple(map(TopLogprob, names, tops)), rank)
        for token, logprob, rank, names, tops in rows
    ]
