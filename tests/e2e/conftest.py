"""One etcd for all end-to-end tests, and meshes that tests of the same form share."""

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from common.registry.settings import EtcdSettings
from tests.checkpoints import tiny_checkpoint, vlm_checkpoint
from tests.etcd import etcd_server
from tests.mesh import LocalMesh
from tests.tokenizer import save_tokenizer

VLM = "vlm-"
KEPT = 4


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """checkpoint(architecture, **config): a tiny random one with a tokenizer, made once. "vlm-…" takes images."""
    made: dict[str, Path] = {}

    def make(architecture: str, **config: Any) -> Path:
        key = f"{architecture} {sorted(config.items())}"
        if key not in made:
            directory = tmp_path_factory.mktemp(architecture)
            if architecture.startswith(VLM):
                made[key] = vlm_checkpoint(architecture.removeprefix(VLM), directory, **config)
            else:
                made[key] = save_tokenizer(tiny_checkpoint(architecture, directory, **config))
        return made[key]

    return make


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def etcd(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    async with etcd_server(tmp_path_factory.mktemp("etcd")) as server:
        yield server


class Meshes:
    """Meshes by their options, started when first asked for. The latest `KEPT` stay: each goes on beating and watching,
    and in one process with dozens of them everything is slow."""

    def __init__(self, etcd: Any, checkpoint: Callable[[str], Path], directory: Path) -> None:
        self._etcd, self._checkpoint, self._directory = etcd, checkpoint, directory
        self._kept: OrderedDict[str, LocalMesh] = OrderedDict()
        self._count = 0

    def make(self, architecture: str = "llama", *, config: dict[str, Any] | None = None, **options: Any) -> LocalMesh:
        """A mesh of its own, to be entered by the test. config: of the checkpoint."""
        self._count += 1
        settings: EtcdSettings = self._etcd.settings(prefix=f"/epd-{self._count}")
        run_dir = self._directory / str(self._count)
        return LocalMesh(settings, self._checkpoint(architecture, **(config or {})), run_dir, **options)

    async def get(self, architecture: str = "llama", **options: Any) -> LocalMesh:
        """A shared one; a test leaves it as idle as it found it, and asks for at most `KEPT`."""
        key = f"{architecture} {sorted(options.items())}"
        if key not in self._kept:
            while len(self._kept) >= KEPT:
                await self._close_oldest()
            self._kept[key] = await self.make(architecture, **options).__aenter__()
        self._kept.move_to_end(key)
        return self._kept[key]

    async def close(self) -> None:
        while self._kept:
            await self._close_oldest()

    async def _close_oldest(self) -> None:
        _, mesh = self._kept.popitem(last=False)
        await mesh.__aexit__(None, None, None)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def meshes(etcd: Any, checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Meshes]:
    kept = Meshes(etcd, checkpoint, tmp_path_factory.mktemp("run"))
    yield kept
    await kept.close()
