"""What the role services of one worker share: identity, engine, encoder, telemetry, draining."""

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import grpc
from opentelemetry import trace

from common import telemetry
from common.encoder.encoder import Encoder
from common.engine.client import Engine
from common.engine.messages import Done, Failed, Prefilled
from common.errors import Draining, EngineFailed, EpdError, InvalidArgument, ModelNotFound, WrongIncarnation, by_reason
from common.registry.record import WorkerRecord
from common.rpc import wire
from common.rpc.adapters import WorkerAdapters
from common.sampling import MAX_CHOICES, SamplingParams
from common.transfer.key import Identity, TransferKey
from epd.v1 import types_pb2

MAX_REQUEST_SECONDS = 3600.0  # hard end of a call that came without a deadline


def new_incarnation() -> str:
    return secrets.token_hex(8)


def engine_error(event: Failed) -> EpdError:
    """The engine's refusal as the error that a caller sees."""
    cls = by_reason().get(event.reason, EngineFailed)
    return cls(event.message, field=event.field, retry_after_seconds=event.retry_after_seconds)


class WorkerContext:
    """One life of one worker: with a language engine, an encoder, or both, as its roles need."""

    def __init__(self, record: WorkerRecord, engine: Engine | None, encoder: Encoder | None = None) -> None:
        self.record = record
        self.language = engine
        self.vision = encoder
        self.adapters: WorkerAdapters | None = None  # of those with a language engine
        self.draining = False
        self.running_requests = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def engine(self) -> Engine:
        """For the roles that have one."""
        assert self.language is not None
        return self.language

    @property
    def encoder(self) -> Encoder:
        """For the role that has one."""
        assert self.vision is not None
        return self.vision

    @property
    def identity(self) -> Identity:
        return Identity(self.record.worker_id, self.record.incarnation)

    async def idle(self) -> None:
        """Returns when no request is running, of which publications still to be pulled are the callers' part."""
        await self._idle.wait()

    def check(self, target: Identity, model: str) -> None:
        """Refuses calls meant for another life of this worker, for another model, and new ones while draining."""
        if target != self.identity:
            raise WrongIncarnation(f"this is {self.record.worker_id}, but not the incarnation that was called")
        if model and model not in self.record.names:
            raise ModelNotFound(f"this worker serves {self.record.model!r}, not {model!r}", field="model")
        if self.draining:
            raise Draining(f"{self.record.worker_id} is draining", retry_after_seconds=1.0)

    def check_prompt(
        self, prompt: Sequence[int], output: Sequence[int], choices: Sequence[int], sampling: SamplingParams
    ) -> None:
        """The gateway validates too; a worker never trusts its caller with its engine."""
        if not prompt:
            raise InvalidArgument("prompt_token_ids must not be empty", field="prompt_token_ids")
        vocab = self.record.vocab_size
        if max(prompt) >= vocab or (output and max(output) >= vocab):
            raise InvalidArgument(f"token ids must be below the vocabulary size {vocab}", field="prompt_token_ids")
        if not 1 <= len(choices) <= MAX_CHOICES or len(set(choices)) != len(choices):
            raise InvalidArgument(f"choices must be 1 to {MAX_CHOICES} distinct indexes", field="choices")
        if output and len(choices) != 1:
            raise InvalidArgument("a resume carries exactly one choice", field="choices")
        sampling.validate(vocab)

    def cache_blocks(self, cache_bytes: int) -> int | None:
        """KV blocks of a tenant's limit, rounded down; None for 0, no bound."""
        return cache_bytes // self.record.layout.block_bytes if cache_bytes else None

    def remaining(self, context: grpc.aio.ServicerContext) -> float:
        """Seconds until the call's hard end."""
        remaining = context.time_remaining()
        return MAX_REQUEST_SECONDS if remaining is None else max(0.0, min(remaining, MAX_REQUEST_SECONDS))

    @contextmanager
    def request_span(self, name: str, key: TransferKey, tenant: str) -> Iterator[trace.Span]:
        """The worker's span of one call; the call counts as running inside."""
        self.running_requests += 1
        self._idle.clear()
        attributes = {
            telemetry.REQUEST_ID: key.request_id.hex(),
            telemetry.LEG: key.leg,
            telemetry.ATTEMPT: key.attempt,
            telemetry.TENANT: tenant,
            telemetry.WORKER: self.record.worker_id,
        }
        try:
            with telemetry.start_span(name, kind=trace.SpanKind.SERVER, attributes=attributes) as span:
                yield span
        finally:
            self.running_requests -= 1
            if not self.running_requests:
                self._idle.set()

    def hops(self, *durations: tuple[str, float]) -> list[types_pb2.HopTiming]:
        return [wire.hop_to_proto(name, seconds, self.record.worker_id) for name, seconds in durations]

    def record_prefill_spans(self, parent: trace.Span, event: Prefilled | Done) -> None:
        """Child spans of a prompt's computation, from the engine's durations."""
        spans = [
            (telemetry.PREFILL_QUEUE, event.queue_seconds),
            (telemetry.CACHE_LOOKUP, event.lookup_seconds),
            (telemetry.PREFILL_FORWARD, event.forward_seconds),
        ]
        self.record_spans(parent, spans, {telemetry.CACHED_TOKENS: event.cached_tokens})

    def record_decode_spans(self, parent: trace.Span, done: Done, *, pulled: bool) -> None:
        after = [(telemetry.DECODE_FIRST_STEP, done.first_step_seconds), (telemetry.DECODE_STEPS, done.decode_seconds)]
        if pulled:
            spans = [(telemetry.DECODE_QUEUE, done.queue_seconds), *after]
        else:
            spans = [
                (telemetry.PREFILL_QUEUE, done.queue_seconds),
                (telemetry.CACHE_LOOKUP, done.lookup_seconds),
                (telemetry.PREFILL_FORWARD, done.forward_seconds),
                *after,
            ]
        self.record_spans(parent, spans, {telemetry.CACHED_TOKENS: done.cached_tokens})

    def record_spans(
        self, parent: trace.Span, spans: Sequence[tuple[str, float]], attributes: dict[str, int] | None = None
    ) -> None:
        """Child spans from durations, laid end to end before now."""
        ago = sum(seconds for _, seconds in spans)
        for name, seconds in spans:
            telemetry.record_span(name, parent, ago, seconds, attributes)
            ago -= seconds
