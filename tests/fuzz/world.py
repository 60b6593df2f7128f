"""A real mesh to be fuzzed: every role, a tiny model that takes images, pools and times small enough to run out."""

import asyncio
import io
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
from PIL import Image

from common.policies.handoff.terms import HandoffLimits
from common.rpc import wire
from common.transfer.key import TransferKey
from epd.v1 import generation_pb2, types_pb2
from services.worker import Worker
from tests.checkpoints import vlm_checkpoint
from tests.etcd import EtcdForTests, etcd_server
from tests.fuzz.calls import open_channel
from tests.fuzz.oracle import Fault, Logged
from tests.mesh import MODEL, LocalMesh, collect, request

LIMITS = HandoffLimits(create_wait_seconds=0.3, stall_seconds=0.5, room_seconds=1.0, unpulled_seconds=0.5)
PROMPTS: tuple[list[int], ...] = ([33, 34, 35, 30, 31], list(range(40, 80)))


def picture(width: int = 56, height: int = 84, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.linear_gradient("L").resize((width, height)).convert("RGB").save(out, kind)
    return out.getvalue()


def new_key(part: int = 0, attempt: int = 1) -> types_pb2.RequestKey:
    return wire.key_to_proto(TransferKey(secrets.token_bytes(16), 0, attempt, part))


class World:
    """One mesh with a worker for each role, a client, and the right answers to a few requests."""

    def __init__(self, mesh: LocalMesh, etcd: EtcdForTests, checkpoint: Path, directory: Path) -> None:
        self.mesh, self.etcd, self.checkpoint, self.directory = mesh, etcd, checkpoint, directory
        self.logged = Logged()
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._right: list[list[int]] = []

    def worker(self, role: str) -> Worker:
        return next(worker for worker in self.mesh.workers if role in worker.settings.roles)

    @property
    def gateway(self) -> grpc.aio.Channel:
        return self.channel(self.mesh.gateway.grpc_address)

    def channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = open_channel(address)
        return self._channels[address]

    async def learn(self) -> None:
        self._right = await self._answers()

    async def alive(self) -> None:
        """Nothing is left of any request, no error was logged, and the right tokens come."""
        await self.mesh.settled()
        self.logged.check()
        if (found := await self._answers()) != self._right:
            raise Fault(f"wrong tokens: {found}, not {self._right}")

    async def _answers(self) -> list[list[int]]:
        asked = [request(prompt, max_tokens=6, ignore_eos=True) for prompt in PROMPTS]
        chat = generation_pb2.GenerateRequest(model=MODEL)
        content = chat.chat.messages.add(role="user").content
        content.add().image.data = picture()
        content.add(text="and?")
        chat.sampling.CopyFrom(types_pb2.SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
        answers = [await collect(self.mesh.stub.Generate(each, timeout=60)) for each in (*asked, chat)]
        return [answer.tokens for answer in answers]

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))


@asynccontextmanager
async def world(directory: Path) -> AsyncIterator[World]:
    checkpoint = await asyncio.to_thread(vlm_checkpoint, "qwen2_vl", directory / "model")
    async with AsyncExitStack() as stack:
        etcd = await stack.enter_async_context(etcd_server(directory / "etcd"))
        mesh = LocalMesh(
            etcd.settings(prefix="/fuzz"),
            checkpoint,
            directory / "run",
            ("encode", "prefill", "decode"),
            worker={"handoff": LIMITS},
            gateway={
                "default_timeout_seconds": 10.0,
                "route_wait_seconds": 1.0,
                "hold_seconds": 2.0,
                "recovery_seconds": 5.0,
            },
            encoder={"rows": 256},
            num_blocks=64,
            max_context=160,
            embedding_rows=256,
        )
        await stack.enter_async_context(mesh)
        made = World(mesh, etcd, checkpoint, directory)
        stack.push_async_callback(made.close)
        await made.learn()
        logging.root.addHandler(made.logged)
        stack.callback(logging.root.removeHandler, made.logged)
        yield made
