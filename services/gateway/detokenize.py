"""Token ids to text as they come.

The pieces add up to the text of all ids decoded at once, and none ends in half a character.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from common.models.tokenizer import Tokenizer

# A UTF-8 character has at most 4 bytes, so an ending that is still broken after as many tokens is not a character.
_PENDING_TOKENS = 4
_BROKEN = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    def push(self, token_ids: Sequence[int]) -> str:
        """Text that is complete with these ids."""

    def flush(self) -> str:
        """The rest, once no more ids come. What never became a character is shown as one replacement character."""


def detokenizer(
    tokenizer: Tokenizer, *, skip_special_tokens: bool = True, shown: frozenset[int] = frozenset()
) -> Detokenizer:
    """shown: special tokens that are not skipped."""
    skip = tokenizer.special_ids - shown if skip_special_tokens else frozenset()
    return ByteDetokenizer(tokenizer, skip) if tokenizer.byte_level else WindowDetokenizer(tokenizer, skip)


class ByteDetokenizer:
    """For byte-level tokenizers: a token is a fixed string of bytes, so a UTF-8 decoder is all that is needed."""

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int]) -> None:
        self._table = tokenizer.byte_table
        self._skip = skip
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_ids: Sequence[int]) -> str:
        table, skip = self._table, self._skip
        known = len(table)
        return self._decode(b"".join([table[i] for i in token_ids if i not in skip and i < known]))

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """For any tokenizer: decodes a short window of ids and takes what it has gained over the last one.

    The window starts at the ids that gave the last text, since a decoder may treat the start of its input differently
    (it cuts a leading space), and ends with those that are not a whole character yet. Its length is bounded, so a token
    costs O(1). Where a decoder would spoil valid characters for an invalid byte after them, those already given out
    stay as they are.
    """

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int]) -> None:
        self._decode = tokenizer.decode
        self._skip = skip
        self._ids: list[int] = []
        self._shown = 0  # ids whose text was given out
        self._text = ""  # text of those

    def push(self, token_ids: Sequence[int]) -> str:
        self._ids.extend(i for i in token_ids if i not in self._skip)
        pending = len(self._ids) - self._shown
        for back in range(min(pending, _PENDING_TOKENS)):
            end = len(self._ids) - back
            text = self._decode(self._ids[:end], skip_special_tokens=False)
            # The fourth id from the end cannot be waiting for more: what is broken there stays broken.
            if not text.endswith(_BROKEN) or back + 1 == _PENDING_TOKENS:
                return self._advance(end, text)
        return ""

    def flush(self) -> str:
        if len(self._ids) == self._shown:
            return ""
        return self._advance(len(self._ids), self._decode(self._ids, skip_special_tokens=False))

    def _advance(self, end: int, text: str) -> str:
        if text.startswith(self._text):
            gained = text[len(self._text) :]
        else:
            gained = self._decode(self._ids[self._shown : end], skip_special_tokens=False)
        if gained:
            # The ids shown now are the context of the next; those before them have done their part.
            self._ids = self._ids[self._shown :]
            self._shown = end - self._shown
            self._text = self._decode(self._ids[: self._shown], skip_special_tokens=False)
        return gained
