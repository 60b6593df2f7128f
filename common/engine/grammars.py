"""Sequences whose output follows a grammar: they wait until it is compiled, off the step's thread."""

import contextlib
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from llguidance import LLMatcher

from common.engine.executor import Executor
from common.engine.sequence import Sequence
from common.engine.settings import EngineSettings
from common.errors import EpdError, InvalidArgument, Overloaded
from common.grammar.cache import COMPILE_SECONDS, GrammarCache, too_slow
from common.grammar.compiler import GrammarCompiler


class Grammars:
    """wake: a descriptor that can be read when `take` may have something to give, until `heard`."""

    def __init__(self, cache: GrammarCache, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        """most: sequences that may wait."""
        self._cache = cache
        self._most = most
        self._clock = clock
        self._waiting: list[tuple[Sequence, Future[LLMatcher], float]] = []
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __del__(self) -> None:
        os.close(self.wake)  # not before: whoever compiles for it may still write

    def start(self, sequence: Sequence) -> bool:
        """True when its choices can go on at once, False when `take` will tell. Raises InvalidArgument, Overloaded."""
        grammar = sequence.sampling.grammar
        assert grammar is not None
        found = self._cache.compile(grammar)
        if found.done():
            self._equip(sequence, found)
            return True
        if len(self._waiting) >= self._most:
            raise Overloaded(f"{len(self._waiting)} grammars are waiting already", retry_after_seconds=1.0)
        self._waiting.append((sequence, found, self._clock() + COMPILE_SECONDS))
        found.add_done_callback(lambda _: os.eventfd_write(self.wake, 1))
        return False

    def take(self) -> list[tuple[Sequence, EpdError | None]]:
        """Sequences that wait no more, in order, with what is wrong."""
        if not self._waiting:
            return []
        now, found, self._waiting, waiting = self._clock(), [], [], self._waiting
        for sequence, future, deadline in waiting:
            if not future.done() and now < deadline:
                self._waiting.append((sequence, future, deadline))
                continue
            error: EpdError | None = None
            try:
                self._equip(sequence, future)
            except EpdError as raised:
                error = raised
            found.append((sequence, error))
        return found

    def heard(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake)

    def timeout(self) -> float | None:
        """Seconds until the first has waited too long; None when none waits."""
        if not self._waiting:
            return None
        return max(0.0, min(deadline for _, _, deadline in self._waiting) - self._clock())

    def _equip(self, sequence: Sequence, future: Future[LLMatcher]) -> None:
        if not future.done():
            raise too_slow()
        matcher = future.result()
        for choice in sequence.choices:
            choice.grammar = self._cache.state(matcher)
            if choice.output and choice.grammar.ended(choice.output):
                raise InvalidArgument("the output is complete by its grammar", field="output")
            if choice.grammar.error:
                raise InvalidArgument(choice.grammar.error, field="output")


def load_grammars(settings: EngineSettings, executor: Executor) -> Grammars | None:
    """None where there are no tokens to speak of: the `timed` executor, a directory without a tokenizer, a model that
    cannot end its text."""
    directory = Path(settings.model_dir)
    if executor.name == "timed" or not executor.eos_token_ids or not (directory / "tokenizer.json").is_file():
        return None
    cache = GrammarCache(lambda: GrammarCompiler(directory, executor.vocab_size, executor.eos_token_ids))
    cache.warm_up()
    return Grammars(cache, settings.max_waiting)
