"""Identity: who calls, and what they may use."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from common.errors import InvalidArgument, PermissionDenied, Unauthenticated
from common.metrics import Metrics
from common.policies.limits import TenantLimits
from common.registry.settings import EtcdSettings
from services.gateway.identity.etcd import EtcdSource
from services.gateway.identity.file import FileSource
from services.gateway.identity.keys import MAX_TENANT_CHARACTERS, bearer, hash_key
from services.gateway.identity.settings import IdentitySettings
from services.gateway.identity.tenants import Directory
from services.gateway.settings import DEFAULT_TENANT

NO_LIMITS = TenantLimits()
AUTHORIZATION = "authorization"
TENANT_KEY = "x-epd-tenant"


class Source(Protocol):
    async def start(self) -> None: ...
    async def stop(self) -> None: ...


class Identity:
    """limits: by tenant, from the gateway's own settings; those of the source win. other_limits: of all others."""

    def __init__(
        self,
        settings: IdentitySettings,
        metrics: Metrics,
        *,
        etcd: EtcdSettings | None = None,
        limits: Mapping[str, TenantLimits] | None = None,
        other_limits: TenantLimits = NO_LIMITS,
    ) -> None:
        """Raises InvalidArgument when the source lacks what it needs."""
        self.required = settings.source != "off"
        self._admins = frozenset(settings.admins)
        self._limits = dict(limits or {})
        self._other_limits = other_limits
        self._directory = Directory()
        self._source: Source | None = None
        if settings.source == "file":
            if not settings.file:
                raise InvalidArgument("identity.source is file: identity.file must name it", field="identity.file")
            self._source = FileSource(Path(settings.file), self._directory, metrics, settings.reload_seconds)
        elif settings.source == "etcd":
            if etcd is None:
                raise InvalidArgument("identity.source is etcd, and this gateway has none", field="identity.source")
            self._source = EtcdSource(etcd, self._directory, metrics)

    async def start(self) -> None:
        """Returns with the first keys. Raises InvalidArgument, Unavailable, RegistryRefused."""
        if self._source is not None:
            await self._source.start()

    async def stop(self) -> None:
        if self._source is not None:
            await self._source.stop()

    def tenant_of(self, headers: Mapping[str, str]) -> str:
        """The caller's tenant: of its key, or, where no key is needed, the one it names.

        headers: names in lower case. Raises Unauthenticated, PermissionDenied for naming another tenant than the key's,
        InvalidArgument for what cannot be a tenant's name.
        """
        named = _check_name(headers.get(TENANT_KEY, ""))
        if not self.required:
            return named or DEFAULT_TENANT
        key = bearer(headers.get(AUTHORIZATION, ""))
        if key is None:
            raise Unauthenticated(
                "a key is needed here, as `authorization: Bearer KEY`; epd's commands take it from EPD_API_KEY",
                field=AUTHORIZATION,
            )
        tenant = self._directory.tenants_by_hash.get(hash_key(key))
        if tenant is None:
            raise Unauthenticated("this key is not known", field=AUTHORIZATION)
        if named and named != tenant:
            raise PermissionDenied("the key is another tenant's than the one named", field=TENANT_KEY)
        return tenant

    def check_admin(self, headers: Mapping[str, str]) -> None:
        """Raises as tenant_of does, and PermissionDenied for tenants that may not change what is served."""
        tenant = self.tenant_of(headers)
        if self.required and tenant not in self._admins:
            raise PermissionDenied("this is for the tenants in the gateway's setting identity.admins")

    def limits(self, tenant: str) -> TenantLimits:
        return self._directory.limits.get(tenant) or self._limits.get(tenant) or self._other_limits

    def weight(self, tenant: str) -> float:
        """A tenant's share under overload, relative to others'."""
        return self.limits(tenant).weight


def _check_name(tenant: str) -> str:
    if len(tenant) > MAX_TENANT_CHARACTERS or not tenant.isprintable():
        raise InvalidArgument(
            f"{TENANT_KEY} must be at most {MAX_TENANT_CHARACTERS} printable characters", field=TENANT_KEY
        )
    return tenant
