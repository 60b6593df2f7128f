"""A whole mesh in this process: real etcd, real gRPC on loopback, engines in threads."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from common.encoder.settings import EncoderSettings
from common.engine.settings import EngineSettings
from common.registry.settings import EtcdSettings
from common.rpc.channel import connect
from epd.v1 import generation_pb2, generation_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from services.gateway.main import Gateway
from services.gateway.settings import GatewaySettings
from services.worker import Worker
from services.worker_settings import WorkerSettings

PATIENCE_SECONDS = 150.0  # a bound for broken code, on cores that others use too
MODEL = "tiny"


@dataclass
class Choice:
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: int = 0
    logprobs: list[types_pb2.TokenLogprob] = field(default_factory=list)
    stop_string: str = ""


@dataclass
class Answer:
    """A whole stream, put together."""

    choices: dict[int, Choice]
    usage: generation_pb2.Usage
    accounting: generation_pb2.Accounting
    messages: int
    prompt: generation_pb2.Prompt | None = None

    @property
    def tokens(self) -> list[int]:
        return self.choices[0].tokens


async def collect(stream: Any) -> Answer:
    answer = Answer({}, generation_pb2.Usage(), generation_pb2.Accounting(), 0)
    async for message in stream:
        answer.messages += 1
        if message.HasField("prompt"):
            assert answer.prompt is None
            answer.prompt = message.prompt
        for delta in message.choices:
            choice = answer.choices.setdefault(delta.index, Choice())
            choice.tokens += delta.token_ids
            choice.text += delta.text
            choice.logprobs += delta.logprobs
            choice.finish_reason = delta.finish_reason or choice.finish_reason
            choice.stop_string = delta.stop_string or choice.stop_string
        if message.HasField("usage"):
            answer.usage.CopyFrom(message.usage)
        if message.HasField("accounting"):
            answer.accounting.CopyFrom(message.accounting)
    return answer


def request(
    prompt: Sequence[int] | str,
    *,
    model: str = MODEL,
    n: int = 1,
    stop: Sequence[str] = (),
    priority: int = 0,
    echo: bool = False,
    **sampling: Any,
) -> Any:
    """A GenerateRequest; greedy unless a temperature is given."""
    made = generation_pb2.GenerateRequest(model=model, n=n, stop=stop, priority=priority, echo=echo)
    if isinstance(prompt, str):
        made.text = prompt
    else:
        made.token_ids.ids.extend(prompt)
    sampling.setdefault("temperature", 0.0)
    made.sampling.CopyFrom(types_pb2.SamplingParams(**sampling))
    return made


class MeshClient:
    """What tests do with a mesh, whatever it is made of. `connect` it to its gateway first."""

    channel: Any
    stub: Any
    metadata: Sequence[tuple[str, str]] = ()  # of every call: a key, where one is needed

    async def connect(self, address: str) -> None:
        self.channel = connect(address)
        self.stub = generation_pb2_grpc.GenerationServiceStub(self.channel)

    async def generate(self, prompt: Sequence[int] | str, **options: Any) -> Answer:
        return await collect(self.open(prompt, **options))

    def open(self, prompt: Sequence[int] | str, *, timeout: float = PATIENCE_SECONDS, **options: Any) -> Any:
        """The stream of one request, to be read by the test."""
        return self.stub.Generate(request(prompt, **options), timeout=timeout, metadata=self.metadata)

    async def routable_workers(self) -> tuple[int, int]:
        """Prefill and decode workers that the gateway can send requests to; (0, 0) too while it cannot be reached."""
        try:
            models = (await self.stub.ListModels(generation_pb2.ListModelsRequest(), metadata=self.metadata)).models
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return 0, 0
        return (models[0].prefill_workers, models[0].decode_workers) if models else (0, 0)

    async def encode_workers(self) -> int:
        """Encode workers that the gateway can send images to. It must be there."""
        models = (await self.stub.ListModels(generation_pb2.ListModelsRequest(), metadata=self.metadata)).models
        return models[0].encode_workers if models else 0

    async def settled(self) -> None:
        """Waits until nothing is left of any request; fails with what is."""
        left: list[str] = ["not looked yet"]
        try:
            async with asyncio.timeout(10):
                while left:
                    left = await self.leftovers()
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"left behind: {left}") from None

    async def leftovers(self) -> list[str]:
        """What an idle mesh must not have."""
        raise NotImplementedError


def left_in(name: str, status: worker_pb2.GetStatusResponse) -> list[str]:
    """What an idle worker must not have: broken counts, held or active blocks or rows, open publications and pulls."""
    load = status.load
    left = [f"{name}: {error}" for error in status.integrity_errors]
    if load.free_blocks + load.cached_blocks != load.total_blocks:
        left.append(f"{name}: {load.active_blocks} active and {load.held_blocks} held blocks")
    if load.free_rows + load.cached_rows != load.total_rows:
        left.append(f"{name}: {load.held_rows} held embedding rows")
    left += [f"{name}: running"] * (load.running + load.waiting + load.pending_images)
    left += [f"{name}: publication"] * status.open_publications + [f"{name}: pull"] * status.open_pulls
    return left


class LocalMesh(MeshClient):
    """One gateway and a worker for each entry of `roles`, e.g. ("encode", "prefill", "decode") or ("prefill,decode",).

    engine: settings of every worker's model, encoder: of encode workers.
    """

    def __init__(
        self,
        etcd: EtcdSettings,
        checkpoint: Path,
        run_dir: Path,
        roles: Sequence[str] = ("prefill", "decode"),
        *,
        channels: tuple[str, ...] = ("shm", "grpc"),
        worker: dict[str, Any] | None = None,
        gateway: dict[str, Any] | None = None,
        encoder: dict[str, Any] | None = None,
        **engine: Any,
    ) -> None:
        self._encoders = sum("encode" in each.split(",") for each in roles)
        engine = {"dtype": "float32", "num_blocks": 256, "served_name": MODEL, **engine}
        self.workers = [
            Worker(
                WorkerSettings(
                    roles=tuple(each.split(",")),
                    worker_id=f"{each.replace(',', '-')}-{number}",
                    etcd=etcd,
                    run_dir=str(run_dir),
                    channels=channels,
                    engine_in_thread=True,
                    engine=EngineSettings(model_dir=str(checkpoint), **engine),
                    encoder=EncoderSettings(**(encoder or {})),
                    **(worker or {}),
                )
            )
            for number, each in enumerate(roles)
        ]
        self.gateway = Gateway(
            GatewaySettings(
                **{
                    "models": {MODEL: str(checkpoint)},
                    "grpc_bind": "127.0.0.1:0",
                    "http_bind": "127.0.0.1:0",
                    "etcd": etcd,
                    **(gateway or {}),
                }
            )
        )

    async def __aenter__(self) -> "LocalMesh":
        try:
            await asyncio.gather(*(worker.start() for worker in self.workers))
            await self.gateway.start()
            await self.connect(self.gateway.grpc_address)
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not all(await self.routable_workers()) or await self.encode_workers() < self._encoders:
                    await asyncio.sleep(0.02)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self._stop()

    async def _stop(self) -> None:
        await asyncio.gather(self.gateway.stop(), *(worker.stop() for worker in self.workers))

    async def status(self, worker: Worker) -> worker_pb2.GetStatusResponse:
        async with connect(worker.address) as channel:
            return await worker_pb2_grpc.WorkerServiceStub(channel).GetStatus(worker_pb2.GetStatusRequest())

    async def leftovers(self) -> list[str]:
        """What an idle mesh must not have: broken counts, held or active blocks, open publications, pulls and spans."""
        left = [f"gateway span {name}" for name in self.gateway.telemetry.open_span_names()]
        for worker in self.workers:
            name = worker.settings.worker_id
            left += left_in(name, await self.status(worker))
            # Spans of calls such as this one come and go; those of requests must all have ended.
            spans = worker.telemetry.open_span_names()
            stages = ("encode.", "prefill.", "decode.", "transfer.")
            left += [f"{name}: span {span}" for span in spans if span.startswith(stages)]
            if (embeddings := worker.transfers.embeddings) and embeddings.room.free < embeddings.room.num_blocks:
                left.append(f"{name}: room for embeddings is taken")
        return left
