"""PrefillService: prompt to KV cache and first token. The only file of this role that knows protobuf."""

from collections.abc import AsyncIterator, Sequence

import grpc
from msgspec.structs import replace

from common import telemetry
from common.engine.client import EngineStream
from common.engine.messages import Cancel, Chunk, Failed, Media, Prefilled, Started, Submit
from common.errors import EngineFailed, EpdError, InvalidArgument, TransferFailed
from common.rpc import wire
from common.rpc.worker_context import WorkerContext, engine_error
from common.sampling import SamplingParams
from common.tasks import unless
from common.transfer.embeddings import EmbeddingPull, Embeddings, sources_from_proto
from common.transfer.publications import Publication, PublicationTable
from epd.v1 import prefill_pb2, prefill_pb2_grpc

_PULLER_LEFT = "the puller left before the prompt was computed"


class PrefillService(prefill_pb2_grpc.PrefillServiceServicer):
    """Runs prompts on the engine and publishes their blocks for one puller each."""

    def __init__(
        self, worker: WorkerContext, publications: PublicationTable, embeddings: Embeddings | None = None
    ) -> None:
        """embeddings: None where prompts with images are not computed."""
        self._worker = worker
        self._publications = publications
        self._embeddings = embeddings

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        key = wire.key_from_proto(request.key)
        sampling = wire.sampling_from_proto(request.sampling)
        self._worker.check(wire.identity_from_proto(request.target), request.model)
        self._worker.check_prompt(request.prompt_token_ids, request.output_token_ids, request.choices, sampling)
        sources = sources_from_proto(request.embeddings, len(request.prompt_token_ids))
        if sources and self._embeddings is None:
            raise InvalidArgument("this worker computes no prompts with images", field="embeddings")
        seq = f"prefill/{key}"
        stream: EngineStream | None = None

        def release() -> None:
            if stream is not None:  # else it was never asked for, and is not once the publication has ended
                self._worker.engine.send(Cancel(seq=seq))

        with self._worker.request_span(telemetry.PREFILL_RUN, key, request.tenant) as span:
            publication: Publication | None = None
            images: EmbeddingPull | None = None
            finished = False
            try:
                if request.HasField("publication"):
                    publication = self._publications.publish(
                        key,
                        request.publication.ticket,
                        puller=wire.identity_from_proto(request.publication.puller),
                        tenant=request.tenant,
                        deadline_seconds=self._worker.remaining(context),
                        on_release=release,
                    )
                if not sources:  # with images the engine is asked only when it has them
                    stream = self._worker.engine.open(self._submit(seq, request, sampling))
                yield prefill_pb2.PrefillResponse(accepted=prefill_pb2.PrefillAccepted())
                if stream is None:
                    assert self._embeddings is not None
                    images = self._embeddings.open(
                        key, sources, tenant=request.tenant, deadline_seconds=self._worker.remaining(context)
                    )
                    media = await unless(publication.released if publication else None, images.pull())
                    if media is None:
                        raise TransferFailed(_PULLER_LEFT)
                    stream = self._worker.engine.open(self._submit(seq, request, sampling, media))
                    images.hand_over(seq)
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
                                first = [replace(each, prompt_logprobs=None) for each in event.first]
                                publication.finished(first, event.token_count, event.token_hash)
                            finished = True
                            self._worker.record_prefill_spans(span, event)
                            yield self._finished(event, images)
                            return
                        case Failed():
                            raise engine_error(event)
                if publication and publication.released.is_set():
                    # Nothing is wrong here: the retry may come back, and finds the prefix that was computed.
                    raise TransferFailed(_PULLER_LEFT)
                raise EngineFailed("the engine ended before the prompt was computed")
            except EpdError as error:
                if publication and not finished:
                    publication.fail(error)
                raise
            finally:
                # Cancelled or failed: nobody may wait for this publication. A finished one lives on by its pull stream.
                if images:
                    images.close()
                if not finished:
                    if publication:
                        publication.cancel()
                    else:
                        release()

    def _submit(
        self,
        seq: str,
        request: prefill_pb2.PrefillRequest,
        sampling: SamplingParams,
        media: Sequence[Media] = (),
    ) -> Submit:
        return Submit(
            seq=seq,
            prompt=list(request.prompt_token_ids),
            output=list(request.output_token_ids),
            choices=list(request.choices),
            sampling=sampling,
            salt=request.salt,
            adapter=request.adapter,
            cache_blocks=self._worker.cache_blocks(request.cache_bytes),
            priority=request.priority,
            publish=request.HasField("publication"),
            decode=False,
            media=list(media),
        )

    def _finished(self, event: Prefilled, images: EmbeddingPull | None) -> prefill_pb2.PrefillResponse:
        pulled = [(telemetry.EMBEDDING_PULL, images.seconds)] if images else []
        return prefill_pb2.PrefillResponse(
            finished=prefill_pb2.PrefillFinished(
                first=wire.all_to_proto(event.first),
                cached_tokens=event.cached_tokens,
                hops=self._worker.hops(
                    *pulled,
                    (telemetry.PREFILL_QUEUE, event.queue_seconds),
                    (telemetry.CACHE_LOOKUP, event.lookup_seconds),
                    (telemetry.PREFILL_FORWARD, event.forward_seconds),
                ),
            )
        )
