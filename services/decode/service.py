"""DecodeService: KV cache to tokens. The only file of this role that knows protobuf."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import msgspec

from common import telemetry
from common.cache.keys import token_hash
from common.engine.client import EngineStream
from common.engine.messages import Cancel, Commit, Done, Failed, Finish, Reserve, Reserved, Started, Submit, Tokens
from common.errors import Cancelled, DuplicateRequest, EngineFailed, InvalidArgument, NotReady
from common.rpc import wire
from common.rpc.worker_context import WorkerContext, engine_error
from common.sampling import ChoiceTokens, SamplingParams, merge
from common.transfer.embeddings import (
    EmbeddingPull,
    Embeddings,
    EmbeddingSource,
    media_from_proto,
    sources_from_proto,
)
from common.transfer.key import TransferKey
from common.transfer.puller import Puller, PullResult, PullTarget
from epd.v1 import decode_pb2, decode_pb2_grpc
from services.decode.subscribers import Subscriber, Subscribers


class DecodeService(decode_pb2_grpc.DecodeServiceServicer):
    """Pulls prompts' KV, or computes them here, and streams the tokens of every choice."""

    def __init__(self, worker: WorkerContext, puller: Puller, embeddings: Embeddings | None = None) -> None:
        """embeddings: None where prompts with images are not computed."""
        self._worker = worker
        self._puller = puller
        self._embeddings = embeddings
        self._running: dict[TransferKey, _Run] = {}
        self._subscribers = Subscribers()

    async def Decode(
        self, request: decode_pb2.DecodeRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        key = wire.key_from_proto(request.key)
        sampling = wire.sampling_from_proto(request.sampling)
        self._worker.check(wire.identity_from_proto(request.target), request.model)
        self._worker.check_prompt(request.prompt_token_ids, request.output_token_ids, request.choices, sampling)
        if not request.HasField("source") and "prefill" not in self._worker.record.roles:
            raise InvalidArgument("source is required: this worker only decodes", field="source")
        if key in self._running:
            raise DuplicateRequest("this attempt is running here")
        run = _Run(self._worker, self._puller, self._embeddings, request, key, sampling)
        if request.HasField("subscription"):
            run.subscribe(self._subscribers.get(request.subscription.subscriber), request.subscription.tag)
        self._running[key] = run
        try:
            with self._worker.request_span(telemetry.DECODE_RUN, key, request.tenant) as span:
                yield decode_pb2.DecodeResponse(accepted=decode_pb2.DecodeAccepted())
                stream = await run.start(self._worker.remaining(context))
                if stream is None:
                    yield run.finished(Done(seq=run.seq, cached_tokens=0))
                    return
                async for event in stream:
                    done: Done | None = None
                    # One message for all that is there: a stream slower than the engine coalesces by itself.
                    for item in (event, *stream.drain()):
                        match item:
                            case Tokens():
                                run.tokens.extend(choice for _, choice in item.items)
                            case Done():
                                done = item
                            case Failed():
                                raise engine_error(item)
                            case Started():
                                pass
                    if tokens := run.take():
                        yield decode_pb2.DecodeResponse(
                            tokens=decode_pb2.DecodeTokens(choices=wire.all_to_proto(tokens))
                        )
                    if done:
                        run.ended = True
                        await run.let_go()
                        self._worker.record_decode_spans(span, done, pulled=run.pulled is not None)
                        yield run.finished(done)
                        return
                run.check_subscriber()
                raise EngineFailed("the engine ended in mid-stream")
        finally:
            del self._running[key]
            run.close()

    async def Subscribe(
        self, request: decode_pb2.SubscribeRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[decode_pb2.SubscribeResponse]:
        subscriber = self._subscribers.open(wire.ticket_from_proto(request.subscriber))
        try:
            yield decode_pb2.SubscribeResponse()
            while True:
                calls = [
                    decode_pb2.CallTokens(tag=tag, choices=wire.all_to_proto(merge(tokens)))
                    for tag, tokens in (await subscriber.take()).items()
                ]
                yield decode_pb2.SubscribeResponse(calls=calls)
        finally:
            self._subscribers.close(request.subscriber)

    async def Hold(self, request: decode_pb2.HoldRequest, context: grpc.aio.ServicerContext) -> decode_pb2.HoldResponse:
        run = self._running.get(wire.key_from_proto(request.key))
        if run is not None:  # else it ended by itself meanwhile
            run.hold(request.hold)
        return decode_pb2.HoldResponse()

    async def Finish(
        self, request: decode_pb2.FinishRequest, context: grpc.aio.ServicerContext
    ) -> decode_pb2.FinishResponse:
        run = self._running.get(wire.key_from_proto(request.key))
        if run is not None:  # else it ended by itself meanwhile
            self._worker.engine.send(Finish(seq=run.seq, choices=list(request.choices)))
        return decode_pb2.FinishResponse()


class _Run:
    """One decode call: how its sequence gets into the engine, and where its tokens go."""

    def __init__(
        self,
        worker: WorkerContext,
        puller: Puller,
        embeddings: Embeddings | None,
        request: decode_pb2.DecodeRequest,
        key: TransferKey,
        sampling: SamplingParams,
    ) -> None:
        self._worker, self._puller, self._embeddings = worker, puller, embeddings
        self._request, self._key = request, key
        self.seq = f"decode/{key}"
        self.pulled: PullResult | None = None
        self.ended = False
        self.tokens: list[ChoiceTokens] = []  # not sent yet
        self._subscriber: Subscriber | None = None
        self._tag = 0
        self._free = asyncio.Event()  # not held back
        self._free.set()
        self._stream: EngineStream | None = None
        self._images: EmbeddingPull | None = None
        self._sources: list[EmbeddingSource] = []
        if not request.HasField("source"):
            self._sources = sources_from_proto(request.embeddings, len(request.prompt_token_ids))
        self._command = Reserve(
            seq=self.seq,
            prompt=list(request.prompt_token_ids),
            output=list(request.output_token_ids),
            choices=list(request.choices),
            sampling=sampling,
            salt=request.salt,
            adapter=request.adapter,
            cache_blocks=worker.cache_blocks(request.cache_bytes),
            priority=request.priority,
            media=media_from_proto(request.embeddings, len(request.prompt_token_ids)),
        )

    async def start(self, remaining_seconds: float) -> EngineStream | None:
        """The stream of tokens, after a pull and its commit or of a prompt computed here.

        None when the first tokens, which prefill has answered with, were already the last.
        """
        if not self._request.HasField("source"):
            return await self._compute(remaining_seconds)
        source = self._request.source
        tokens = [*self._command.prompt, *self._command.output]
        target = PullTarget(
            key=self._key,
            ticket=source.ticket,
            owner=wire.identity_from_proto(source.owner),
            address=source.address,
            tenant=self._request.tenant,
            token_count=len(tokens),
            content_hash=token_hash(tokens),
            num_blocks=-(-len(tokens) // self._worker.record.layout.block_size),
            deadline_seconds=remaining_seconds,
        )
        with telemetry.start_span(telemetry.TRANSFER_PULL) as span:
            pulled = self.pulled = await self._puller.pull(target, self._reserve)
            span.set_attribute(telemetry.TRANSFER_BYTES, pulled.bytes_read)
            span.set_attribute(telemetry.TRANSFER_CHANNEL, pulled.channel)
        metrics = telemetry.current().metrics
        metrics.transfer_bytes.labels(channel=pulled.channel).inc(pulled.bytes_read)
        metrics.transfer_seconds.labels(channel=pulled.channel).observe(pulled.total_seconds)
        self.check_subscriber()
        if not pulled.moved:
            return None
        assert self._stream is not None
        self._worker.engine.send(Commit(seq=self.seq, first=pulled.first))
        return self._stream

    async def _compute(self, remaining_seconds: float) -> EngineStream:
        """The prompt is computed here, from its images' embeddings where it has some."""
        command = Submit(**msgspec.structs.asdict(self._command))
        if not self._sources:
            return self._worker.engine.open(command)
        if self._embeddings is None:
            raise InvalidArgument("this worker computes no prompts with images", field="embeddings")
        self._images = self._embeddings.open(
            self._key, self._sources, tenant=self._request.tenant, deadline_seconds=remaining_seconds
        )
        command.media = await self._images.pull()
        self.check_subscriber()
        stream = self._worker.engine.open(command)
        self._images.hand_over(self.seq)
        return stream

    def subscribe(self, subscriber: Subscriber, tag: int) -> None:
        """Raises NotReady, DuplicateRequest."""
        subscriber.join(tag, self._subscriber_lost)
        self._subscriber, self._tag = subscriber, tag

    def check_subscriber(self) -> None:
        if self._subscriber is not None and self._subscriber.lost:
            raise NotReady("the subscriber's stream has ended")

    def _subscriber_lost(self) -> None:
        self._free.set()
        self._worker.engine.send(Cancel(seq=self.seq))  # ends the stream of tokens

    def take(self) -> list[ChoiceTokens]:
        """Tokens for the call's own stream; those of a subscriber go their way, unless they are held back."""
        if self._subscriber is None:
            tokens, self.tokens = self.tokens, []
            return merge(tokens)
        if self.tokens and self._free.is_set():
            self._subscriber.put(self._tag, self.tokens)
            self.tokens = []
        return []

    def hold(self, hold: bool) -> None:
        if hold:
            self._free.clear()
        else:
            self._free.set()
            self.take()

    async def let_go(self) -> None:
        """Returns when nothing is held back any more."""
        await self._free.wait()
        self.take()

    def close(self) -> None:
        if self._images is not None:
            self._images.close()
        if self._subscriber is not None:
            self._subscriber.leave(self._tag)
        if not self.ended:
            self._worker.engine.send(Cancel(seq=self.seq))

    async def _reserve(self, token_count: int) -> Reserved:
        with telemetry.start_span(telemetry.DECODE_RESERVE):
            self._stream = self._worker.engine.open(self._command)
            async for event in self._stream:
                match event:
                    case Reserved():
                        return event
                    case Failed():
                        raise engine_error(event)
                    case Done():
                        raise Cancelled("every choice was finished before its first token was there")
        self.check_subscriber()
        raise EngineFailed("the engine ended while room was being reserved")

    def finished(self, done: Done) -> decode_pb2.DecodeResponse:
        """Hops after the first token for a pull; all hops for a prompt computed here."""
        if self.pulled:
            hops = [(telemetry.TRANSFER_PULL, self.pulled.exposed_seconds)]
        else:
            hops = [(telemetry.EMBEDDING_PULL, self._images.seconds)] if self._images else []
            hops += [
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
