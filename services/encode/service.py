"""EncodeService: image files to published embeddings. The only file of this role that knows protobuf."""

import functools
from collections.abc import AsyncIterator

import grpc

from common import telemetry
from common.cache.keys import embedding_hash
from common.encoder.encoder import EncodeCall, EncodeTimings, ImageRequest
from common.errors import EpdError, InvalidArgument, TransferFailed
from common.rpc import wire
from common.rpc.worker_context import WorkerContext
from common.tasks import unless
from common.transfer.publications import Publication, PublicationTable
from epd.v1 import encode_pb2, encode_pb2_grpc

MEDIA_KEY_BYTES = 32


class EncodeService(encode_pb2_grpc.EncodeServiceServicer):
    """Encodes the images of a call, or finds them cached, and publishes their rows for one puller."""

    def __init__(self, worker: WorkerContext, publications: PublicationTable) -> None:
        self._worker = worker
        self._publications = publications

    async def Encode(
        self, request: encode_pb2.EncodeRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[encode_pb2.EncodeResponse]:
        key = wire.key_from_proto(request.key)
        if key.part < 1:
            raise InvalidArgument("part must be at least 1: 0 is the prompt's KV", field="key")
        self._worker.check(wire.identity_from_proto(request.target), request.model)
        ticket, images = wire.ticket_from_proto(request.ticket), self._images(request)
        encoder = self._worker.encoder
        publication: Publication | None = None
        try:
            with self._worker.request_span(telemetry.ENCODE_RUN, key, request.tenant) as span:
                call = encoder.reserve(images, request.priority, tenant=request.tenant, cache_bytes=request.cache_bytes)
                release = functools.partial(encoder.release, call)
                try:
                    publication = self._publications.publish(
                        key,
                        ticket,
                        puller=wire.identity_from_proto(request.puller),
                        tenant=request.tenant,
                        deadline_seconds=self._worker.remaining(context),
                        on_release=release,
                    )
                except EpdError:
                    release()
                    raise
                yield encode_pb2.EncodeResponse(accepted=encode_pb2.EncodeAccepted())
                rows = sum(image.rows for image in images)
                span.set_attribute(telemetry.IMAGES, len(images))
                span.set_attribute(telemetry.IMAGE_TOKENS, rows)
                span.set_attribute(telemetry.CACHED_IMAGES, call.cached_images)
                try:
                    timings = await self._encoded(call, publication)
                except EpdError as error:
                    publication.fail(error)
                    raise
                generations = [encoder.cache.generation(block) for block in call.blocks]
                publication.started(call.blocks, generations, rows)
                publication.finished((), rows, embedding_hash([(image.key, image.rows) for image in images]))
                stages = (
                    (telemetry.ENCODE_QUEUE, timings.queue_seconds),
                    (telemetry.ENCODE_PREPROCESS, timings.preprocess_seconds),
                    (telemetry.ENCODE_FORWARD, timings.forward_seconds),
                )
                if call.cached_images < len(images):
                    self._worker.record_spans(span, stages)
                yield encode_pb2.EncodeResponse(
                    finished=encode_pb2.EncodeFinished(
                        cached_images=call.cached_images, hops=self._worker.hops(*stages)
                    )
                )
            # The caller may still let the rows go; so the call lasts as long as they are published.
            await publication.released.wait()
        finally:
            if publication:
                publication.cancel()

    async def _encoded(self, call: EncodeCall, publication: Publication) -> EncodeTimings:
        """Raises TransferFailed when the publication ends first: a newer attempt, or a puller that left."""
        timings = await unless(publication.released, self._worker.encoder.encoded(call))
        if timings is None:
            raise TransferFailed("the publication ended before the images were encoded")
        return timings

    def _images(self, request: encode_pb2.EncodeRequest) -> list[ImageRequest]:
        """The gateway validates too; a worker never trusts its caller with its pool. Raises InvalidArgument."""
        limits = self._worker.encoder.settings.media
        if not request.images:
            raise InvalidArgument("images must not be empty", field="images")
        limits.check_count(len(request.images), "images")
        limits.check_total(sum(len(image.data) for image in request.images), "images")
        for image in request.images:
            limits.check_file(len(image.data), f"images[{image.index}]")
            if len(image.media_key) != MEDIA_KEY_BYTES:
                raise InvalidArgument(f"media_key must be {MEDIA_KEY_BYTES} bytes", field="media_key")
            if image.rows < 1:
                raise InvalidArgument("rows must be at least 1", field="rows")
        return [
            ImageRequest(key=image.media_key, data=image.data, rows=image.rows, index=image.index)
            for image in request.images
        ]
