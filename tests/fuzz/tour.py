"""All surfaces, each as it wants to be started and ended."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.fuzz.entries import Entries, Records
from tests.fuzz.frames import EngineFrames, Handshakes
from tests.fuzz.http import Http
from tests.fuzz.owners import Transfers
from tests.fuzz.peers import Peers
from tests.fuzz.pictures import Pictures
from tests.fuzz.public import PublicGrpc
from tests.fuzz.surface import Surface
from tests.fuzz.workers import WorkerGrpc
from tests.fuzz.world import World

# How many inputs of each in CI; a long run shares its time between them.
CI: dict[str, int] = {
    "gRPC, public": 1200,
    "gRPC, workers": 1200,
    "transfer frames": 400,
    "workers' answers": 160,
    "HTTP": 1200,
    "images": 2000,
    "etcd values": 3000,
    "etcd entries": 200,
    "engine frames": 1700,
    "shm hand-shake": 300,
}
MAKERS: dict[str, Callable[[World], Surface]] = {
    PublicGrpc.name: PublicGrpc,
    WorkerGrpc.name: WorkerGrpc,
    Transfers.name: Transfers,
    Peers.name: lambda world: Peers(world.directory / "evil"),
    Http.name: Http,
    Pictures.name: lambda world: Pictures(world.checkpoint),
    Records.name: lambda _: Records(),
    Entries.name: Entries,
    EngineFrames.name: lambda _: EngineFrames(),
    Handshakes.name: Handshakes,
}


@asynccontextmanager
async def opened(name: str, world: World) -> AsyncIterator[Surface]:
    """The surface of this name, ready for inputs."""
    if name == Peers.name:
        (world.directory / "evil").mkdir(exist_ok=True)
    surface: Any = MAKERS[name](world)
    if hasattr(surface, "start"):
        await surface.start()
    try:
        yield surface
    finally:
        if hasattr(surface, "close"):
            await surface.close()
