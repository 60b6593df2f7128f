"""The batching policy: decodes, unfinished prompts, new ones."""

import math

from hypothesis import given, settings
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
    # 98 tokens: 49 by age, 30 to 1 and 19 to 3, and 49 to the shortest, 20 to 5 and the rest to 3.
    assert plan(running, newcomers, **{**ROOM, "token_budget": 100}) == Plan([2, 4], [(1, 30), (3, 48)], [(5, 20)])
    assert plan(running, newcomers, **ROOM) == Plan([2, 4], [(1, 30), (3, 12)], [(5, 20)])
    by_age = {**ROOM, "oldest_share": 1.0}
    assert plan(running, newcomers, **by_age) == Plan([2, 4], [(1, 30), (3, 32)], [])


def test_priority_comes_before_age_and_length():
    running = [chunk(1, 100), chunk(2, 10)]
    assert plan(running, [Newcomer(3, 90, 2, 1, priority=1)], **ROOM) == Plan([], [], [(3, 64)])
    assert plan([chunk(1, 100), chunk(2, 90, priority=1)], [], **ROOM).chunks == [(2, 64)]


def test_prompts_of_one_length_are_computed_one_after_the_other():
    """Splitting a step among them would only make the first ones later."""
    assert plan([chunk(1, 100), chunk(2, 100)], [Newcomer(3, 100, 2, 1)], **ROOM).chunks == [(1, 64)]


class Worker:
    """Prompts alone: a step computes what the policy says."""

    def __init__(self, budget, share):
        self.options = {"token_budget": budget, "max_running": 64, "room_blocks": 10_000, "oldest_share": share}
        self.left = {}
        self.waiting = {}
        self.done = {}
        self.steps = 0

    def submit(self, tokens):
        key = len(self.left) + len(self.waiting) + len(self.done)
        self.waiting[key] = tokens
        return key

    def step(self):
        running = [chunk(key, tokens) for key, tokens in self.left.items()]
        newcomers = (Newcomer(key, tokens, 1, 1) for key, tokens in self.waiting.items())
        made = plan(running, newcomers, **self.options)
        self.steps += 1
        for key, _ in made.admitted:
            self.left[key] = self.waiting.pop(key)
        for key, tokens in made.chunks + made.admitted:
            self.left[key] -= tokens
            if not self.left[key]:
                self.done[key] = self.steps
                del self.left[key]


@settings(deadline=None, max_examples=40)
@given(st.integers(8, 256), st.sampled_from([0.25, 0.5, 0.75]), st.integers(1, 400), st.integers(1, 4))
def test_endless_short_prompts_hold_up_a_long_one_no_longer_than_its_bound(budget, share, short, each_step):
    worker, tokens = Worker(budget, share), 20 * budget + short
    long = worker.submit(tokens)
    bound = math.ceil(tokens / math.ceil(share * budget))
    for _ in range(bound):
        for _ in range(each_step):
            worker.submit(short)
        worker.step()
    assert worker.done[long] <= bound


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1_000, 100_000), min_size=1, max_size=6), st.lists(st.integers(1, 100), max_size=10))
def test_a_short_prompt_is_not_stuck_behind_long_ones(longer, shorter):
    worker = Worker(64, 0.5)
    for tokens in longer:
        worker.submit(tokens)
    worker.step()
    for tokens in shorter:
        worker.submit(tokens)
    mine = worker.submit(100)
    bound = 1 + math.ceil((100 + sum(shorter)) / 32)
    while mine not in worker.done:
        worker.step()
        assert worker.steps <= bound


def test_by_age_alone_it_is():
    worker = Worker(64, 1.0)
    worker.submit(6_400)
    worker.step()
    mine = worker.submit(10)
    for _ in range(99):
        worker.step()
    assert mine not in worker.done


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
