"""Fixtures of the transfer tests."""

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.transfer.mesh import Mesh


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    with tempfile.TemporaryDirectory(prefix="epd") as directory:  # short: sockets have short names
        made = Mesh(Path(directory))
        yield made
        await made.close()


@pytest.fixture(params=["shm", "grpc"])
def channel(request: pytest.FixtureRequest) -> str:
    return str(request.param)
