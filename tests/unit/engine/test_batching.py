"""The batching policy: decodes, unfinished prompts, new ones."""

from hypothesis import given
from hypothesis import strategies as st

from common.policies.batching import Newcomer, Plan, Running, plan, victim

ROOM = {"token_budget": 64, "max_running": 8, "room_blocks": 100}


def decode(key, priority=0, arrival=None):
    return Running(key, True, 1, priority, key if arrival is None else arrival)


def chunk(key, pending, priority=0):
    return Running(key, False, pending, priority, key)


def test_order_and_budget():
    running = [chunk(1, 30), decode(2), chunk(3, 50), decode(4)]
    newcomers = [Newcomer(5, 20, 2, 1)]
    assert plan(running, newcomers, **{**ROOM, "token_budget": 100}) == Plan([2, 4], [(1, 30), (3, 50)], [(5, 18)])
    assert plan(running, newcomers, **ROOM) == Plan([2, 4], [(1, 30), (3, 32)], [])


def test_priority_then_arrival():
    running = [decode(1), decode(2, priority=1), decode(3, arrival=0)]
    assert plan(running, [], **ROOM).decodes == [2, 3, 1]


def test_the_first_that_does_not_fit_ends_admission():
    newcomers = [Newcomer(1, 5, 3, 1), Newcomer(2, 5, 90, 1), Newcomer(3, 5, 1, 1)]
    assert plan([], newcomers, **{**ROOM, "room_blocks": 50}).admitted == [(1, 5)]


def test_every_decode_keeps_room_for_its_next_block():
    assert plan([decode(1), decode(2)], [Newcomer(3, 5, 9, 1)], **{**ROOM, "room_blocks": 10}).admitted == []
    assert plan([decode(1), decode(2)], [Newcomer(3, 5, 9, 1)], **{**ROOM, "room_blocks": 11}).admitted == [(3, 5)]


def test_choices_count_as_rows():
    assert plan([decode(1)], [Newcomer(2, 5, 1, 8)], **ROOM).admitted == []
    assert plan([decode(1)], [Newcomer(2, 5, 1, 7)], **ROOM).admitted == [(2, 5)]


def test_victim_is_the_lowest_priority_and_latest():
    assert victim([decode(1), decode(2), decode(3, priority=1)]) == 2
    assert victim([decode(1, priority=-1), decode(2)]) == 1


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 300), st.integers(-2, 2)), max_size=20),
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 30), st.integers(1, 4)), max_size=20),
    st.integers(1, 128),
    st.integers(1, 16),
    st.integers(0, 60),
)
def test_bounds_hold(running, newcomers, budget, max_running, room):
    running = [
        Running(key, decoding, 1 if decoding else pending, priority, key)
        for key, (decoding, pending, priority) in enumerate(running)
    ]
    newcomers = [Newcomer(100 + key, *each) for key, each in enumerate(newcomers)]
    made = plan(running, newcomers, token_budget=budget, max_running=max_running, room_blocks=room)
    tokens = len(made.decodes) + sum(count for _, count in made.chunks + made.admitted)
    assert tokens <= budget
    assert len(made.decodes) <= max_running
    by_key = {each.key: each for each in newcomers}
    assert sum(by_key[key].blocks for key, _ in made.admitted) <= max(0, room)
    if made.admitted:
        assert len(running) + sum(by_key[key].rows for key, _ in made.admitted) <= max_running
    # Work conserving: whatever runs gets a share before the budget is left unused.
    wanted = sum(each.pending for each in running if not each.decoding)
    decoding = sum(each.decoding for each in running)
    assert tokens >= min(budget, wanted + min(decoding, max_running))
