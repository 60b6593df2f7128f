"""Events made from sequences."""

import common.engine.messages as msg
from common.cache.keys import token_hash
from common.engine.block_pool import BlockPool
from common.engine.executor import Row, Sampled
from common.engine.sequence import Choice, Limits, Sequence
from common.errors import EpdError
from common.sampling import ChoiceTokens


def reserved(sequence: Sequence, pool: BlockPool) -> msg.Reserved:
    return msg.Reserved(
        seq=sequence.seq,
        blocks=list(sequence.reserved),
        generations=[pool.generation(block) for block in sequence.reserved],
        hit_blocks=sequence.hit_blocks,
        wait_seconds=sequence.timings.queue,
    )


def started(sequence: Sequence, pool: BlockPool) -> msg.Started:
    blocks = list(sequence.leader.blocks)
    return msg.Started(
        seq=sequence.seq,
        cached_tokens=sequence.cached_tokens,
        blocks=blocks,
        generations=[pool.generation(block) for block in blocks],
        queue_seconds=sequence.timings.queue,
        lookup_seconds=sequence.timings.lookup,
    )


def chunk(row: Row, step: int) -> msg.Chunk:
    return msg.Chunk(
        seq=row.choice.sequence.seq, step=step, start=row.start, end=row.end, last=row.end == row.choice.length
    )


def token(choice: Choice, sampled: Sampled, limits: Limits) -> ChoiceTokens:
    """Gives a choice its next token and says so."""
    reason, stop = choice.append(sampled.token_id, limits)
    choice.finished = reason is not None
    return ChoiceTokens(
        choice=choice.index,
        token_ids=[sampled.token_id],
        logprobs=None if sampled.logprob is None else [sampled.logprob],
        finish_reason=reason,
        stop_token_id=stop,
    )


def prefilled(sequence: Sequence, first: list[ChoiceTokens]) -> msg.Prefilled:
    timings = sequence.timings
    return msg.Prefilled(
        seq=sequence.seq,
        first=first,
        token_count=sequence.total,
        token_hash=token_hash(sequence.leader.tokens(0, sequence.total)),
        cached_tokens=sequence.cached_tokens,
        queue_seconds=timings.queue,
        lookup_seconds=timings.lookup,
        forward_seconds=timings.forward,
    )


def done(sequence: Sequence) -> msg.Done:
    timings = sequence.timings
    return msg.Done(
        seq=sequence.seq,
        cached_tokens=sequence.cached_tokens,
        queue_seconds=timings.queue,
        lookup_seconds=timings.lookup,
        forward_seconds=timings.forward,
        first_step_seconds=timings.first_step,
        decode_seconds=timings.decode,
    )


def failed(seq: str, error: EpdError) -> msg.Failed:
    return msg.Failed(
        seq=seq,
        reason=error.reason,
        message=error.message,
        field=error.field,
        retry_after_seconds=error.retry_after_seconds,
    )
