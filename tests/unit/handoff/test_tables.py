"""Limits and single steps that random histories do not pin down."""

from common.policies.handoff import owner as own
from common.policies.handoff import puller as pull
from common.policies.handoff.tables import Attempts, OwnerTable
from common.policies.handoff.terms import End, Finished, Grant, HandoffLimits, Refusal, Span, Started, Watermark
from common.sampling import ChoiceTokens
from common.transfer.key import Identity, TransferKey

OWNER, PULLER = Identity("p", "1"), Identity("d", "1")
LIMITS = HandoffLimits()


def key(number: int = 0, attempt: int = 1) -> TransferKey:
    return TransferKey(number.to_bytes(16, "big"), 0, attempt)


def grant(number: int = 0, attempt: int = 1) -> Grant:
    return Grant(key(number, attempt), b"t" * 16, OWNER, PULLER, "tenant")


def table(limits: HandoffLimits = LIMITS) -> OwnerTable:
    return OwnerTable(OWNER, 2, limits)


def test_waiters_are_bounded() -> None:
    owners = table()
    for number in range(LIMITS.max_waiters):
        assert owners.open(number, grant(number), 0.0, 60.0) == []
    assert owners.open(5000, grant(5000), 0.0, 60.0) == [(key(5000), own.Refuse(5000, Refusal.TOO_MANY))]
    refusals = owners.tick(LIMITS.create_wait_seconds)
    assert len(refusals) == LIMITS.max_waiters
    assert owners.waiter_count == 0


def test_waiting_is_cut_to_the_remaining_time() -> None:
    owners = table()
    owners.open(1, grant(1), 0.0, 2.0)
    assert owners.next_due() == 2.0
    assert owners.tick(2.0) == [(key(1), own.Refuse(1, Refusal.UNKNOWN))]


def test_tombstones_are_bounded_and_forget_the_oldest() -> None:
    attempts = Attempts(LIMITS)
    for number in range(LIMITS.max_tombstones + 1):
        attempts.end(key(number))
    assert attempts.tombstone_count == LIMITS.max_tombstones
    assert not attempts.ended(key(0))
    assert attempts.ended(key(1))


def test_a_waiting_pull_with_the_wrong_ticket_does_not_block_the_right_one() -> None:
    owners = table()
    right = grant()
    owners.open(1, Grant(right.key, b"x" * 16, OWNER, PULLER, "tenant"), 0.0, 60.0)
    owners.open(2, right, 0.0, 60.0)
    why, outcome = owners.create(right, 1.0, 60.0)
    assert why is None
    assert outcome == [(key(), own.Refuse(1, Refusal.CREDENTIALS)), (key(), own.Accept(2))]


def started() -> Started:
    return Started(40, (5, 6, 7), (1, 1, 1))


def test_stall_counts_from_when_data_is_ready() -> None:
    """An idle puller is not stalled: prefill may take its time."""
    owners = table()
    owners.create(grant(), 0.0, 60.0)
    owners.open(1, grant(), 0.0, 60.0)
    owners.apply(key(), own.Start(started()), 1.0)
    assert owners.next_due() == 60.0
    owners.apply(key(), own.Advance(Watermark(1, 0)), 30.0)
    assert owners.next_due() == 32.0
    owners.apply(key(), own.Ack(1, Watermark(1, 0), 100), 31.0)
    assert owners.next_due() == 60.0
    owners.apply(key(), own.Advance(Watermark(2, 0)), 40.0)
    assert owners.tick(41.9) == []
    assert owners.tick(42.0) == [(key(), own.EndStream(1, End.STALLED)), (key(), own.Free())]


def test_waiting_for_room_is_bounded_in_all() -> None:
    owners = table()
    owners.create(grant(), 0.0, 60.0)
    owners.open(1, grant(), 0.0, 60.0)
    owners.apply(key(), own.Start(started()), 0.0)
    owners.apply(key(), own.Advance(Watermark(1, 0)), 0.0)
    now = 0.0
    while key() in owners.owners:
        now += 0.5
        owners.tick(now)
        owners.apply(key(), own.Ack(1, Watermark(), 0, waiting=True), now)
    assert LIMITS.room_seconds < now <= LIMITS.room_seconds + LIMITS.stall_seconds + 1


def test_reads_outside_of_what_is_ready_are_refused() -> None:
    owners = table()
    owners.create(grant(), 0.0, 60.0)
    owners.open(1, grant(), 0.0, 60.0)
    owners.apply(key(), own.Start(started()), 0.0)
    owners.apply(key(), own.Advance(Watermark(1, 1)), 0.0)

    def read(span: Span) -> list:
        return owners.apply(key(), own.ReadBegin(b"t" * 16, (span,)), 0.0)

    assert read(Span(0, 2, 0, 1)) == read(Span(0, 1, 1, 2)) == []
    for span in (Span(0, 2, 0, 2), Span(1, 1, 2, 1), Span(0, 1, 3, 1), Span(2, 1, 0, 1), Span(0, 3, 0, 1)):
        assert read(span) == [(key(), own.Refuse(None, Refusal.NOT_READABLE))]
    assert owners.owners[key()].readers == 2


def machine(deadline: float = 60.0) -> pull.Puller:
    return pull.open_pull(pull.Target(key(), 40, b"hash", 3, 2), 0.0, deadline, LIMITS)


def feed(puller: pull.Puller, *events: pull.Event, now: float = 0.0) -> tuple[pull.Puller, list[pull.Action]]:
    actions: list[pull.Action] = []
    for event in events:
        puller, more = pull.step(puller, event, now)
        actions += more
    return puller, actions


def test_silent_owner_is_given_up() -> None:
    puller = machine()
    assert pull.next_due(puller) == LIMITS.create_wait_seconds + LIMITS.stall_seconds
    puller, _ = feed(puller, pull.Opened())
    assert pull.next_due(puller) == 60.0


def test_owner_that_announces_too_much_breaks_the_protocol() -> None:
    puller, _ = feed(machine(), pull.Opened(), pull.Start(started()))
    for bad in (pull.Ready(Watermark(4, 0)), pull.Ready(Watermark(0, 3)), pull.Start(started()), pull.Opened()):
        failed, _ = feed(puller, bad)
        assert failed.failure is not None
    for blocks in (Started(40, (5, 6), (1, 1)), Started(40, (5, 6, 7), (1, 1)), Started(41, (5, 6, 7), (1, 1, 1))):
        failed, actions = feed(machine(), pull.Opened(), pull.Start(blocks))
        assert failed.phase is pull.Phase.ABANDONED
        assert pull.Reserve(40) not in actions


def test_nothing_is_reserved_before_the_owner_has_started() -> None:
    """Resource order: prefill blocks before decode blocks."""
    puller, actions = feed(machine(), pull.Opened())
    assert actions == []
    _, actions = feed(puller, pull.Start(started()))
    assert actions == [pull.Reserve(40)]


def test_a_stream_that_ends_well_too_early_is_a_failure() -> None:
    """Invariant 8."""
    puller, _ = feed(machine(), pull.Opened(), pull.Start(started()), pull.Reserved(0), pull.Ready(Watermark(3, 2)))
    puller, actions = feed(puller, pull.Copied(), pull.StreamEnd("ended"))
    assert actions[-1] == pull.Abandon("ended")
    finished = Finished(key(), 40, b"hash", (ChoiceTokens(choice=0, token_ids=[1]),))
    again, actions = feed(puller, pull.Finish(finished))
    assert (again, actions) == (puller, [])


def test_commit_needs_every_field() -> None:
    before, _ = feed(machine(), pull.Opened(), pull.Start(started()), pull.Reserved(0), pull.Ready(Watermark(3, 2)))
    before, _ = feed(before, pull.Copied())
    good = Finished(key(), 40, b"hash")
    assert feed(before, pull.Finish(good))[1] == [pull.SendDone(), pull.Complete(moved=True)]
    for bad in (
        Finished(key(attempt=2), 40, b"hash"),
        Finished(key(7), 40, b"hash"),
        Finished(key(), 41, b"hash"),
        Finished(key(), 40, b"hasH"),
    ):
        assert isinstance(feed(before, pull.Finish(bad))[1][-1], pull.Abandon)
