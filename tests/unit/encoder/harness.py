"""An encode worker without registry, and the side of a prompt worker that pulls embeddings: real gRPC on loopback."""

import asyncio
import contextlib
import io
import itertools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from PIL import Image

from common.cache.keys import EmbeddingLayout, media_key
from common.encoder.encoder import Encoder
from common.encoder.settings import EncoderSettings, TimedVision
from common.engine.messages import Media
from common.engine.settings import EngineSettings, TimedModel
from common.policies.handoff.terms import HandoffLimits
from common.rpc import wire
from common.rpc.channel import connect
from common.rpc.errors import from_rpc
from common.rpc.server import make_server
from common.rpc.worker_context import WorkerContext, new_incarnation
from common.transfer.embedding_room import EmbeddingRoom
from common.transfer.embeddings import EmbeddingPull, Embeddings, EmbeddingSource
from common.transfer.key import Identity, TransferKey
from common.transfer.pool_memory import PoolMemory
from common.transfer.puller import Puller
from epd.v1 import encode_pb2, encode_pb2_grpc, transfer_pb2_grpc
from services.encode.service import EncodeService
from services.worker_parts import Computing, Transfers, describe
from services.worker_settings import WorkerSettings

TENANT = "acme"
PROMPT_WORKER = Identity("prefill-0", "p1")
PATIENCE_SECONDS = 30.0  # a bound for broken code
TIMED = EngineSettings(executor="timed", timed=TimedModel(image_hidden_size=8))
_requests = itertools.count(1)


def new_key(part: int = 1) -> TransferKey:
    return TransferKey(next(_requests).to_bytes(16, "big"), 0, 1, part)


def ticket(part: int) -> bytes:
    return bytes([part]) * 16


def timed(**vision: Any) -> TimedVision:
    return TimedVision(**{"base_seconds": 0.0, "seconds_per_row": 0.0, **vision})


def file(picture: Image.Image) -> bytes:
    """As PNG: nothing is lost."""
    out = io.BytesIO()
    picture.save(out, "PNG")
    return out.getvalue()


class Shown:
    """One image of a call."""

    def __init__(self, data: bytes, rows: int, index: int = 0) -> None:
        self.data, self.rows, self.index = data, rows, index
        self.key = media_key(data, b"options", TENANT.encode())

    def proto(self, *, send: bool) -> encode_pb2.EncodeImage:
        return encode_pb2.EncodeImage(
            media_key=self.key, data=self.data if send else b"", rows=self.rows, index=self.index
        )


class Call:
    """An Encode call that is under way; `finished` has ended well, and holds the rows until `close`."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    async def accepted(self) -> None:
        assert (await self._read()).HasField("accepted")

    async def finished(self) -> encode_pb2.EncodeFinished:
        await self.accepted()
        return await self.outcome()

    async def outcome(self) -> encode_pb2.EncodeFinished:
        message = await self._read()
        assert message.HasField("finished")
        return message.finished

    async def ended(self) -> None:
        assert await self._read() is grpc.aio.EOF

    async def _read(self) -> Any:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                return await self.stream.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None

    def close(self) -> None:
        self.stream.cancel()


class EncodeWorker:
    """Made by `encode_worker`."""

    def __init__(self, context: WorkerContext, transfers: Transfers, address: str, channel: grpc.aio.Channel) -> None:
        self.context, self.transfers, self.address = context, transfers, address
        self.encoder = context.encoder
        self._stub = encode_pb2_grpc.EncodeServiceStub(channel)

    def call(
        self,
        images: Sequence[Shown],
        key: TransferKey | None = None,
        *,
        send: bool = True,
        priority: int = 0,
        timeout: float = PATIENCE_SECONDS,
        **changes: Any,
    ) -> Call:
        key = key or new_key()
        fields = {
            "key": wire.key_to_proto(key),
            "target": wire.identity_to_proto(self.context.identity),
            "model": self.context.record.model,
            "tenant": TENANT,
            "ticket": ticket(key.part),
            "puller": wire.identity_to_proto(PROMPT_WORKER),
            "images": [image.proto(send=send) for image in images],
            "priority": priority,
        }
        return Call(self._stub.Encode(encode_pb2.EncodeRequest(**{**fields, **changes}), timeout=timeout))

    def source(self, image: Shown, start: int, part: int = 1) -> EmbeddingSource:
        return EmbeddingSource(
            media=Media(key=image.key, start=start, length=image.rows, rows=image.rows),
            owner=self.context.identity,
            address=self.address,
            ticket=ticket(part),
            part=part,
        )

    def left(self) -> list[str]:
        """What an idle worker must not have."""
        load, left = self.encoder.load, list(self.encoder.check_integrity())
        left += [f"{load.held_rows} held rows"] * (load.held_rows > 0)
        left += [f"{load.pending_images} pending images"] * (load.pending_images > 0)
        left += ["a publication"] * self.transfers.tables.open_publications
        return left + ["a request"] * self.context.running_requests

    async def idle(self) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self.left():
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def encode_worker(
    run_dir: Path,
    engine: EngineSettings = TIMED,
    *,
    name: str = "encode-0",
    in_thread: bool = True,
    limits: HandoffLimits | None = None,
    **encoder: Any,
) -> AsyncIterator[EncodeWorker]:
    """encoder: settings beside those of an instant `timed` one."""
    chosen = EncoderSettings(**{"rows": 256, "timed": timed(), **encoder})
    settings = WorkerSettings(
        roles=("encode",), run_dir=str(run_dir), engine=engine, encoder=chosen, handoff=limits or HandoffLimits()
    )
    async with contextlib.AsyncExitStack() as cleanup:
        async with asyncio.timeout(3 * PATIENCE_SECONDS):
            made = await Encoder.launch(engine, chosen, in_thread=in_thread)
        cleanup.push_async_callback(made.close)
        identity = Identity(name, new_incarnation())
        computing = Computing(None, made)
        transfers = Transfers(settings, computing, identity)
        await transfers.start(cleanup)
        context = WorkerContext(await describe(settings, computing, identity), None, made)
        assert transfers.tables.embeddings is not None
        server = make_server(receive_bytes=chosen.media.message_bytes)
        encode = EncodeService(context, transfers.tables.embeddings)
        server.add(encode_pb2_grpc.add_EncodeServiceServicer_to_server, encode, "epd.v1.EncodeService")
        server.add(transfer_pb2_grpc.add_TransferServiceServicer_to_server, transfers.service, "epd.v1.TransferService")
        await server.start("127.0.0.1:0")
        cleanup.push_async_callback(server.stop)
        channel = await cleanup.enter_async_context(connect(server.address))
        yield EncodeWorker(context, transfers, server.address, channel)


class FakeEngine:
    """The engine of a prompt worker, as far as embeddings go. `reading`: submissions that it still reads."""

    def __init__(self) -> None:
        self.reading: dict[str, asyncio.Event] = {}

    async def embeddings_freed(self, seq: str) -> None:
        await self.reading.setdefault(seq, asyncio.Event()).wait()


class PromptWorker:
    """Pulls embeddings into a pool of `rows` rows."""

    def __init__(
        self,
        layout: EmbeddingLayout,
        run_dir: Path,
        channel: str = "shm",
        *,
        rows: int = 256,
        wait_seconds: float = 10.0,
    ) -> None:
        self.layout = layout
        self.engine = FakeEngine()
        blocks = rows // layout.block_rows
        self.pool = PoolMemory.create(layout.num_layers, blocks, layout.unit_bytes)
        self.room = EmbeddingRoom(blocks, wait_seconds)
        channels = ("shm", "grpc") if channel == "shm" else (channel,)
        puller = Puller(PROMPT_WORKER, self.pool, layout, connect, channels=channels, run_dir=str(run_dir))
        self.embeddings = Embeddings(self.engine, layout, puller, self.room)  # type: ignore[arg-type]

    async def __aenter__(self) -> "PromptWorker":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.embeddings.close()

    def open(self, key: TransferKey, sources: Sequence[EmbeddingSource], **changes: Any) -> EmbeddingPull:
        return self.embeddings.open(key, sources, **{"tenant": TENANT, "deadline_seconds": PATIENCE_SECONDS, **changes})

    def rows(self, media: Media) -> np.ndarray:
        """uint8 [level, row, row bytes], as the engine reads them."""
        data = self.pool.data.reshape(self.layout.levels, -1, self.layout.hidden_size * self.layout.itemsize)
        size = self.layout.block_rows
        return data[:, [media.blocks[row // size] * size + row % size for row in range(media.rows)]]
