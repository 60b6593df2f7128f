"""Compiled grammars, the recently used ones kept; compiling goes on in a thread of its own."""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

from llguidance import LLMatcher

from common.errors import InvalidArgument
from common.grammar.compiler import GrammarCompiler, GrammarState
from common.grammar.grammar import Grammar

KEPT = 64
COMPILE_SECONDS = 30.0  # a large vocabulary, read for the first one, included


class GrammarCache:
    """Grammars compiled for one model, least recently used ones forgotten first. Thread-safe.

    What is wrong with a grammar is kept as well, so that asking again costs nothing.
    """

    def __init__(self, make: Callable[[], GrammarCompiler], *, kept: int = KEPT) -> None:
        """make: called once, in the thread, for the first grammar: reading a vocabulary takes a moment. May raise
        InvalidArgument."""
        self._make = make
        self._kept = kept
        self._compiler: GrammarCompiler | None = None
        self._found: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._lock = Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def __len__(self) -> int:
        return len(self._found)

    def compile(self, grammar: Grammar) -> Future[LLMatcher]:
        """Done at once for what is kept. Equal grammars are compiled once. The matcher is shared: `state` copies it."""
        with self._lock:
            found = self._found.get(grammar)
            if found is None:
                found = self._found[grammar] = self._thread.submit(self._compile, grammar)
                while len(self._found) > self._kept:
                    self._found.popitem(last=False)  # whoever waits for it gets it all the same
            else:
                self._found.move_to_end(grammar)
            return found

    def state(self, matcher: LLMatcher) -> GrammarState:
        """A state of its own at the start of a grammar compiled here."""
        assert self._compiler is not None
        return GrammarState(matcher.deep_copy(), self._compiler.vocab_size)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        return self._ready().compile(grammar)

    def warm_up(self) -> None:
        """Begins to read the vocabulary, so that the first grammar need not wait for it."""
        self._thread.submit(self._ready)

    def _ready(self) -> GrammarCompiler:
        if self._compiler is None:
            self._compiler = self._make()
        return self._compiler

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def too_slow() -> InvalidArgument:
    return InvalidArgument(f"the grammar was not compiled within {COMPILE_SECONDS:g} seconds", field="grammar")
