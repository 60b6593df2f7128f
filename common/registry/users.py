"""Users of etcd and what each may read and write: a service's mistakes and thefts stay its own."""

import secrets
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec

from common.registry.adapter import EtcdConnection, end_of_prefix
from common.registry.settings import EtcdSettings
from common.rpc.peer_name import CLIENT, ETCD, GATEWAY, WORKER, PeerName

ROOT = "root"  # etcd's own name for who may do everything; without it rights cannot be turned on
_READ, _READ_WRITE = 0, 2  # of etcd's protocol


class Right(msgspec.Struct, frozen=True):
    """Of a key, or of all that begins with it."""

    key: str
    write: bool = False
    prefix: bool = True


def rights(settings: EtcdSettings, role: str, peer_id: str = "") -> list[Right]:
    """What a service may: a worker may write its own entry alone, of all workers' if no id is given.

    Raises KeyError for a role that has no business there.
    """
    workers, gateways = settings.folder("workers"), settings.folder("gateways")
    keys, tenants, adapters = settings.folder("keys"), settings.folder("tenants"), settings.folder("adapters")
    own = Right(workers + peer_id, write=True, prefix=False) if peer_id else Right(workers, write=True)
    return {
        WORKER: [Right(workers), own, Right(adapters)] if peer_id else [own, Right(adapters)],
        GATEWAY: [
            *(Right(workers), Right(keys), Right(tenants)),
            *(Right(gateways, write=True), Right(adapters, write=True)),
        ],
        CLIENT: [
            *(Right(workers), Right(gateways), Right(adapters)),
            *(Right(keys, write=True), Right(tenants, write=True)),
        ],
    }[role]


async def make_users(
    connection: EtcdConnection,
    settings: EtcdSettings,
    names: Iterable[PeerName] = (),
    passwords: dict[str, str] | None = None,
) -> None:
    """Makes users with their rights; what is there already gets them too, and the given password.

    names: of certificates; each becomes a user that has no password, since etcd takes the name in the certificate for
    the user. passwords: by "worker", "gateway" and "client", users that serve all of a role.
    Raises RegistryRefused when the connection's own user may not.
    """
    for name in names:
        if name.role == ETCD:  # who has it can pass for etcd itself, so it may administer it, too
            await _make_root(connection, name.id, None)
        else:
            await _make_user(connection, name.id, None, rights(settings, name.role, name.id))
    for role, password in (passwords or {}).items():
        await _make_user(connection, role, password, rights(settings, role))


async def turn_on(connection: EtcdConnection, root_password: str = "") -> None:
    """From now on only users get in. Without a password nobody can be root; etcd's own certificate is as good."""
    await _make_root(connection, ROOT, root_password or secrets.token_urlsafe(32))
    await connection.administer(lambda auth: auth.auth_enable())


async def _make_root(connection: EtcdConnection, user: str, password: str | None) -> None:
    await connection.administer(lambda auth: auth.role_add(ROOT))
    await connection.administer(lambda auth: auth.user_add(user, password or "", no_password=password is None))
    await connection.administer(lambda auth: auth.user_grant_role(user, ROOT))


async def _make_user(connection: EtcdConnection, user: str, password: str | None, allowed: list[Right]) -> None:
    role = f"epd-{user}"
    await connection.administer(lambda auth: auth.role_add(role))
    for right in allowed:
        await connection.administer(_grant(role, right))
    new = await connection.administer(lambda auth: auth.user_add(user, password or "", no_password=password is None))
    if not new and password is not None:
        await connection.administer(lambda auth: auth.user_change_password(user, password))
    await connection.administer(lambda auth: auth.user_grant_role(user, role))


def _grant(role: str, right: Right) -> Callable[[Any], Awaitable[Any]]:
    end = end_of_prefix(right.key) if right.prefix else None
    kind = _READ_WRITE if right.write else _READ
    return lambda auth: auth.role_grant_permission(role, right.key, end, perm_type=kind)
