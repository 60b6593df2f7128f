"""How models write tool calls: a table by what their chat templates contain."""

import secrets
import string

import msgspec

from common.models.tokenizer import Tokenizer


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Calls are JSON objects with a name and arguments, between markers.

    begin, end: around each call or, for an array, begin before all of them. Without a begin an answer is either calls
    or text. skipped: may come before the first call. arguments: the key that the model writes. glue: between two calls;
    empty where the model makes one.
    """

    begin: str = ""
    end: str = ""
    skipped: str = ""
    array: bool = False
    before: str = ""  # of the first object, after begin
    arguments: str = "arguments"
    glue: str = ""
    id_prefix: str = "call_"
    id_length: int = 24

    def new_id(self) -> str:
        alphabet = string.ascii_letters + string.digits
        return self.id_prefix + "".join(secrets.choice(alphabet) for _ in range(self.id_length))

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.begin, self.end, self.skipped)))


HERMES = ToolFormat(begin="<tool_call>", end="</tool_call>", before="\n", glue="\n")
# Its templates refuse ids of any other form.
MISTRAL = ToolFormat(begin="[TOOL_CALLS]", array=True, before=" ", glue=", ", id_prefix="", id_length=9)
LLAMA = ToolFormat(skipped="<|python_tag|>", arguments="parameters")
_BY_TEMPLATE = (
    ("<tool_call>", HERMES),
    ("[TOOL_CALLS]", MISTRAL),
    ("<|python_tag|>", LLAMA),
    ('"parameters": ', LLAMA),
)


def format_of(tokenizer: Tokenizer) -> ToolFormat:
    """Hermes' where the template tells nothing: then the prompt does, or the grammar."""
    template = tokenizer.chat_template
    if not knows_tools(tokenizer):
        return HERMES
    return next((found for word, found in _BY_TEMPLATE if word in template), HERMES)


def knows_tools(tokenizer: Tokenizer) -> bool:
    return "tools" in tokenizer.chat_template


def special_markers(form: ToolFormat, tokenizer: Tokenizer) -> dict[str, int]:
    """Those of the format's markers that are special tokens of this model, which text is otherwise shown without."""
    special = {tokenizer.token_bytes(token).decode(errors="replace"): token for token in tokenizer.special_ids}
    return {marker: special[marker] for marker in form.markers if marker in special}
