"""The workers' gRPC: what gateways and other workers call, one call at a time and as they belong together."""

import asyncio
import secrets
from dataclasses import dataclass
from random import Random
from typing import Any

from common.cache.keys import media_key
from common.rpc import wire
from common.transfer.key import Identity
from common.transfer.layout import show_layout
from epd.v1 import decode_pb2, encode_pb2, prefill_pb2, trace_pb2, transfer_pb2, types_pb2, worker_pb2
from services.worker import Worker
from tests.fuzz import messages
from tests.fuzz.calls import Outcome, call
from tests.fuzz.oracle import check_rpc
from tests.fuzz.surface import Surface
from tests.fuzz.world import World, new_key, picture
from tests.mesh import MODEL

TENANT = "acme"
PULLER = Identity("fuzz", "1")
IMAGE_ROWS = 6  # of `picture()`: 56 × 84 pixels, 28 a side


@dataclass
class Step:
    """One call of several: to whom, which, its messages; `leave_after` answers it is left."""

    worker: Worker
    method: str
    sent: list[Any]
    leave_after: int | None = None


def _sampling(rng: Random) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(temperature=rng.choice((0.0, 0.7)), max_tokens=rng.choice((1, 3, 8)), seed=1)


class Calls:
    """Valid calls to a mesh's workers."""

    def __init__(self, world: World) -> None:
        self.encode, self.prefill, self.decode = (world.worker(role) for role in ("encode", "prefill", "decode"))

    def prompt(self, rng: Random) -> list[int]:
        return [rng.randrange(20, 500) for _ in range(rng.choice((1, 15, 16, 17, 40)))]

    def encoding(self, rng: Random, key: types_pb2.RequestKey, ticket: bytes, puller: Identity = PULLER) -> Step:
        file = picture()
        image = encode_pb2.EncodeImage(media_key=_media_key(file), data=file, rows=IMAGE_ROWS)
        sent = encode_pb2.EncodeRequest(
            key=key,
            target=wire.identity_to_proto(self.encode.context.identity),
            model=MODEL,
            tenant=TENANT,
            ticket=ticket,
            puller=wire.identity_to_proto(puller),
            images=[image],
        )
        return Step(self.encode, "EncodeService/Encode", [sent], rng.choice((None, 1, 2)))

    def prefilling(
        self, rng: Random, key: types_pb2.RequestKey, ticket: bytes, prompt: list[int], puller: Identity = PULLER
    ) -> Step:
        sent = prefill_pb2.PrefillRequest(
            key=key,
            target=wire.identity_to_proto(self.prefill.context.identity),
            model=MODEL,
            prompt_token_ids=prompt,
            sampling=_sampling(rng),
            choices=[0],
            tenant=TENANT,
        )
        if ticket:
            sent.publication.ticket = ticket
            sent.publication.puller.CopyFrom(wire.identity_to_proto(puller))
        return Step(self.prefill, "PrefillService/Prefill", [sent])

    def decoding(self, rng: Random, key: types_pb2.RequestKey, ticket: bytes, prompt: list[int]) -> Step:
        sent = decode_pb2.DecodeRequest(
            key=key,
            target=wire.identity_to_proto(self.decode.context.identity),
            model=MODEL,
            prompt_token_ids=prompt,
            sampling=_sampling(rng),
            choices=[0],
            tenant=TENANT,
        )
        sent.source.owner.CopyFrom(wire.identity_to_proto(self.prefill.context.identity))
        sent.source.address, sent.source.ticket = self.prefill.address, ticket
        return Step(self.decode, "DecodeService/Decode", [sent])

    def pulling(self, rng: Random, owner: Worker, key: types_pb2.RequestKey, ticket: bytes) -> Step:
        opening = transfer_pb2.PullOpen(
            key=key,
            ticket=ticket,
            owner=wire.identity_to_proto(owner.context.identity),
            puller=wire.identity_to_proto(PULLER),
            channels=["grpc"],
            tenant=TENANT,
        )
        tables = owner.transfers.tables
        table = tables.embeddings if key.part else tables.kv
        assert table is not None
        show_layout(opening, table.engine.layout)
        sent = [transfer_pb2.PullRequest(open=opening)]
        ack = transfer_pb2.PullRequest(ack=transfer_pb2.PullAck(complete_blocks=1, bytes_read=10))
        done = transfer_pb2.PullRequest(done=transfer_pb2.PullDone())
        sent += rng.choices((ack, done), k=rng.randrange(3))
        if rng.random() < 0.15:  # the wrong order
            rng.shuffle(sent)
        return Step(owner, "TransferService/Pull", sent, rng.choice((None, 1, 2, 4)))

    def reading(self, owner: Worker, key: types_pb2.RequestKey, ticket: bytes) -> Step:
        span = transfer_pb2.ReadSpan(first_layer=0, layer_count=1, first_block=0, block_count=1)
        return Step(
            owner, "TransferService/Read", [transfer_pb2.ReadRequest(key=key, ticket=ticket, spans=[span, span])]
        )


class WorkerGrpc(Surface):
    name = "gRPC, workers"

    def __init__(self, world: World) -> None:
        self._world = world
        self._calls = Calls(world)

    def _single(self, rng: Random) -> list[Step]:
        calls, key, ticket = self._calls, new_key(), secrets.token_bytes(16)
        worker = rng.choice(self._world.mesh.workers)
        prompt = calls.prompt(rng)
        match rng.randrange(9):
            case 0:
                return [calls.encoding(rng, new_key(part=1), ticket)]
            case 1:
                step = calls.prefilling(rng, key, b"", prompt)
                step.sent[0].embeddings.add(
                    media_key=_media_key(b"x"),
                    owner=wire.identity_to_proto(calls.encode.context.identity),
                    address=calls.encode.address,
                    ticket=ticket,
                    rows=1,
                    length=1,
                    part=1,
                )
                return [step]
            case 2:
                return [calls.prefilling(rng, key, b"", prompt)]
            case 3:
                step = calls.decoding(rng, key, ticket, prompt)
                step.sent[0].subscription.subscriber = secrets.token_bytes(16)
                return [step]
            case 4:
                subscribe = decode_pb2.SubscribeRequest(subscriber=secrets.token_bytes(16))
                return [Step(calls.decode, "DecodeService/Subscribe", [subscribe], 1)]
            case 5:
                finish = decode_pb2.FinishRequest(key=key, choices=[0, 1])
                hold = decode_pb2.HoldRequest(key=key, hold=True)
                return [
                    Step(calls.decode, "DecodeService/Finish", [finish]),
                    Step(calls.decode, "DecodeService/Hold", [hold]),
                ]
            case 6:
                watch = worker_pb2.WatchRequest(from_sequence=3, incarnation=worker.context.identity.incarnation)
                return [Step(worker, "WorkerService/Watch", [watch], 2)]
            case 7:
                trace = trace_pb2.GetTraceRequest(trace_id=rng.randbytes(16).hex())
                return [
                    Step(worker, "WorkerService/GetStatus", [worker_pb2.GetStatusRequest()]),
                    Step(worker, "WorkerService/ServeAdapter", [worker_pb2.ServeAdapterRequest(path="x", name="x")]),
                    Step(worker, "WorkerService/DropAdapter", [worker_pb2.DropAdapterRequest(name="x")]),
                    Step(worker, "TraceService/GetTrace", [trace]),
                ]
            case _:
                owner = rng.choice((calls.encode, calls.prefill))
                part = int(owner is calls.encode)
                return [calls.pulling(rng, owner, new_key(part), ticket), calls.reading(owner, new_key(part), ticket)]

    def _together(self, rng: Random) -> list[Step]:
        """Calls that share a key and a ticket, so that the faults meet a running transfer."""
        calls, ticket, prompt = self._calls, secrets.token_bytes(16), self._calls.prompt(rng)
        match rng.randrange(3):
            case 0:  # a prompt, handed over
                key = new_key()
                puller = calls.decode.context.identity
                subscriber = secrets.token_bytes(16)
                decoding = calls.decoding(rng, key, ticket, prompt)
                steps = [calls.prefilling(rng, key, ticket, prompt, puller)]
                if rng.random() < 0.5:
                    subscribe = decode_pb2.SubscribeRequest(subscriber=subscriber)
                    steps.insert(0, Step(calls.decode, "DecodeService/Subscribe", [subscribe], rng.choice((1, 3))))
                    decoding.sent[0].subscription.subscriber = subscriber
                steps.append(decoding)
                steps.append(Step(calls.decode, "DecodeService/Hold", [decode_pb2.HoldRequest(key=key, hold=False)]))
                steps.append(
                    Step(calls.decode, "DecodeService/Finish", [decode_pb2.FinishRequest(key=key, choices=[0])])
                )
                return steps
            case 1:  # a prompt, pulled and read by us
                key = new_key()
                return [
                    calls.prefilling(rng, key, ticket, prompt),
                    calls.pulling(rng, calls.prefill, key, ticket),
                    calls.reading(calls.prefill, key, ticket),
                ]
            case _:  # an image, pulled and read by us
                key = new_key(part=1)
                return [
                    calls.encoding(rng, key, ticket),
                    calls.pulling(rng, calls.encode, key, ticket),
                    calls.reading(calls.encode, key, ticket),
                ]

    async def one(self, rng: Random) -> str:
        steps = self._single(rng) if rng.random() < 0.6 else self._together(rng)
        broken = rng.randrange(len(steps))
        running: list[asyncio.Task[Outcome]] = []
        async with asyncio.TaskGroup() as group:
            for number, step in enumerate(steps):
                most = 3 if number == broken else 0
                sent = [messages.mutated(rng, each, most) if most else each.SerializeToString() for each in step.sent]
                if number == broken and rng.random() < 0.03:
                    sent = sent * rng.choice((0, 2))
                channel = self._world.channel(step.worker.address)
                running.append(
                    group.create_task(
                        call(channel, f"/epd.v1.{step.method}", sent, leave_after=step.leave_after, timeout=2.0)
                    )
                )
                for _ in range(rng.choice((1, 20))):
                    await asyncio.sleep(0)
        for task in running:
            outcome = task.result()
            check_rpc(outcome.code, outcome.reason, outcome.details)
        return running[broken].result().label

    async def alive(self) -> None:
        await self._world.alive()


def _media_key(file: bytes) -> bytes:
    return media_key(file, b"options", TENANT.encode())
