"""What an engine says of itself: its load, and whether its books balance."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import common.engine.messages as msg
from common.engine.block_pool import BlockPool, Owner
from common.engine.kv_manager import KvManager
from common.engine.scheduler import Scheduler
from common.engine.sequence import Sequence, State


def load(scheduler: Scheduler, kv: KvManager, pool: BlockPool, steps: int) -> msg.LoadReport:
    prefilling = sum(choice.pending for choice in scheduler.running if choice.prefilling)
    return msg.LoadReport(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting) + len(scheduler.reserving),
        pending_prefill_tokens=prefilling + sum(map(kv.uncached_tokens, scheduler.waiting)),
        active_blocks=pool.active,
        free_blocks=pool.free,
        cached_blocks=pool.cached,
        held_blocks=pool.held,
        total_blocks=pool.num_blocks,
        steps=steps,
        preemptions=scheduler.preempted,
    )


def integrity_errors(scheduler: Scheduler, pool: BlockPool, sequences: Iterable[Sequence]) -> list[str]:
    """Empty: free + cached + active + held == total and every count agrees with what the sequences hold."""
    living = list(sequences)
    active: list[SequenceOf[int]] = [choice.blocks for each in living for choice in each.choices]
    active += [each.spare for each in living if each.state is not State.RESERVED]
    errors = pool.check_integrity(
        {
            Owner.SEQUENCE: active,
            Owner.PUBLICATION: [each.published for each in living],
            Owner.RESERVATION: [each.reserved + each.spare for each in living if each.state is State.RESERVED],
        }
    )
    queued = [choice.sequence for choice in [*scheduler.running, *scheduler.waiting]] + scheduler.reserving
    if any(sequence not in living for sequence in queued):
        errors.append("an ended sequence is queued")
    return errors
