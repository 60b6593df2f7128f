"""Shares: what each tenant keeps in one cache, and which of it could go. Pure."""

from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Shares(Generic[K]):
    """Entries of a cache by tenant, in blocks. A tenant may keep `limits[tenant]` blocks; without one any number.

    Parked entries are those nobody needs: the least recently parked of a tenant that keeps too much goes first. What
    is needed stays, however much: a limit bounds what is kept, not what runs.
    """

    def __init__(self) -> None:
        self.limits: dict[bytes, int] = {}
        self.kept: Counter[bytes] = Counter()
        self._owner: dict[K, tuple[bytes, int]] = {}  # entry → tenant, blocks
        self._parked: dict[bytes, OrderedDict[K, None]] = {}

    def add(self, entry: K, tenant: bytes, blocks: int = 1, most: int | None = None) -> None:
        """most: blocks that the tenant may keep from now on, until its last entry has gone; None: no bound."""
        self._owner[entry] = tenant, blocks
        self.kept[tenant] += blocks
        if most is None:
            self.limits.pop(tenant, None)
        else:
            self.limits[tenant] = most

    def remove(self, entry: K) -> None:
        """It is kept no more, parked or not."""
        self.unpark(entry)
        tenant, blocks = self._owner.pop(entry)
        self.kept[tenant] -= blocks
        if not self.kept[tenant]:
            del self.kept[tenant]
            self.limits.pop(tenant, None)

    @property
    def entries(self) -> set[K]:
        return set(self._owner)

    def tenant(self, entry: K) -> bytes:
        return self._owner[entry][0]

    def park(self, entry: K) -> None:
        """Nobody needs it now."""
        self._parked.setdefault(self.tenant(entry), OrderedDict())[entry] = None

    def unpark(self, entry: K) -> None:
        tenant = self.tenant(entry)
        parked = self._parked.get(tenant)
        if parked is not None and entry in parked:
            del parked[entry]
            if not parked:
                del self._parked[tenant]

    def excess(self, tenant: bytes, most: int | None) -> K | None:
        """What should go first for the tenant to keep `most` blocks; None: nothing should, or could."""
        if most is None or self.kept[tenant] <= most:
            return None
        return next(iter(self._parked.get(tenant, ())), None)

    def check_integrity(self, parked: set[K]) -> list[str]:
        """What is wrong, against the cache's own list of what nobody needs."""
        errors = []
        if {entry for each in self._parked.values() for entry in each} != parked:
            errors.append("the tenants' parked entries disagree with the cache")
        counted: Counter[bytes] = Counter()
        for tenant, blocks in self._owner.values():
            counted[tenant] += blocks
        if counted != self.kept or not self.limits.keys() <= self.kept.keys():
            errors.append("what the tenants keep disagrees with their entries")
        return errors
