"""Keys and tenants in a real etcd, as gateways see them."""

import asyncio
import json

import pytest

from common.errors import Unauthenticated, UnknownId
from common.metrics import Metrics
from services.commands import keys as commands
from services.gateway.identity.identity import Identity
from services.gateway.identity.keys import hash_key
from services.gateway.identity.settings import IdentitySettings
from tests.etcd import EtcdForTests, eventually


def known(identity: Identity, key: str) -> str:
    try:
        return identity.tenant_of({"authorization": f"Bearer {key}"})
    except Unauthenticated:
        return ""


async def test_keys_and_limits_are_followed_and_bad_values_counted(etcd: EtcdForTests) -> None:
    metrics = Metrics()
    store = commands.EtcdStore(etcd.endpoint)
    early = await asyncio.to_thread(commands.create, store, "alice", "early")
    identity = Identity(IdentitySettings(source="etcd"), metrics, etcd=etcd.settings())
    await identity.start()
    try:
        assert known(identity, early) == "alice"
        late = await asyncio.to_thread(commands.create, store, "bob", "")
        await eventually(lambda: known(identity, late) == "bob")
        limits = {"requests_per_minute": 7, "weight": 2.5}
        value = json.dumps({"protocol_version": 1, "tenant": "bob", "limits": limits})
        await etcd.ctl("put", "/epd/tenants/bob", stdin=value.encode())
        await eventually(lambda: identity.limits("bob").requests_per_minute == 7)
        assert identity.weight("bob") == 2.5
        # What is wrong is nobody's key: another hash than the entry's, an unknown field, a limit that is none.
        for key, bad in (
            ("/epd/keys/" + "0" * 64, {"protocol_version": 1, "hash": hash_key(late), "tenant": "eve"}),
            ("/epd/keys/" + "1" * 64, {"protocol_version": 1, "hash": "1" * 64, "tenant": "eve", "admin": True}),
            ("/epd/tenants/eve", {"protocol_version": 1, "tenant": "eve", "limits": {"weight": -1}}),
        ):
            await etcd.ctl("put", key, stdin=json.dumps(bad).encode())
        text = 'epd_registry_bad_values_total{cause="schema"} 2.0'
        await eventually(lambda: text in metrics.exposition().decode())
        assert 'cause="key"} 1.0' in metrics.exposition().decode()
        assert known(identity, late) == "bob"
        # Away: what it last said stands. Gone: refused at once.
        etcd.pause()
        assert known(identity, early) == "alice"
        etcd.resume()
        listed = await asyncio.to_thread(store.all)
        assert {record.tenant for record in listed} == {"alice", "bob", "eve"}
        await asyncio.to_thread(commands.revoke, store, hash_key(early)[:12])
        await eventually(lambda: not known(identity, early))
        assert known(identity, late) == "bob"
        with pytest.raises(UnknownId):
            await asyncio.to_thread(commands.revoke, store, hash_key(early)[:12])
    finally:
        await identity.stop()
