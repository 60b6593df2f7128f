"""A streaming gRPC client that notes when tokens come."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from epd.v1 import generation_pb2, generation_pb2_grpc


@dataclass
class Timeline:
    """Seconds of one request on the client's clock; `times` has one entry a token."""

    sent: float
    times: list[float] = field(default_factory=list)
    accounting: generation_pb2.Accounting | None = None

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def tpot(self) -> float:
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)


async def ask(
    stub: generation_pb2_grpc.GenerationServiceStub,
    prompt: Sequence[int],
    tokens: int,
    *,
    stream_interval: int = 1,
    timeout: float = 300,
) -> Timeline:
    """Greedy, `tokens` tokens whatever they are."""
    request = generation_pb2.GenerateRequest(stream_interval=stream_interval)
    request.token_ids.ids.extend(prompt)
    sampling = request.sampling
    sampling.max_tokens, sampling.temperature, sampling.ignore_eos = tokens, 0.0, True
    line = Timeline(time.perf_counter())
    async for message in stub.Generate(request, timeout=timeout):
        now = time.perf_counter()
        for choice in message.choices:
            line.times += [now] * len(choice.token_ids)
        if message.HasField("accounting"):
            line.accounting = message.accounting
    return line


async def ask_all(
    stub: generation_pb2_grpc.GenerationServiceStub, prompts: Sequence[Sequence[int]], tokens: int, **options: int
) -> list[Timeline]:
    return list(await asyncio.gather(*(ask(stub, prompt, tokens, **options) for prompt in prompts)))
