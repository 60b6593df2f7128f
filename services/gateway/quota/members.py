"""Which gateways live, and which of them owns a tenant."""

import hashlib
from collections.abc import Callable, Mapping

from common.policies.limits import Share
from common.registry.record import GatewayRecord


class Members:
    """This gateway and those that the registry names. All on one event loop."""

    def __init__(self, mine: GatewayRecord) -> None:
        self.mine = mine
        self.records: dict[str, GatewayRecord] = {}
        self.digest = b""
        self._ids: list[str] = []
        self._on_change: list[Callable[[], None]] = []
        self.update({})

    def update(self, records: Mapping[str, GatewayRecord]) -> None:
        """The registry's current records by id. This gateway is always one of them, whatever they say of it."""
        self.records = {**records, self.mine.gateway_id: self.mine}
        self._ids = sorted(self.records)
        self.digest = hashlib.sha256("\n".join(self._ids).encode()).digest()
        for call in self._on_change:
            call()

    def on_change(self, call: Callable[[], None]) -> None:
        self._on_change.append(call)

    @property
    def others(self) -> dict[str, GatewayRecord]:
        return {name: record for name, record in self.records.items() if name != self.mine.gateway_id}

    def ranking(self, tenant: str) -> list[str]:
        """Ids, the owner's first: rendezvous hashing, so that a gateway that comes or goes moves its own part alone."""
        if len(self._ids) == 1:
            return self._ids
        return sorted(self._ids, key=lambda name: hashlib.sha256(f"{name}\n{tenant}".encode()).digest())

    def owner(self, tenant: str) -> str:
        return self.ranking(tenant)[0]

    def shares(self, tenant: str) -> dict[str, Share]:
        """Each gateway's part of a tenant's limits while it counts for itself."""
        ranking = self.ranking(tenant)
        return {name: Share(rank, len(ranking)) for rank, name in enumerate(ranking)}
