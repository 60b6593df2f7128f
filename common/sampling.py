"""What a request asks of the sampler, with the limits of every field."""

from typing import Any

import msgspec

from common.errors import InvalidArgument
from common.grammar.grammar import Grammar

MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_PROMPT_LOGPROBS = 262_144  # entries of one prompt, alternatives included: about 3 MB on the wire


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Resolved sampling parameters; defaults are the neutral values."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    max_tokens: int | None = None  # None: until end of text or the context's end
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    top_logprobs: int | None = None  # None: no logprobs; 0: the chosen token's only
    prompt_logprobs: int | None = None  # likewise, of the prompt's tokens
    grammar: Grammar | None = None  # that the whole output follows

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def validate(self, vocab_size: int) -> None:
        """Raises InvalidArgument naming the first field out of its range."""
        _range("temperature", self.temperature, 0, 2)
        _range("top_p", self.top_p, 0, 1, open_low=True)
        _range("top_k", self.top_k, 0, vocab_size)
        _range("min_p", self.min_p, 0, 1)
        _range("repetition_penalty", self.repetition_penalty, 0, 10, open_low=True)
        _range("presence_penalty", self.presence_penalty, -2, 2)
        _range("frequency_penalty", self.frequency_penalty, -2, 2)
        _range("seed", self.seed, 0, 2**64 - 1)
        if self.max_tokens is not None:
            _range("max_tokens", self.max_tokens, 1, None)
            _range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _range("min_tokens", self.min_tokens, 0, None)
        if self.top_logprobs is not None:
            _range("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)
        if self.prompt_logprobs is not None:
            _range("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidArgument(
                f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS}", field="logit_bias"
            )
        for token, bias in self.logit_bias.items():
            _range("logit_bias token id", token, 0, vocab_size - 1, field="logit_bias")
            _range("logit_bias value", bias, -100, 100, field="logit_bias")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidArgument(
                f"stop_token_ids has {len(self.stop_token_ids)} entries; at most {MAX_STOP_TOKEN_IDS}",
                field="stop_token_ids",
            )
        for token in self.stop_token_ids:
            _range("stop_token_ids", token, 0, vocab_size - 1)
        if self.grammar is not None:
            self.grammar.validate()

    def check_prompt(self, tokens: int) -> None:
        """Raises InvalidArgument when the prompt's log probabilities would be too many."""
        entries = tokens * (1 + (self.prompt_logprobs or 0))
        if self.prompt_logprobs is not None and entries > MAX_PROMPT_LOGPROBS:
            raise InvalidArgument(
                f"prompt_logprobs {self.prompt_logprobs} of {tokens} tokens are {entries} entries; "
                f"at most {MAX_PROMPT_LOGPROBS}",
                field="prompt_logprobs",
            )


def _range(name: str, value: Any, low: float, high: float | None, *, open_low: bool = False, field: str = "") -> None:
    # NaN fails every comparison, so it is refused too.
    ok = (value > low if open_low else value >= low) and (value < float("inf") if high is None else value <= high)
    if not ok:
        bound = f"{'greater than' if open_low else 'at least'} {low}" + ("" if high is None else f" and at most {high}")
        raise InvalidArgument(f"{name} must be {bound}, got {value}", field=field or name)


class TopLogprob(msgspec.Struct, frozen=True, array_like=True):
    token_id: int
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of one token from the raw logits, before penalties and temperature."""

    token_id: int
    logprob: float
    top: tuple[TopLogprob, ...] = ()
    rank: int = 0  # of a prompt's token: 1 + how many are likelier


class ChoiceTokens(msgspec.Struct, kw_only=True):
    """New tokens of one choice, in order, each sent once."""

    choice: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None  # "stop" | "length", with the last token
    stop_token_id: int | None = None  # the token that ended it, when one did
    prompt_logprobs: list[TokenLogprob] | None = None  # with the first tokens: of every prompt token but the first


def merge(parts: list[ChoiceTokens]) -> list[ChoiceTokens]:
    """One entry a choice, tokens in order."""
    merged: dict[int, ChoiceTokens] = {}
    for part in parts:
        into = merged.get(part.choice)
        if into is None:
            merged[part.choice] = part
            continue
        into.token_ids += part.token_ids
        if part.logprobs is not None:
            into.logprobs = (into.logprobs or []) + part.logprobs
        into.finish_reason, into.stop_token_id = part.finish_reason, part.stop_token_id
    return list(merged.values())
