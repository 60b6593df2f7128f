"""Virtual token counters on a virtual clock: shares, the paper's bound, nothing saved up, nobody starved."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.policies.fairness import Counters, FairnessPolicy, FairQueue, Waiting

LONGEST_PROMPT = 64
LONGEST_OUTPUT = 32
ROOM = 8  # requests that run at once
VTC = FairnessPolicy()
FCFS = FairnessPolicy(order="fcfs")
# max(prompt_cost · longest prompt, output_cost · tokens that may be generated together)
UNIT = max(VTC.prompt_cost * LONGEST_PROMPT, VTC.output_cost * ROOM * LONGEST_OUTPUT)


class Asked(Waiting):
    """And how much it will generate."""

    output = 0


class Server:
    """Continuous batching: each step admits what there is room for, then gives every running request a token."""

    def __init__(self, policy=VTC, weights=None, seed=0):
        self.queue = FairQueue(policy, (weights or {}).get if weights else lambda tenant: 1.0)
        self.random = random.Random(seed)
        self.now = 0.0
        self.running = []  # [tenant, tokens left]
        self.served = Counter()
        self.gaps = []  # served["a"] - served["b"] while both wait
        self.idle = 0  # steps with room and somebody waiting

    def ask(self, tenant, count=1, prompt=None, output=None):
        for _ in range(count):
            one = Asked(tenant, prompt or self.random.randint(1, LONGEST_PROMPT), self.now)
            one.output = output or self.random.randint(1, LONGEST_OUTPUT)
            self.queue.push(one)

    def step(self):
        while len(self.running) < ROOM and (first := next(self.queue.in_order(), None)):
            self.queue.remove(first)
            self.queue.admit(first.tenant, first.tokens, waited=True)
            self.served[first.tenant] += VTC.prompt_cost * first.tokens
            self.running.append([first.tenant, first.output])
        self.idle += len(self.queue) > 0 and len(self.running) < ROOM
        for each in self.running:
            each[1] -= 1
            self.served[each[0]] += VTC.output_cost
            self.queue.counters.output(each[0], 1)
        self.running = [each for each in self.running if each[1]]
        self.now += 0.01
        if {"a", "b"} <= set(self.queue.tenants()):
            self.gaps.append(self.served["a"] - self.served["b"])


def one_to_ten(policy, steps=6000, seed=0):
    """Demand 1 : 10, the smaller one alone more than half of what the server can do."""
    server = Server(policy, seed=seed)
    for _ in range(steps):
        server.ask("a", server.random.random() < 0.4)
        server.ask("b", 4)
        server.step()
    return server


def test_a_tenth_of_the_demand_gets_half_of_the_service():
    fair, plain = one_to_ten(VTC), one_to_ten(FCFS)
    assert fair.served["b"] / fair.served["a"] == pytest.approx(1.0, abs=0.1)
    assert plain.served["b"] / plain.served["a"] == pytest.approx(10.0, rel=0.15)
    assert fair.idle == plain.idle == 0
    assert max(fair.gaps) - min(fair.gaps) <= 2 * UNIT
    assert max(plain.gaps) - min(plain.gaps) > 2 * UNIT


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32), st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 30)), min_size=5, max_size=60))
def test_the_gap_is_bounded_and_no_room_is_left_unused(seed, arrivals):
    server = Server(seed=seed)
    apart = []  # of each stretch in which both wait
    for tenant, count in arrivals:
        server.ask(tenant, count)
        for _ in range(server.random.randint(1, 20)):
            before = len(server.gaps)
            server.step()
            if len(server.gaps) == before:
                apart.append(server.gaps)
                server.gaps = []
    for gaps in filter(None, [*apart, server.gaps]):
        assert max(gaps) - min(gaps) <= 2 * UNIT
    assert server.idle == 0


def test_shares_follow_weights():
    server = Server(weights={"a": 3.0, "b": 1.0})
    server.ask("a", 2000)
    server.ask("b", 2000)
    for _ in range(4000):
        server.step()
    assert {"a", "b"} <= set(server.queue.tenants())
    assert server.served["a"] / server.served["b"] == pytest.approx(3.0, rel=0.1)


def test_an_idle_tenant_saves_nothing_up():
    server = Server()
    server.ask("b", 3000)
    for _ in range(1500):
        server.step()
    had = server.served["b"]
    assert had > 20 * UNIT
    server.ask("a", 3000)
    before = dict(server.served)
    for _ in range(1500):
        server.step()
    assert server.served["a"] - before.get("a", 0) == pytest.approx(server.served["b"] - before["b"], abs=2 * UNIT)


def test_nor_does_one_that_comes_when_nobody_waits():
    queue = FairQueue(VTC)
    for _ in range(100):
        queue.admit("b", 1000, waited=False)
        queue.counters.output("b", 50)
    queue.admit("a", 10, waited=False)
    assert queue.counters["a"] == queue.counters["b"] + 10


def test_who_waits_keeps_its_credit():
    """Only coming back raises a counter, not the end of a wait."""
    queue = FairQueue(VTC)
    first, second = Waiting("a", 1, 0.0), Waiting("b", 1, 0.0)
    queue.push(second)
    queue.counters.output("b", 500)
    queue.push(first)
    queue.counters.output("b", 500)
    value = queue.counters["a"]
    queue.remove(first)
    queue.admit("a", 7, waited=True)
    assert queue.counters["a"] == value + 7 < queue.counters["b"]


def test_a_correction_gives_back_what_the_cache_had():
    queue = FairQueue(VTC)
    queue.admit("a", 100, waited=False)
    queue.counters.prompt("a", -60)
    assert queue.counters["a"] == 40


def test_resumed_requests_are_first_and_free():
    queue = FairQueue(VTC)
    queue.push(Waiting("a", 5, 0.0, priority=9))
    queue.push(Waiting("b", 900, 1.0, resumed=True))
    queue.push(Waiting("b", 5, 2.0, resumed=True))
    assert [each.tokens for each in queue.in_order()] == [900, 5, 5]
    assert queue.counters["b"] == 0
    assert queue.tokens == 5


def test_every_tenants_first_comes_before_anybodys_second():
    queue = FairQueue(VTC)
    for tenant in "abc":
        for tokens in (20, 10):
            queue.push(Waiting(tenant, tokens, 0.0))
    queue.counters.output("a", 1)
    assert [(each.tenant, each.tokens) for each in queue.in_order()] == [
        *(("b", 10), ("c", 10), ("a", 10)),
        *(("b", 20), ("c", 20), ("a", 20)),
    ]


def test_priority_counts_inside_a_tenant_only():
    queue = FairQueue(VTC)
    queue.push(Waiting("a", 10, 0.0))
    queue.push(Waiting("b", 10, 0.0, priority=-5))
    queue.push(Waiting("b", 10, 9.0, priority=5))
    queue.counters.output("b", 1)
    assert [(each.tenant, each.priority) for each in queue.in_order()] == [("a", 0), ("b", 5), ("b", -5)]


def overtaken(tokens, policy, *, other=10, pause=0.05):
    """How long after a request others come that still go before it, in an endless stream."""
    queue, last = FairQueue(policy), 0.0
    mine = Waiting("a", tokens, 0.0)
    queue.push(mine)
    for count in range(10_000):
        now = count * pause
        queue.push(Waiting("a", other, now))
        first = next(queue.in_order())
        if first is mine:
            return last
        last = max(last, first.arrival)
        queue.remove(first)
    raise AssertionError("it never was first")


@pytest.mark.parametrize("tokens", [100, 5_000, 100_000])
def test_case_endless_short_prompts_hold_up_a_long_one_no_longer_than_its_bound(tokens):
    assert overtaken(tokens, VTC) <= min(tokens / VTC.ageing_tokens_per_second, VTC.overtaking_seconds)


def test_short_prompts_do_not_wait_behind_a_long_one_that_came_with_them():
    queue = FairQueue(VTC)
    queue.push(Waiting("a", 100_000, 0.0))
    for count in range(20):
        queue.push(Waiting("a", 10, count * VTC.overtaking_seconds / 21))
    assert [each.tokens for each in queue.in_order()] == [10] * 20 + [100_000]


def test_endless_long_prompts_hold_up_no_short_one():
    """One that came before it, and nothing later."""
    queue = FairQueue(VTC)
    queue.push(Waiting("a", 100_000, 0.0))
    queue.push(Waiting("a", 10, 1.0))
    queue.push(Waiting("a", 100_000, 2.0))
    assert next(queue.in_order()).tokens == 10


def test_fcfs_is_the_order_of_arrival():
    queue = FairQueue(FCFS)
    asked = [Waiting("b", 5, 0.0), Waiting("b", 900, 0.0, priority=3), Waiting("a", 1, 0.0)]
    for each in asked:
        queue.push(each)
    assert list(queue.in_order()) == asked
    assert queue.ahead(Waiting("a", 1, 0.0)) == (906, 906)
    assert queue.share("a") == 1.0
    for each in asked:
        queue.remove(each)
    assert not len(queue)
    assert not list(queue.tenants())


def test_what_is_ahead_and_the_share():
    queue = FairQueue(VTC, {"a": 3.0, "b": 1.0, "c": 4.0}.get)
    queue.push(Waiting("a", 1000, 0.0))
    queue.push(Waiting("a", 10, 0.0, priority=1))
    queue.push(Waiting("b", 500, 0.0))
    assert queue.ahead(Waiting("a", 10, 0.0)) == (10, 1510)
    assert queue.ahead(Waiting("a", 10, 60.0)) == (1010, 1510)
    assert queue.ahead(Waiting("c", 10, 0.0)) == (0, 1510)
    assert queue.share("a") == 0.75
    assert queue.share("c") == 0.5


def test_who_has_most_leaves_a_full_queue():
    queue = FairQueue(VTC)
    mine = [Waiting("a", tokens, float(number)) for number, tokens in enumerate((40, 30, 20))]
    for each in mine:
        queue.push(each)
    queue.push(Waiting("b", 5, 0.0))
    assert queue.to_leave(Waiting("b", 5, 9.0), 100) == []
    assert queue.to_leave(Waiting("b", 15, 9.0), 100) == [mine[2]]
    assert queue.to_leave(Waiting("b", 30, 9.0), 100) == [mine[2], mine[1]]
    assert queue.to_leave(Waiting("a", 30, 9.0), 100) is None
    assert queue.to_leave(Waiting("b", 90, 9.0), 100) is None
    assert FairQueue(VTC).to_leave(Waiting("a", 1000, 0.0), 100) == []


def test_memory_is_bounded_and_only_debts_are_lost():
    policy = FairnessPolicy(max_idle_tenants=10)
    queue = FairQueue(policy)
    queue.push(Waiting("waits", 1, 0.0))
    for number in range(1000):
        queue.admit(f"t{number}", 100 + number, waited=False)
    assert len(queue.counters) <= 2 * 10 + 2
    assert queue.counters["t999"] > 0
    assert "waits" in queue.tenants()


def test_a_weight_of_nothing_is_next_to_nothing():
    counters = Counters(VTC, lambda tenant: 0.0)
    counters.prompt("a", 1)
    assert counters["a"] == pytest.approx(1e6)
