"""Every surface with fixed seeds: ten thousand inputs in all. `make fuzz` goes on with new ones."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.fuzz.entries import Entries
from tests.fuzz.surface import Ledger, play
from tests.fuzz.tour import CI, opened
from tests.fuzz.world import World, world

SEED = "1"
module = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    async with world(tmp_path_factory.mktemp("fuzz")) as made:
        yield made


def test_ten_thousand_inputs() -> None:
    assert sum(CI.values()) >= 10_000


@module
@pytest.mark.parametrize("name", CI)
async def test_surface(name: str, mesh: World) -> None:
    ledger = Ledger()
    async with opened(name, mesh) as surface:
        await play(surface, SEED, range(CI[name]), ledger)
    assert ledger.total == CI[name]
    if name != Entries.name:  # whose requests beside it all go well
        assert len(ledger.of(name)) > 1  # some were taken, some refused
