"""All workers the registry names, and the snapshot that the router works on."""

import asyncio
import functools
from collections import Counter
from collections.abc import Mapping

from common.errors import NoWorkers
from common.metrics import Metrics
from common.policies.circuit import CircuitPolicy
from common.policies.encoding import ENCODE
from common.policies.routing import DECODE, PREFILL, WorkerView
from common.registry.record import PROTOCOL_VERSION, WorkerRecord
from common.rpc.channel import KEEPALIVE_SECONDS, connect
from common.rpc.tls import TlsOptions
from services.gateway.names import Adapter
from services.gateway.pairs import Pairs
from services.gateway.worker import Worker


def _life(record: WorkerRecord) -> tuple[str, str]:
    return record.incarnation, record.address


class Fleet:
    """Follows the registry (`update`) and the workers themselves. Everything here runs on one event loop."""

    def __init__(
        self,
        metrics: Metrics,
        tls: TlsOptions | None = None,
        keepalive_seconds: float = KEEPALIVE_SECONDS,
        circuit: CircuitPolicy | None = None,
    ) -> None:
        self._workers: dict[str, Worker] = {}
        self._metrics = metrics
        self._policy = circuit or CircuitPolicy()
        self.pairs = Pairs(self._policy, self._notify)
        self._connect = functools.partial(connect, tls=tls, metrics=metrics, keepalive_seconds=keepalive_seconds)
        self._changed = asyncio.Event()
        self._load_changed = asyncio.Event()
        self._closing: dict[asyncio.Task[None], Worker] = {}  # workers that the registry has forgotten
        self._roles_told: set[tuple[str, str]] = set()  # of metrics: model and role
        self._away_told: set[tuple[str, str]] = set()  # model and why

    def update(self, records: Mapping[str, WorkerRecord]) -> None:
        """The registry's current records by worker id. A new incarnation replaces all we knew of the old."""
        usable = {k: record for k, record in records.items() if record.protocol_version == PROTOCOL_VERSION}
        for worker_id, worker in list(self._workers.items()):
            record = usable.get(worker_id)
            if record is None or _life(record) != _life(worker.record):
                del self._workers[worker_id]
                self.pairs.forget(worker)
                task = asyncio.create_task(worker.close())
                self._closing[task] = worker
                task.add_done_callback(self._closing.pop)
            else:
                worker.record = record
        for worker_id, record in usable.items():
            if worker_id not in self._workers:
                self._workers[worker_id] = Worker(record, self._notify, self.note_load, self._connect, self._policy)
        self._notify()

    def get(self, worker_id: str) -> Worker | None:
        return self._workers.get(worker_id)

    def all(self) -> list[Worker]:
        return list(self._workers.values())

    def in_use(self) -> list[Worker]:
        """With those that are forgotten but still work for somebody: a stopped worker loses its lease, too."""
        return [*self._workers.values(), *self._closing.values()]

    def snapshot(self, model: str) -> list[WorkerView]:
        """Routable workers of a model."""
        return [
            worker.view(self.pairs.unreachable(worker))
            for worker in self._workers.values()
            if model in worker.record.names and worker.routable
        ]

    def can_replace(self, worker: Worker) -> bool:
        """Whether others can take over all that this one does."""
        record = worker.record
        others = [each for each in self._workers.values() if each.identity != worker.identity and each.routable]

        def does(other: Worker, role: str) -> bool:
            if role == ENCODE:
                return other.record.embedding_layout == record.embedding_layout
            return other.compat_id == worker.compat_id and other.record.model == record.model

        return all(any(role in other.record.roles and does(other, role) for other in others) for role in record.roles)

    def records(self, model: str) -> list[WorkerRecord]:
        """Records of a model's routable workers, else of all its workers: for limits that hold in either case. Workers
        that only encode images set no limits of prompts."""
        named = [
            worker
            for worker in self._workers.values()
            if model in worker.record.names and {PREFILL, DECODE} & set(worker.record.roles)
        ]
        return [worker.record for worker in named if worker.routable] or [worker.record for worker in named]

    def model_roles(self) -> dict[str, dict[str, list[WorkerRecord]]]:
        """Routable workers by model and role; only of models that can be asked: by a fitting pair, or one with both."""
        found: dict[str, dict[str, list[WorkerRecord]]] = {}
        for worker in self._workers.values():
            if worker.routable:
                for name in worker.record.names:
                    roles = found.setdefault(name, {PREFILL: [], DECODE: [], ENCODE: []})
                    for role in worker.record.roles:
                        if role in roles:
                            roles[role].append(worker.record)
        return {
            model: roles
            for model, roles in found.items()
            if {r.compat_id for r in roles[PREFILL]} & {r.compat_id for r in roles[DECODE]}
        }

    def adapters(self) -> dict[str, Adapter]:
        """LoRA adapters by name: what most workers mean by it, those that can take requests first."""
        votes: dict[str, Counter[Adapter]] = {}
        for worker in self._workers.values():
            for name, adapter in worker.adapter_names.items():
                votes.setdefault(name, Counter())[adapter] += len(self._workers) + 1 if worker.routable else 1
        return {
            name: max(found, key=lambda each: (found[each], each.checksum, each.model)) for name, found in votes.items()
        }

    def roles_with(self, adapter: Adapter) -> tuple[int, int] | None:
        """Routable prefill and decode workers that hold an adapter; None without a pair that fits."""
        holding = [
            worker
            for worker in self._workers.values()
            if worker.routable and adapter.model in worker.record.names and adapter.checksum in worker.adapters
        ]
        prefills, decodes = ([each for each in holding if role in each.record.roles] for role in (PREFILL, DECODE))
        fitting = {each.compat_id for each in prefills} & {each.compat_id for each in decodes}
        return (len(prefills), len(decodes)) if fitting else None

    def no_workers(self, model: str, adapter: str = "") -> NoWorkers:
        """The error of a request that nobody can take, which says what is missing. adapter: its checksum."""
        asked = f"{model} with this adapter" if adapter else model
        missing = self._missing(model, adapter)
        return NoWorkers(f"no worker can take requests for {asked} now{missing}", retry_after_seconds=1.0)

    def _missing(self, model: str, adapter: str) -> str:
        named = [
            worker
            for worker in self._workers.values()
            if model in worker.record.names and (not adapter or adapter in worker.adapters)
        ]
        if not named:
            return ": none has it" if adapter else ": none has registered"
        roles = {role: [each for each in named if role in each.record.roles] for role in (PREFILL, DECODE)}
        there = {role: [each for each in each_role if each.routable] for role, each_role in roles.items()}
        missing = [
            f"none of its {len(found)} {role} workers can be reached" if found else f"it has no {role} worker"
            for role, found in roles.items()
            if not there[role]
        ]
        if missing:
            return f": {' and '.join(missing)}"
        if not {each.compat_id for each in there[PREFILL]} & {each.compat_id for each in there[DECODE]}:
            return ": its prefill and decode workers differ in revision, dtype or block size"
        return ""

    async def wait_for_records(self, model: str, seconds: float) -> list[WorkerRecord]:
        """`records`, once there are any. Raises NoWorkers when none turns up in time."""
        try:
            async with asyncio.timeout(seconds):
                while not (found := self.records(model)):
                    await self.changed()
                return found
        except TimeoutError:
            raise self.no_workers(model) from None

    async def changed(self) -> None:
        """Returns at the next change of what is routable."""
        await self._changed.wait()

    async def load_changed(self) -> None:
        """Returns at the next change of what is routable, or of a worker's load."""
        await self._load_changed.wait()

    def note_load(self) -> None:
        self._load_changed.set()
        self._load_changed = asyncio.Event()

    async def close(self) -> None:
        self.update({})
        await asyncio.sleep(0)  # their first step, so that the end of their watches is not cut off
        for task in self._closing:
            task.cancel()
        while self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)

    def _notify(self) -> None:
        self.note_load()
        self._changed.set()
        self._changed = asyncio.Event()
        counts: dict[tuple[str, str], int] = {}
        for worker in self._workers.values():
            for role in worker.record.roles:
                key = (worker.record.model, role)
                counts[key] = counts.get(key, 0) + worker.routable
        # What is gone is told as 0: of a series that ends, dashboards show the last value.
        self._roles_told |= counts.keys()
        for model, role in self._roles_told:
            self._metrics.workers.labels(model=model, role=role).set(counts.get((model, role), 0))
        away: dict[tuple[str, str], int] = {}
        for worker in self._workers.values():
            if why := worker.away:
                key = (worker.record.model, why)
                away[key] = away.get(key, 0) + 1
        self._away_told |= away.keys()
        for model, why in self._away_told:
            self._metrics.workers_away.labels(model=model, why=why).set(away.get((model, why), 0))
        self._metrics.pairs_away.set(len(self.pairs.open()))
