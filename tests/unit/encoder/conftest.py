"""Fixtures of the encoder tests."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="epd") as directory:  # short: sockets have short names
        yield Path(directory)


@pytest.fixture(params=["shm", "grpc"])
def channel(request: pytest.FixtureRequest) -> str:
    return str(request.param)
