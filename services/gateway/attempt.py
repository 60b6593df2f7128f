"""One try of one leg: prefill and decode called at the same time, their tokens handed to the choices in order.

All calls of an attempt end with it, however it ends. Nothing of it is used by a later one but the tokens received.
"""

import asyncio
import contextlib
import functools
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc

from common.errors import EngineFailed, WorkerLost
from common.tasks import together
from epd.v1 import decode_pb2, prefill_pb2, types_pb2
from services.gateway.accounting import AttemptRecord
from services.gateway.call import CallFailed, WorkerCall
from services.gateway.choice import Choice
from services.gateway.encoding import places_only
from services.gateway.outbox import Outbox
from services.gateway.preprocess import Prepared
from services.gateway.settings import GatewaySettings
from services.gateway.token_stream import TokenRoute
from services.gateway.worker import TELL_SECONDS, Worker

# Once every choice has ended only the worker's own timings are still to come.
_LAST_WORDS_SECONDS = 0.5
_LAST_TOKENS_SECONDS = 5.0


class Turn:
    """Which of the attempts that run side by side may speak: the first that has a token. The others are let go."""

    def __init__(self) -> None:
        self.speaker: AttemptRecord | None = None
        self.on_taken: Callable[[], None] = lambda: None

    def take(self, record: AttemptRecord) -> bool:
        if self.speaker is None:
            self.speaker = record
            self.on_taken()
        return self.speaker is record


class Attempt:
    """prefill and decode: disaggregated; decode alone: it computes the prompt too; prefill alone: one token."""

    def __init__(
        self,
        request: Prepared,
        key: types_pb2.RequestKey,
        choices: Sequence[Choice],
        record: AttemptRecord,
        outbox: Outbox,
        settings: GatewaySettings,
        *,
        prefill: Worker | None,
        decode: Worker | None,
        embeddings: Sequence[types_pb2.EmbeddingRef] = (),
        encoders: Iterable[Worker] = (),
        turn: Turn | None = None,
    ) -> None:
        """encoders: those that hold the embeddings."""
        self._request = request
        self._key = key
        self._choices = {choice.index: choice for choice in choices}
        self._record = record
        self._outbox = outbox
        self._settings = settings
        self._prefill = prefill
        self._decode = decode
        self._embeddings = embeddings
        self._encoders = tuple(encoders)
        self._turn = turn or Turn()
        self._calls: list[WorkerCall] = []
        self._cause: CallFailed | None = None  # of an abort
        self._ticket = secrets.token_bytes(16)
        # Those of prefill come before those of decode, whichever message is faster.
        self._first_tokens = asyncio.Event()
        self._decode_task: asyncio.Task[None] | None = None
        self._call: WorkerCall | None = None  # to decode
        self._routed = False  # its tokens come by the worker's token stream
        self._decoding = False  # decode has made a token
        # The first tokens bring the prompt's log probabilities, which a resume does not need again.
        first = self._choices.get(0)
        wants = request.sampling.prompt_logprobs is not None
        self._scores = wants and first is not None and first.prompt_logprobs is None and not first.output_token_ids
        self._sampling = request.sampling_proto
        if wants and not self._scores:
            self._sampling = types_pb2.SamplingParams()
            self._sampling.CopyFrom(request.sampling_proto)
            self._sampling.ClearField("prompt_logprobs")
        self._early: list[Iterable[types_pb2.ChoiceTokens]] = []  # those that were faster than the first ones
        self._ended = asyncio.Event()  # every choice has
        self._holding: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """Returns when every choice has ended. Raises CallFailed for the call that failed first."""
        self._record.called = self._loop.time()
        watched = [(worker, functools.partial(self._source_stuck, worker)) for worker in self._sources]
        for worker, callback in watched:
            worker.on_stuck.add(callback)
        tasks: list[asyncio.Task[None]] = []
        if self._decode is not None:
            self._decode_task = asyncio.create_task(self._run_decode(self._decode))
            tasks.append(self._decode_task)
        if self._prefill is not None:
            tasks.append(asyncio.create_task(self._run_prefill(self._prefill)))
        try:
            await together(*tasks)
        except Exception as failure:
            if self._finished:
                return
            raise self._cause or failure from None
        finally:
            for worker, callback in watched:
                worker.on_stuck.discard(callback)
        if not self._finished:  # whatever the reason: an answer that is cut off is never a good end
            raise CallFailed(EngineFailed("the attempt ended without an answer"), self.worker)

    @property
    def worker(self) -> Worker:
        """The one that makes the last token."""
        worker = self._decode or self._prefill
        assert worker is not None
        return worker

    def abort(self, cause: CallFailed) -> None:
        """`run` raises this, unless every choice has ended."""
        self._cause = cause
        for call in self._calls:
            call.abort()

    @property
    def _sources(self) -> list[Worker]:
        """Those that the others pull from: their own calls may be over while what they have is still needed."""
        return [*self._encoders, self._prefill] if self._prefill and self._decode else list(self._encoders)

    def _source_stuck(self, worker: Worker) -> None:
        needed = not self._decoding if worker is self._prefill else not self._record.first
        if needed and not self._finished:
            self.abort(CallFailed(WorkerLost(f"{worker.worker_id} shows no sign of life"), worker))

    @property
    def _finished(self) -> bool:
        return all(choice.finished for choice in self._choices.values())

    async def _run_prefill(self, worker: Worker) -> None:
        call = self._open(worker, worker.prefill.Prefill(self._prefill_request(worker)))
        try:
            while True:
                message = await call.read()
                if message is grpc.aio.EOF:
                    raise call.lost("ended before the first token")
                if message.HasField("finished"):
                    break
            finished = message.finished
            self._record.add(finished.hops)
            self._record.cached_tokens = finished.cached_tokens
            if {tokens.choice for tokens in finished.first if tokens.token_ids} != set(self._choices):
                raise CallFailed(EngineFailed("prefill sampled no first token for a choice"), worker)
            call.worked()
            self._deliver(worker, finished.first)
            self._first_tokens.set()
            if self._decode is not None:
                early, self._early = self._early, []
                for choices in early:
                    self._take(self._decode, choices)
            if self._finished:
                if self._decode_task is not None:
                    self._decode_task.cancel()
            elif self._decode is None:
                raise CallFailed(EngineFailed("prefill did not end a request of one token"), worker)
            # The call's own end, so that it does not count as cancelled. Should it fail now, its work is done; the
            # decode worker finds out if the blocks went with it.
            with contextlib.suppress(CallFailed):
                await call.read()
        finally:
            call.close()

    async def _run_decode(self, worker: Worker) -> None:
        def arrived(choices: Iterable[types_pb2.ChoiceTokens]) -> None:
            call.alive()
            if self._prefill is not None and not self._first_tokens.is_set():
                self._early.append(choices)
            else:
                self._take(worker, choices)

        route = worker.tokens.attach(arrived, lambda: call.abort()) if worker.tokens is not None else None
        self._routed = route is not None
        call = self._call = self._open(worker, worker.decode.Decode(self._decode_request(worker, route)))
        try:
            while True:
                message = await call.read()
                if message is grpc.aio.EOF:
                    raise call.lost("ended in mid-stream")
                kind = message.WhichOneof("event")
                if kind == "accepted":
                    continue
                if self._prefill is not None and not self._first_tokens.is_set():
                    await self._first_tokens.wait()
                if kind == "tokens":
                    self._take(worker, message.tokens.choices)
                    if self._outbox.full and not self._finished:
                        await self._wait_for_client()
                elif kind == "finished":
                    await self._last_tokens(route)
                    self._decode_finished(message.finished)
                    await call.read()  # the call's own end, as above
                    return
        except CallFailed:
            if not self._finished:
                raise
        finally:
            if route is not None:
                assert worker.tokens is not None
                worker.tokens.detach(route)
            if self._holding is not None:
                self._holding.cancel()
            call.close()

    def _take(self, worker: Worker, choices: Iterable[types_pb2.ChoiceTokens]) -> None:
        """Tokens of decode, from its call or from the worker's token stream."""
        if not self._decoding:
            self._decoding = True
            assert self._call is not None
            self._call.worked()
        stopped = self._deliver(worker, choices)
        if stopped:
            self._tell_finished(worker, stopped)
        if self._finished:
            self._ended.set()
            assert self._call is not None
            self._call.hurry(_LAST_WORDS_SECONDS)
        elif self._outbox.full and self._routed and self._holding is None:
            self._holding = asyncio.create_task(self._hold(worker))

    async def _hold(self, worker: Worker) -> None:
        """A slow client: the worker keeps its tokens until the client has caught up."""
        try:
            await worker.decode.Hold(decode_pb2.HoldRequest(key=self._key, hold=True), timeout=TELL_SECONDS)
            await self._wait_for_client()
            await worker.decode.Hold(decode_pb2.HoldRequest(key=self._key, hold=False), timeout=TELL_SECONDS)
            self._holding = None
        except grpc.aio.AioRpcError:  # held back for good, perhaps: another attempt is surer
            assert self._call is not None
            self._call.abort()

    async def _last_tokens(self, route: TokenRoute | None) -> None:
        """The call's end may overtake its last tokens, which come by another stream."""
        if route is not None and not self._finished:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_TOKENS_SECONDS):
                    await self._ended.wait()

    def _deliver(self, worker: Worker, items: Iterable[types_pb2.ChoiceTokens]) -> list[int]:
        """Hands tokens over; returns the choices that a stop string ended."""
        if not self._turn.take(self._record):
            return []  # too late: another attempt speaks
        self._record.arrived(self._loop.time())
        stopped = []
        for tokens in items:
            choice = self._choices.get(tokens.choice)
            if self._scores and tokens.choice == 0:
                if len(tokens.prompt_logprobs) != len(self._request.prompt) - 1:
                    raise CallFailed(EngineFailed("the prompt's log probabilities are not there"), worker)
                self._scores = False
            try:
                if choice is not None and choice.receive(tokens):
                    stopped.append(tokens.choice)
            except EngineFailed as error:
                raise CallFailed(error, worker) from None
        self._outbox.notify()
        return stopped

    def _decode_finished(self, finished: decode_pb2.DecodeFinished) -> None:
        record = self._record
        record.add(finished.hops)
        record.transfer_bytes, record.transfer_channel = finished.transfer_bytes, finished.transfer_channel
        if self._prefill is None:
            record.cached_tokens = finished.cached_tokens
        if not self._finished:
            assert self._decode is not None
            raise CallFailed(EngineFailed("decode finished without ending every choice"), self._decode)

    async def _wait_for_client(self) -> None:
        before = self._loop.time()
        await self._outbox.room()
        self._record.blocked_seconds += self._loop.time() - before

    def _tell_finished(self, worker: Worker, choices: list[int]) -> None:
        # Not waited for: the stream's end tells. When it is lost the call's cancellation does the same.
        worker.tell_finished(decode_pb2.FinishRequest(key=self._key, choices=choices))

    def _open(self, worker: Worker, call: object) -> WorkerCall:
        settings = self._settings
        opened = WorkerCall(
            worker, call, first_byte_seconds=settings.first_byte_seconds, stall_seconds=settings.stall_seconds
        )
        self._calls.append(opened)
        return opened

    def _output_token_ids(self) -> list[int]:
        """Tokens of the one choice that is resumed; a leg of several starts from the prompt's end."""
        return next(iter(self._choices.values())).output_token_ids if len(self._choices) == 1 else []

    def _fields(self, worker: Worker) -> dict[str, Any]:
        """What every call to a worker says of the request."""
        request = self._request
        return {
            "key": self._key,
            "target": worker.identity,
            "model": request.model,
            "prompt_token_ids": request.prompt,
            "output_token_ids": self._output_token_ids(),
            "sampling": self._sampling,
            "choices": list(self._choices),
            "salt": request.salt,
            "adapter": request.adapter,
            "tenant": request.tenant,
            "priority": request.priority,
            "cache_bytes": request.cache_bytes,
        }

    def _prefill_request(self, worker: Worker) -> prefill_pb2.PrefillRequest:
        publication = None
        if self._decode is not None:
            publication = prefill_pb2.Publication(ticket=self._ticket, puller=self._decode.identity)
        return prefill_pb2.PrefillRequest(**self._fields(worker), publication=publication, embeddings=self._embeddings)

    def _decode_request(self, worker: Worker, route: TokenRoute | None) -> decode_pb2.DecodeRequest:
        source, embeddings = None, self._embeddings
        if self._prefill is not None:
            source = decode_pb2.KvSource(
                owner=self._prefill.identity, address=self._prefill.record.address, ticket=self._ticket
            )
            embeddings = [places_only(each) for each in embeddings]
        return decode_pb2.DecodeRequest(
            **self._fields(worker),
            source=source,
            embeddings=embeddings,
            subscription=route.subscription if route is not None else None,
        )
