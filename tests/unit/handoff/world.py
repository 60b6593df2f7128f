"""A simulated mesh on a virtual clock: gateway, prefill and decode workers, their pools, and a network that delays,
reorders, breaks and replays. It drives the real machines of common.policies.handoff and checks every step."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from common.policies.handoff import owner as own
from common.policies.handoff import puller as pull
from common.policies.handoff.terms import Finished, Grant, Started, Watermark
from common.transfer.key import Identity, TransferKey
from tests.unit.handoff.sim_decode import Decode
from tests.unit.handoff.sim_pool import END, LIMITS, POOL_BLOCKS, REQUEST_SECONDS, require
from tests.unit.handoff.sim_prefill import Prefill


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
                Grant(grant.key.of_attempt(grant.key.attempt + 1), grant.ticket, *_rest(grant)),
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
