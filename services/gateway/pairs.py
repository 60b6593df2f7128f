"""Which workers cannot pull from which: a circuit for each pair that has failed, from what pullers tell."""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterator

from common.policies.circuit import Circuit, CircuitPolicy, State
from common.transfer.key import Identity
from services.gateway.worker import Worker

_log = logging.getLogger(__name__)


class Pairs:
    """Circuits by (owner's life, puller's life); a pair without one has never failed. They go with their workers."""

    def __init__(self, policy: CircuitPolicy, changed: Callable[[], None]) -> None:
        self._policy = policy
        self._changed = changed
        self._circuits: dict[tuple[Identity, Identity], tuple[Circuit, Worker, Worker]] = {}

    def failed(self, owner: Worker, puller: Worker, began: float) -> None:
        """A pull of an attempt that began then, by what the puller says. When either is away that explains it."""
        if owner.away or puller.away:
            return
        key, loop = _key(owner, puller), asyncio.get_running_loop()
        circuit, *_ = self._circuits.setdefault(key, (Circuit(self._policy, random.random), owner, puller))
        if circuit.failed(began, loop.time()):
            seconds = circuit.until - loop.time()
            _log.warning("%s cannot pull from %s: not tried for %.1f s", puller.worker_id, owner.worker_id, seconds)
            loop.call_at(circuit.until, self._changed)
            self._changed()

    def worked(self, owner: Worker, puller: Worker, began: float) -> None:
        found = self._circuits.get(_key(owner, puller))
        if found is not None and found[0].succeeded(began, asyncio.get_running_loop().time()):
            self._changed()

    @contextlib.contextmanager
    def use(self, owner: Worker | None, puller: Worker | None) -> Iterator[None]:
        """An attempt with this pair, which is a probe when the pair's circuit is half-open."""
        found = self._circuits.get(_key(owner, puller)) if owner is not None and puller is not None else None
        if found is None:
            yield
            return
        probe = found[0].began(asyncio.get_running_loop().time())
        try:
            yield
        finally:
            found[0].ended(probe)
            if probe:
                self._changed()

    def unreachable(self, puller: Worker) -> frozenset[str]:
        """Ids of the owners that it had better not pull from now."""
        if not self._circuits:
            return frozenset()
        now = asyncio.get_running_loop().time()
        return frozenset(
            owner.worker_id
            for circuit, owner, other in self._circuits.values()
            if other is puller and not circuit.allows(now)
        )

    def forget(self, worker: Worker) -> None:
        """That life is over."""
        for key in [key for key, (_, *ends) in self._circuits.items() if worker in ends]:
            del self._circuits[key]

    def open(self) -> list[tuple[Worker, Worker, State]]:
        """(owner, puller, state) of those that are not closed."""
        now = asyncio.get_running_loop().time()
        found = [(owner, puller, circuit.state(now)) for circuit, owner, puller in self._circuits.values()]
        return [each for each in found if each[2] is not State.CLOSED]


def _key(owner: Worker, puller: Worker) -> tuple[Identity, Identity]:
    return _life(owner), _life(puller)


def _life(worker: Worker) -> Identity:
    return Identity(worker.worker_id, worker.record.incarnation)
