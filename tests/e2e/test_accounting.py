"""Where the time of a real request went: hops add up, hardly anything is left over, and the client's clock agrees."""

import asyncio
from statistics import median
from typing import Any

import pytest

from common import telemetry as names
from common.engine.settings import TimedModel
from common.policies.slo import SloTarget
from common.rpc import wire
from epd.v1 import generation_pb2
from tests.e2e.conftest import Meshes
from tests.mesh import LocalMesh, collect, request

session = pytest.mark.asyncio(loop_scope="session")

FORMS: dict[str, dict[str, Any]] = {
    "aggregated": {"roles": ("prefill,decode",)},
    "disaggregated": {"roles": ("prefill", "decode")},
}
# As long as a real model's, so that 2 % means something.
TIMED = TimedModel(base_seconds=0.01, seconds_per_prefill_token=0.0005, num_layers=3, vocab_size=512, max_context=4096)
REQUESTS = 20


async def timed_request(mesh: LocalMesh, prompt: list[int]) -> tuple[float, float, generation_pb2.Accounting]:
    """(seconds to the first token, to the end) by the client's clock, and the gateway's account."""
    loop = asyncio.get_running_loop()
    start, first = loop.time(), 0.0
    account = generation_pb2.Accounting()
    async for message in mesh.stub.Generate(request(prompt, max_tokens=12, ignore_eos=True)):
        first = first or loop.time()
        if message.HasField("accounting"):
            account = message.accounting
    return first - start, loop.time() - start, account


async def bare_trip(mesh: LocalMesh) -> float:
    loop = asyncio.get_running_loop()
    start = loop.time()
    await mesh.stub.ListModels(generation_pb2.ListModelsRequest())
    return loop.time() - start


def hop(hops: Any, name: str) -> float:
    return sum(wire.hop_seconds(each) for each in hops if each.name == name)


def slack(seconds: float, least: float) -> float:
    return max(0.02 * seconds, least)


@session
@pytest.mark.parametrize("form", FORMS)
async def test_hops_add_up_and_the_clients_clock_agrees(form: str, meshes: Meshes) -> None:
    mesh = await meshes.get(executor="timed", timed=TIMED, prefix_cache=False, **FORMS[form])
    await mesh.generate(range(100), max_tokens=3)  # connections, first imports
    taken: list[tuple[float, float, generation_pb2.Accounting]] = []
    trips: list[float] = []  # of calls that do nothing: what lies between the client's clock and the gateway's
    for i in range(REQUESTS):
        trips.append(await bare_trip(mesh))
        first, total, account = await timed_request(mesh, list(range(10 * i, 10 * i + 200)))
        taken.append((first, total, account))
        for hops, seconds, clock in (
            (account.ttft_hops, account.ttft_seconds, first),
            (account.total_hops, account.total_seconds, total),
        ):
            assert sum(map(wire.hop_seconds, hops)) == pytest.approx(seconds, abs=1e-7)
            assert all(wire.hop_seconds(each) >= 0 for each in hops)
            assert seconds <= clock  # the client began earlier, and heard of the end later
    # What is left out is left out of every request, however busy the machine: the least that was seen counts.
    ttft, total = min(first for first, _, _ in taken), min(total for _, total, _ in taken)
    trip = max(0.003, 2 * median(trips))
    for left, allowed in (
        (min(hop(a.ttft_hops, names.UNATTRIBUTED) for _, _, a in taken), slack(ttft, 0.002)),
        (min(hop(a.total_hops, names.UNATTRIBUTED) for _, _, a in taken), slack(total, 0.002)),
        (min(first - a.ttft_seconds for first, _, a in taken), slack(ttft, trip)),
        (min(total - a.total_seconds for _, total, a in taken), slack(total, trip)),
    ):
        assert left <= allowed
    # Work is found where it was done: of 200 tokens at half a millisecond each.
    for _, _, account in taken:
        assert hop(account.ttft_hops, names.PREFILL_FORWARD) >= 0.1
        places = {each.name: each.where for each in account.total_hops}
        assert places[names.PREFILL_FORWARD] == mesh.workers[0].settings.worker_id
        assert places[names.DECODE_STEPS] == mesh.workers[-1].settings.worker_id
    # On the gateway's clock, where the first of two messages may have been the slower one: so of most requests.
    assert median(hop(account.total_hops, names.DECODE_STEPS) for _, _, account in taken) >= 0.9 * 10 * 0.01


@session
@pytest.mark.parametrize("form", FORMS)
async def test_hops_of_each_form(form: str, meshes: Meshes) -> None:
    mesh = await meshes.get(**FORMS[form])
    answer = await mesh.generate(list(range(30, 70)), max_tokens=8, ignore_eos=True)
    ttft = {each.name for each in answer.accounting.ttft_hops}
    assert {names.GATEWAY_ADMIT, names.GATEWAY_PREPROCESS, names.GATEWAY_ROUTE, names.PREFILL_FORWARD} <= ttft
    rest = {each.name for each in answer.accounting.total_hops}
    assert ttft <= rest
    assert names.DECODE_STEPS in rest
    assert (names.TRANSFER_PULL in rest) == (form == "disaggregated")
    assert answer.accounting.tpot_seconds > 0
    assert answer.accounting.ttft_seconds < answer.accounting.total_seconds


@session
async def test_a_miss_names_the_hop(meshes: Meshes) -> None:
    """A slow prefill is to blame for a late first token; what both have time for is met."""
    slow = TimedModel(base_seconds=0.002, seconds_per_prefill_token=0.02, num_layers=3, vocab_size=512)
    target = SloTarget(ttft_seconds=3.0, tpot_seconds=60.0)  # 4 s of prefill miss it, 0.4 s on any machine do not
    mesh = await meshes.get(executor="timed", timed=slow, gateway={"slo": target})
    answer = await mesh.generate(list(range(200)), max_tokens=3, ignore_eos=True)
    assert not answer.accounting.slo_met
    assert answer.accounting.slo_blame == names.PREFILL_FORWARD
    short = await mesh.generate(list(range(20)), max_tokens=3, ignore_eos=True)
    assert short.accounting.slo_met
    assert short.accounting.slo_blame == ""


@session
async def test_streams_of_several_choices_add_up_too(meshes: Meshes) -> None:
    mesh = await meshes.get(**FORMS["disaggregated"])
    asked = request(list(range(40, 90)), n=3, max_tokens=9, ignore_eos=True, temperature=0.8, seed=3)
    account = (await collect(mesh.stub.Generate(asked))).accounting
    assert sum(map(wire.hop_seconds, account.total_hops)) == pytest.approx(account.total_seconds, abs=1e-7)
    assert sum(map(wire.hop_seconds, account.ttft_hops)) == pytest.approx(account.ttft_seconds, abs=1e-7)
