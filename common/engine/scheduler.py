"""Who gets blocks and a place in the next step: the batching policy applied to the queues."""

import time
from collections.abc import Callable, Iterator

from common.engine.block_pool import BlockPool, OutOfBlocks
from common.engine.executor import Batch, Row
from common.engine.kv_manager import KvManager
from common.engine.sequence import Choice, Limits, Sequence, State
from common.engine.settings import EngineSettings
from common.errors import EpdError, Overloaded, Preempted
from common.policies import batching

MAX_PREEMPTIONS = 1  # recomputed here so often; then the gateway takes the request elsewhere
_MAX_RETRY_AFTER_SECONDS = 30.0
_STREAMS = 1 << 31  # priority of what has been preempted: above all that a request can have


class Scheduler:
    """Queues and running choices.

    waiting: choices that need their tokens computed: new sequences (their leader) and preempted choices.
    reserving: sequences that wait for blocks to pull into. running: choices with blocks and something to compute.
    newly_started, newly_reserved, failed: what the last schedule() changed, for the core to tell.
    """

    def __init__(
        self,
        settings: EngineSettings,
        limits: Limits,
        pool: BlockPool,
        kv: KvManager,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._limits = limits
        self._pool = pool
        self._kv = kv
        self._clock = clock
        self.waiting: list[Choice] = []
        self.reserving: list[Sequence] = []
        self.running: list[Choice] = []
        self.newly_started: list[Sequence] = []
        self.newly_reserved: list[Sequence] = []
        self.failed: list[tuple[Sequence, EpdError]] = []
        self.preempted = 0  # choices, in all
        self._admitted_at = clock()
        self._admission_seconds = 0.1  # moving average of the time between two admissions

    # --- queues -----------------------------------------------------------------------------------------------------

    def enqueue(self, sequence: Sequence) -> None:
        """Raises Overloaded, with a hint for a retry, when the bounded queue is full."""
        queued = len(self.reserving) + sum(not choice.preemptions for choice in self.waiting)
        if queued >= self._settings.max_waiting:
            wait = min(_MAX_RETRY_AFTER_SECONDS, max(0.1, self._admission_seconds * queued))
            raise Overloaded(f"{queued} requests are waiting already", retry_after_seconds=round(wait, 3))
        if sequence.state is State.RESERVING:
            self.reserving.append(sequence)
            self.reserving.sort(key=lambda each: (-each.priority, each.arrival))
        else:
            self._wait(sequence.leader)

    def _wait(self, choice: Choice) -> None:
        """Into the queue: what streams already first, then by priority and arrival."""
        self.waiting.append(choice)
        self.waiting.sort(
            key=lambda each: (not each.preemptions, -each.sequence.priority, each.sequence.arrival, each.index)
        )

    @property
    def busy(self) -> bool:
        """Something is unfinished, though perhaps nothing can be done about it now."""
        return bool(self.running or self.waiting or self.reserving)

    # --- one step ---------------------------------------------------------------------------------------------------

    def schedule(self, step: int) -> Batch:
        """Rows of the next step, their blocks allocated."""
        self.newly_started, self.newly_reserved, self.failed = [], [], []
        self._grant_reservations()
        choices = {id(choice): choice for choice in self.running + self.waiting}
        plan = batching.plan(
            [_snapshot(choice) for choice in self.running],
            self._newcomers(),
            token_budget=self._settings.token_budget,
            max_running=self._settings.max_running,
            room_blocks=self._pool.available,
            oldest_share=self._settings.oldest_share,
        )
        preempted = False
        for key in plan.decodes:
            preempted |= not self._grow(choices[key])
        running = set(map(id, self.running))  # a preemption may have taken any of them
        rows = [_row(choices[key], 1) for key in plan.decodes if key in running]
        decodes = len(rows)
        rows += [_row(choices[key], tokens) for key, tokens in plan.chunks if key in running]
        for key, tokens in plan.admitted:
            if preempted or not self._admit(choices[key]):
                break
            rows.append(_row(choices[key], min(tokens, choices[key].pending)))
        return Batch(step, rows, decodes)

    def _newcomers(self) -> Iterator[batching.Newcomer]:
        # Published blocks, those under way too, stay within half of the pool; a larger prompt waits to be the only one.
        publishing = self._pool.published + sum(
            len(choice.blocks) for choice in self.running if choice.prefilling and choice.sequence.publish
        )
        full = False
        for choice in self.waiting:
            if self.reserving and not choice.preemptions:
                return  # a reservation holds up another worker's blocks: nothing new may overtake it
            if choice.sequence.publish:
                wanted = self._limits.blocks(choice.length)
                full |= publishing > 0 and 2 * (publishing + wanted) > self._pool.num_blocks
                if full:
                    continue
                publishing += wanted
            yield batching.Newcomer(
                id(choice),
                self._kv.uncached_tokens(choice),
                self._kv.cost(choice),
                max(1, self._kv.spares(choice)),
                _STREAMS if choice.preemptions else choice.sequence.priority,
            )

    def _admit(self, choice: Choice) -> bool:
        begin = self._clock()
        if not self._kv.admit(choice):
            return False
        self.waiting.remove(choice)
        self.running.append(choice)
        sequence = choice.sequence
        if not sequence.started:
            now = self._clock()
            sequence.started, sequence.state = True, State.RUNNING
            sequence.hit_blocks, sequence.cached_tokens = choice.indexed, choice.computed
            sequence.timings.lookup, sequence.timings.started = now - begin, now
            self._admission_seconds += 0.1 * (now - self._admitted_at - self._admission_seconds)
            self._admitted_at = now
            if sequence.publish:
                self._kv.export_hits(sequence)
            self.newly_started.append(sequence)
        return True

    def _grant_reservations(self) -> None:
        """Reservations wait for blocks only, in order; what streams already goes before them."""
        while self.reserving and not any(choice.preemptions for choice in self.waiting):
            sequence = self.reserving[0]
            kept = sum(not choice.prefilling for choice in self.running)  # every decode's next block
            if self._kv.cost(sequence.leader) > self._pool.available - kept or not self._kv.reserve(sequence):
                return
            self.reserving.pop(0)
            sequence.state = State.RESERVED
            sequence.timings.started = self._clock()
            self.newly_reserved.append(sequence)

    # --- preemption -------------------------------------------------------------------------------------------------

    def _grow(self, choice: Choice) -> bool:
        """Room for the next token's KV; False when something was preempted for it, the choice itself perhaps."""
        undisturbed = True
        while choice in self.running and self._kv.full(choice):
            try:
                self._kv.grow(choice)
            except OutOfBlocks:
                self._preempt()
                undisturbed = False
        return undisturbed

    def _preempt(self) -> None:
        # A prompt whose blocks another worker is reading is no victim: its work would be lost there too.
        candidates = {
            id(choice): choice for choice in self.running if not (choice.prefilling and choice.sequence.publish)
        }
        choice = candidates[batching.victim(map(_snapshot, candidates.values()))]
        self.running.remove(choice)
        self._kv.free(choice)
        choice.preemptions += 1
        self.preempted += 1
        choice.computed = choice.indexed = 0
        choice.prefilling = True
        sequence = choice.sequence
        if sequence.media is not None and not sequence.reads_embeddings:
            self.drop(sequence)
            self.failed.append((sequence, Preempted("no KV blocks were left for a request with images")))
        elif choice.preemptions > MAX_PREEMPTIONS:
            self.drop(sequence)
            self.failed.append((sequence, Preempted("no KV blocks were left for the request, twice")))
        else:
            self._wait(choice)

    # --- after a step -----------------------------------------------------------------------------------------------

    def fork(self, sequence: Sequence) -> None:
        """Every open choice goes on alone."""
        self._kv.fork(sequence)
        for choice in sequence.choices:
            if choice.finished:
                self.finish(choice)
            elif choice not in self.running:
                self.running.append(choice)

    def commit(self, sequence: Sequence) -> None:
        """A reservation was filled: its choices run."""
        self._kv.commit(sequence)
        sequence.state = State.RUNNING
        self.fork(sequence)

    def finish(self, choice: Choice) -> None:
        """A choice has its last token, or is not wanted any more."""
        choice.finished = True
        self._forget(choice)
        self._kv.free(choice)

    def drop(self, sequence: Sequence, *, poisoned: bool = False) -> None:
        """Forgets a sequence in any state and frees what it holds. poisoned: what it computed must never be shared."""
        if sequence in self.reserving:
            self.reserving.remove(sequence)
        self._kv.drop(sequence, poisoned=poisoned)
        for choice in sequence.choices:
            choice.finished = True
            self._forget(choice)

    def _forget(self, choice: Choice) -> None:
        for queue in (self.running, self.waiting):
            if choice in queue:
                queue.remove(choice)


def _snapshot(choice: Choice) -> batching.Running:
    sequence = choice.sequence
    return batching.Running(id(choice), not choice.prefilling, choice.pending, sequence.priority, sequence.arrival)


def _row(choice: Choice, tokens: int) -> Row:
    end, media = choice.computed + tokens, choice.sequence.media
    if media is not None:
        end = media.chunk_end(end)  # beyond the token budget, by less than an image
    if end < choice.length:
        return Row(choice, choice.computed, end, ())
    samples = (choice,) if choice.sequence.forked else tuple(choice.sequence.open_choices())
    return Row(choice, choice.computed, end, samples)
