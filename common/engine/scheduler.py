"""Who gets blocks and a place in the next step: the batching policy applied to the pool."""

import time
from collections.abc import Callable, Iterator

from common.cache.keys import hit_limit
from common.engine.block_pool import BlockPool, OutOfBlocks, Owner
from common.engine.executor import Batch, Executor, Row
from common.engine.sequence import Choice, Limits, Sequence, State
from common.engine.settings import EngineSettings
from common.errors import EpdError, Overloaded, Preempted
from common.policies import batching

MAX_PREEMPTIONS = 1  # recomputed here so often; then the gateway takes the request elsewhere
_MAX_RETRY_AFTER_SECONDS = 30.0


class Scheduler:
    """Queues, running choices and their blocks.

    waiting: choices that need a prompt computed: new sequences (their leader) and preempted choices. reserving: sequences
    that wait for blocks to pull into. running: choices with blocks and something to compute.
    failed: sequences given up since the last step, for the core to report; they hold nothing.
    """

    def __init__(
        self,
        settings: EngineSettings,
        limits: Limits,
        pool: BlockPool,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._limits = limits
        self._pool = pool
        self._executor = executor
        self._clock = clock
        self.waiting: list[Choice] = []
        self.reserving: list[Sequence] = []
        self.running: list[Choice] = []
        self.failed: list[tuple[Sequence, EpdError]] = []
        self.newly_started: list[Sequence] = []
        self.newly_reserved: list[Sequence] = []
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

    @property
    def busy(self) -> bool:
        """Another step would do something, or may."""
        return bool(self.running or self.waiting or self.reserving)

    # --- one step ---------------------------------------------------------------------------------------------------

    def schedule(self, step: int) -> Batch:
        """Rows of the next step, their blocks allocated. Fills newly_reserved, newly_started and failed."""
        self._grant_reservations()
        choices = {id(choice): choice for choice in self.running + self.waiting}
        plan = batching.plan(
            [self._snapshot(choice) for choice in self.running],
            self._newcomers(),
            token_budget=self._settings.token_budget,
            max_running=self._settings.max_running,
            room_blocks=self._pool.available,
        )
        preempted = False
        grown: list[Choice] = []
        for key in plan.decodes:
            preempted |= not self._grow(choices[key])
            grown.append(choices[key])
        running = set(map(id, self.running))  # a preemption may have taken any of them
        rows = [_row(choice, 1) for choice in grown if id(choice) in running]
        decodes = len(rows)
        rows += [_row(choices[key], tokens) for key, tokens in plan.chunks if key in running]
        for key, tokens in plan.admitted:
            if preempted or not self._admit(choices[key]):
                break
            rows.append(_row(choices[key], min(tokens, choices[key].pending)))
        return Batch(step, rows, decodes)

    def _snapshot(self, choice: Choice) -> batching.Running:
        sequence = choice.sequence
        return batching.Running(id(choice), not choice.prefilling, choice.pending, sequence.priority, sequence.arrival)

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
            hits = self._hits(choice)
            spares = _spares(choice)
            yield batching.Newcomer(
                id(choice),
                choice.length - len(hits) * self._limits.block_size,
                self._limits.blocks(choice.length) - len(hits) + spares + self._pool.unused(hits),
                max(1, spares),
            )

    def uncached_tokens(self, choice: Choice) -> int:
        return choice.length - len(self._hits(choice)) * self._limits.block_size

    def _hits(self, choice: Choice) -> list[int]:
        """Cached blocks that the choice's tokens may start from."""
        if not self._settings.prefix_cache:
            return []
        size = self._limits.block_size
        keys = choice.extend_keys(size, choice.length)
        return self._pool.lookup(keys[: hit_limit(choice.length, size)])

    # --- admission --------------------------------------------------------------------------------------------------

    def _admit(self, choice: Choice) -> bool:
        """Gives a waiting choice its blocks; False, and nothing changed, when they are not there."""
        begin = self._clock()
        sequence = choice.sequence
        spares = _spares(choice)
        taken = self._take(choice, spares, Owner.SEQUENCE)
        if taken is None:
            return False
        hits, fresh = taken
        split = len(fresh) - spares
        choice.blocks = hits + fresh[:split]
        sequence.spare = fresh[split:] if spares else sequence.spare
        choice.computed = len(hits) * self._limits.block_size
        choice.indexed = len(hits)
        choice.prefilling = True
        # A block that is read before it is full must hold finite numbers: the last one, if partial, and the spares.
        self._executor.zero(fresh[choice.length // self._limits.block_size - len(hits) :])
        self.waiting.remove(choice)
        self.running.append(choice)
        if not sequence.started:
            now = self._clock()
            sequence.started = True
            sequence.state = State.RUNNING
            sequence.hit_blocks, sequence.cached_tokens = len(hits), choice.computed
            sequence.timings.lookup, sequence.timings.started = now - begin, now
            self._admission_seconds += 0.1 * (now - self._admitted_at - self._admission_seconds)
            self._admitted_at = now
            if sequence.publish:
                self._executor.export_blocks(hits)
            self.newly_started.append(sequence)
        return True

    def _grant_reservations(self) -> None:
        """Reservations wait for blocks only, in order; what streams already goes before them."""
        while self.reserving and not any(choice.preemptions for choice in self.waiting):
            sequence = self.reserving[0]
            hits = self._hits(sequence.leader)
            wanted = self._limits.blocks(sequence.total) - len(hits) + sequence.rows + self._pool.unused(hits)
            if wanted > self._pool.available - sum(not choice.prefilling for choice in self.running):
                return
            taken = self._take(sequence.leader, sequence.rows, Owner.RESERVATION)
            if taken is None:
                return
            hits, fresh = taken
            split = len(fresh) - sequence.rows
            sequence.reserved = hits + fresh[:split]
            sequence.spare = fresh[split:]
            sequence.hit_blocks, sequence.cached_tokens = len(hits), len(hits) * self._limits.block_size
            sequence.state = State.RESERVED
            sequence.timings.started = self._clock()
            self.reserving.pop(0)
            self.newly_reserved.append(sequence)

    def _take(self, choice: Choice, spares: int, owner: Owner) -> tuple[list[int], list[int]] | None:
        """(hit blocks, fresh blocks) for all of a choice's tokens and `spares` more, or None."""
        hits = self._hits(choice)
        self._pool.acquire(hits, owner)
        try:
            return hits, self._pool.allocate(self._limits.blocks(choice.length) - len(hits) + spares, owner)
        except OutOfBlocks:
            self._pool.release(hits, owner)
            return None

    # --- growth and preemption --------------------------------------------------------------------------------------

    def _grow(self, choice: Choice) -> bool:
        """Room for the next token's KV; False when something was preempted for it, the choice itself perhaps."""
        undisturbed = True
        while choice in self.running and len(choice.blocks) * self._limits.block_size < choice.length:
            try:
                blocks = self._pool.allocate(1, Owner.SEQUENCE)
            except OutOfBlocks:
                self._preempt()
                undisturbed = False
                continue
            self._executor.zero(blocks)
            choice.blocks += blocks
        return undisturbed

    def _preempt(self) -> None:
        # A prompt whose blocks another worker is reading is no victim: its work would be lost there too.
        candidates = [choice for choice in self.running if not (choice.prefilling and choice.sequence.publish)]
        key = batching.victim(self._snapshot(choice) for choice in candidates)
        choice = next(each for each in candidates if id(each) == key)
        self.running.remove(choice)
        self._free_choice(choice)
        choice.preemptions += 1
        choice.computed = choice.indexed = 0
        choice.prefilling = True
        sequence = choice.sequence
        if not sequence.forked:
            self._pool.release(sequence.spare, Owner.SEQUENCE)
            sequence.spare = []
        if choice.preemptions > MAX_PREEMPTIONS:
            self.drop(sequence)
            self.failed.append((sequence, Preempted("no KV blocks were left for the request, twice")))
        else:
            self._wait(choice)

    def _wait(self, choice: Choice) -> None:
        self.waiting.append(choice)
        self.waiting.sort(
            key=lambda each: (not each.preemptions, -each.sequence.priority, each.sequence.arrival, each.index)
        )

    # --- after a step -----------------------------------------------------------------------------------------------

    def index_blocks(self, choice: Choice) -> None:
        """Offer the blocks completed so far to the prefix index."""
        size = self._limits.block_size
        complete = choice.computed // size
        if not self._settings.prefix_cache or complete <= choice.indexed:
            return
        keys = choice.extend_keys(size, choice.computed)
        for position in range(choice.indexed, complete):
            self._pool.index(keys[position], choice.blocks[position])
        choice.indexed = complete

    def fork(self, sequence: Sequence) -> None:
        """Every open choice goes on alone: complete blocks are shared, the partial last one is copied."""
        leader, size = sequence.leader, self._limits.block_size
        prompt_blocks, complete = leader.blocks, sequence.total // size
        shared, partial = prompt_blocks[:complete], prompt_blocks[complete:]
        for choice in sequence.choices[1:]:
            if choice.finished:
                continue
            mine = sequence.spare.pop()
            if partial:
                self._executor.copy(partial[0], mine)
            self._pool.acquire(shared, Owner.SEQUENCE)
            choice.blocks = [*shared, mine]
            choice.keys = list(leader.keys[:complete])
            choice.computed, choice.indexed, choice.prefilling = sequence.total, complete, False
            self.running.append(choice)
        if leader.finished:
            self._free_choice(leader)
            if leader in self.running:
                self.running.remove(leader)
        elif sequence.spare:
            leader.blocks.append(sequence.spare.pop())
        self._pool.release(sequence.spare, Owner.SEQUENCE)
        sequence.spare = []
        sequence.forked = True

    def publish(self, sequence: Sequence) -> None:
        """Keep the prompt's blocks for a puller until the release."""
        blocks = sequence.leader.blocks[: self._limits.blocks(sequence.total)]
        self._pool.acquire(blocks, Owner.PUBLICATION)
        sequence.published = list(blocks)

    def unpublish(self, sequence: Sequence) -> None:
        self._pool.release(sequence.published, Owner.PUBLICATION)
        sequence.published = []

    def commit(self, sequence: Sequence) -> None:
        """A reservation was filled: its blocks become the leader's, complete ones are shared, choices run."""
        leader, size = sequence.leader, self._limits.block_size
        self._pool.transfer(sequence.reserved + sequence.spare, Owner.RESERVATION, Owner.SEQUENCE)
        leader.blocks, sequence.reserved = sequence.reserved, []
        self._executor.import_blocks(leader.blocks[sequence.hit_blocks :])
        if sequence.total % size:
            self._executor.zero(leader.blocks[-1:], sequence.total % size)
        self._executor.zero(sequence.spare)
        leader.computed, leader.indexed, leader.prefilling = sequence.total, sequence.hit_blocks, False
        sequence.state = State.RUNNING
        self.index_blocks(leader)
        self.running.append(leader)
        self.fork(sequence)

    def finish(self, choice: Choice) -> None:
        """A choice has its last token: its blocks stay cached as far as they are indexed."""
        choice.finished = True
        if choice in self.running:
            self.running.remove(choice)
        if choice in self.waiting:
            self.waiting.remove(choice)
        self._free_choice(choice)

    def drop(self, sequence: Sequence, *, poisoned: bool = False) -> None:
        """Free everything a sequence holds, in any state. poisoned: what it computed must never be shared."""
        if poisoned:
            for choice in sequence.choices:
                self._pool.unindex(choice.blocks[sequence.hit_blocks :])
        if sequence in self.reserving:
            self.reserving.remove(sequence)
        for choice in sequence.choices:
            self.finish(choice)
        owner = Owner.RESERVATION if sequence.state is State.RESERVED else Owner.SEQUENCE
        self._pool.release(sequence.reserved, Owner.RESERVATION)
        self._pool.release(sequence.spare, owner)
        sequence.reserved, sequence.spare = [], []
        self.unpublish(sequence)

    def _free_choice(self, choice: Choice) -> None:
        self._pool.release(choice.blocks, Owner.SEQUENCE)
        choice.blocks = []


def _spares(choice: Choice) -> int:
    """Blocks kept for the fork: one a choice, so that it never fails."""
    return choice.sequence.rows if choice.sequence.decode and not choice.sequence.forked else 0


def _row(choice: Choice, tokens: int) -> Row:
    end = choice.computed + tokens
    if end < choice.length:
        return Row(choice, choice.computed, end, ())
    samples = (choice,) if choice.sequence.forked else tuple(choice.sequence.open_choices())
    return Row(choice, choice.computed, end, samples)
