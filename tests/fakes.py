"""Workers without an engine: real gRPC servers on loopback that answer deterministic tokens and fail when told to."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from common import telemetry
from common.cache.keys import EmbeddingLayout, KvLayout
from common.errors import EmbeddingMissing, EpdError, InvalidArgument, WrongIncarnation
from common.registry.record import WorkerRecord
from common.rpc import wire
from common.rpc.server import make_server
from common.rpc.trace_service import TraceService
from common.sampling import ChoiceTokens, SamplingParams, TokenLogprob, TopLogprob
from common.span_store import SpanStore
from common.transfer.key import TransferKey
from epd.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    encode_pb2,
    encode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    trace_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)

MODEL = "fake"
EOS = 256  # of the byte tokenizer in tests/tokenizers.py
LAYOUT = KvLayout(model=MODEL, revision="r1", dtype="float32", num_layers=2, num_kv_heads=1, head_dim=4, block_size=16)
EMBEDDINGS = EmbeddingLayout(model=MODEL, revision="r1", dtype="float32", levels=1, hidden_size=8)
# (choice, position in the output) -> token id
Script = Callable[[int, int], int]


def letters(choice: int, position: int) -> int:
    """a, b, c, … for choice 0, one letter further on for each choice."""
    return ord("a") + (choice + position) % 26


def spell(text: str, *, eos: bool = True) -> Script:
    """The bytes of a text, then the end of text."""
    data = text.encode()
    return lambda choice, position: data[position] if position < len(data) else (EOS if eos else ord("."))


class Network:
    """What decode workers could have pulled from prefill workers."""

    def __init__(self) -> None:
        self._first: dict[TransferKey, asyncio.Future[None]] = {}

    def first(self, key: TransferKey) -> asyncio.Future[None]:
        return self._first.setdefault(key, asyncio.get_running_loop().create_future())


class FakeWorker(
    encode_pb2_grpc.EncodeServiceServicer,
    prefill_pb2_grpc.PrefillServiceServicer,
    decode_pb2_grpc.DecodeServiceServicer,
    worker_pb2_grpc.WorkerServiceServicer,
):
    """Set the public attributes to make it behave. `calls` lists (method, request) in order of arrival."""

    def __init__(
        self,
        network: Network,
        worker_id: str,
        roles: Sequence[str],
        *,
        script: Script = letters,
        layout: KvLayout = LAYOUT,
        num_blocks: int = 1024,
        max_context: int = 4096,
        prompt_rows: int = 4096,
        incarnation: str = "1",
    ) -> None:
        self.network = network
        self.script = script
        self.calls: list[tuple[str, Any]] = []
        self.cancelled: list[tuple[str, Any]] = []
        self.finish_calls: list[Any] = []
        self.running = 0
        self.changed = asyncio.Condition()
        self.load = worker_pb2.Load(total_blocks=num_blocks, free_blocks=num_blocks)
        self.adapters = worker_pb2.Adapters()
        self.adapter_files: dict[str, str] = {}  # path to checksum, of what there is to load
        self.adapter_calls: list[Any] = []
        self.blocks: list[worker_pb2.BlockEvents] = [
            worker_pb2.BlockEvents(sequence=0, snapshot_start=True, snapshot_end=True)
        ]
        self.next_blocks: list[worker_pb2.BlockEvents] = []  # instead of `blocks` from the next watch on
        self.watches: list[worker_pb2.WatchRequest] = []
        self.accept = asyncio.Event()  # cleared: calls are not even accepted
        self.accept.set()
        self.prefill_gate = asyncio.Event()  # cleared: prefill computes for ever
        self.prefill_gate.set()
        self.decode_gate = asyncio.Event()  # cleared: decode stands still before its next token
        self.decode_gate.set()
        self.encode_gate = asyncio.Event()  # cleared: images are accepted and never ready
        self.encode_gate.set()
        self.encode_errors: list[EpdError] = []  # one for each call to come
        self.encoded: set[bytes] = set()  # media keys
        self.prefill_errors: list[EpdError] = []  # one for each call to come
        self.decode_errors: list[tuple[int, EpdError]] = []  # (after so many tokens a choice, error), one a call
        self.cached_tokens = 0
        self.step_tokens = 1
        self.logprobs = False
        self.scores = True
        self.hops: dict[str, float] = {}
        self.store = SpanStore()
        self.telemetry = telemetry.Telemetry("fake", telemetry.TracerProvider(shutdown_on_exit=False), self.store)
        self._stopped: set[tuple[bytes, int, int]] = set()
        self.template = WorkerRecord(
            worker_id=worker_id,
            incarnation=incarnation,
            roles=tuple(roles),
            address="",
            model=layout.model,
            layout=layout,
            max_context=max_context,
            vocab_size=300,
            num_blocks=num_blocks,
            executor="fake",
            embedding_layout=EMBEDDINGS if "encode" in roles else None,
            embedding_rows=1024 if "encode" in roles else 0,
            prompt_rows=prompt_rows if "prefill" in roles else 0,
        )
        self.record = self.template

    async def start(self, bind: str = "127.0.0.1:0") -> WorkerRecord:
        self._server = make_server(telemetry=self.telemetry)
        for add, name in (
            (prefill_pb2_grpc.add_PrefillServiceServicer_to_server, "epd.v1.PrefillService"),
            (decode_pb2_grpc.add_DecodeServiceServicer_to_server, "epd.v1.DecodeService"),
            (encode_pb2_grpc.add_EncodeServiceServicer_to_server, "epd.v1.EncodeService"),
            (worker_pb2_grpc.add_WorkerServiceServicer_to_server, "epd.v1.WorkerService"),
        ):
            self._server.add(add, self, name)
        self._server.add(
            trace_pb2_grpc.add_TraceServiceServicer_to_server, TraceService(self.store), "epd.v1.TraceService"
        )
        await self._server.start(bind)
        fields = {name: getattr(self.template, name) for name in WorkerRecord.__struct_fields__}
        self.record = WorkerRecord(**fields | {"address": self._server.address})
        return self.record

    async def kill(self) -> None:
        """As abrupt as it gets in one process: running calls are cut off and nobody listens any more."""
        await self._server.stop(0)

    async def note(self) -> None:
        """Wakes those who wait for this worker's attributes."""
        async with self.changed:
            self.changed.notify_all()

    async def until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        async with asyncio.timeout(seconds), self.changed:
            await self.changed.wait_for(condition)

    # --- services

    async def Watch(
        self, request: worker_pb2.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.WatchResponse]:
        self.watches.append(request)
        self.blocks, self.next_blocks = self.next_blocks or self.blocks, []
        sent, told = 0, worker_pb2.Adapters()
        await self.note()
        while True:
            while sent < len(self.blocks):
                yield worker_pb2.WatchResponse(blocks=self.blocks[sent])
                sent += 1
            if self.adapters != told:
                told = self.adapters
                yield worker_pb2.WatchResponse(adapters=told)
            yield worker_pb2.WatchResponse(load=self.load)
            known = self._state()
            async with self.changed:
                while self._state() == known:
                    await self.changed.wait()

    async def ServeAdapter(
        self, request: worker_pb2.ServeAdapterRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.ServeAdapterResponse:
        self.adapter_calls.append(request)
        if request.path not in self.adapter_files:
            raise InvalidArgument("no such directory", field="lora_path")
        checksum = self.adapter_files[request.path]
        adapter = worker_pb2.Adapter(checksum=checksum, name=request.name, model=request.model)
        if request.name:
            await self.hold([*(each for each in self.adapters.adapters if each.name != request.name), adapter])
        return worker_pb2.ServeAdapterResponse(adapter=adapter)

    async def DropAdapter(
        self, request: worker_pb2.DropAdapterRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.DropAdapterResponse:
        self.adapter_calls.append(request)
        await self.hold([each for each in self.adapters.adapters if each.name != request.name])
        return worker_pb2.DropAdapterResponse()

    async def hold(self, adapters: Sequence[worker_pb2.Adapter]) -> None:
        self.adapters = worker_pb2.Adapters(adapters=adapters)
        await self.note()

    async def Encode(
        self, request: encode_pb2.EncodeRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[encode_pb2.EncodeResponse]:
        async with self._call("encode", request):
            if self.encode_errors:
                raise self.encode_errors.pop(0)
            missing = [image for image in request.images if not image.data and image.media_key not in self.encoded]
            if missing:
                raise EmbeddingMissing("not here")
            cached = sum(image.media_key in self.encoded for image in request.images)
            yield encode_pb2.EncodeResponse(accepted=encode_pb2.EncodeAccepted())
            await self.encode_gate.wait()
            self.encoded |= {image.media_key for image in request.images}
            finished = encode_pb2.EncodeFinished(cached_images=cached, hops=self._hops("encode"))
            yield encode_pb2.EncodeResponse(finished=finished)
            await asyncio.Event().wait()  # the lease: until the gateway lets go

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        async with self._call("prefill", request):
            sampling = wire.sampling_from_proto(request.sampling)
            if self.prefill_errors:
                raise self.prefill_errors.pop(0)
            yield prefill_pb2.PrefillResponse(accepted=prefill_pb2.PrefillAccepted())
            yield prefill_pb2.PrefillResponse(started=prefill_pb2.PrefillStarted(cached_tokens=self.cached_tokens))
            await self.prefill_gate.wait()
            start = len(request.output_token_ids)
            first = [self._tokens(choice, start, 1, sampling) for choice in request.choices]
            self._score(first, request, sampling)
            message = prefill_pb2.PrefillFinished(
                first=wire.all_to_proto(first), cached_tokens=self.cached_tokens, hops=self._hops("prefill", "cache")
            )
            pulled = self.network.first(wire.key_from_proto(request.key))
            if not pulled.done():
                pulled.set_result(None)
            yield prefill_pb2.PrefillResponse(finished=message)

    async def Decode(
        self, request: decode_pb2.DecodeRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        async with self._call("decode", request):
            sampling = wire.sampling_from_proto(request.sampling)
            yield decode_pb2.DecodeResponse(accepted=decode_pb2.DecodeAccepted())
            after, error = self.decode_errors.pop(0) if self.decode_errors else (-1, None)
            pulls = request.HasField("source")
            if pulls:
                await asyncio.shield(self.network.first(wire.key_from_proto(request.key)))
                await self.decode_gate.wait()
            start = len(request.output_token_ids)
            positions = dict.fromkeys(request.choices, start + pulls)
            # Choices that the first token has ended are not decoded.
            if pulls:
                for choice in request.choices:
                    if self._tokens(choice, start, 1, sampling).finish_reason:
                        del positions[choice]
            made = 0
            while positions:
                await self.decode_gate.wait()
                if made == after and error is not None:
                    raise error
                step = []
                for choice in list(positions):
                    if (request.key.request_id, request.key.leg, choice) in self._stopped:
                        del positions[choice]
                        continue
                    tokens = self._tokens(choice, positions[choice], self.step_tokens, sampling)
                    positions[choice] += len(tokens.token_ids)
                    step.append(tokens)
                    if tokens.finish_reason:
                        del positions[choice]
                made += 1
                if made == 1 and not pulls:
                    self._score(step, request, sampling)
                if step:
                    message = decode_pb2.DecodeTokens(choices=wire.all_to_proto(step))
                    yield decode_pb2.DecodeResponse(tokens=message)
                await asyncio.sleep(0)
            wanted = ("transfer", "decode") if pulls else ("prefill", "cache", "decode")
            finished = decode_pb2.DecodeFinished(cached_tokens=self.cached_tokens, hops=self._hops(*wanted))
            yield decode_pb2.DecodeResponse(finished=finished)

    async def Finish(
        self, request: decode_pb2.FinishRequest, context: grpc.aio.ServicerContext
    ) -> decode_pb2.FinishResponse:
        self.finish_calls.append(request)
        for choice in request.choices:
            self._stopped.add((request.key.request_id, request.key.leg, choice))
        await self.note()
        return decode_pb2.FinishResponse()

    # --- parts

    def _state(self) -> tuple[int, bytes]:
        return len(self.blocks), self.load.SerializeToString() + self.adapters.SerializeToString()

    @contextlib.asynccontextmanager
    async def _call(self, method: str, request: Any) -> AsyncIterator[None]:
        self.calls.append((method, request))
        self.running += 1
        await self.note()
        try:
            if request.target.incarnation != self.record.incarnation:
                raise WrongIncarnation("another life of this worker")
            await self.accept.wait()
            with telemetry.start_span(f"{method}.run"):
                yield
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.append((method, request))
            raise
        finally:
            self.running -= 1
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().create_task(self.note())

    def _tokens(self, choice: int, position: int, count: int, sampling: SamplingParams) -> ChoiceTokens:
        """Up to `count` tokens from `position` on, with the end when there is one."""
        ids: list[int] = []
        for i in range(position, position + count):
            token = self.script(choice, i)
            ends = token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos)
            if ends and i < sampling.min_tokens:
                token, ends = ord("_"), False
            ids.append(token)
            if ends:
                return self._message(choice, ids, "stop", token)
            if sampling.max_tokens is not None and i + 1 >= sampling.max_tokens:
                return self._message(choice, ids, "length", None)
        return self._message(choice, ids, None, None)

    def _score(self, first: list[ChoiceTokens], request: Any, sampling: SamplingParams) -> None:
        """A prompt's tokens are each the second best, unless this worker is too old to know."""
        if sampling.prompt_logprobs is not None and self.scores:
            first[0].prompt_logprobs = [
                TokenLogprob(
                    i, -1.5, (TopLogprob((i + 1) % 256, -0.5), TopLogprob(i, -1.5))[: sampling.prompt_logprobs], 2
                )
                for i in request.prompt_token_ids[1:]
            ]

    def _message(self, choice: int, ids: list[int], reason: str | None, stop: int | None) -> ChoiceTokens:
        entries = None
        if self.logprobs:
            entries = [TokenLogprob(i, -0.5, (TopLogprob(i, -0.5), TopLogprob((i + 1) % 256, -1.5))) for i in ids]
        return ChoiceTokens(choice=choice, token_ids=ids, logprobs=entries, finish_reason=reason, stop_token_id=stop)

    def _hops(self, *prefixes: str) -> list[types_pb2.HopTiming]:
        return [
            wire.hop_to_proto(name, seconds, self.record.worker_id)
            for name, seconds in self.hops.items()
            if name.startswith(prefixes)
        ]
