"""Grammars by llguidance: compiled over a model's tokens, and followed by one choice's output.

The library's own words may quote a grammar or tokens, so of its errors only what is safe is told.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from common.grammar.grammar import Grammar, invalid
from common.models.tokenizer import Tokenizer

# Endless blanks are a known way for a model to never finish an object; these are enough to indent it.
JSON_OPTIONS = {"whitespace_pattern": r"[ \t\r\n]{1,32}"}
_QUOTED = re.compile(r'"[^"]*"|\'[^\']*\'|`[^`]*`')
_KEYWORDS = re.compile(r'Unimplemented keys: \[([a-zA-Z$", ]{1,200})\]')
_HINTS = ("unsatisfiable schema", "too deeply nested", "recursion limit", "too large", "fuel exhausted", "unclosed")


class _Vocabulary:
    """What LLTokenizer asks of a tokenizer. Text is never tokenized here: masks need the tokens' bytes alone."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: Sequence[int], end: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = end

    def __call__(self, text: bytes | str) -> list[int]:
        return []


class GrammarCompiler:
    """Compiles grammars for one model's logits. Thread-safe: what it makes shares nothing that is written to."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        """vocab_size: of the logits. end_token_ids: allowed where the grammar may end, and only there."""
        known = min(tokenizer.vocab_size, vocab_size)
        ends = [token for token in end_token_ids if token < vocab_size]
        special = sorted({token for token in tokenizer.special_ids if token < known} | set(ends))
        tokens = [tokenizer.token_bytes(token) for token in range(known)] + [b""] * (vocab_size - known)
        self.vocab_size = vocab_size
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Vocabulary(tokens, special, ends[0])), n_vocab=vocab_size, eos_token=ends
        )
        self._limits = LLParserLimits(
            initial_lexer_fuel=500_000, max_lexer_states=20_000, max_grammar_size=200_000, verbose_errors=False
        )

    @classmethod
    def of_directory(cls, directory: str | Path, vocab_size: int, end_token_ids: Sequence[int]) -> "GrammarCompiler":
        return cls(Tokenizer(directory), vocab_size, end_token_ids)

    def compile(self, grammar: Grammar) -> LLMatcher:
        """A matcher at the grammar's start. Blocking, without the GIL; milliseconds mostly. Raises InvalidArgument with
        the field "grammar" for one that is wrong, too large, or matches nothing."""
        grammar.validate()
        matcher = LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds out that nothing matches, and pays for the first token's mask
        if matcher.is_error():
            raise invalid(_told(grammar, matcher.get_error()))
        return matcher


class GrammarState:
    """Where one choice is in its grammar. It follows the choice's output, whoever made that: this engine before and
    after a preemption, another one before a hand-off or a resume.

    error: why it cannot go on; empty while it can.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        """matcher: at the grammar's start, and this state's own."""
        self._matcher = matcher
        self._size = vocab_size
        self._consumed = 0
        self.error = ""

    def allowed(self, output: Sequence[int], *, ends: Sequence[int] = ()) -> np.ndarray | None:
        """Tokens that may follow, bool [vocab_size], at least one; None after an error.

        ends: these only where nothing else may follow.
        """
        if not self._follow(output):
            return None
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        bits: np.ndarray = np.unpackbits(mask, bitorder="little")[: self._size].view(bool)
        if ends:
            others = bits.copy()
            others[list(ends)] = False
            bits = others if others.any() else bits
        if self._matcher.is_error() or not bits.any():
            self.error = "the output cannot go on by the grammar within the limits on its parser"
            return None
        return bits

    def ended(self, output: Sequence[int]) -> bool:
        """The output is complete: not even an end-of-text token can follow."""
        return self._follow(output) and self._matcher.is_stopped()

    def _follow(self, output: Sequence[int]) -> bool:
        new = list(output[self._consumed :])
        self._consumed = len(output)
        if new and not self.error and not self._matcher.consume_tokens(new):
            self.error = "the output so far does not follow the grammar"
        return not self.error


def lark_of(text: str) -> str:
    """GBNF to Lark; Lark stays as it is. Raises InvalidArgument. Slow for long ones: not for an event loop."""
    if "::=" not in text:
        return text
    try:
        return str(any_to_lark(text))
    except (ValueError, RecursionError, IndexError, KeyError, AssertionError):
        raise invalid("the grammar is not valid GBNF") from None


def lark_string(text: str) -> str:
    """A literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def _source(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_schema":
            try:
                return str(LLMatcher.grammar_from_json_schema(grammar.source, defaults=JSON_OPTIONS))
            except ValueError:
                raise invalid("the JSON schema must be a JSON object") from None
        case "regex":
            return str(LLMatcher.grammar_from_regex(grammar.source))
        case "choice":
            return "start: " + " | ".join(map(lark_string, grammar.choices()))
        case "lark":
            return str(LLMatcher.grammar_from_lark(grammar.source))


def _told(grammar: Grammar, error: str) -> str:
    """The library's reason as far as it says nothing of the grammar's own strings."""
    if keywords := _KEYWORDS.search(error):
        return f"the JSON schema has keywords that are not supported: {keywords[1]}"
    plain = _QUOTED.sub("", error).lower()
    hint = next((f": {hint}" for hint in _HINTS if hint in plain), "")
    if "NoExtension" in error:
        hint = ": nothing matches it"
    return f"the {grammar.noun} cannot be used{hint}"
