"""Keys and tenants in etcd, beside the workers: /epd/keys/<hash> and /epd/tenants/<tenant>.

Unlike everything else there they are nobody's to rebuild, and hang on no lease. A key that is gone is refused at once:
no grace, not even after etcd was away.
"""

from common.metrics import Metrics
from common.registry.etcd import EtcdRegistry
from common.registry.settings import EtcdSettings
from services.gateway.identity.keys import KeyRecord
from services.gateway.identity.tenants import Directory, TenantRecord

KEYS, TENANTS = "keys", "tenants"


class EtcdSource:
    """Follows both; while etcd is away what it last said stands. Bad values are skipped and counted."""

    def __init__(self, settings: EtcdSettings, directory: Directory, metrics: Metrics) -> None:
        self._settings, self._directory = settings, directory
        self._registry = EtcdRegistry(settings, metrics)

    async def start(self) -> None:
        """Raises Unavailable, RegistryRefused."""
        await self._registry.watch(
            lambda keys: self._directory.set_keys(keys.values()),
            grace_seconds=0.0,
            prefix=self._settings.folder(KEYS),
            kind=KeyRecord,
        )
        await self._registry.watch(
            lambda found: self._directory.set_limits({name: record.limits for name, record in found.items()}),
            grace_seconds=0.0,
            prefix=self._settings.folder(TENANTS),
            kind=TenantRecord,
        )

    async def stop(self) -> None:
        await self._registry.close()
