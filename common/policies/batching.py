"""What runs in the next engine step: Sarathi-Serve's stall-free batching (Agrawal et al., OSDI 2024).

Decodes first, so that no prompt delays a running stream; then prompts, unfinished and new ones, all under one token
budget. Of what decodes leave, `oldest_share` goes to prompts in their order of arrival, the rest to those that have
least left. So, with b tokens a step for prompts and among requests of one priority,

    the oldest prompt of L tokens is computed within ⌈L / ⌈oldest_share · b⌉⌉ steps, whatever comes after it;
    a prompt with k tokens left in it and in all shorter ones: within about k / ((1 − oldest_share) · b) steps, however
    long the prompts before it are, as soon as it has blocks.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

_NEWCOMERS = 32  # looked at in one step, so that a long queue costs no time


class Running(NamedTuple):
    """A sequence that holds blocks. pending: tokens whose KV is not computed yet (1 for a decode)."""

    key: int
    decoding: bool
    pending: int
    priority: int
    arrival: int


class Newcomer(NamedTuple):
    """A sequence that waits. pending: tokens to compute, cached ones left out; blocks: what it takes from the pool's
    room; rows: sequences it becomes once it decodes."""

    key: int
    pending: int
    blocks: int
    rows: int
    priority: int = 0


class Plan(NamedTuple):
    """Keys and token counts of one step, in order."""

    decodes: list[int]
    chunks: list[tuple[int, int]]
    admitted: list[tuple[int, int]]


class _Prompt(NamedTuple):
    key: int
    pending: int
    priority: int
    place: int  # in the order of arrival


def plan(
    running: Sequence[Running],
    newcomers: Iterable[Newcomer],
    *,
    token_budget: int,
    max_running: int,
    room_blocks: int,
    oldest_share: float = 0.5,
) -> Plan:
    """Decides one step.

    newcomers: in the order of admission; the first that does not fit ends admission, so that small requests never
    take the blocks a large one waits for. room_blocks: blocks free or evictable. Every running decode keeps room for
    its next block, or admission would soon be paid for with a preemption. oldest_share: 1 is the order of arrival.
    """
    ordered = sorted(running, key=_order)
    decodes = [each.key for each in ordered if each.decoding][: min(token_budget, max_running)]
    budget = token_budget - len(decodes)
    if budget <= 0:
        return Plan(decodes, [], [])
    prompts = [
        _Prompt(each.key, each.pending, each.priority, place) for place, each in enumerate(ordered) if not each.decoding
    ]
    under_way = len(prompts)
    room = room_blocks - sum(each.decoding for each in running)
    for newcomer in _fitting(newcomers, max_running - len(running), room):
        prompts.append(_Prompt(newcomer.key, newcomer.pending, newcomer.priority, len(ordered) + len(prompts)))
    given: Counter[int] = Counter()
    oldest = math.ceil(oldest_share * budget)
    left = _spread(sorted(prompts, key=lambda each: (-each.priority, each.place)), oldest, given)
    shortest = sorted(prompts, key=lambda each: (-each.priority, each.pending - given[each.key], each.place))
    _spread(shortest, budget - oldest + left, given)
    chunks = [(each.key, given[each.key]) for each in prompts if given[each.key]]
    running_keys = {each.key for each in prompts[:under_way]}
    return Plan(
        decodes,
        [chunk for chunk in chunks if chunk[0] in running_keys],
        [chunk for chunk in chunks if chunk[0] not in running_keys],
    )


def _fitting(newcomers: Iterable[Newcomer], rows: int, room: int) -> Iterable[Newcomer]:
    """The first ones, as far as there is room for all of them together."""
    if rows <= 0:
        return
    for newcomer in islice(newcomers, _NEWCOMERS):
        rows -= newcomer.rows
        room -= newcomer.blocks
        if rows < 0 or room < 0:
            return
        yield newcomer


def _spread(prompts: Iterable[_Prompt], tokens: int, given: Counter[int]) -> int:
    """Adds to `given` as much as each still wants, in turn. Returns what nobody wants."""
    for each in prompts:
        if tokens <= 0:
            return 0
        taken = min(each.pending - given[each.key], tokens)
        given[each.key] += taken
        tokens -= taken
    return tokens


def victim(running: Iterable[Running]) -> int:
    """Who gives up its blocks: the lowest priority, among equals the latest arrival."""
    return max(running, key=_order).key


def _order(each: Running) -> tuple[int, int]:
    return -each.priority, each.arrival
