"""What tools mean for one request: its grammar, and how its text is read."""

import msgspec

from common.errors import InvalidArgument
from common.grammar.grammar import Grammar
from common.models.tokenizer import Tokenizer
from services.gateway.tools.formats import ToolFormat, format_of, special_markers
from services.gateway.tools.grammar import calls_grammar
from services.gateway.tools.parser import ToolCallParser
from services.gateway.tools.schema import Offer


class ToolPlan(msgspec.Struct, frozen=True):
    """shown: special tokens that are not cut out of the text before it is read, being its markers."""

    form: ToolFormat
    parallel: bool
    shown: frozenset[int]
    grammar: Grammar | None

    def parser(self) -> ToolCallParser:
        return ToolCallParser(self.form, parallel=self.parallel)


def plan(offer: Offer, tokenizer: Tokenizer, grammar: Grammar | None) -> ToolPlan | None:
    """grammar: that the request asks for beside tools; then an answer is a call, or text that follows it. None without
    tools. Raises InvalidArgument."""
    if not offer.told:
        return None
    form = format_of(tokenizer)
    if grammar is not None and grammar.kind != "json_schema":
        raise InvalidArgument(f"tools and a {grammar.noun} cannot go together", field="tools")
    found: Grammar | None = None
    if offer.forced:
        found = calls_grammar(form, offer.forced, tokenizer, parallel=offer.parallel)
    elif grammar is not None:
        found = calls_grammar(form, offer.functions, tokenizer, parallel=offer.parallel, otherwise=grammar)
    return ToolPlan(form, offer.parallel, frozenset(special_markers(form, tokenizer).values()), found)
