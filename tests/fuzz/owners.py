"""Transfer frames: workers that pull from an owner whose stream and pieces are wrong."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Any

import grpc

from common.cache.keys import embedding_hash, media_key, token_hash
from common.rpc import wire
from common.transfer.channel import checksum
from common.transfer.key import Identity
from epd.v1 import decode_pb2, prefill_pb2, transfer_pb2, types_pb2
from tests.fuzz import messages
from tests.fuzz.calls import call
from tests.fuzz.oracle import check_rpc
from tests.fuzz.surface import Surface
from tests.fuzz.world import World, new_key
from tests.mesh import MODEL

TENANT = "acme"
PROMPT = list(range(40, 75))  # three blocks
ROWS = 6
_SERVICE = "epd.v1.TransferService"


class Plan:
    """What the owner will say in one pull. spoil: what happens to a piece of its data on the way."""

    def __init__(self, said: list[bytes], unit_bytes: int, spoil: Callable[[Any], list[bytes]], pause: float) -> None:
        self.said, self.unit_bytes, self.spoil, self.pause = said, unit_bytes, spoil, pause


class Owner(grpc.GenericRpcHandler):
    """Answers pulls with raw bytes, by the request id."""

    def __init__(self) -> None:
        self.plans: dict[bytes, Plan] = {}
        self.address = ""
        self._server = grpc.aio.server()

    async def start(self) -> None:
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)

    def service(self, details: Any) -> Any:
        if details.method == f"/{_SERVICE}/Pull":
            return grpc.stream_stream_rpc_method_handler(self._pull)
        return grpc.unary_stream_rpc_method_handler(self._read)

    async def _pull(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        opening = transfer_pb2.PullRequest.FromString(await anext(aiter(requests)))
        plan = self.plans.get(opening.open.key.request_id)
        if plan is None:  # the call that pulls is over
            return
        for said in plan.said:
            yield said
            await asyncio.sleep(plan.pause)
        async for _ in requests:  # acks, until the puller is done or leaves
            pass

    async def _read(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        asked = transfer_pb2.ReadRequest.FromString(request)
        plan = self.plans.get(asked.key.request_id)
        if plan is None:
            return
        for span in asked.spans:
            data = bytes(span.layer_count * span.block_count * plan.unit_bytes)
            for piece in plan.spoil(transfer_pb2.ReadResponse(data=data, crc32=checksum(data))):
                yield piece


class Transfers(Surface):
    name = "transfer frames"
    at_once = 12

    def __init__(self, world: World) -> None:
        self._world = world
        self._owner = Owner()

    async def start(self) -> None:
        await self._owner.start()

    async def close(self) -> None:
        await self._owner.stop()

    def _plan(self, rng: Random, key: types_pb2.RequestKey, count: int, content: bytes, layout: Any) -> Plan:
        """A right one, then a few things wrong."""
        blocks = -(-count // layout.block_size)
        event = transfer_pb2.PullResponse
        said: list[Any] = [
            event(opened=transfer_pb2.PullOpened(channel=rng.choice(("grpc",) * 8 + ("shm", "rdma")))),
            event(
                started=transfer_pb2.PullStarted(token_count=count, block_ids=range(blocks), generations=[1] * blocks)
            ),
            event(ready=transfer_pb2.PullReady(complete_blocks=blocks, layers_done=layout.num_layers)),
            event(
                finished=transfer_pb2.PullFinished(
                    key=key,
                    token_count=count,
                    token_hash=content,
                    first=[] if key.part else [types_pb2.ChoiceTokens(choice=0, token_ids=[33])],
                )
            ),
        ]
        kind = rng.randrange(12)
        if kind == 0:
            rng.shuffle(said)
        elif kind == 1:
            del said[rng.randrange(len(said))]
        elif kind == 2:
            said.insert(rng.randrange(len(said)), rng.choice(said))
        broken = rng.randrange(8)
        sent = [
            messages.mutated(rng, each, 2) if number == broken else each.SerializeToString()
            for number, each in enumerate(said)
        ]

        def spoil(piece: Any) -> list[bytes]:
            if broken < 5 or rng.random() < 0.3:
                return [piece.SerializeToString()]
            return [messages.mutated(rng, piece, 2)] * rng.choice((1, 1, 0, 2))

        return Plan(sent, layout.unit_bytes, spoil, rng.choice((0.0, 0.0, 0.01)))

    async def one(self, rng: Random) -> str:
        pulls_kv = rng.random() < 0.6
        worker = self._world.worker("decode" if pulls_kv else "prefill")
        # Sometimes one that has a socket here, for the shm channel.
        real = self._world.worker("prefill" if pulls_kv else "encode").context.identity
        owner = wire.identity_to_proto(rng.choice((Identity("evil", "1"), real)))
        ticket, key = secrets.token_bytes(16), new_key()
        common: dict[str, Any] = {
            "key": key,
            "target": wire.identity_to_proto(worker.context.identity),
            "model": MODEL,
            "prompt_token_ids": PROMPT,
            "choices": [0],
            "sampling": types_pb2.SamplingParams(temperature=0.0, max_tokens=3),
            "tenant": TENANT,
        }
        if pulls_kv:
            assert worker.transfers.puller is not None
            layout: Any = worker.context.record.layout
            source = decode_pb2.KvSource(owner=owner, address=self._owner.address, ticket=ticket)
            request: Any = decode_pb2.DecodeRequest(**common, source=source)
            plan = self._plan(rng, key, len(PROMPT), token_hash(PROMPT), layout)
            method = "DecodeService/Decode"
        else:
            assert worker.transfers.embeddings is not None
            layout = worker.transfers.embeddings.layout
            image = media_key(rng.randbytes(8), b"", b"")
            part = types_pb2.RequestKey()
            part.CopyFrom(key)
            part.part = 1
            request = prefill_pb2.PrefillRequest(**common)
            request.embeddings.add(
                media_key=image,
                owner=owner,
                address=self._owner.address,
                ticket=ticket,
                rows=ROWS,
                length=ROWS,
                part=1,
                grid=(1, 3, 2),
            )
            plan = self._plan(rng, part, ROWS, embedding_hash([(image, ROWS)]), layout)
            method = "PrefillService/Prefill"
        self._owner.plans[key.request_id] = plan
        try:
            outcome = await call(
                self._world.channel(worker.address), f"/epd.v1.{method}", [request.SerializeToString()], timeout=2.0
            )
        finally:
            with contextlib.suppress(KeyError):
                del self._owner.plans[key.request_id]
        check_rpc(outcome.code, outcome.reason, outcome.details)
        return outcome.label

    async def alive(self) -> None:
        await self._world.alive()
