"""A decode worker of the simulated mesh: its pulls, their copies in steps, and what it commits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from common.policies.handoff import owner as own
from common.policies.handoff import puller as pull
from common.policies.handoff.tables import Attempts
from common.policies.handoff.terms import Grant, Watermark, spans_between
from common.transfer.key import Identity, TransferKey
from tests.unit.handoff.sim_pool import BLOCKS, END, LAYERS, LIMITS, TOKENS, Pool, require
from tests.unit.handoff.sim_prefill import Prefill

if TYPE_CHECKING:
    from tests.unit.handoff.world import World


@dataclass
class Copying:
    """A copy under way, in three steps: look, copy, look again."""

    taken: Watermark
    ready: Watermark
    through_owner: bool  # the grpc channel: the owner reads; else shm: it does not know
    step: int = 0
    seen: tuple[int, ...] = ()
    cells: list[tuple[int, int, Any]] = field(default_factory=list)
    cancelled: bool = False
    owner_life: Prefill | None = None


@dataclass
class Pull:
    machine: pull.Puller
    grant: Grant
    stream: int
    tokens: str
    through_owner: bool
    blocks: tuple[int, ...] = ()
    copying: Copying | None = None
    wants_room: bool = False
    room_refused: bool = False
    result: Any = None


class Decode:
    def __init__(self, world: World, name: str, life: int) -> None:
        self.world, self.me = world, Identity(name, str(life))
        self.pool = Pool()
        self.attempts = Attempts(LIMITS)
        self.pulls: dict[TransferKey, Pull] = {}
        self.committed: dict[TransferKey, tuple[int, ...]] = {}

    def decode(self, grant: Grant, tokens: str, deadline: float, through_owner: bool) -> None:
        if grant.puller != self.me or self.attempts.refusal(grant.key):
            return
        older = self.attempts.begin(grant.key)
        target = pull.Target(grant.key, TOKENS, tokens.encode(), BLOCKS, LAYERS)
        machine = pull.open_pull(target, self.world.now, deadline, LIMITS)
        stream = self.world.connect(grant, self)
        self.pulls[grant.key] = Pull(machine, grant, stream, tokens, through_owner)
        if older in self.pulls:
            self.apply(older, pull.Cancel())

    def cancel(self, key: TransferKey) -> None:
        self.apply(key, pull.Cancel())
        self.attempts.end(key)

    def apply(self, key: TransferKey, event: pull.Event) -> None:
        run = self.pulls.get(key)
        if run is None:
            return
        run.machine, actions = pull.step(run.machine, event, self.world.now)
        up = self.world.streams[run.stream].up
        for action in actions:
            require(run.result is None, "something happened after the result")
            match action:
                case pull.Reserve():
                    run.wants_room = True
                case pull.CancelReserve():
                    run.room_refused = True
                case pull.Copy(taken, ready):
                    run.copying = Copying(taken, ready, run.through_owner)
                    self.pool.use(run.blocks, +1)
                case pull.CancelCopy():
                    assert run.copying
                    run.copying.cancelled = True
                case pull.SendAck(taken):
                    up.append(("ack", taken))
                case pull.SendDone():
                    up += ["done", END]
                case pull.CloseStream():
                    up.append(END)
                case pull.Complete(moved):
                    run.result = action
                    self.commit(key, run) if moved else self.pool.give(run.blocks)
                case pull.Abandon():
                    run.result = action
                    self.pool.give(run.blocks)
        if run.result is not None:
            self.attempts.end(key)
            del self.pulls[key]

    def commit(self, key: TransferKey, run: Pull) -> None:
        require(not any(self.pool.users.get(block) for block in run.blocks), "committed while a copy runs")
        for index, block in enumerate(run.blocks):
            right = [(run.tokens, index, layer) for layer in range(LAYERS)]
            require(self.pool.data[block] == right, "committed wrong bytes")
        self.committed[key] = run.blocks
        self.world.commits += 1

    def room(self, key: TransferKey, hits: int) -> None:
        run = self.pulls[key]
        run.wants_room = False
        run.blocks = self.pool.take()
        for index in range(hits):  # the prefix cache has them right already
            self.pool.data[run.blocks[index]] = [(run.tokens, index, layer) for layer in range(LAYERS)]
        self.apply(key, pull.Reserved(hits))

    def no_room(self, key: TransferKey) -> None:
        self.pulls[key].wants_room = False
        self.apply(key, pull.ReserveFailed("no room"))

    def copy_step(self, key: TransferKey) -> None:
        """Whatever fails is told only when nothing is read or written any more."""
        run = self.pulls[key]
        job = run.copying
        assert job
        assert run.machine.started
        owner = self.world.prefills[run.grant.owner.worker_id]
        started = run.machine.started
        spans = tuple(spans_between(job.taken, job.ready, BLOCKS, LAYERS))
        if job.step == 0:
            alive = owner.me == run.grant.owner
            if alive and job.through_owner and spans:
                outcome = owner.table.apply(key, own.ReadBegin(run.grant.ticket, spans), self.world.now)
                alive = key in owner.table.owners and not outcome
                if alive:
                    owner.pool.use(started.blocks, +1)
            if not alive or job.cancelled:
                if alive and job.through_owner and spans:
                    self.read_end(key, owner, started.blocks)
                return self.copy_end(key, ok=False)
            job.owner_life, job.seen = owner, tuple(owner.pool.generations[block] for block in started.blocks)
        elif job.step == 1:
            source = job.owner_life.pool  # mapped memory outlives its process
            for span in spans:
                for index in range(span.first_block, span.first_block + span.block_count):
                    for layer in range(span.first_layer, span.first_layer + span.layer_count):
                        self.pool.data[run.blocks[index]][layer] = source.data[started.blocks[index]][layer]
        else:
            source = job.owner_life.pool
            after = tuple(source.generations[block] for block in started.blocks)
            ok = job.seen == after == started.generations or not self.world.check_generations
            if job.through_owner and spans:
                dead = owner is not job.owner_life
                if not dead:
                    self.read_end(key, owner, started.blocks)
                ok = ok and not dead
            return self.copy_end(key, ok=ok and not job.cancelled)
        job.step += 1

    def read_end(self, key: TransferKey, owner: Prefill, blocks: tuple[int, ...]) -> None:
        owner.pool.use(blocks, -1)
        owner.apply(key, own.ReadEnd())

    def copy_end(self, key: TransferKey, ok: bool) -> None:
        run = self.pulls[key]
        run.copying = None
        self.pool.use(run.blocks, -1)
        self.apply(key, pull.Copied() if ok else pull.CopyFailed("copy failed"))

    def enabled(self) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = []
        for key, run in self.pulls.items():
            if run.copying:
                found.append(lambda key=key: self.copy_step(key))
            elif run.room_refused and run.wants_room:
                found.append(lambda key=key: self.no_room(key))
            elif run.wants_room and len(self.pool.free) >= BLOCKS:
                found += [lambda key=key: self.room(key, 0), lambda key=key: self.room(key, BLOCKS - 1)]
            elif run.wants_room and self.world.now % 1 == 0:
                up = self.world.streams[run.stream].up
                if not up:
                    found.append(lambda up=up: up.append(("waiting", None)))
        return found
