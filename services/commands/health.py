"""`epd health`. Containers are asked by it again and again, so it imports little."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import Unavailable
from epd.v1 import generation_pb2, generation_pb2_grpc
from services.commands.client import NO_TRUST, dial, gateway_address
from services.commands.trust import Trust

_TIMEOUT_SECONDS = 5.0


async def health(address: str, service: str, trust: Trust = NO_TRUST) -> None:
    """Raises Unavailable unless the server says SERVING and, asked as a whole, a gateway has workers for a model."""
    target = gateway_address(address)
    async with dial(target, trust) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=service), timeout=_TIMEOUT_SECONDS
        )
        models = None if service else await _models(channel)
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise Unavailable(f"{target} says {name}")
    if models == []:
        raise Unavailable(
            f"the gateway at {target} runs, but no worker can take requests now: workers are starting, or gone, or "
            "their roles do not fit together; look at `epd status`"
        )
    print(f"{target} {name}{': ' if models else ''}{', '.join(models or ())}")


async def _models(channel: grpc.aio.Channel) -> list[str] | None:
    """Models that a request would reach now; None of a server that is no gateway."""
    try:
        answer = await generation_pb2_grpc.GenerationServiceStub(channel).ListModels(
            generation_pb2.ListModelsRequest(), timeout=_TIMEOUT_SECONDS
        )
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return None
        raise
    return [model.id for model in answer.models]
