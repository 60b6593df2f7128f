"""The only encode worker dies: a request that was with it waits for it to start again, as for any other worker."""

import asyncio
from pathlib import Path

import grpc
import pytest

from tests.unit.gateway.conftest import Mesh, generate
from tests.unit.gateway.test_images import WIDE, chat, vlm_dir

__all__ = ["vlm_dir"]  # a fixture


async def test_case_d11_the_only_encoder_is_killed_and_starts_again(vlm_dir: Path) -> None:
    mesh = Mesh(vlm_dir)
    await mesh.start(route_wait_seconds=0.2, recovery_seconds=30.0)
    try:
        await mesh.pair()
        encoder = await mesh.add("e0", ["encode"])
        encoder.encode_gate.clear()
        asked = asyncio.create_task(generate(mesh, chat(WIDE, "?")))
        await encoder.until(lambda: encoder.running == 1)
        await encoder.kill()
        del mesh.workers["e0"]
        await mesh.publish(wait=False)
        done, _ = await asyncio.wait((asked,), timeout=1.0)  # longer than a new request would wait
        assert not done
        await mesh.add("e0", ["encode"], incarnation="2")
        answer = await asyncio.wait_for(asked, 20)
        assert answer
    finally:
        await mesh.stop()


async def test_a_new_request_waits_no_longer_than_for_a_route(vlm_dir: Path) -> None:
    mesh = Mesh(vlm_dir)
    await mesh.start(route_wait_seconds=0.2, recovery_seconds=600.0)
    try:
        await mesh.pair()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(generate(mesh, chat(WIDE, "?")), 60)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await mesh.stop()
