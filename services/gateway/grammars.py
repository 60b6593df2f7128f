"""Grammars of requests, compiled before any worker is called: what is wrong with one is told at once."""

import asyncio
from collections.abc import Mapping

from common.errors import InvalidArgument
from common.grammar.cache import COMPILE_SECONDS, GrammarCache, too_slow
from common.grammar.compiler import GrammarCompiler, lark_of
from common.grammar.grammar import Grammar
from common.models.tokenizer import Tokenizer


class GrammarChecks:
    """By model, with the bounds that its workers have."""

    def __init__(self, tokenizers: Mapping[str, Tokenizer]) -> None:
        self._tokenizers = tokenizers
        self._caches: dict[str, GrammarCache] = {}

    async def check(self, model: str, grammar: Grammar, *, field: str = "grammar") -> Grammar:
        """The grammar as workers take it. Raises InvalidArgument with the field."""
        try:
            grammar.validate()
            if grammar.kind == "lark":
                grammar = Grammar("lark", await asyncio.to_thread(lark_of, grammar.source))
            compiled = asyncio.wrap_future(self._cache(model).compile(grammar))
            # Shielded: others may wait for the same one.
            async with asyncio.timeout(COMPILE_SECONDS):
                await asyncio.shield(compiled)
        except TimeoutError:
            raise InvalidArgument(too_slow().message, field=field) from None
        except InvalidArgument as error:
            raise InvalidArgument(error.message, field=field) from None
        return grammar

    def _cache(self, model: str) -> GrammarCache:
        found = self._caches.get(model)
        if found is None:
            tokenizer = self._tokenizers[model]
            # Which tokens end a worker's text is not known here, and does not matter: one of them will do.
            ends = (tokenizer.end_token_id,)
            found = self._caches[model] = GrammarCache(
                lambda: GrammarCompiler(tokenizer.directory, tokenizer.vocab_size, ends)
            )
        return found

    def close(self) -> None:
        for cache in self._caches.values():
            cache.close()
