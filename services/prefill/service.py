"""PrefillService: prompt to KV cache and first token. The only file of this role that knows protobuf."""

from collections.abc import AsyncIterator

import grpc

from common import telemetry
from common.engine.messages import Cancel, Chunk, Failed, Prefilled, Started, Submit
from common.errors import EngineFailed, EpdError, TransferFailed
from common.rpc import wire
from common.rpc.worker_context import WorkerContext, engine_error
from common.transfer.publications import Publication, PublicationTable
from epd.v1 import prefill_pb2, prefill_pb2_grpc


class PrefillService(prefill_pb2_grpc.PrefillServiceServicer):
    """Runs prompts on the engine and publishes their blocks for one puller each."""

    def __init__(self, worker: WorkerContext, publications: PublicationTable) -> None:
        self._worker = worker
        self._publications = publications

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        key = wire.key_from_proto(request.key)
        sampling = wire.sampling_from_proto(request.sampling)
        self._worker.check(wire.identity_from_proto(request.target), request.model)
        self._worker.check_prompt(request.prompt_token_ids, request.output_token_ids, request.choices, sampling)
        seq = f"prefill/{key}"
        with self._worker.request_span(telemetry.PREFILL_RUN, key, request.tenant) as span:
            stream = self._worker.engine.open(
                Submit(
                    seq=seq,
                    prompt=list(request.prompt_token_ids),
                    output=list(request.output_token_ids),
                    choices=list(request.choices),
                    sampling=sampling,
                    salt=request.salt,
                    priority=request.priority,
                    publish=request.HasField("publication"),
                    decode=False,
                )
            )
            publication: Publication | None = None
            finished = False
            try:
                if request.HasField("publication"):
                    publication = self._publications.publish(
                        key,
                        request.publication.ticket,
                        puller=wire.identity_from_proto(request.publication.puller),
                        tenant=request.tenant,
                        deadline_seconds=self._worker.remaining(context),
                        on_release=lambda: self._worker.engine.send(Cancel(seq=seq)),
                    )
                yield prefill_pb2.PrefillResponse(accepted=prefill_pb2.PrefillAccepted())
                async for event in stream:
                    match event:
                        case Started():
                            if publication:
                                tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
                                publication.started(event.blocks, event.generations, tokens)
                            yield prefill_pb2.PrefillResponse(
                                started=prefill_pb2.PrefillStarted(cached_tokens=event.cached_tokens)
                            )
                        case Chunk() if publication:
                            publication.chunk(event.step, event.start, event.end, event.last)
                        case Prefilled():
                            if publication:
                                publication.finished(event.first, event.token_count, event.token_hash)
                            finished = True
                            self._worker.record_prefill_spans(span, event)
                            yield self._finished(event)
                            return
                        case Failed():
                            raise engine_error(event)
                if publication and publication.released.is_set():
                    # Nothing is wrong here: the retry may come back, and finds the prefix that was computed.
                    raise TransferFailed("the puller left before the prompt was computed")
                raise EngineFailed("the engine ended before the prompt was computed")
            except EpdError as error:
                if publication and not finished:
                    publication.fail(error)
                raise
            finally:
                # Cancelled or failed: nobody may wait for this publication. A finished one lives on by its pull stream.
                if not finished:
                    if publication:
                        publication.cancel()
                    else:
                        self._worker.engine.send(Cancel(seq=seq))

    def _finished(self, event: Prefilled) -> prefill_pb2.PrefillResponse:
        return prefill_pb2.PrefillResponse(
            finished=prefill_pb2.PrefillFinished(
                first=wire.all_to_proto(event.first),
                cached_tokens=event.cached_tokens,
                hops=self._worker.hops(
                    (telemetry.PREFILL_QUEUE, event.queue_seconds),
                    (telemetry.CACHE_LOOKUP, event.lookup_seconds),
                    (telemetry.PREFILL_FORWARD, event.forward_seconds),
                ),
            )
        )
