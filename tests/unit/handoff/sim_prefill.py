"""A prefill worker of the simulated mesh: its engine's jobs and its table of publications."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.policies.handoff import owner as own
from common.policies.handoff.tables import Outcome, OwnerTable
from common.policies.handoff.terms import Finished, Grant, Started, Watermark, spans_between
from common.sampling import ChoiceTokens
from common.transfer.key import Identity, TransferKey
from tests.unit.handoff.sim_pool import BLOCKS, END, LAYERS, LIMITS, TOKENS, Pool, require

if TYPE_CHECKING:
    from tests.unit.handoff.world import World


@dataclass
class Job:
    """One prompt in a prefill worker's engine."""

    tokens: str
    blocks: tuple[int, ...] = ()
    done_units: Watermark = field(default_factory=Watermark)
    writing: Watermark | None = None
    stopped: bool = False
    unwanted: bool = False


class Prefill:
    def __init__(self, world: World, name: str, life: int) -> None:
        self.world, self.me = world, Identity(name, str(life))
        self.pool = Pool()
        self.table = OwnerTable(self.me, LAYERS, LIMITS)
        self.jobs: dict[TransferKey, Job] = {}
        self.accepted: set[bytes] = set()
        self.newest: dict[tuple[bytes, int], int] = {}
        self.cancelled: set[TransferKey] = set()

    def create(self, grant: Grant, tokens: str, deadline: float) -> None:
        if grant.key.attempt < self.newest.get(grant.key.line, 0) or grant.key in self.cancelled:
            before = dict(self.table.owners)
            why, outcome = self.table.create(grant, self.world.now, deadline)
            require(why is not None and not outcome and before == self.table.owners, "a stale attempt was published")
            return
        why, outcome = self.table.create(grant, self.world.now, deadline)
        if why is None:
            self.newest[grant.key.line] = grant.key.attempt
            self.jobs[grant.key] = Job(tokens)
        self.carry_out(outcome)

    def cancel(self, key: TransferKey) -> None:
        if key in self.jobs:
            self.jobs[key].stopped = True
        self.carry_out(self.table.cancel(key, self.world.now))
        self.cancelled.add(key)
        require(self.table.cancel(key, self.world.now) == [], "cancel is not idempotent")
        self.collect(key)

    def apply(self, key: TransferKey, event: own.Event) -> None:
        self.carry_out(self.table.apply(key, event, self.world.now))

    def carry_out(self, outcome: Outcome) -> None:
        for key, action in outcome:
            match action:
                case own.Accept(stream):
                    ticket = self.world.streams[stream].shown.ticket
                    require(self.world.tickets.get(ticket) == self.world.streams[stream].shown, "forged pull accepted")
                    require(ticket not in self.accepted, "a ticket was accepted twice")
                    require(key.attempt >= self.newest[key.line], "a stale attempt was accepted")
                    require(key not in self.cancelled, "a cancelled transfer was accepted")
                    self.accepted.add(ticket)
                    self.world.streams[stream].down.append("opened")
                case own.Tell(stream, what):
                    self.world.streams[stream].down.append(what)
                case own.Refuse(stream, why) if stream is not None:
                    self.world.seen.add(why)
                    self.world.streams[stream].down += [why, END]
                case own.EndStream(stream, end):
                    self.world.seen.add(end)
                    self.world.streams[stream].down += [end, END]
                case own.Free() if key in self.jobs:
                    self.jobs[key].unwanted = True
                    self.collect(key)

    # The engine: one job's step at a time may be under way for each job.

    def start(self, key: TransferKey) -> None:
        job = self.jobs[key]
        job.blocks = self.pool.take()
        started = Started(TOKENS, job.blocks, tuple(self.pool.generations[block] for block in job.blocks))
        self.apply(key, own.Start(started))

    def write_begin(self, key: TransferKey) -> None:
        job = self.jobs[key]
        last = job.done_units.blocks == BLOCKS - 1
        job.writing = (
            Watermark(BLOCKS - 1, job.done_units.layers + 1) if last else Watermark(job.done_units.blocks + 1, 0)
        )
        self.pool.use(job.blocks, +1)

    def write_end(self, key: TransferKey) -> None:
        job = self.jobs[key]
        assert job.writing is not None
        for span in spans_between(job.done_units, job.writing, BLOCKS, LAYERS):
            for index in range(span.first_block, span.first_block + span.block_count):
                for layer in range(span.first_layer, span.first_layer + span.layer_count):
                    self.pool.data[job.blocks[index]][layer] = (job.tokens, index, layer)
        job.done_units, job.writing = job.writing, None
        self.pool.use(job.blocks, -1)
        if job.done_units.layers == LAYERS:
            job.stopped = True
            first = (ChoiceTokens(choice=0, token_ids=[1], finish_reason=self.world.first_reason),)
            self.apply(key, own.Finish(Finished(key, TOKENS, job.tokens.encode(), first)))
        else:
            self.apply(key, own.Advance(job.done_units))
        self.collect(key)

    def collect(self, key: TransferKey) -> None:
        job = self.jobs.get(key)
        if job and job.stopped and job.unwanted and job.writing is None:
            self.pool.give(job.blocks)
            del self.jobs[key]

    def enabled(self) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = []
        for key, job in self.jobs.items():
            if job.writing is not None:
                found.append(lambda key=key: self.write_end(key))
            elif not job.stopped and job.blocks:
                found.append(lambda key=key: self.write_begin(key))
            elif not job.stopped and len(self.pool.free) >= BLOCKS:
                found.append(lambda key=key: self.start(key))
        return found
