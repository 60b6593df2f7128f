"""A simulated mesh on a virtual clock: gateway, prefill and decode workers, their pools, and a network that delays,
reorders, breaks and replays. It drives the real machines of common.policies.handoff and checks every step."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from common.policies.handoff import owner as own
from common.policies.handoff import puller as pull
from common.policies.handoff.tables import Attempts, Outcome, OwnerTable
from common.policies.handoff.terms import Finished, Grant, HandoffLimits, Started, Watermark, spans_between
from common.sampling import ChoiceTokens
from common.transfer.key import Identity, TransferKey

LAYERS, BLOCKS, TOKENS = 2, 3, 40  # of one transfer: three blocks of 16, the last one partial
POOL_BLOCKS = 2 * BLOCKS
LIMITS = HandoffLimits(max_waiters=2, max_tombstones=4)
REQUEST_SECONDS = 20.0
END = object()  # a stream's end, seen from the other side


class InvariantBroken(AssertionError):
    pass


def require(condition: bool, what: str) -> None:
    if not condition:
        raise InvariantBroken(what)


class Pool:
    """Blocks with generations and contents; contents survive a block's owner, as in memory."""

    def __init__(self) -> None:
        self.free = list(range(POOL_BLOCKS))
        self.generations = [0] * POOL_BLOCKS
        self.data: list[list[Any]] = [[None] * LAYERS for _ in range(POOL_BLOCKS)]
        self.users: dict[int, int] = {}  # block -> copies under way that read or write it

    def take(self) -> tuple[int, ...]:
        blocks, self.free = tuple(self.free[:BLOCKS]), self.free[BLOCKS:]
        for block in blocks:
            self.generations[block] += 1
        return blocks

    def give(self, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            require(block not in self.free, "a block was freed twice")
            require(not self.users.get(block), "a block was freed under a reader or writer")
            self.free.insert(0, block)  # reused first: the worst case for a late reader
            self.generations[block] += 1

    def use(self, blocks: tuple[int, ...], change: int) -> None:
        for block in blocks:
            self.users[block] = self.users.get(block, 0) + change


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
    def __init__(self, world: "World", name: str, life: int) -> None:
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
    def __init__(self, world: "World", name: str, life: int) -> None:
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


@dataclass
class Stream:
    """Both directions of one pull stream: each ordered, independent of the other and of other streams."""

    shown: Grant
    side: Decode | None  # None: an intruder's
    up: deque = field(default_factory=deque)
    down: deque = field(default_factory=deque)


class World:
    def __init__(
        self, *, check_generations: bool = True, first_reason: str | None = None, slow_puller: bool = False
    ) -> None:
        self.now = 0.0
        self.slow_puller = slow_puller
        self.check_generations = check_generations
        self.first_reason = first_reason
        self.lives = 0
        self.streams: dict[int, Stream] = {}
        self.tickets: dict[bytes, Grant] = {}
        self.bag: list[Callable[[], None]] = []  # gateway messages under way
        self.sent: list[Callable[[], None]] = []  # all there ever were, for replays
        self.attempt: dict[bytes, int] = {}
        self.commits = 0
        self.seen: set[Any] = set()  # how things ended or were refused, to show what the histories reach
        self.prefills = {name: Prefill(self, name, self.life()) for name in ("p0", "p1")}
        self.decodes = {name: Decode(self, name, self.life()) for name in ("d0",)}

    def life(self) -> int:
        self.lives += 1
        return self.lives

    # What the gateway does.

    def send(self, *messages: Callable[[], None]) -> None:
        self.bag += messages
        self.sent += messages

    def attempt_new(self, arg: int) -> None:
        """The first or the next attempt of one of two requests."""
        request = bytes([arg % 2]) * 16
        self.attempt[request] = attempt = self.attempt.get(request, 0) + 1
        key = TransferKey(request, 0, attempt)
        prefill, decode = f"p{arg // 2 % 2}", "d0"
        tokens = f"prompt {arg % 2}"
        wrong = tokens + "!" if arg % 16 == 15 else tokens  # the two workers were given different prompts
        ticket = b"%16d" % len(self.tickets)
        grant = Grant(key, ticket, self.prefills[prefill].me, self.decodes[decode].me, "tenant")
        self.tickets[ticket] = grant
        deadline = self.now + REQUEST_SECONDS
        through_owner = bool(arg // 4 % 2)
        self.send(
            lambda: self.prefills[prefill].create(grant, wrong, deadline),
            lambda: self.decodes[decode].decode(grant, tokens, deadline, through_owner),
        )

    def cancel(self, arg: int) -> None:
        grants = list(self.tickets.values())
        if grants:
            grant = grants[-1 - arg % len(grants)]
            self.send(
                lambda: self.prefills[grant.owner.worker_id].cancel(grant.key),
                lambda: self.decodes[grant.puller.worker_id].cancel(grant.key),
            )

    # What the network does.

    def connect(self, shown: Grant, side: Decode | None) -> int:
        number = len(self.streams)
        self.streams[number] = Stream(shown, side, deque(["open"]))
        return number

    def deliver_up(self, number: int) -> None:
        stream = self.streams[number]
        message = stream.up.popleft()
        worker, key = self.prefills[stream.shown.owner.worker_id], stream.shown.key
        if message == "open":
            worker.carry_out(worker.table.open(number, stream.shown, self.now, self.now + REQUEST_SECONDS))
        elif message == "done":
            worker.apply(key, own.Done(number))
        elif message is END:
            worker.carry_out(worker.table.stream_ended(number, key, self.now))
        else:
            kind, taken = message
            worker.apply(key, own.Ack(number, taken or Watermark(), waiting=kind == "waiting"))

    def deliver_down(self, number: int) -> None:
        stream = self.streams[number]
        message = stream.down.popleft()
        side, key = stream.side, stream.shown.key
        run = side.pulls.get(key) if side else None
        if side is None or run is None or run.stream != number:
            return
        match message:
            case "opened":
                side.apply(key, pull.Opened())
            case Started():
                side.apply(key, pull.Start(message))
            case Watermark():
                side.apply(key, pull.Ready(message))
            case Finished():
                side.apply(key, pull.Finish(message))
            case _ if message is END:
                side.apply(key, pull.StreamEnd("stream ended"))

    def break_stream(self, arg: int) -> None:
        if self.streams:
            stream = self.streams[len(self.streams) - 1 - arg % len(self.streams)]
            stream.up.clear()
            stream.down.clear()
            stream.up.append(END)
            stream.down.append(END)

    def intrude(self, arg: int) -> None:
        """A replayed, forged or misdirected opening."""
        grants = list(self.tickets.values())
        if grants:
            grant = grants[-1 - arg % len(grants)]
            forged = [
                grant,
                Grant(grant.key, b"x" * 16, grant.owner, grant.puller, grant.tenant),
                Grant(grant.key, grant.ticket, grant.owner, grant.puller, "other tenant"),
                Grant(grant.key, grant.ticket, grant.owner, Identity("d0", "?"), grant.tenant),
                Grant(TransferKey(*grant.key.line, grant.key.attempt + 1), grant.ticket, *_rest(grant)),
            ]
            self.connect(forged[arg // 4 % len(forged)], None)

    def replay(self, arg: int) -> None:
        if self.sent:
            self.bag.append(self.sent[arg % len(self.sent)])

    def drop(self, arg: int) -> None:
        if self.bag:
            self.bag.pop(arg % len(self.bag))

    # What time and death do.

    def pass_time(self, arg: int) -> None:
        self.now += (0.25, 1.0, 2.5, 6.0)[arg % 4]
        self.tick()

    def tick(self) -> None:
        for worker in self.prefills.values():
            worker.carry_out(worker.table.tick(self.now))
        for worker in self.decodes.values():
            for key in list(worker.pulls):
                worker.apply(key, pull.Tick())

    def kill_prefill(self, arg: int) -> None:
        name = f"p{arg % 2}"
        dead, self.prefills[name] = self.prefills[name], Prefill(self, name, self.life())
        for number, stream in self.streams.items():
            if stream.shown.owner == dead.me:
                self.break_stream(len(self.streams) - 1 - number)

    def kill_decode(self, arg: int) -> None:
        dead, self.decodes["d0"] = self.decodes["d0"], Decode(self, "d0", self.life())
        for run in dead.pulls.values():
            if run.copying and run.copying.through_owner and run.copying.owner_life:
                owner = run.copying.owner_life  # its server notices that the reader is gone
                owner.pool.use(run.machine.started.blocks, -1)
                owner.apply(run.grant.key, own.ReadEnd())
        for number, stream in self.streams.items():
            if stream.side is dead:
                stream.side = None
                self.break_stream(len(self.streams) - 1 - number)

    # Running.

    def enabled(self) -> list[Callable[[], None]]:
        """All that can go on by itself right now."""
        found: list[Callable[[], None]] = []
        for index in range(len(self.bag)):
            found.append(lambda index=index: self.bag.pop(index)())
        for number, stream in self.streams.items():
            if stream.up:
                found.append(lambda number=number: self.deliver_up(number))
            if stream.down:
                found.append(lambda number=number: self.deliver_down(number))
        for worker in [*self.prefills.values(), *self.decodes.values()]:
            found += worker.enabled()
        return found

    def go_on(self, arg: int) -> None:
        if self.slow_puller and arg % 4:  # the owner's side alone goes on
            found = [step for worker in self.prefills.values() for step in worker.enabled()]
            found += [lambda index=index: self.bag.pop(index)() for index in range(len(self.bag))]
        else:
            found = self.enabled()
        if found:
            found[arg // 4 % len(found)]()

    def release_committed(self, arg: int = 0) -> None:
        """Decoding has ended."""
        for worker in self.decodes.values():
            for blocks in worker.committed.values():
                worker.pool.give(blocks)
            worker.committed.clear()

    def check(self) -> None:
        for worker in self.prefills.values():
            held = [block for job in worker.jobs.values() for block in job.blocks]
            require(sorted(held + worker.pool.free) == list(range(POOL_BLOCKS)), "prefill blocks do not add up")
            require(worker.table.waiter_count <= LIMITS.max_waiters, "too many waiters")
            require(worker.table.attempts.tombstone_count <= LIMITS.max_tombstones, "too many tombstones")
            for owner in worker.table.owners.values():
                due = own.next_due(owner, LIMITS)
                require(not owner.live or (due is not None and due <= owner.deadline), "a publication without an end")
        for worker in self.decodes.values():
            held = [block for run in worker.pulls.values() for block in run.blocks]
            held += [block for blocks in worker.committed.values() for block in blocks]
            require(sorted(held + worker.pool.free) == list(range(POOL_BLOCKS)), "decode blocks do not add up")
            for run in worker.pulls.values():
                due = pull.next_due(run.machine)
                ending = run.machine.phase is pull.Phase.ENDING
                require(ending or (due is not None and due <= run.machine.deadline), "a pull without an end")

    def settle(self) -> None:
        """Everything under way ends and time goes by: then nothing may be held (invariants 2 and 9)."""
        for _ in range(8):
            for _ in range(400):
                found = self.enabled()
                if not found:
                    break
                found[0]()
                self.check()
            self.now += 10.25  # no whole second, so that nobody says any more that he waits for room
            self.tick()
            self.release_committed()
        for worker in self.prefills.values():
            require(not worker.table.owners and not worker.table.waiter_count, "a publication was left over")
            require(not worker.jobs and len(worker.pool.free) == POOL_BLOCKS, "prefill blocks were left over")
            require(worker.table.next_due() is None, "a timer was left over")
        for worker in self.decodes.values():
            require(not worker.pulls and len(worker.pool.free) == POOL_BLOCKS, "decode blocks were left over")


def _rest(grant: Grant) -> tuple[Identity, Identity, str]:
    return grant.owner, grant.puller, grant.tenant


Operation = Callable[[World, int], None]
PEACE: list[Operation] = [World.go_on]
OPERATIONS: list[Operation] = [World.go_on] * 24 + [
    World.attempt_new,
    World.attempt_new,
    World.cancel,
    World.break_stream,
    World.intrude,
    World.replay,
    World.drop,
    World.pass_time,
    World.pass_time,
    World.kill_prefill,
    World.kill_decode,
    World.release_committed,
]


def run_history(history: list[tuple[int, int]], **options: Any) -> World:
    """history: (operation, argument) pairs. Raises InvariantBroken."""
    world = World(**options)
    world.attempt_new(history[0][1] if history else 0)
    for operation, arg in history:
        OPERATIONS[operation % len(OPERATIONS)](world, arg)
        world.check()
    world.settle()
    return world
