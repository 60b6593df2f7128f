"""Who has which key, and what each tenant may use."""

from collections.abc import Iterable, Mapping

import msgspec

from common.policies.limits import TenantLimits
from common.registry.record import PROTOCOL_VERSION
from services.gateway.identity.keys import KeyRecord, TenantName


class TenantRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant's limits; in etcd under /epd/tenants/<tenant>."""

    protocol_version: int = PROTOCOL_VERSION
    tenant: TenantName
    limits: TenantLimits = TenantLimits()

    @property
    def entry_id(self) -> str:
        return self.tenant


class Directory:
    """What the source says now. Replaced in parts as it changes."""

    def __init__(self) -> None:
        self.tenants_by_hash: dict[str, str] = {}
        self.limits: dict[str, TenantLimits] = {}

    def set_keys(self, keys: Iterable[KeyRecord]) -> None:
        self.tenants_by_hash = {key.hash: key.tenant for key in keys}

    def set_limits(self, limits: Mapping[str, TenantLimits]) -> None:
        self.limits = dict(limits)
