"""`make compose-test` needs Docker; what can be told without it is told here."""

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest
import yaml
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from common.rpc.channel import connect
from tests.compose import images, receiver, static
from tests.compose.checks import crossings
from tests.compose.command import ROOT, CommandFailed, run
from tests.compose.project import FILES, Project
from tests.compose.report import NotChecked, Report
from tests.otlp import Collector, Received

OVERLAYS = (
    "compose.cuda.yaml",
    "compose.tls.yaml",
    "docker/compose.local.yaml",
    *sorted((ROOT / FILES).glob("*.yaml")),
)
OF_TLS = {"certs", "rights"}


class Loader(yaml.SafeLoader):
    """Takes Compose's !override and !reset for what they stand before."""


def _plain(loader: yaml.SafeLoader, _: str, node: yaml.Node) -> object:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    return None


Loader.add_multi_constructor("!", _plain)


def services(file: str | Path) -> dict:
    return yaml.load((ROOT / file).read_text(), Loader)["services"]


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda file: Path(file).name)
def test_overlays_change_services_that_are_there(overlay: str | Path) -> None:
    new = services(overlay).keys() - services("compose.yaml").keys()
    assert new == (OF_TLS if overlay == "compose.tls.yaml" else set())


async def test_compose_accepts_every_combination() -> None:
    assert "accepted" in await static.compose_files()


async def test_what_others_are_configured_by() -> None:
    assert "panels" in await static.grafana_files()
    assert await static.collector_file()


def test_spans_go_where_the_receiver_listens() -> None:
    files = ("compose.yaml", "docker/compose.local.yaml", FILES / "test.yaml", FILES / "uncollected.yaml")
    found = Project("epd-config", files, {}).config()["services"]
    port = receiver.OTLP.rpartition(":")[2]
    for role in ("gateway", "encode", "prefill", "decode"):
        assert found[role]["environment"]["EPD_OTLP_ENDPOINT"] == f"jaeger:{port}"
    assert found["jaeger"]["entrypoint"][:3] == ["python", "-m", "tests.compose.receiver"]
    assert found["jaeger"]["read_only"] is True
    collector = yaml.safe_load((ROOT / "docker" / "otel-collector.yaml").read_text())
    assert collector["exporters"]["otlp/jaeger"]["endpoint"] == f"jaeger:{port}"


async def test_the_receiver_keeps_spans_in_its_file(tmp_path: Path) -> None:
    kept = tmp_path / "spans"
    collector = Collector()
    collector.spans = receiver.Kept(kept)
    request = trace_service_pb2.ExportTraceServiceRequest()
    sent = request.resource_spans.add()
    sent.resource.attributes.add(key="service.name").value.string_value = "decode"
    span = sent.scope_spans.add().spans.add(name="decode.run", trace_id=b"\1" * 16, span_id=b"\2" * 8)
    span.attributes.add(key="epd.worker").value.string_value = "decode-0"
    async with collector, connect(collector.address) as channel:
        await trace_service_pb2_grpc.TraceServiceStub(channel).Export(request, timeout=20)
    (read,) = [Received(**json.loads(line)) for line in kept.read_text().splitlines()]
    assert (read.name, read.service, read.trace_id) == ("decode.run", "decode", "01" * 16)
    assert read.attributes == {"epd.worker": "decode-0"}


def test_crossings_are_between_services() -> None:
    root = Received("t", "1", "", "gateway.generate", "gateway", {}, 0, 1, False)
    call = dataclasses.replace(root, span_id="2", parent_span_id="1", name="call")
    served = dataclasses.replace(call, span_id="3", parent_span_id="2", name="decode.run", service="decode")
    stray = dataclasses.replace(served, span_id="4", parent_span_id="9", service="prefill")
    assert crossings([root, call, served, stray]) == {("gateway", "decode")}


def test_the_base_image_is_one_that_debootstrap_can_stand_in_for() -> None:
    assert images.base_image() == ("python:3.11-slim-bookworm", "bookworm")


async def test_a_report_goes_on_after_a_failure_and_tells_it(capsys: pytest.CaptureFixture) -> None:
    async def good() -> str:
        return "seen"

    async def bad() -> str:
        raise AssertionError("not as it should be")

    async def lacking() -> str:
        raise NotChecked("no such program")

    report = Report()
    for what, checking in (("first", bad), ("second", lacking), ("third", good)):
        await report.check(what, checking)
    assert report.failed
    assert [line.result for line in report.lines] == ["FAILED", "not checked", "ok"]
    assert report.table().splitlines()[-1] == "1 passed, 1 failed"
    assert "not as it should be" in capsys.readouterr().out


def test_commands_say_how_they_failed() -> None:
    assert run("echo", "fine") == "fine\n"
    with pytest.raises(CommandFailed, match="ended with 3\nwhy"):
        run("sh", "-c", "echo why >&2; exit 3")
    with pytest.raises(CommandFailed, match="not done after"):
        run("sleep", "60", seconds=0.2)
    with pytest.raises(CommandFailed, match="there is no"):
        run("no-such-program-of-ours")


async def test_checks_that_are_cancelled_stay_cancelled() -> None:
    async def endless() -> str:
        await asyncio.Event().wait()
        return ""

    report = Report()
    task = asyncio.create_task(report.check("endless", endless))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not report.lines
