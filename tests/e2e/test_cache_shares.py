"""What a tenant may keep in the caches, from the gateway's settings to the blocks of real workers."""

import random
from pathlib import Path
from typing import Any

import pytest

from common.policies.limits import TenantLimits
from tests.e2e.conftest import Meshes
from tests.e2e.test_vlm_exact import image_request, picture
from tests.mesh import Answer, LocalMesh, collect, request

session = pytest.mark.asyncio(loop_scope="session")

KEPT_BLOCKS = 4


async def asked(mesh: LocalMesh, tenant: str, what: Any) -> Answer:
    return await collect(mesh.stub.Generate(what, timeout=60, metadata=(("x-epd-tenant", tenant),)))


@session
async def test_a_tenant_keeps_so_many_bytes_of_kv_and_no_more(meshes: Meshes, tmp_path: Path) -> None:
    layout = (await meshes.get(roles=("prefill", "decode"))).workers[0].context.record.layout
    limits = {"flood": TenantLimits(cache_bytes=KEPT_BLOCKS * layout.block_bytes + 1)}
    async with meshes.make(roles=("prefill", "decode"), num_blocks=128, gateway={"limits": limits}) as mesh:
        rng = random.Random("shares")
        prompts = [[rng.randrange(10, 500) for _ in range(3 * layout.block_size + 1)] for _ in range(5)]
        for prompt in prompts:
            for tenant in ("flood", "guest"):
                await asked(mesh, tenant, request(prompt, max_tokens=2, ignore_eos=True))
        await mesh.settled()
        for worker in mesh.workers:
            cached = (await mesh.status(worker)).load.cached_blocks
            assert len(prompts) * 3 < cached <= len(prompts) * 3 + KEPT_BLOCKS
        again: dict[str, list[int]] = {"flood": [], "guest": []}
        for tenant, found in again.items():
            for prompt in reversed(prompts):  # the last first: what is asked anew pushes out what is older
                answer = await asked(mesh, tenant, request(prompt, max_tokens=1, ignore_eos=True))
                found.append(answer.usage.cached_tokens)
        assert again["guest"] == [3 * layout.block_size] * len(prompts)
        assert again["flood"] == [3 * layout.block_size] + [0] * (len(prompts) - 1)


@session
async def test_a_tenant_that_may_keep_nothing_has_no_embedding_cached(meshes: Meshes) -> None:
    gateway = {"limits": {"flood": TenantLimits(cache_bytes=1)}}
    async with meshes.make("vlm-llava", roles=("encode", "prefill,decode"), gateway=gateway) as mesh:
        for tenant, expected in (("flood", [0, 0, 0]), ("guest", [0, 1, 1])):
            found = []
            for number in range(3):  # another beginning each time: no block of the prompt is found
                what = image_request(f"{number} times <image> once more", [picture(1)], max_tokens=1)
                found.append((await asked(mesh, tenant, what)).accounting.cached_images)
            assert found == expected
        await mesh.settled()
        assert (await mesh.status(mesh.workers[0])).load.cached_rows > 0
