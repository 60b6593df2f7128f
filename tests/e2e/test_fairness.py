"""Two tenants at 1 : 10 demand under saturation, real gateway and workers that take the time a model would take: what
each of them gets."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from common.engine.settings import TimedModel
from common.policies.fairness import FairnessPolicy
from common.policies.routing import RoutingPolicy
from tests.e2e.conftest import Meshes
from tests.mesh import MODEL, PATIENCE_SECONDS, LocalMesh, request

session = pytest.mark.asyncio(loop_scope="session")

PROMPT, TOKENS = 64, 4
CLIENTS = {"light": 12, "heavy": 120}  # each has a request there all the time
WARM, ENOUGH = 10, 120  # answers
# Prefill is what there is too little of: 32 ms a prompt.
MODEL_TIME = TimedModel(
    base_seconds=0.0, seconds_per_prefill_token=0.0005, seconds_per_decode=0.0, vocab_size=512, max_context=4096
)


def options(order: Any) -> dict[str, Any]:
    gateway = {
        "fairness": FairnessPolicy(order=order),
        "routing": RoutingPolicy(dispatch_tokens=PROMPT),
        "max_in_flight": 200,
        "refuse_by": "never",
        "hold_seconds": PATIENCE_SECONDS,
    }
    return {"executor": "timed", "timed": MODEL_TIME, "num_blocks": 1024, "gateway": gateway}


class Demand:
    """Two tenants that ask for more than there is. Between `WARM` and `ENOUGH` answers it notes

    served: prompt tokens and twice the output tokens that each tenant's clients got; gap: the most by which the
    gateway's counters moved apart while both waited; admitted: the most requests that were not in the queue.
    """

    def __init__(self, mesh: LocalMesh) -> None:
        self._mesh = mesh
        self._queue = mesh.gateway.generator.orchestrator.planner._queue(MODEL)
        self._sent = self._answers = 0
        self._enough = asyncio.Event()
        self.served: Counter[str] = Counter()
        self.gap = 0.0
        self.admitted = 0
        self._apart: list[float] = []  # since when both wait

    async def run(self) -> None:
        places = [(number / count, tenant) for tenant, count in CLIENTS.items() for number in range(count)]
        tasks = [asyncio.create_task(self._client(tenant)) for _, tenant in sorted(places)]  # evenly mixed
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._enough.wait()
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [each for each in ended if not isinstance(each, asyncio.CancelledError)] == []

    async def _client(self, tenant: str) -> None:
        while True:
            self._sent += 1
            prompt = [10 + self._sent // 400, 10 + self._sent % 400, *range(10, 8 + PROMPT)]  # no two share a block
            asked = request(prompt, max_tokens=TOKENS, ignore_eos=True)
            metadata = (("x-epd-tenant", tenant),)
            first = True
            async for message in self._mesh.stub.Generate(asked, timeout=PATIENCE_SECONDS, metadata=metadata):
                tokens = sum(len(choice.token_ids) for choice in message.choices)
                if tokens:
                    self._note(tenant, PROMPT * first + 2 * tokens)
                    first = False
            self._answers += 1
            if self._answers >= ENOUGH:
                self._enough.set()

    def _note(self, tenant: str, service: int) -> None:
        if not WARM <= self._answers < ENOUGH:
            return
        fair = self._queue.fair
        self.served[tenant] += service
        self.admitted = max(self.admitted, sum(CLIENTS.values()) - len(fair))
        if set(fair.tenants()) != set(CLIENTS):  # whoever comes back is lifted
            self._apart.clear()
            return
        self._apart.append(fair.counters["light"] - fair.counters["heavy"])
        self.gap = max(self.gap, max(self._apart) - min(self._apart))

    @property
    def ratio(self) -> float:
        return self.served["heavy"] / self.served["light"]

    @property
    def bound(self) -> float:
        return 2 * max(PROMPT, 2 * self.admitted * TOKENS)


@session
@pytest.mark.parametrize("roles", [("prefill", "decode"), ("prefill,decode",)], ids=["disaggregated", "aggregated"])
async def test_two_tenants_get_the_same_whatever_they_ask_for(meshes: Meshes, roles: Any) -> None:
    mesh = await meshes.get(roles=roles, **options("vtc"))
    demand = Demand(mesh)
    await demand.run()
    await mesh.settled()
    assert demand.ratio == pytest.approx(1.0, abs=0.1)
    assert demand.gap <= demand.bound


@session
async def test_in_the_order_of_arrival_they_get_what_they_ask_for(meshes: Meshes) -> None:
    mesh = await meshes.get(roles=("prefill", "decode"), **options("fcfs"))
    demand = Demand(mesh)
    await demand.run()
    await mesh.settled()
    assert demand.ratio == pytest.approx(10.0, rel=0.3)
    assert demand.gap > demand.bound
