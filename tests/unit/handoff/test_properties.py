"""Random histories of the hand-off keep the invariants; deliberately broken machines do not.

EPD_HISTORIES sets the number of histories (default 2000).
"""

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.policies.handoff import owner, puller, tables
from common.policies.handoff.tables import Attempts
from common.policies.handoff.terms import End, Refusal
from common.transfer.key import TransferKey
from tests.unit.handoff.sim_pool import END, InvariantBroken
from tests.unit.handoff.world import OPERATIONS, World, run_history

HISTORIES = int(os.environ.get("EPD_HISTORIES", "2000"))
MUTANT_HISTORIES = 6000  # within which each mutant must be caught; most are within some dozens

history = st.lists(st.tuples(st.integers(0, len(OPERATIONS) - 1), st.integers(0, 255)), min_size=10, max_size=120)


@settings(max_examples=HISTORIES, deadline=None, suppress_health_check=list(HealthCheck))
@given(history=history, first_reason=st.sampled_from([None, None, None, "stop"]), slow_puller=st.booleans())
def test_invariants_hold_over_random_histories(
    history: list[tuple[int, int]], first_reason: str | None, slow_puller: bool
) -> None:
    run_history(history, first_reason=first_reason, slow_puller=slow_puller)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(order=st.lists(st.integers(0, 255), min_size=120, max_size=120), arg=st.sampled_from([0, 2, 4, 6]))
def test_undisturbed_transfer_always_commits(order: list[int], arg: int) -> None:
    """Whatever the order of independent events: without faults the blocks arrive."""
    world = World()
    world.attempt_new(arg)
    for choice in order:
        world.go_on(choice)
        world.check()
    while found := [step for step in world.enabled() if world.commits == 0]:
        found[0]()
    assert world.commits == 1
    world.settle()


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(order=st.lists(st.integers(0, 255), min_size=60, max_size=60))
def test_all_choices_ended_at_prefill_commit_nothing(order: list[int]) -> None:
    """Case A6."""
    world = World(first_reason="stop")
    world.attempt_new(0)
    for choice in order:
        world.go_on(choice)
    world.settle()
    assert world.commits == 0


def random_history(seed: int) -> list[tuple[int, int]]:
    draw = random.Random(seed)
    return [(draw.randrange(len(OPERATIONS)), draw.randrange(256)) for _ in range(draw.randrange(40, 160))]


def run_many(count: int, **options: Any) -> tuple[set, int]:
    """What `count` histories reached: ways to end and to be refused, and commits."""
    seen: set = set()
    commits = 0
    for seed in range(count):
        world = run_history(random_history(seed), **options)
        seen |= world.seen
        commits += world.commits
    return seen, commits


def test_histories_reach_every_end_and_refusal() -> None:
    seen, commits = run_many(1000)
    assert seen >= set(End) - {End.PULLER_LEFT, End.FAILED, End.UNPULLED}  # the last three tell no open stream
    assert seen >= set(Refusal) - {Refusal.DUPLICATE, Refusal.NOT_READABLE}  # of publications and reads
    assert commits > 200


def keep(*_: object) -> None:
    return None


def forget(self: Attempts, key: object) -> None:
    self._live.pop(key.line, None)  # type: ignore[attr-defined]


MUTANTS: dict[str, tuple[object, str, Callable]] = {
    "frees under a reader": (owner, "may_release", lambda state: True),
    "serves a ticket twice": (owner, "used", keep),
    "takes any ticket": (owner, "refusal", lambda state, shown: owner.used(state)),
    "never ends by itself": (owner, "next_due", keep),
    "frees under its own copy": (puller, "may_settle", lambda state: True),
    "commits without the hash": (puller, "mismatch", keep),
    "never times out": (puller, "next_due", keep),
    "admits stale attempts": (Attempts, "refusal", keep),
    "keeps no tombstones": (Attempts, "end", forget),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The properties can fail: each broken rule breaks an invariant within a bounded number of histories."""
    holder, attribute, broken = MUTANTS[name]
    monkeypatch.setattr(holder, attribute, broken)
    with pytest.raises(InvariantBroken):
        run_many(MUTANT_HISTORIES)


def late_pull(check_generations: bool) -> World:
    """Case A1: the puller is so slow that the owner has given its blocks to another prompt before the first copy."""
    world = World(check_generations=check_generations)
    world.attempt_new(0)
    prefill, decode = world.prefills["p0"], world.decodes["d0"]
    while world.bag:
        world.bag.pop(0)()
    world.deliver_up(0)
    while steps := prefill.enabled():
        steps[0]()
    prefill.cancel(TransferKey(bytes(16), 0, 1))  # told on the stream behind everything else
    world.attempt_new(1)
    world.bag.pop(0)()
    while steps := prefill.enabled():
        steps[0]()
    stream = world.streams[0]
    while steps := [*decode.enabled(), *([lambda: world.deliver_down(0)] if stream.down[0] is not END else [])]:
        steps[0]()
    return world


def test_late_pull_of_reused_blocks_is_refused() -> None:
    world = late_pull(check_generations=True)
    assert world.commits == 0
    world.settle()


def test_ignored_generations_are_caught() -> None:
    with pytest.raises(InvariantBroken, match="committed wrong bytes"):
        late_pull(check_generations=False)


def test_table_limits_are_those_of_the_design() -> None:
    limits = tables.HandoffLimits()
    assert (limits.create_wait_seconds, limits.stall_seconds, limits.unpulled_seconds) == (5.0, 2.0, 5.0)
    assert (limits.max_waiters, limits.max_tombstones) == (1024, 4096)
