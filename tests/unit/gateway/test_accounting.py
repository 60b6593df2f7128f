"""The time line's hops, by hand, and that they add up in real answers."""

import pytest

from common import telemetry as names
from common.errors import EngineFailed
from common.policies.slo import Hop, SloTarget
from services.gateway.accounting import AttemptRecord, TimeLine, account
from services.gateway.settings import GatewaySettings
from tests.unit.gateway.conftest import Mesh, ask, generate

LINE = TimeLine(received=10.0, admitted=10.01, prepared=10.03, first_sent=10.31)
PREFILL = [
    Hop(names.PREFILL_QUEUE, 0.05, "p"),
    Hop(names.CACHE_LOOKUP, 0.01, "p"),
    Hop(names.PREFILL_FORWARD, 0.17, "p"),
]
DECODE = [
    Hop(names.TRANSFER_PULL, 0.02, "d"),
    Hop(names.DECODE_QUEUE, 0.01, "d"),
    Hop(names.DECODE_FIRST_STEP, 0.03, "d"),
    Hop(names.DECODE_STEPS, 0.45, "d"),
]


def record(**fields: object) -> AttemptRecord:
    base = {
        "attempt": 1,
        "started": 10.03,
        "called": 10.05,
        "first": 10.30,
        "first_step": 10.37,
        "last": 10.87,
        "prefill_worker": "p",
        "decode_worker": "d",
        "hops": [*PREFILL, *DECODE],
    }
    return AttemptRecord(**base | fields)


def test_disaggregated_by_hand() -> None:
    found = account(LINE, [[record()]], [11], SloTarget(), now=10.9)
    assert {hop.name: hop.seconds for hop in found.ttft_hops} == {
        names.GATEWAY_ADMIT: pytest.approx(0.01),
        names.GATEWAY_PREPROCESS: pytest.approx(0.02),
        names.GATEWAY_ROUTE: pytest.approx(0.02),
        names.PREFILL_QUEUE: pytest.approx(0.05),
        names.CACHE_LOOKUP: pytest.approx(0.01),
        names.PREFILL_FORWARD: pytest.approx(0.17),
        names.PREFILL_RPC: pytest.approx(0.02),  # 0.25 in the call less 0.23 there
        names.GATEWAY_EMIT: pytest.approx(0.01),
    }
    total = {hop.name: hop.seconds for hop in found.total_hops}
    assert total[names.TRANSFER_PULL] == pytest.approx(0.02)
    assert total[names.DECODE_FIRST_STEP] == pytest.approx(0.03)
    # 0.07 to the first step less 0.06 there, and 0.50 of steps less the 0.45 reported
    assert total[names.DECODE_RPC] == pytest.approx(0.01 + 0.05)
    # Sending the first token took 0.01 beside all this: the steps lose it.
    assert total[names.DECODE_STEPS] == pytest.approx(0.45 - 0.01)
    assert total[names.GATEWAY_EMIT] == pytest.approx(0.01 + 0.03)
    assert found.ttft_seconds == pytest.approx(0.31)
    assert found.total_seconds == pytest.approx(0.9)
    assert sum(total.values()) == pytest.approx(0.9)
    assert found.tpot_seconds == pytest.approx((10.87 - 10.30) / 10)
    assert not found.verdict.met  # 57 ms a token
    assert found.verdict.blame == names.DECODE_RPC


def test_a_failed_attempt_before_the_first_token_is_retry() -> None:
    failed = AttemptRecord(attempt=1, started=10.03, called=10.04, failed=10.13, prefill_worker="q")
    found = account(LINE, [[failed, record(attempt=2, started=10.15, called=10.16, hops=[])]], [11], SloTarget(), 10.9)
    order = [hop.name for hop in found.ttft_hops]
    assert order.index(names.GATEWAY_PREPROCESS) < order.index(names.GATEWAY_RETRY) < order.index(names.GATEWAY_ROUTE)
    ttft = {hop.name: hop.seconds for hop in found.ttft_hops}
    assert ttft[names.GATEWAY_RETRY] == pytest.approx(0.12)  # the attempt and the back-off
    assert ttft[names.PREFILL_RPC] == pytest.approx(0.14)
    assert sum(ttft.values()) == pytest.approx(0.31)
    assert found.attempts == 2


def test_a_failure_in_mid_stream_is_retry_from_the_last_token_on() -> None:
    broken = record(last=10.47, failed=10.50, hops=PREFILL)
    resumed = record(attempt=2, started=10.52, called=10.53, first=10.60, first_step=10.62, last=10.80, hops=[])
    found = account(LINE, [[broken, resumed]], [30], SloTarget(), now=10.81)
    assert sum(hop.seconds for hop in found.total_hops) == pytest.approx(0.81)
    # In time: the first attempt, the failure and the back-off, then the second attempt with hops of its own.
    order = [hop.name for hop in found.total_hops]
    retry = order.index(names.GATEWAY_RETRY)
    first, second = found.total_hops[:retry], found.total_hops[retry + 1 :]
    assert found.total_hops[retry].seconds == pytest.approx(0.05)
    assert order.count(names.GATEWAY_RETRY) == 1
    for hops, rpc in ((first, 0.02), (second, 0.07)):
        found_names = [hop.name for hop in hops]
        assert len(set(found_names)) == len(found_names)
        assert {names.GATEWAY_ROUTE, names.PREFILL_RPC, names.DECODE_STEPS} <= set(found_names)
        assert found_names.index(names.GATEWAY_ROUTE) < found_names.index(names.DECODE_STEPS)
        assert {hop.name: hop.seconds for hop in hops}[names.PREFILL_RPC] == pytest.approx(rpc)


def test_the_choice_that_ends_last_is_the_critical_path() -> None:
    early = record(last=10.5, decode_worker="other")
    found = account(LINE, [[early], [record()]], [5, 11], SloTarget(), now=10.9)
    assert found.decode_worker == "d"
    assert found.tpot_seconds == pytest.approx(0.057)


def test_one_token() -> None:
    single = record(first_step=0.0, last=10.30, decode_worker="", hops=PREFILL)
    found = account(LINE, [[single]], [1], SloTarget(), now=10.32)
    assert found.tpot_seconds == 0.0
    assert found.verdict.met
    assert sum(hop.seconds for hop in found.total_hops) == pytest.approx(0.32)


def test_targets_of_tenant_and_model() -> None:
    mine, models = SloTarget(ttft_seconds=1), SloTarget(ttft_seconds=2)
    settings = GatewaySettings(slo_tenants={"t": mine}, slo_models={"m": models})
    assert settings.slo_target("m", "t") is mine
    assert settings.slo_target("m", "other") is models
    assert settings.slo_target("n", "other") == SloTarget(ttft_seconds=0.5, tpot_seconds=0.05)


@pytest.mark.parametrize("form", ["pair", "aggregated", "one token", "retry", "stop"])
async def test_hops_of_real_answers_add_up(mesh: Mesh, form: str) -> None:
    workers = [await mesh.add("b0", ["prefill", "decode"])] if form == "aggregated" else list(await mesh.pair())
    for worker in workers:
        worker.hops = {"prefill.queue": 1e-5, "prefill.forward": 1e-4, "transfer.pull": 1e-5, "decode.steps": 1e-4}
    if form == "retry":
        workers[-1].decode_errors = [(2, EngineFailed("broke"))]
    request = ask(max_tokens=1 if form == "one token" else 12, **({"stop": ["ef"]} if form == "stop" else {}))
    found = (await generate(mesh, request)).accounting
    total = sum(hop.duration.ToNanoseconds() for hop in found.total_hops) / 1e9
    ttft = sum(hop.duration.ToNanoseconds() for hop in found.ttft_hops) / 1e9
    assert total == pytest.approx(found.total_seconds, abs=1e-6)
    assert ttft == pytest.approx(found.ttft_seconds, abs=1e-6)
    assert 0 < found.ttft_seconds <= found.total_seconds
    assert "prefill.forward" in {hop.name for hop in found.ttft_hops}
    unattributed = [hop for hop in found.total_hops if hop.name == names.UNATTRIBUTED]
    assert all(hop.duration.ToNanoseconds() / 1e9 <= max(0.002, 0.02 * found.total_seconds) for hop in unattributed)


async def test_slo_metrics(model_dir) -> None:
    mesh = Mesh(model_dir)
    impossible = SloTarget(ttft_seconds=1e-9)
    await mesh.start(slo=SloTarget(ttft_seconds=60, tpot_seconds=60), slo_tenants={"strict": impossible})
    try:
        await mesh.pair()
        fine = await generate(mesh, ask(max_tokens=5))
        missed = await generate(mesh, ask(max_tokens=5), metadata=(("x-epd-tenant", "strict"),))
        assert (fine.accounting.slo_met, fine.accounting.slo_blame) == (True, "")
        assert not missed.accounting.slo_met
        assert missed.accounting.slo_blame in {hop.name for hop in missed.accounting.ttft_hops}
        metrics = mesh.gateway.telemetry.metrics
        assert metrics.goodput_tokens.labels("fake", "default")._value.get() == 5
        assert metrics.slo_met.labels("fake", "default")._value.get() == 1
        blame = missed.accounting.slo_blame
        assert metrics.slo_missed.labels("fake", "strict", blame)._value.get() == 1
        spans = mesh.gateway.store.trace(missed.accounting.trace_id)
        root = next(span for span in spans if span.name == "gateway.generate")
        assert (root.attributes["epd.slo.met"], root.attributes["epd.slo.blame"]) == ("False", blame)
    finally:
        await mesh.stop()
