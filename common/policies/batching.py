"""What runs in the next engine step: Sarathi-Serve's stall-free batching (Agrawal et al., OSDI 2024).

Decodes first, so that no prompt delays a running stream; then unfinished prompts; then new ones, all under one token
budget.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


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


class Plan(NamedTuple):
    """Keys and token counts of one step, in order."""

    decodes: list[int]
    chunks: list[tuple[int, int]]
    admitted: list[tuple[int, int]]


def plan(
    running: Sequence[Running],
    newcomers: Iterable[Newcomer],
    *,
    token_budget: int,
    max_running: int,
    room_blocks: int,
) -> Plan:
    """Decides one step.

    newcomers: in the order of admission, read only as far as the budget goes; the first that does not fit ends
    admission, so that small requests never starve a large one. room_blocks: blocks free or evictable. Every running
    decode keeps room for its next block, or admission would soon be paid for with a preemption.
    """
    budget = token_budget
    ordered = sorted(running, key=_order)
    decodes = [each.key for each in ordered if each.decoding][: min(budget, max_running)]
    budget -= len(decodes)
    chunks: list[tuple[int, int]] = []
    for each in ordered:
        if not each.decoding and budget > 0:
            tokens = min(each.pending, budget)
            chunks.append((each.key, tokens))
            budget -= tokens
    rows = len(running)
    room = room_blocks - sum(each.decoding for each in running)
    admitted: list[tuple[int, int]] = []
    if budget > 0 and rows < max_running:
        for newcomer in newcomers:
            if rows + newcomer.rows > max_running or newcomer.blocks > room:
                break
            tokens = min(newcomer.pending, budget)
            admitted.append((newcomer.key, tokens))
            budget -= tokens
            rows += newcomer.rows
            room -= newcomer.blocks
            if budget <= 0 or rows >= max_running:
                break
    return Plan(decodes, chunks, admitted)


def victim(running: Iterable[Running]) -> int:
    """Who gives up its blocks: the lowest priority, among equals the latest arrival."""
    return max(running, key=_order).key


def _order(each: Running) -> tuple[int, int]:
    return -each.priority, each.arrival
