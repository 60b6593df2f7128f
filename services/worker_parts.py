"""What a worker computes with, and the transfers in and out of it: chosen by its roles."""

import asyncio
import contextlib
import functools
import math
import os
import tempfile

import msgspec

from common import telemetry
from common.encoder.encoder import Encoder
from common.engine.dtype import resolve_dtype
from common.engine.process import EngineProcess
from common.models.config import kv_layout, read_config
from common.registry.record import WorkerRecord
from common.rpc.channel import connect
from common.tasks import ended, first
from common.transfer.channel_shm import ShmServer
from common.transfer.channels import allowed_channels
from common.transfer.embedding_room import EmbeddingRoom
from common.transfer.embeddings import Embeddings
from common.transfer.key import Identity
from common.transfer.publications import PublicationTable
from common.transfer.puller import Puller
from common.transfer.service import TransferService
from common.transfer.tables import PublicationTables
from services.worker_settings import WorkerSettings

ENCODE, PREFILL, DECODE = ROLES = ("encode", "prefill", "decode")


class Computing:
    """The processes: a language engine for prefill and decode, an encoder for encode."""

    def __init__(self, engine: EngineProcess | None, encoder: Encoder | None) -> None:
        self.engine, self.encoder = engine, encoder

    @classmethod
    async def launch(cls, settings: WorkerSettings, exit_stack: contextlib.AsyncExitStack) -> "Computing":
        """Both at once. Raises what either raised."""
        in_thread = settings.engine_in_thread

        async def language() -> EngineProcess | None:
            if not {PREFILL, DECODE} & set(settings.roles):
                return None
            engine = await EngineProcess.launch(settings.engine, in_thread=in_thread)
            exit_stack.push_async_callback(engine.close)
            return engine

        async def vision() -> Encoder | None:
            if ENCODE not in settings.roles:
                return None
            encoder = await Encoder.launch(settings.engine, settings.encoder, in_thread=in_thread)
            exit_stack.push_async_callback(encoder.close)
            return encoder

        launching = asyncio.create_task(language()), asyncio.create_task(vision())
        try:
            return cls(*await asyncio.gather(*launching))
        finally:
            for task in launching:
                task.cancel()  # one of them failed
            await ended(*launching)

    async def closed(self) -> None:
        """Returns once one of them is gone."""
        await first(*(part.closed() for part in (self.engine, self.encoder) if part is not None))


async def describe(settings: WorkerSettings, computing: Computing, identity: Identity) -> WorkerRecord:
    """The worker's record, but for the port that it will have. Without a language engine the model's own figures."""
    engine, encoder = computing.engine, computing.encoder
    if engine is not None:
        layout, num_blocks = engine.layout, settings.engine.num_blocks
        max_context, vocab_size, executor = engine.ready.max_context, engine.ready.vocab_size, engine.ready.executor
    else:
        assert encoder is not None
        chosen = resolve_dtype(settings.engine)
        layout, num_blocks, executor = await asyncio.to_thread(kv_layout, chosen), 0, encoder.ready.executor
        if chosen.executor == "timed":
            max_context, vocab_size = chosen.timed.max_context, chosen.timed.vocab_size
        else:
            config = await asyncio.to_thread(functools.partial(read_config, revision=layout.revision), chosen.model_dir)
            max_context, vocab_size = config.max_context, config.vocab_size
    return WorkerRecord(
        worker_id=identity.worker_id,
        incarnation=identity.incarnation,
        roles=settings.roles,
        address=f"{settings.reachable_host}:{settings.port}",
        model=layout.model,
        aliases=settings.aliases,
        layout=layout,
        max_context=max_context,
        vocab_size=vocab_size,
        num_blocks=num_blocks,
        executor=executor,
        embedding_layout=encoder.layout if encoder is not None else None,
        embedding_rows=encoder.load.total_rows if encoder is not None else 0,
        prompt_rows=_prompt_rows(engine) if PREFILL in settings.roles else 0,
    )


def _prompt_rows(engine: EngineProcess | None) -> int:
    if engine is None or engine.embeddings is None or engine.embedding_layout is None:
        return 0
    rows: int = engine.embeddings.num_blocks * engine.embedding_layout.block_rows
    return rows


class Transfers:
    """Publications of what this worker makes, pulls of what it needs, and the server's side of both."""

    puller: Puller | None = None  # KV, for decode
    embeddings: Embeddings | None = None  # for those that compute prompts with images
    tables: PublicationTables
    service: TransferService

    def __init__(self, settings: WorkerSettings, computing: Computing, identity: Identity) -> None:
        self._settings, self._identity = settings, identity
        # Shared by all workers of this host and user: how they find out that they are neighbours.
        self._run_dir = settings.run_dir or os.path.join(tempfile.gettempdir(), f"epd-{os.geteuid()}")
        self._computing = computing
        self._channels = allowed_channels(settings.channels, encrypted=settings.tls is not None)

    async def start(self, exit_stack: contextlib.AsyncExitStack) -> None:
        settings, engine, encoder = self._settings, self._computing.engine, self._computing.encoder
        kv = embeddings = None
        if engine is not None:
            kv = PublicationTable(self._identity, engine, overlap=settings.pull_overlap, limits=settings.handoff)
        if encoder is not None:
            # No limit for the puller to come: the encode call stays open until then (docs/adr/0012).
            limits = msgspec.structs.replace(settings.handoff, unpulled_seconds=math.inf)
            embeddings = PublicationTable(self._identity, encoder, limits=limits)
        self.tables = PublicationTables(kv, embeddings)
        shm: ShmServer | None = None
        if "shm" in self._channels:
            shm = ShmServer(self._run_dir, self.tables)
            await shm.start()
            exit_stack.push_async_callback(shm.stop)
        self.service = TransferService(self.tables, channels=self._channels, nonce=shm.nonce if shm else b"")
        if engine is None:
            return
        self.puller = self._make_puller(engine)
        exit_stack.push_async_callback(self.puller.close)
        if PREFILL in settings.roles and engine.embeddings is not None and engine.embedding_layout is not None:
            self.embeddings = Embeddings(
                engine,
                engine.embedding_layout,
                self._make_puller(engine, embeddings=True),
                EmbeddingRoom(engine.embeddings.num_blocks, settings.handoff.room_seconds),
            )
            exit_stack.push_async_callback(self.embeddings.close)

    def _make_puller(self, engine: EngineProcess, *, embeddings: bool = False) -> Puller:
        """Into the engine's KV pool, or into its pool of embeddings."""
        settings = self._settings
        pool, layout = (engine.embeddings, engine.embedding_layout) if embeddings else (engine.pool, engine.layout)
        assert pool is not None
        assert layout is not None
        return Puller(
            self._identity,
            pool,
            layout,
            functools.partial(
                connect,
                tls=settings.tls,
                metrics=telemetry.current().metrics,
                keepalive_seconds=settings.keepalive_seconds,
            ),
            channels=self._channels,
            run_dir=self._run_dir,
            bytes_per_second=settings.throttle_bytes_per_second,
            limits=settings.handoff,
        )

    @property
    def open_pulls(self) -> int:
        pullers = [self.puller, self.embeddings.puller if self.embeddings else None]
        return sum(puller.open_pulls for puller in pullers if puller is not None)
