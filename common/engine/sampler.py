"""From logits to tokens."""

from collections.abc import Sequence

import numpy as np
import torch

from common.engine.executor import Sampled
from common.engine.philox import gumbel
from common.engine.sequence import Choice
from common.sampling import SamplingParams, TokenLogprob, TopLogprob

LARGEST, SMALLEST = np.finfo(np.float32).max, np.finfo(np.float32).tiny


class Sampler:
    """Applies SamplingParams to rows of logits.

    Order: logit_bias, repetition penalty, presence and frequency penalties, min_tokens, grammar, temperature, top_k,
    top_p, min_p, then Gumbel-max: the token with the highest score + noise, its noise a function of (seed, choice,
    position, token id). A random cumulative sum would do too, but flips on noise of 1e-5 in any logit; a maximum flips
    on near ties only.
    """

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self._eos = tuple(eos_token_ids)

    def sample(self, logits: torch.Tensor, targets: Sequence[Sequence[Choice]]) -> list[list[Sampled | None]]:
        """One token for every choice of targets[i], from logits[i].

        logits: [rows, vocab_size], any float dtype, any device. None stands for a row that is not finite, or for a
        choice whose grammar has failed.
        """
        if not targets:
            return []
        logits = logits.float()
        highest, best = logits.max(dim=-1)  # NaN wins a maximum; among equals the lowest id does
        tops, greedy = highest.cpu().numpy(), best.cpu().numpy()
        results: list[list[Sampled | None]] = []
        for row, choices in enumerate(targets):
            if not np.isfinite(tops[row]):
                results.append([None] * len(choices))
                continue
            values: np.ndarray | None = None
            sampled: list[Sampled | None] = []
            for choice in choices:
                params = choice.sequence.sampling
                token: int | None
                if params.greedy and _plain(choice) and choice.grammar is None:
                    token = int(greedy[row])
                else:
                    values = logits[row].cpu().numpy() if values is None else values
                    token = choose(values, choice, self._eos)
                if token is None:
                    sampled.append(None)
                    continue
                logprob = None
                if params.top_logprobs is not None:
                    values = logits[row].cpu().numpy() if values is None else values
                    logprob = log_probability(values, token, params.top_logprobs)
                sampled.append(Sampled(token, logprob))
            results.append(sampled)
        return results


def _plain(choice: Choice) -> bool:
    """Nothing but temperature and filters, which never change the best token."""
    params = choice.sequence.sampling
    return (
        not params.logit_bias
        and params.repetition_penalty == 1.0
        and params.presence_penalty == 0.0
        and params.frequency_penalty == 0.0
        and len(choice.output) >= params.min_tokens
    )


def choose(logits: np.ndarray, choice: Choice, eos_token_ids: Sequence[int]) -> int | None:
    """The next token of a choice; None when its grammar has failed, or no token is possible.

    logits: float32 [vocab_size], raw; left as they are.
    """
    params = choice.sequence.sampling
    scores = logits if _plain(choice) else _penalized(logits, choice, eos_token_ids)
    allowed: np.ndarray | None = None
    if choice.grammar is not None:
        allowed = choice.grammar.allowed(choice.output, ends=eos_token_ids if params.ignore_eos else ())
        if allowed is None:
            return None
        # Where min_tokens forbids all that the grammar allows, its end, the grammar counts.
        scores = _masked(scores if np.isfinite(scores[allowed]).any() else logits, allowed)
    best = scores.max()
    if not np.isfinite(best):
        return None
    if params.greedy:
        return int(scores.argmax())
    # Relative to the best, so that the smallest temperature cannot overflow.
    scores = (scores.astype(np.float64) - best) / params.temperature
    kept = _filtered(scores, params)
    if kept is None and allowed is not None:
        kept = np.flatnonzero(allowed)
    noise = gumbel(params.seed, choice.index, len(choice.output), kept, len(scores))
    if kept is None:
        return int((scores + noise).argmax())
    return int(kept[(scores[kept] + noise).argmax()])


def _penalized(logits: np.ndarray, choice: Choice, eos_token_ids: Sequence[int]) -> np.ndarray:
    params = choice.sequence.sampling
    scores = logits.astype(np.float32, copy=True)
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    if params.repetition_penalty != 1.0:
        # As transformers and vLLM: over prompt and output, whatever the sign of the score.
        seen = np.unique(np.asarray(choice.sequence.prompt + choice.output))
        values = scores[seen]
        penalty = max(np.float32(params.repetition_penalty), SMALLEST)
        with np.errstate(over="ignore"):
            values = np.where(values < 0, values * penalty, values / penalty)
        scores[seen] = np.clip(values, -LARGEST, LARGEST)  # infinite, nothing could be compared with it
    if choice.output and (params.presence_penalty or params.frequency_penalty):
        tokens, counts = np.unique(np.asarray(choice.output), return_counts=True)
        scores[tokens] -= (params.presence_penalty + params.frequency_penalty * counts).astype(np.float32)
    if len(choice.output) < params.min_tokens:
        stops = [*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)]
        scores[[token for token in stops if token < len(scores)]] = -np.inf
    return scores


def _masked(scores: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """What the grammar does not allow cannot be drawn."""
    return np.where(allowed, scores, np.float32(-np.inf))


def _filtered(scores: np.ndarray, params: SamplingParams) -> np.ndarray | None:
    """Ids that top_k, top_p and min_p leave, ascending; None: all. scores: float64 [vocab_size], temperature
    applied."""
    size = len(scores)
    ids: np.ndarray | None = None
    if 0 < params.top_k < size:
        threshold = np.partition(scores, size - params.top_k)[size - params.top_k]
        ids = np.flatnonzero(scores >= threshold)  # ties of the last place stay, as in transformers
    if params.top_p < 1.0:
        ids = np.arange(size) if ids is None else ids
        values = scores[ids]
        order = np.argsort(-values, kind="stable")
        weights = np.exp(values[order] - values[order[0]])
        before = np.cumsum(weights) - weights
        ids = np.sort(ids[order[before < params.top_p * weights.sum()]])
    if params.min_p > 0.0:
        ids = np.arange(size) if ids is None else ids
        ids = ids[scores[ids] >= scores.max() + np.log(params.min_p)]
    return ids


def log_probability(logits: np.ndarray, token: int, top: int) -> TokenLogprob:
    """Log softmax of the raw logits at a token and at the `top` best ones (ties: lowest id first)."""
    values = logits.astype(np.float64)
    highest = values.max()
    values -= highest + np.log(np.exp(values - highest).sum())
    best: tuple[TopLogprob, ...] = ()
    if top:
        candidates = np.flatnonzero(values >= np.partition(values, len(values) - top)[len(values) - top])
        order = np.argsort(-values[candidates], kind="stable")[:top]
        best = tuple(TopLogprob(int(each), float(values[each])) for each in candidates[order])
    return TokenLogprob(token, float(values[token]), best)
