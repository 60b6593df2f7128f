"""The engine: commands change its queues, steps compute and yield events."""

import math
import time
from collections.abc import Callable

import common.engine.messages as msg
from common.cache.keys import root_key
from common.engine import answers, report
from common.engine.adapters import Adapters
from common.engine.block_pool import BlockPool
from common.engine.executor import Batch, Executor, Row, Sampled
from common.engine.grammars import Grammars
from common.engine.kv_manager import KvManager
from common.engine.prompt_media import read_media
from common.engine.scheduler import Scheduler
from common.engine.sequence import Limits, Sequence, State, Timings
from common.engine.settings import EngineSettings
from common.errors import Draining, DuplicateRequest, EngineFailed, EpdError, InvalidArgument, TransferFailed
from common.sampling import ChoiceTokens
from common.transfer.pool_memory import PoolMemory


class EngineCore:
    """One model, one pool, all sequences. Not thread-safe; no I/O but the executor's.

    model, revision: what the layout says; they enter every block's key. emit takes events in the order they happen.
    ring is called when the pool's progress counter has moved and somebody may wait for it. grammars: None where no
    output can follow one.
    """

    def __init__(
        self,
        settings: EngineSettings,
        executor: Executor,
        memory: PoolMemory,
        *,
        model: str,
        revision: str,
        emit: Callable[[msg.AnyEvent], None],
        ring: Callable[[], None] = lambda: None,
        grammars: Grammars | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        context = executor.max_context
        self.limits = Limits(
            vocab_size=executor.vocab_size,
            max_context=min(settings.max_context or context, context),
            block_size=settings.block_size,
            num_blocks=settings.num_blocks,
            max_running=settings.max_running,
            eos_token_ids=frozenset(executor.eos_token_ids),
        )
        self.pool = BlockPool(settings.num_blocks, memory.generations)
        self.kv = KvManager(self.limits, self.pool, executor, prefix_cache=settings.prefix_cache)
        self.scheduler = Scheduler(settings, self.limits, self.pool, self.kv, clock)
        self.sequences: dict[str, Sequence] = {}
        self.steps = 0
        self.grammars = grammars
        self.adapters = Adapters(executor, lambda: {sequence.adapter for sequence in self.sequences.values()})
        self._executor, self._memory = executor, memory
        self._root = (model, revision)
        self._emit, self._ring, self._clock = emit, ring, clock
        self._arrivals = 0
        self._draining = False

    # --- commands ---------------------------------------------------------------------------------------------------

    def handle(self, command: msg.AnyCommand) -> None:
        """Applies one command. What is wrong with a request is answered with Failed, never raised."""
        match command:
            case msg.Submit() | msg.Reserve():
                self._open(command)
            case msg.Commit(seq=seq, first=first):
                self._commit(seq, first)
            case msg.Release(seq=seq):
                self._release(seq)
            case msg.Cancel(seq=seq):
                if seq in self.sequences:
                    self.scheduler.drop(self.sequences[seq])
                    self._forget(self.sequences[seq])
            case msg.Finish(seq=seq, choices=choices):
                self._finish(seq, choices)
            case msg.LoadAdapter():
                self._emit(self.adapters.load(command))
            case msg.LetAdapterGo(adapter=adapter):
                self.adapters.let_go(adapter)
            case msg.Inspect(number=number):
                self._emit(msg.Inspected(number=number, errors=self.check_integrity(), load=self.load()))
            case msg.Drain():
                self._draining = True
            case msg.Shutdown():
                pass  # the loop's

    def _open(self, command: msg.Submit | msg.Reserve) -> None:
        if command.seq in self.sequences:
            # Answered by name, but the first one with it lives on: its stream must not see this, nor its embeddings be
            # freed.
            self._emit(answers.failed(command.seq, DuplicateRequest("the engine has this sequence already")))
            return
        submit = isinstance(command, msg.Submit)
        self._arrivals += 1
        root = root_key(*self._root, salt=command.salt, adapter=command.adapter)
        sequence = Sequence.of(command, root, self._arrivals, self._clock())
        sequence.reads_embeddings = submit and bool(command.media)
        try:
            if self._draining:
                raise Draining("the engine takes no new work")
            self.limits.check(sequence)
            self.adapters.check(command.adapter)
            sequence.media = read_media(self._executor.images, command.prompt, command.media, compute=submit)
            if self._understands(sequence):
                self.scheduler.enqueue(sequence)
        except EpdError as error:
            self._emit(answers.failed(command.seq, error))
            self._free_embeddings(sequence)
            return
        self.sequences[command.seq] = sequence

    def _understands(self, sequence: Sequence) -> bool:
        """False while the sequence's grammar is being compiled. Raises InvalidArgument, Overloaded."""
        if sequence.sampling.grammar is None:
            return True
        if self.grammars is None:
            raise InvalidArgument("this model's output cannot follow a grammar", field="grammar")
        return self.grammars.start(sequence)

    def _enqueue_compiled(self) -> None:
        for sequence, error in self.grammars.take() if self.grammars is not None else ():
            if self.sequences.get(sequence.seq) is not sequence:
                continue  # cancelled meanwhile
            try:
                if error is not None:
                    raise error
                self.scheduler.enqueue(sequence)
            except EpdError as failure:
                self._fail(sequence, failure)

    def _commit(self, seq: str, first: list[ChoiceTokens]) -> None:
        sequence = self.sequences.get(seq)
        if sequence is None or sequence.state is not State.RESERVED:
            return  # cancelled meanwhile
        tokens = {each.choice: each for each in first}
        if tokens.keys() != {choice.index for choice in sequence.choices} or len(tokens) != len(first):
            self._fail(sequence, TransferFailed("the first tokens do not match the reservation's choices"))
            return
        vocabulary = range(self.limits.vocab_size)
        if not all(len(each.token_ids) == 1 and each.token_ids[0] in vocabulary for each in first):
            self._fail(sequence, TransferFailed("the first tokens are not one of the vocabulary for each choice"))
            return
        for choice in sequence.choices:
            given = tokens[choice.index]
            choice.output += given.token_ids
            choice.finished |= given.finish_reason is not None
        now = self._clock()
        sequence.timings = Timings(arrived=now)
        self.scheduler.commit(sequence)
        self._end_if_finished(sequence)

    def _release(self, seq: str) -> None:
        sequence = self.sequences.get(seq)
        if sequence is None:
            return
        sequence.publish = False  # still computing: the first token is wanted, the blocks are not
        self.kv.unpublish(sequence)
        if sequence.state is State.PUBLISHED:
            self._done(sequence)

    def _finish(self, seq: str, indexes: list[int]) -> None:
        sequence = self.sequences.get(seq)
        if sequence is None:
            return
        for choice in sequence.open_choices():
            if choice.index in indexes:
                if sequence.forked:
                    self.scheduler.finish(choice)
                else:
                    choice.finished = True  # the first choice may still compute for the others
        self._end_if_finished(sequence)

    # --- one step ---------------------------------------------------------------------------------------------------

    def step(self, flush: Callable[[], None] = lambda: None) -> bool:
        """Schedule → execute → postprocess; False when there was nothing to compute.

        flush is called between, so that chunks are known before they are computed.
        """
        self._enqueue_compiled()
        batch = self.scheduler.schedule(self.steps + 1)
        self._announce(batch)
        flush()
        if batch.rows:
            self.steps = batch.step
            begin = self._clock()
            sampled = self._executor.execute(batch, self._layer_done)
            self._memory.set_progress(batch.step, self._executor.num_layers)
            if batch.published:
                self._ring()
            self._postprocess(batch, sampled, begin)
        self._emit_blocks()
        return bool(batch.rows)

    def _announce(self, batch: Batch) -> None:
        scheduler = self.scheduler
        for sequence, error in scheduler.failed:
            self._forget(sequence)
            self._emit(answers.failed(sequence.seq, error))
        for sequence in scheduler.newly_reserved:
            self._emit(answers.reserved(sequence, self.pool))
        for sequence in scheduler.newly_started:
            self._emit(answers.started(sequence, self.pool))
        for row in batch.published:
            self._emit(answers.chunk(row, batch.step))

    def _layer_done(self, layers: int) -> None:
        self._memory.set_progress(self.steps, layers)
        self._ring()

    def _postprocess(self, batch: Batch, results: list[list[Sampled | None]], begin: float) -> None:
        now = self._clock()
        items: list[tuple[str, ChoiceTokens]] = []
        ended: list[Sequence] = []
        prefilled: list[tuple[Sequence, list[ChoiceTokens]]] = []
        for number, (row, sampled) in enumerate(zip(batch.rows, results, strict=True)):
            sequence = row.choice.sequence
            if sequence.seq not in self.sequences:
                continue  # another row of it failed just now
            tokens = [token for token in sampled if token is not None]
            scores = batch.scored.get(number, [])
            if len(tokens) < len(sampled) or any(math.isnan(entry.logprob) for entry in scores):
                self._fail(sequence, *_why(row))
                continue
            row.choice.computed = row.end
            if scores:
                sequence.take_scores(row.start, scores)
            self.kv.index(row.choice)
            if not row.samples:
                continue
            first = not sequence.forked
            new = [answers.token(choice, token, self.limits) for choice, token in zip(row.samples, tokens, strict=True)]
            if sequence.scores_prompt:
                new[0].prompt_logprobs = sequence.prompt_logprobs
            sequence.timings.note_step(begin, now, prefill=first)
            row.choice.prefilling = False
            self._free_embeddings(sequence)
            if first and not sequence.decode:
                prefilled.append((sequence, new))
                continue
            items += [(sequence.seq, each) for each in new]
            if first:
                if sequence.publish:
                    self.kv.publish(sequence)
                self.scheduler.fork(sequence)
            elif row.choice.finished:
                self.scheduler.finish(row.choice)
            if not sequence.open_choices():
                ended.append(sequence)
        if items:
            self._emit(msg.Tokens(step=batch.step, items=items))
        for sequence, new in prefilled:
            self._prefilled(sequence, new)
        for sequence in ended:
            self._end_if_finished(sequence)

    def _prefilled(self, sequence: Sequence, first: list[ChoiceTokens]) -> None:
        if sequence.publish:
            self.kv.publish(sequence)
        for choice in sequence.choices:
            self.scheduler.finish(choice)
        self._emit(answers.prefilled(sequence, first))
        if sequence.publish:
            sequence.state = State.PUBLISHED
        elif sequence.leased:
            self._done(sequence)  # released before it was ready
        else:
            self._forget(sequence)

    # --- ends -------------------------------------------------------------------------------------------------------

    def _end_if_finished(self, sequence: Sequence) -> None:
        if sequence.open_choices() or sequence.state is State.PUBLISHED:
            return
        if sequence.published:
            sequence.state = State.PUBLISHED  # decoded to the end here, still wanted by a puller
            return
        self.scheduler.drop(sequence)
        self._done(sequence)

    def _done(self, sequence: Sequence) -> None:
        self._forget(sequence)
        self._emit(answers.done(sequence))

    def _fail(self, sequence: Sequence, error: EpdError, poisoned: bool = False) -> None:
        self.scheduler.drop(sequence, poisoned=poisoned)
        self._forget(sequence)
        self._emit(answers.failed(sequence.seq, error))

    def _forget(self, sequence: Sequence) -> None:
        self.sequences.pop(sequence.seq, None)
        self._free_embeddings(sequence)

    def _free_embeddings(self, sequence: Sequence) -> None:
        """No step will read them any more. Never called within one."""
        if sequence.reads_embeddings:
            sequence.reads_embeddings = False
            self._emit(msg.EmbeddingsFreed(seq=sequence.seq))

    def fail_all(self) -> None:
        """The engine broke: every sequence is told so."""
        for sequence in list(self.sequences.values()):
            self._forget(sequence)
            self._emit(answers.failed(sequence.seq, EngineFailed("the engine failed in a step")))

    # --- reports ----------------------------------------------------------------------------------------------------

    def load(self) -> msg.LoadReport:
        return report.load(self.scheduler, self.kv, self.pool, self.steps)

    def check_integrity(self) -> list[str]:
        return report.integrity_errors(self.scheduler, self.pool, self.sequences.values())

    def _emit_blocks(self) -> None:
        stored, removed = self.pool.events()
        if stored or removed:
            self._emit(msg.Blocks(stored=stored, removed=removed))


def _why(row: Row) -> tuple[EpdError, bool]:
    """Why a row has no token for each of its choices, and whether what it computed must never be shared."""
    for choice in row.samples:
        if choice.grammar is not None and choice.grammar.error:
            return InvalidArgument(choice.grammar.error, field="grammar"), False
    return EpdError("the model's output is not finite for this request"), True
