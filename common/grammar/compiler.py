"""Grammars by llguidance: compiled over a model's tokens, and followed by one choice's output.

The library's own words may quote a grammar or tokens, so of its errors only what is safe is told.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from common.grammar.grammar import Grammar, invalid

# Endless blanks are a known way for a model to never finish an object; these are enough to indent it.
JSON_BLANKS = r"[ \t\r\n]{1,32}"
_QUOTED = re.compile(r'"[^"]*"|\'[^\']*\'|`[^`]*`')
_KEYWORDS = re.compile(r'Unimplemented keys: \[([a-zA-Z$", ]{1,200})\]')
_EXPECTED = re.compile(r"Expected ([a-z0-9 ]{1,30}) for '([a-zA-Z]{1,30})'")  # a keyword of JSON schema
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
# What the library says, in small letters, and our words for it; None: the same.
_HINTS = {
    "unsatisfiable schema": None,
    "oneof constraints": None,
    "too deeply nested": None,
    "recursion limit": None,
    "too large": None,
    "fuel exhausted": None,
    "unclosed": None,
    "look-around": "look-around is not supported",
    "invalid repetition count range": None,
    "invalid type": "a `type` is none of JSON's",
    "type must be a string or array of strings": None,
    "properties must be an object": "`properties` must be an object",
    "schema must be an object or boolean": "a schema within it must be an object or a boolean",
    "unknown format": "a `format` is not supported",
    "does not exist": "a `$ref` leads nowhere",
    "unknown name": "it uses a rule that it does not define",
    "no start rule": "it has no rule `start`",
    "lexer error": "a sign is not understood",
}


class GrammarCompiler:
    """Compiles grammars for one model's logits. Thread-safe: what it makes shares nothing that is written to."""

    def __init__(self, directory: str | Path, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        """directory: with a tokenizer.json. vocab_size: of the logits. end_token_ids: allowed where the grammar may
        end, and only there. Raises InvalidArgument for a tokenizer whose tokens are not byte strings."""
        self.vocab_size = vocab_size
        try:
            tokenizer_json = (Path(directory) / "tokenizer.json").read_text(encoding="utf-8")
            known = _known(tokenizer_json)
            self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=max(known, vocab_size), eos_token=list(end_token_ids))
        except ValueError:
            raise invalid("this model's tokens do not suit grammars") from None
        self._limits = LLParserLimits(
            initial_lexer_fuel=500_000, max_lexer_states=20_000, max_grammar_size=200_000, verbose_errors=False
        )

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


def _known(tokenizer_json: str) -> int:
    """Token ids of a tokenizer, those that were added included: the highest, and 1."""
    found = tokenizers.Tokenizer.from_str(tokenizer_json)
    return 1 + max(found.get_vocab(with_added_tokens=True).values(), default=0)


def lark_of(text: str) -> str:
    """GBNF to Lark; Lark stays as it is. Raises InvalidArgument. Slow for long ones: not for an event loop."""
    if "::=" not in text:
        return text
    try:
        return str(any_to_lark(text))
    except (GbnfToLarkError, ValueError, RecursionError, LookupError, AssertionError):
        raise invalid("the grammar is not valid GBNF") from None


def lark_string(text: str) -> str:
    """A literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def _source(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_schema":
            try:
                return str(
                    LLMatcher.grammar_from_json_schema(grammar.source, defaults={"whitespace_pattern": JSON_BLANKS})
                )
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
    if wrong := _EXPECTED.search(error):
        kind = {"f64": "number"}.get(wrong[1], wrong[1])
        return f"the JSON schema cannot be used: `{wrong[2]}` must be of type {kind}"
    plain = _QUOTED.sub("", error).lower()
    hint = next((words or said for said, words in _HINTS.items() if said in plain), "")
    if "NoExtension" in error:
        hint = "nothing matches it"
    place = _PLACE.match(error) if grammar.kind == "lark" else None
    where = f" (line {place[1]}, column {place[2]})" if place else ""
    return f"the {grammar.noun} cannot be used{where}{f': {hint}' if hint else ''}"
