"""Loading and unloading LoRA adapters: on all prefill and decode workers of the base model, or on none.

The weights go to every worker first, then the registry is told, and only then the adapter gets its name. A worker that
is away meanwhile, or starts later, finds the adapter in the registry.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Sequence

import grpc

from common.errors import EpdError, InvalidArgument, ModelNotFound, Unavailable
from common.policies.routing import DECODE, PREFILL
from common.registry.adapter import Entry, EtcdConnection
from common.registry.record import ADAPTER_NAME, ADAPTERS, AdapterRecord, encode
from common.registry.settings import EtcdSettings
from common.rpc.errors import from_rpc
from epd.v1 import generation_pb2, worker_pb2
from services.gateway.fleet import Fleet
from services.gateway.names import Names
from services.gateway.worker import Worker

_log = logging.getLogger(__name__)
_LOAD_SECONDS = 120.0  # for a worker to read an adapter's files
_TELL_SECONDS = 5.0  # for a worker's word of it to come back here
_WRITES = 3  # of the registry, should others write the same entry


class AdapterControl:
    """etcd: None without a registry (tests); then only the workers that are there are told."""

    def __init__(self, fleet: Fleet, names: Names, etcd: EtcdSettings | None) -> None:
        self._fleet, self._names, self._etcd = fleet, names, etcd
        self._lock = asyncio.Lock()

    async def load(self, request: generation_pb2.LoadAdapterRequest) -> generation_pb2.LoadAdapterResponse:
        """Raises InvalidArgument, ModelNotFound, NoWorkers, and what a worker refused it with."""
        name = request.name
        if not re.fullmatch(ADAPTER_NAME, name):
            raise InvalidArgument(
                "lora_name must be 1 to 128 letters, digits, '.', '_', ':' and '-', and begin with a letter or digit",
                field="lora_name",
            )
        if not request.path or len(request.path) > 1024:
            raise InvalidArgument("lora_path must have 1 to 1024 characters", field="lora_path")
        if self._names.is_model(name):
            raise InvalidArgument(f"{name!r} is the name of a model", field="lora_name")
        model = self._base(request.model)
        async with self._lock:
            if name in self._fleet.adapters() and not request.replace:
                raise InvalidArgument(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                    "'load_inplace' to True.",
                    field="lora_name",
                )
            workers = self._workers(model)
            path = request.path
            asked = worker_pb2.ServeAdapterRequest(path=path, model=model)
            answers = await self._all(workers, asked)
            checksums = {answer.adapter.checksum for answer in answers}
            if len(checksums) > 1:
                raise InvalidArgument(
                    "the workers have different files there: lora.directory must be the same for all of them",
                    field="lora_path",
                )
            asked.checksum, asked.name = checksums.pop(), name
            record = AdapterRecord(name=name, model=model, path=path, checksum=asked.checksum)
            await self._write(name, encode(record))
            try:
                await self._all(workers, asked)
            except EpdError:
                if self._etcd is None:
                    raise
                _log.warning("adapter %s: not every worker has taken it yet", name)  # they follow the registry
            await self._until(lambda: self._served(workers, name, asked.checksum))
        _log.info("adapter %s is loaded on %d workers of %s", name, len(workers), model)
        return generation_pb2.LoadAdapterResponse(checksum=asked.checksum, model=model)

    async def unload(self, name: str) -> None:
        """Raises ModelNotFound, Unavailable."""
        async with self._lock:
            workers = [worker for worker in self._fleet.all() if name in worker.adapter_names]
            if not await self._write(name, None) and not workers:
                raise ModelNotFound(f"The lora adapter '{name[:128]}' cannot be found.", field="lora_name")
            request = worker_pb2.DropAdapterRequest(name=name)
            calls = [worker.service.DropAdapter(request, timeout=_TELL_SECONDS) for worker in workers if worker.up]
            for answer in await asyncio.gather(*calls, return_exceptions=True):
                if isinstance(answer, BaseException) and not isinstance(answer, grpc.aio.AioRpcError | EpdError):
                    raise answer
            await self._until(lambda: name not in self._fleet.adapters())
        _log.info("adapter %s is unloaded", name)

    def _served(self, workers: Sequence[Worker], name: str, checksum: str) -> bool:
        names = [worker.adapter_names.get(name) for worker in workers if worker.routable]
        return all(adapter is not None and adapter.checksum == checksum for adapter in names)

    def _base(self, model: str) -> str:
        """Raises ModelNotFound, and InvalidArgument where an empty name could mean several."""
        if model:
            return self._names.find_model(model)
        pools = {name: frozenset(each.worker_id for each in self._on(name)) for name in self._names.models}
        if len(set(pools.values())) > 1:
            raise InvalidArgument(
                f"base_model_name is needed, since there are several models: {', '.join(pools)}", field="model"
            )
        return self._names.find_model("")

    def _on(self, model: str) -> list[Worker]:
        return [
            worker
            for worker in self._fleet.all()
            if model in worker.record.names and {PREFILL, DECODE} & set(worker.record.roles)
        ]

    def _workers(self, model: str) -> list[Worker]:
        """Raises NoWorkers unless each role is there."""
        workers = [worker for worker in self._on(model) if worker.routable]
        if {PREFILL, DECODE} - {role for worker in workers for role in worker.record.roles}:
            raise self._fleet.no_workers(model)
        return workers

    async def _all(
        self, workers: Sequence[Worker], request: worker_pb2.ServeAdapterRequest
    ) -> list[worker_pb2.ServeAdapterResponse]:
        """Raises the first refusal, once every worker has answered."""
        calls = [worker.service.ServeAdapter(request, timeout=_LOAD_SECONDS) for worker in workers]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for worker, answer in zip(workers, answers, strict=True):
            if isinstance(answer, grpc.aio.AioRpcError):
                error = from_rpc(answer)
                raise type(error)(
                    f"{worker.worker_id}: {error.message}",
                    field=error.field,
                    retry_after_seconds=error.retry_after_seconds,
                )
            if isinstance(answer, BaseException):
                raise answer
        return [answer for answer in answers if isinstance(answer, worker_pb2.ServeAdapterResponse)]

    async def _write(self, name: str, value: bytes | None) -> bool:
        """The registry's entry; None takes it out. False when there was none to take out. Raises Unavailable."""
        if self._etcd is None:
            return False
        key = self._etcd.folder(ADAPTERS) + name
        connection = EtcdConnection(self._etcd)
        try:
            if value is None:
                return await connection.delete(key)
            for _ in range(_WRITES):
                entry = await connection.get(key)
                if await connection.put_if_version(Entry(key, value, entry.version)):
                    return True
        finally:
            await connection.close()
        raise Unavailable("others write the same adapter just now; try again", retry_after_seconds=1.0)

    async def _until(self, done: Callable[[], bool]) -> None:
        """Until the workers' word of what they were told has come back, within bounds: others may still wait for it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TELL_SECONDS):
                while not done():
                    await self._fleet.changed()
