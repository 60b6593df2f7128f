"""Values and keys in etcd, as whoever may write there could leave them: read by the registry, used by a gateway."""

import json
from random import Random
from typing import Any

import msgspec

from common.cache.keys import EmbeddingLayout, KvLayout
from common.registry.adapter import EtcdConnection
from common.registry.record import BadRecord, WorkerRecord, decode, encode
from common.rpc import deadline
from epd.v1 import generation_pb2
from tests.etcd import eventually
from tests.fuzz.calls import call
from tests.fuzz.messages import damaged
from tests.fuzz.oracle import Fault, check_rpc
from tests.fuzz.surface import Surface
from tests.fuzz.world import World
from tests.mesh import MODEL, request

_ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        "",
        "a",
        "é\u0000",
        "x" * 70_000,
        "127.0.0.1:1",
        "[::]:0",
        "unix:/x",
        "host",
        ":1",
        "a:b",
        0,
        -1,
        1,
        16,
    ),
    *(2**31, 2**63, 2**64, -(2**63), 1e308, 0.5, [], {}, [[]], ["encode"], ["prefill", "decode"], ["nothing"]),
)


def record(rng: Random, name: str = "fuzzed") -> WorkerRecord:
    layout = KvLayout(
        model=MODEL, revision="r", dtype="float32", num_layers=3, num_kv_heads=2, head_dim=16, block_size=16
    )
    return WorkerRecord(
        worker_id=name,
        incarnation="1",
        roles=rng.choice((("encode",), ("prefill",), ("decode",), ("encode", "prefill", "decode"))),
        address="127.0.0.1:1",
        model=MODEL,
        layout=layout,
        max_context=160,
        vocab_size=512,
        num_blocks=64,
        executor="modules",
        embedding_layout=EmbeddingLayout(model=MODEL, revision="r", dtype="float32", levels=1, hidden_size=64),
        embedding_rows=64,
    )


def mutated(rng: Random, value: bytes) -> bytes:
    """JSON with fields changed, left out, added or doubled; nested, huge, or no JSON at all."""
    table = json.loads(value)
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        place = table
        if rng.random() < 0.4:
            place = rng.choice([each for each in table.values() if isinstance(each, dict)] or [table])
        name = rng.choice([*place, "extra"])
        if rng.random() < 0.2:
            place.pop(name, None)
        else:
            place[name] = rng.choice(_ODD)
    made = json.dumps(table).encode()
    match rng.randrange(14):
        case 0:
            return damaged(rng, made)
        case 1:
            return rng.randbytes(rng.choice((0, 1, 100, 70_000)))
        case 2:
            return made.replace(
                b'"executor"', rng.choice((b'"x": ' + b"[" * 20_000, b'"executor": 1, "executor"', b'"\xff"'))
            )
        case 3:
            return made + b" " * rng.choice((1, 64 * 1024, 1 << 20))
    return made


class Records(Surface):
    """Through the decoder alone."""

    name = "etcd values"
    at_once = 1

    async def one(self, rng: Random) -> str:
        try:
            decode(mutated(rng, encode(record(rng))))
        except BadRecord as error:
            return error.cause
        return "OK"

    async def alive(self) -> None:
        good = record(Random(0))
        if decode(encode(good)) != good:
            raise Fault("a good record is not read any more")


class Entries(Surface):
    """Through etcd and the gateway that watches it, with a request beside it: it finds its way to the real workers."""

    name = "etcd entries"
    at_once = 4

    def __init__(self, world: World) -> None:
        self._world = world
        self._etcd = EtcdConnection(world.etcd.settings(prefix="/fuzz"))
        self._prefix = world.etcd.settings(prefix="/fuzz").workers_prefix
        self._put: set[str] = set()

    async def one(self, rng: Random) -> str:
        name = rng.choice(("fuzzed", f"fuzzed-{rng.randrange(4)}", "é", "x" * 300, "a/b", "fuzzed\n"))
        key = self._prefix + name
        self._put.add(key)
        made = msgspec.structs.replace(record(rng, "fuzzed"), worker_id=name)
        value = mutated(rng, msgspec.json.encode(made))
        with deadline.detached():
            client = await self._etcd._connected(self._now() + 5)
        await client.kv.put(key, value[: 1 << 20])
        asked = request([30, 31, 32], max_tokens=2) if rng.random() < 0.8 else None
        sent = asked or generation_pb2.ListModelsRequest()
        method = "Generate" if asked is not None else "ListModels"
        outcome = await call(self._world.gateway, f"/epd.v1.GenerationService/{method}", [sent.SerializeToString()])
        check_rpc(outcome.code, outcome.reason, outcome.details)
        return outcome.label

    def _now(self) -> float:
        import asyncio

        return asyncio.get_running_loop().time()

    async def alive(self) -> None:
        client = await self._etcd._connected(self._now() + 5)
        for key in self._put:
            await client.kv.delete(key)
        fleet = self._world.mesh.gateway.fleet
        mine = {worker.settings.worker_id for worker in self._world.mesh.workers}
        await eventually(lambda: {worker.worker_id for worker in fleet.all()} == mine)
        await self._world.alive()

    async def close(self) -> None:
        await self._etcd.close()
