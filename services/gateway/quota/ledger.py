"""What every tenant uses: through this gateway, and through others where this one owns the tenant."""

import asyncio
from collections.abc import Callable
from typing import Any

from common.errors import Overloaded
from common.policies.limits import Amounts, TenantLimits, Usage, check
from services.gateway.quota.members import Members

_MAX_TENANTS = 100_000
_SWEEP_SECONDS = 10.0


class Account:
    """One tenant. told: the stream by which its owner knows of `mine`. asking: requests that wait for its answer."""

    __slots__ = ("asking", "mine", "others", "told")

    def __init__(self) -> None:
        self.mine = Usage()
        self.others: dict[str, Usage] = {}  # by gateway
        self.told: Any = None
        self.asking = 0

    def idle(self, now: float) -> bool:
        return not self.asking and self.mine.idle(now) and all(usage.idle(now) for usage in self.others.values())


class Ledger:
    """Tenants that use nothing are forgotten. settled: whether another gateway counts together with this one now."""

    def __init__(
        self, members: Members, limits: Callable[[str], TenantLimits], clock: Callable[[], float] | None = None
    ) -> None:
        self.members = members
        self.limits = limits
        self.clock = clock or asyncio.get_running_loop().time
        self.settled: Callable[[str], bool] = lambda gateway: False
        self.accounts: dict[str, Account] = {}
        self._next_sweep = self.clock() + _SWEEP_SECONDS

    def account(self, tenant: str) -> Account:
        """Raises Overloaded when too many tenants use something."""
        now = self.clock()
        if now >= self._next_sweep:
            self.sweep()
        found = self.accounts.get(tenant)
        if found is None:
            if len(self.accounts) >= _MAX_TENANTS:
                raise Overloaded(f"{_MAX_TENANTS} tenants have used this gateway within a minute")
            found = self.accounts[tenant] = Account()
        return found

    def sweep(self) -> None:
        now = self.clock()
        self._next_sweep = now + _SWEEP_SECONDS
        self.accounts = {tenant: account for tenant, account in self.accounts.items() if not account.idle(now)}

    def take(self, tenant: str, amounts: Amounts, gateway: str) -> None:
        """As the tenant's owner, for a request at `gateway`. Raises RateLimited, NeverFits, Overloaded."""
        account, mine, now = self.account(tenant), self.members.mine.gateway_id, self.clock()
        known = {**account.others, mine: account.mine}
        here, absent = [account.mine], []
        for name, share in self.members.shares(tenant).items():
            if name != mine:
                usage = known.pop(name, None) or Usage()
                if self.settled(name):
                    here.append(usage)
                else:
                    absent.append((usage, share))
        known.pop(mine)
        here += known.values()  # of gateways that have gone: what they charged counts on
        limits = self.limits(tenant)
        check(limits, amounts, here, now, absent=absent)
        usage = account.mine if gateway == mine else account.others.setdefault(gateway, Usage())
        usage.add(amounts, now)

    def take_share(self, tenant: str, amounts: Amounts) -> None:
        """For a request here, while the owner cannot be asked: of this gateway's own part. Raises as `take`."""
        account, now = self.account(tenant), self.clock()
        share = self.members.shares(tenant)[self.members.mine.gateway_id]
        check(self.limits(tenant), amounts, [account.mine], now, mine=share)
        account.mine.add(amounts, now)

    def add(self, tenant: str, amounts: Amounts, gateway: str = "") -> None:
        """Taken already: granted by the owner to a request here, or by another `gateway` of its own part."""
        account = self.account(tenant)
        usage = account.others.setdefault(gateway, Usage()) if gateway else account.mine
        usage.add(amounts, self.clock())

    def release(self, tenant: str, amounts: Amounts, at: float, gateway: str = "") -> None:
        """gateway: another than this one."""
        account = self.accounts.get(tenant)
        usage = None if account is None else account.others.get(gateway) if gateway else account.mine
        if usage is not None:
            usage.release(amounts, at, self.clock())

    def end_holds(self, gateway: str) -> None:
        """Its stream has ended. What it charged counts on."""
        for account in self.accounts.values():
            if gateway in account.others:
                account.others[gateway].in_flight = 0

    def forget_others(self) -> None:
        """Of tenants that have another owner now: it is told by each gateway itself."""
        for tenant, account in self.accounts.items():
            if account.others and self.members.owner(tenant) != self.members.mine.gateway_id:
                account.others.clear()
