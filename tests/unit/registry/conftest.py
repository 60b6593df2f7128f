from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.etcd import EtcdForTests, etcd_server


@pytest.fixture
async def etcd(tmp_path: Path) -> AsyncIterator[EtcdForTests]:
    async with etcd_server(tmp_path) as server:
        yield server
