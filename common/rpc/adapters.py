"""The adapters of one worker: what its engine holds, and under which names requests may ask for them."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

import msgspec

from common.engine.client import Engine
from common.engine.messages import LetAdapterGo
from common.engine.settings import LoraSettings
from common.errors import EpdError, InvalidArgument, ModelNotFound, by_reason
from common.models.lora import adapter_path
from common.registry.record import AdapterRecord

log = logging.getLogger(__name__)
_RETRY_SECONDS = 5.0  # of what the registry wants and what could not be loaded


class Named(msgspec.Struct, frozen=True):
    """adapter: checksum. model: the name of its base model."""

    adapter: str
    model: str


class WorkerAdapters:
    """models: every name of the worker's model. Adapters come by the worker's settings (`start`), by gateways (`serve`,
    `drop`), and by the registry, which tells a worker that starts later what gateways have loaded (`follow`)."""

    def __init__(self, settings: LoraSettings, engine: Engine, models: tuple[str, ...]) -> None:
        self._settings, self._engine, self._models = settings, engine, models
        self.names: dict[str, Named] = {}
        self.held: set[str] = set()  # checksums; more than have a name, see common.engine.adapters
        self.on_change: Callable[[], None] = lambda: None
        self._lock = asyncio.Lock()
        self._wanted: dict[str, AdapterRecord] | None = None
        self._of_registry: set[str] = set()
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Loads what the settings name. Raises what `serve` does, naming the setting."""
        for name, path in self._settings.adapters.items():
            try:
                await self.serve(path, name=name)
            except EpdError as error:
                raise InvalidArgument(f"lora.adapters: {name}: {error.message}", field="lora.adapters") from None

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def serve(self, path: str, *, name: str = "", model: str = "", checksum: str = "") -> Named:
        """Loads an adapter and, with a name, takes requests for it.

        model: its base model; empty: the one that its files name, else the worker's first. checksum: refused unless the
        files have it; empty: any. Raises InvalidArgument, ModelNotFound, Overloaded, EngineFailed.
        """
        if model and model not in self._models:
            raise ModelNotFound(f"this worker serves {self._models[0]!r}, not {model!r}", field="model")
        async with self._lock:
            directory = await asyncio.to_thread(adapter_path, self._settings.directory, path)
            settings = self._settings
            loaded = await self._engine.load_adapter(
                str(directory), max_rank=settings.max_rank, max_adapters=settings.max_adapters
            )
            if loaded.reason:
                cls = by_reason().get(loaded.reason, EpdError)
                hint = loaded.retry_after_seconds
                raise cls(loaded.message, field=loaded.field, retry_after_seconds=hint)
            self.held = (self.held - set(loaded.dropped)) | {loaded.adapter}
            if checksum and loaded.adapter != checksum:
                self._let_go(loaded.adapter)
                raise InvalidArgument("the adapter's files are not those that other workers have", field="lora_path")
            named = Named(loaded.adapter, model or self._model_of(loaded.base))
            if name:
                before, self.names[name] = self.names.get(name), named
                if before is not None and before != named:
                    self._let_go(before.adapter)
            else:
                self._let_go(loaded.adapter)  # until it gets a name, its place is free
            self.on_change()
            return named

    async def drop(self, name: str) -> bool:
        """Takes no more requests for it; those that run go on. False when there was none of this name."""
        async with self._lock:
            named = self.names.pop(name, None)
            self._of_registry.discard(name)
            if named is not None:
                self._let_go(named.adapter)
                self.on_change()
            return named is not None

    def _let_go(self, adapter: str) -> None:
        if all(named.adapter != adapter for named in self.names.values()):
            self._engine.send(LetAdapterGo(adapter=adapter))

    def _model_of(self, base: str) -> str:
        short = base.rstrip("/").rpartition("/")[2]
        return short if short in self._models else self._models[0]

    # --- the registry's ---------------------------------------------------------------------------------------------

    def follow(self, records: Mapping[str, AdapterRecord]) -> None:
        """What the registry says now."""
        self._wanted = {name: record for name, record in records.items() if record.model in self._models}
        self._wake.set()
        self._settled.clear()
        if self._task is None:
            self._task = asyncio.create_task(self._keep(), name="adapters")

    async def settled(self) -> None:
        """Returns once what the registry said was tried at least once."""
        await self._settled.wait()

    async def _keep(self) -> None:
        told: set[tuple[str, str]] = set()
        while True:
            self._wake.clear()
            failed = False
            for name, record in dict(self._wanted or {}).items():
                have = self.names.get(name)
                self._of_registry.add(name)
                if have == Named(record.checksum, record.model):
                    continue
                try:
                    await self.serve(record.path, name=name, model=record.model, checksum=record.checksum)
                    log.info("adapter %s is loaded", name)
                except EpdError as error:
                    failed = True
                    if (name, error.message) not in told:
                        told.add((name, error.message))
                        log.error("adapter %s is not served here: %s", name, error.message)
            for name in self._of_registry - (self._wanted or {}).keys():
                await self.drop(name)
            if not self._wake.is_set():
                self._settled.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RETRY_SECONDS if failed else None):
                    await self._wake.wait()
