"""`epd etcd-users`: rights in an etcd that somebody else runs."""

import asyncio
import os
import secrets
import stat
from pathlib import Path

import msgspec

from common.errors import InvalidArgument
from common.registry.adapter import EtcdConnection
from common.registry.settings import EtcdSettings
from common.registry.users import ROOT, make_users, turn_on
from common.rpc.peer_name import CLIENT, GATEWAY, WORKER

_USERS = (WORKER, GATEWAY, CLIENT)


def etcd_users(settings: EtcdSettings, certs: Path | None, passwords: Path | None, *, enable: bool) -> None:
    """certs: a user for each certificate there. passwords: a JSON file of users and passwords, made when missing.

    enable: turn rights on, with root's password from that file, else one that nobody knows.
    Raises InvalidArgument, RegistryRefused, Unavailable.
    """
    if certs is None and passwords is None:
        raise InvalidArgument("name --certs, --passwords, or both", field="certs")
    known = _passwords(passwords) if passwords else {}
    asyncio.run(_make(settings, certs, {user: known[user] for user in _USERS if user in known}, known, enable))


async def _make(
    settings: EtcdSettings, certs: Path | None, users: dict[str, str], known: dict[str, str], enable: bool
) -> None:
    from common.rpc.certificates import issued_names

    connection = EtcdConnection(settings)
    try:
        names = list(issued_names(certs)) if certs else []
        await make_users(connection, settings, names, users)
        if enable:
            await turn_on(connection, known.get(ROOT, ""))
    finally:
        await connection.close()
    for user in (*(name.id for name in names), *users):
        print(user)


def _passwords(path: Path) -> dict[str, str]:
    if not path.exists():
        made = {user: secrets.token_urlsafe(24) for user in (ROOT, *_USERS)}
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(made)))
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise InvalidArgument(f"{path} holds passwords and can be read by others; chmod 600 it", field="passwords")
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except msgspec.MsgspecError:
        raise InvalidArgument(f"{path} must be a JSON object of users and passwords", field="passwords") from None
