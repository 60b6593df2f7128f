"""DecodeService: KV cache to tokens. The only file of this role that knows protobuf."""

from collections.abc import AsyncIterator, Iterable

import grpc
import msgspec

from common import telemetry
from common.engine.client import EngineStream
from common.engine.messages import Cancel, Commit, Done, Failed, Finish, Reserve, Reserved, Started, Submit, Tokens
from common.errors import EngineFailed, InvalidArgument
from common.rpc import wire
from common.rpc.worker_context import WorkerContext, engine_error
from common.sampling import ChoiceTokens, SamplingParams, merge
from common.transfer.key import TransferKey
from common.transfer.puller import Puller, PullResult, PullTarget
from epd.v1 import decode_pb2, decode_pb2_grpc


class DecodeService(decode_pb2_grpc.DecodeServiceServicer):
    """Pulls prompts' KV, or computes them here, and streams the tokens of every choice."""

    def __init__(self, worker: WorkerContext, puller: Puller) -> None:
        self._worker = worker
        self._puller = puller
        self._running: dict[TransferKey, str] = {}

    async def Decode(
        self, request: decode_pb2.DecodeRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        key = wire.key_from_proto(request.key)
        sampling = wire.sampling_from_proto(request.sampling)
        self._worker.check(wire.identity_from_proto(request.target), request.model)
        self._worker.check_prompt(request.prompt_token_ids, request.output_token_ids, request.choices, sampling)
        if not request.HasField("source") and "prefill" not in self._worker.record.roles:
            raise InvalidArgument("source is required: this worker only decodes", field="source")
        run = _Run(self._worker, self._puller, request, key, sampling)
        self._running[key] = run.seq
        try:
            with self._worker.request_span(telemetry.DECODE_RUN, key, request.tenant) as span:
                yield decode_pb2.DecodeResponse(accepted=decode_pb2.DecodeAccepted())
                stream = await run.start(self._worker.remaining(context))
                if stream is None:
                    yield run.finished(Done(seq=run.seq, cached_tokens=0))
                    return
                batcher = _Batcher(request.stream_interval)
                async for event in stream:
                    done: Done | None = None
                    # One message for all that is there: a stream slower than the engine coalesces by itself.
                    for item in (event, *stream.drain()):
                        match item:
                            case Tokens():
                                batcher.add(choice for _, choice in item.items)
                            case Done():
                                done = item
                            case Failed():
                                raise engine_error(item)
                            case Started():
                                pass
                    if tokens := batcher.take(everything=done is not None):
                        yield decode_pb2.DecodeResponse(
                            tokens=decode_pb2.DecodeTokens(choices=wire.all_to_proto(tokens))
                        )
                    if done:
                        run.ended = True
                        self._worker.record_decode_spans(span, done, pulled=run.pulled is not None)
                        yield run.finished(done)
                        return
                raise EngineFailed("the engine ended in mid-stream")
        finally:
            del self._running[key]
            if not run.ended:
                self._worker.engine.send(Cancel(seq=run.seq))

    async def Finish(
        self, request: decode_pb2.FinishRequest, context: grpc.aio.ServicerContext
    ) -> decode_pb2.FinishResponse:
        seq = self._running.get(wire.key_from_proto(request.key))
        if seq is not None:  # else it ended by itself meanwhile
            self._worker.engine.send(Finish(seq=seq, choices=list(request.choices)))
        return decode_pb2.FinishResponse()


class _Batcher:
    """Holds tokens until some choice has enough of them for a message, or has ended; the first go at once."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._held: list[ChoiceTokens] = []
        self._first = True

    def add(self, tokens: Iterable[ChoiceTokens]) -> None:
        self._held.extend(tokens)

    def take(self, *, everything: bool) -> list[ChoiceTokens]:
        if not self._held:
            return []
        self._held = merge(self._held)
        due = (
            everything
            or self._first
            or any(len(each.token_ids) >= self._interval or each.finish_reason for each in self._held)
        )
        if not due:
            return []
        held, self._held, self._first = self._held, [], False
        return held


class _Run:
    """One decode call up to its first engine step."""

    def __init__(
        self,
        worker: WorkerContext,
        puller: Puller,
        request: decode_pb2.DecodeRequest,
        key: TransferKey,
        sampling: SamplingParams,
    ) -> None:
        self._worker, self._puller, self._request, self._key = worker, puller, request, key
        self.seq = f"decode/{key}"
        self.pulled: PullResult | None = None
        self.ended = False
        self._stream: EngineStream | None = None
        self._command = Reserve(
            seq=self.seq,
            prompt=list(request.prompt_token_ids),
            output=list(request.output_token_ids),
            choices=list(request.choices),
            sampling=sampling,
            salt=request.salt,
            priority=request.priority,
        )

    async def start(self, remaining_seconds: float) -> EngineStream | None:
        """The stream of tokens, after a pull and its commit or of a prompt computed here.

        None when the first tokens, which prefill has answered with, were already the last.
        """
        if not self._request.HasField("source"):
            return self._worker.engine.open(Submit(**msgspec.structs.asdict(self._command)))
        source = self._request.source
        target = PullTarget(
            key=self._key,
            ticket=source.ticket,
            owner=wire.identity_from_proto(source.owner),
            address=source.address,
            tenant=self._request.tenant,
            token_ids=[*self._command.prompt, *self._command.output],
            deadline_seconds=remaining_seconds,
        )
        with telemetry.start_span(telemetry.TRANSFER_PULL) as span:
            pulled = self.pulled = await self._puller.pull(target, self._reserve)
            span.set_attribute(telemetry.TRANSFER_BYTES, pulled.bytes_read)
            span.set_attribute(telemetry.TRANSFER_CHANNEL, pulled.channel)
        metrics = telemetry.current().metrics
        metrics.transfer_bytes.labels(channel=pulled.channel).inc(pulled.bytes_read)
        metrics.transfer_seconds.labels(channel=pulled.channel).observe(pulled.total_seconds)
        if not pulled.moved:
            return None
        assert self._stream is not None
        self._worker.engine.send(Commit(seq=self.seq, first=pulled.first))
        return self._stream

    async def _reserve(self, token_count: int) -> Reserved:
        with telemetry.start_span(telemetry.DECODE_RESERVE):
            self._stream = self._worker.engine.open(self._command)
            async for event in self._stream:
                match event:
                    case Reserved():
                        return event
                    case Failed():
                        raise engine_error(event)
        raise EngineFailed("the engine ended while room was being reserved")

    def finished(self, done: Done) -> decode_pb2.DecodeResponse:
        """Hops after the first token for a pull; all hops for a prompt computed here."""
        if self.pulled:
            hops = [(telemetry.TRANSFER_PULL, self.pulled.exposed_seconds)]
        else:
            hops = [
                (telemetry.PREFILL_QUEUE, done.queue_seconds),
                (telemetry.CACHE_LOOKUP, done.lookup_seconds),
                (telemetry.PREFILL_FORWARD, done.forward_seconds),
            ]
        if self.pulled:
            hops.append((telemetry.DECODE_QUEUE, done.queue_seconds))
        hops += [
            (telemetry.DECODE_FIRST_STEP, done.first_step_seconds),
            (telemetry.DECODE_STEPS, done.decode_seconds),
        ]
        return decode_pb2.DecodeResponse(
            finished=decode_pb2.DecodeFinished(
                cached_tokens=done.cached_tokens,
                hops=self._worker.hops(*hops),
                transfer_bytes=self.pulled.bytes_read if self.pulled else 0,
                transfer_channel=self.pulled.channel if self.pulled else "",
            )
        )
