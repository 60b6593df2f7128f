"""Ids that nobody knows, waiters that never come back: tables stay bounded, and those who mean it are served."""

import asyncio
import secrets

import pytest

from common.errors import DuplicateRequest, NotReady, Overloaded
from common.policies.handoff import owner as machine
from common.policies.handoff.tables import OwnerTable
from common.policies.handoff.terms import Grant, HandoffLimits, Refusal
from common.sampling import ChoiceTokens
from common.transfer.embedding_room import EmbeddingRoom
from common.transfer.key import Identity, TransferKey
from services.decode.subscribers import MAX_SUBSCRIBERS, Subscribers

OWNER, PULLER = Identity("p0", "1"), Identity("d0", "1")
LIMITS = HandoffLimits()
FLOOD = 10_000


def grant() -> Grant:
    return Grant(TransferKey(secrets.token_bytes(16), 0, 1), secrets.token_bytes(16), OWNER, PULLER, "t")


def served(table: OwnerTable, stream: int, shown: Grant, now: float) -> bool:
    """A publication whose puller comes in time."""
    why, _ = table.create(shown, now, now + 60)
    assert why is None
    outcome = table.open(stream, shown, now, now + 60)
    return any(isinstance(action, machine.Accept) for _, action in outcome)


def test_pulls_of_unknown_transfers() -> None:
    """The bound is kept; beyond it the refusal is immediate. When their time is over all are gone."""
    table = OwnerTable(OWNER, 2, LIMITS)
    refused = 0
    for stream in range(FLOOD):
        for _, action in table.open(stream, grant(), 0.0, 600.0):
            assert isinstance(action, machine.Refuse)
            assert action.why is Refusal.TOO_MANY
            refused += 1
        assert table.waiter_count <= LIMITS.max_waiters
    assert refused == FLOOD - LIMITS.max_waiters
    assert served(table, FLOOD, grant(), 1.0)
    assert table.next_due() is not None
    table.tick(LIMITS.create_wait_seconds + 1.0)
    assert table.waiter_count == 0
    # One that comes before its publication has its place again.
    early = grant()
    assert table.open(FLOOD + 1, early, 10.0, 70.0) == []
    _, outcome = table.create(early, 11.0, 71.0)
    assert any(isinstance(action, machine.Accept) for _, action in outcome)


def test_dead_waiters_leave_with_their_streams() -> None:
    table = OwnerTable(OWNER, 2, LIMITS)
    for stream in range(FLOOD):
        shown = grant()
        table.open(stream, shown, 0.0, 600.0)
        table.stream_ended(stream, shown.key, 0.0)
    assert table.waiter_count == 0
    assert served(table, FLOOD, grant(), 0.0)


def test_cancels_of_unknown_transfers() -> None:
    table = OwnerTable(OWNER, 2, LIMITS)
    for _ in range(FLOOD):
        table.cancel(grant().key, 0.0)
        assert table.attempts.tombstone_count <= LIMITS.max_tombstones
    assert served(table, 1, grant(), 0.0)
    assert (len(table.owners), table.attempts.live_count) == (1, 1)


def test_publications_that_come_and_go_leave_tombstones_only() -> None:
    table = OwnerTable(OWNER, 2, LIMITS)
    for number in range(FLOOD):
        shown = grant()
        assert served(table, number, shown, 0.0)
        table.cancel(shown.key, 0.0)
        table.stream_ended(number, shown.key, 0.0)
    assert (len(table.owners), table.attempts.live_count) == (0, 0)
    assert table.attempts.tombstone_count <= LIMITS.max_tombstones


async def test_waiters_for_embedding_room() -> None:
    room = EmbeddingRoom(4, wait_seconds=600.0, max_waiters=8)
    mine = await room.take(4)
    waiting = [asyncio.create_task(room.take(1)) for _ in range(8)]
    await asyncio.sleep(0)
    for _ in range(100):
        with pytest.raises(Overloaded):  # at once, behind nobody
            await room.take(1)
    assert room.waiting == 8
    for task in waiting:  # dead ones leave no trace
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert room.waiting == 0
    room.give(mine)
    assert len(await room.take(4)) == 4


async def test_subscribers() -> None:
    """Ids are bounded; who is not let in brings its tokens by the call itself, and those inside go on."""
    table = Subscribers()
    ids = [secrets.token_bytes(16) for _ in range(MAX_SUBSCRIBERS)]
    mine = table.open(ids[0])
    for each in ids[1:]:
        table.open(each)
    for _ in range(1000):
        with pytest.raises(NotReady):
            table.open(secrets.token_bytes(16))
        with pytest.raises(NotReady):
            table.get(secrets.token_bytes(16))
    with pytest.raises(DuplicateRequest):
        table.open(ids[0])
    mine.join(1, lambda: None)
    mine.put(1, [ChoiceTokens(choice=0, token_ids=[5])])
    assert list(await mine.take()) == [1]
    for each in ids[1:]:
        table.close(each)
    table.open(secrets.token_bytes(16))
