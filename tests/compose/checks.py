"""What a mesh in containers has to do at rest: health, rights, answers, spans, metrics."""

import json
import time
from collections.abc import Sequence

import yaml

from common import telemetry as names
from common.models.catalog import DEFAULT_MODEL
from tests.compose.command import ROOT
from tests.compose.images import size
from tests.compose.project import OURS, Container, Project, inside, inspected
from tests.compose.traffic import QUESTION, Client, picture
from tests.otlp import Received

ROLES = ("gateway", "encode", "prefill", "decode")
ENCODE, PREFILL = "epd.v1.EncodeService/Encode", "epd.v1.PrefillService/Prefill"
DECODE, PULL = "epd.v1.DecodeService/Decode", "epd.v1.TransferService/Pull"
TEXT_EDGES = {
    (names.GATEWAY_GENERATE, PREFILL),
    (PREFILL, names.PREFILL_RUN),
    (names.PREFILL_RUN, names.PREFILL_FORWARD),
    (names.GATEWAY_GENERATE, DECODE),
    (DECODE, names.DECODE_RUN),
    (names.DECODE_RUN, names.TRANSFER_PULL),
    (names.TRANSFER_PULL, PULL),
}
IMAGE_EDGES = TEXT_EDGES | {
    (names.GATEWAY_GENERATE, names.ENCODE_IMAGES),
    (names.ENCODE_IMAGES, ENCODE),
    (ENCODE, names.ENCODE_RUN),
    (names.ENCODE_RUN, names.ENCODE_FORWARD),
}
_STATUS = """
import json
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
written = []
for path in ("/", "/usr/local/bin/", "/home/epd/", "/models/", "/src/"):
    try:
        open(path + "written", "w")
        written.append(path)
    except OSError:
        pass
uid, capable, new = status["Uid"].split()[1], status["CapEff"].strip(), status["NoNewPrivs"].strip()
print(json.dumps({"uid": int(uid), "capabilities": int(capable, 16), "no_new": int(new), "written": written}))
"""
_SCRAPE = """
import json, socket, sys, urllib.request
found = {}
for address in sorted({each[4][0] for each in socket.getaddrinfo(sys.argv[1], int(sys.argv[2]), socket.AF_INET)}):
    with urllib.request.urlopen(f"http://{address}:{sys.argv[2]}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found[address] = sum(line.startswith(("epd_", "gen_ai_")) for line in lines)
print(json.dumps(found))
"""


async def image_size() -> str:
    return f"{OURS} {size(OURS) / 1e9:.2f} GB"


async def all_healthy(project: Project, scales: dict[str, int]) -> str:
    """Starts them."""
    started = time.monotonic()
    project.up()
    containers = project.containers()
    for container in containers:
        if container.state == "exited":
            assert container.exit_code == 0, container
        else:
            assert container.state == "running", container
            assert container.health in ("healthy", ""), container
    counted = {service: sum(each.service == service for each in containers) for service in scales}
    assert counted == scales, counted
    checked = [container for container in containers if container.health]
    names = ", ".join(f"{service} {count}" for service, count in scales.items())
    return f"{len(checked)} healthy after {time.monotonic() - started:.0f} s: {names}"


async def confined(project: Project) -> str:
    """No root, no capability, nothing that can be written but tmpfs; memory and processes bounded."""
    looked = [each for each in project.containers() if each.state == "running"]
    for container in looked:
        told = inspected(container.id)["HostConfig"]
        assert told["ReadonlyRootfs"], container.name
        assert told["Memory"] > 0, container.name
        assert told["PidsLimit"] > 0, container.name
        if inspected(container.id)["Config"]["Image"] != OURS:
            continue  # of which we cannot say that it has a Python
        seen = json.loads(inside(container.id, "python", "-c", _STATUS))
        assert seen["uid"] == 10001, (container.name, seen)
        assert (seen["capabilities"], seen["no_new"], seen["written"]) == (0, 1, []), (container.name, seen)
    return f"{len(looked)} containers: uid 10001, no capabilities, read-only root and models, limits"


async def answers_http(client: Client) -> str:
    body = {
        "model": DEFAULT_MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 16,
    }
    answer = await client.post("/v1/chat/completions", body)
    text = answer["choices"][0]["message"]["content"]
    assert "Paris" in text, text
    assert text == (await client.chat(QUESTION)).choices[0].text
    return f"{text!r}, the same by gRPC"


async def answers_about_pictures(client: Client) -> str:
    png, question = picture(0)
    answer = await client.see(png, question)
    text = answer.choices[0].text.strip()
    assert text == question.answer, text
    assert answer.accounting.encode_workers
    return f"{question.text!r}: {text!r}, by {answer.accounting.encode_workers[0]}"


async def one_trace_over_all_hops(client: Client) -> str:
    """As Jaeger would get it, over the containers' network."""
    text = await client.chat("Name three colours.")
    png, question = picture(1)
    image = await client.see(png, question)
    looked = []
    for answer, wanted in ((text, TEXT_EDGES), (image, IMAGE_EDGES)):
        looked.append(await client.trace(answer.accounting.trace_id, wanted))
    hops = sorted(f"{one}→{other}" for one, other in crossings(looked[1]))
    assert {"gateway→encode", "gateway→prefill", "gateway→decode"} <= set(hops), hops
    return f"{len(looked[0])} spans of a text, {len(looked[1])} of a picture; {', '.join(hops)}"


def crossings(spans: Sequence[Received]) -> set[tuple[str, str]]:
    """(service, service) of every span whose parent another service has sent."""
    service = {span.span_id: span.service for span in spans}
    pairs = {(service.get(span.parent_span_id, span.service), span.service) for span in spans}
    return {pair for pair in pairs if pair[0] != pair[1]}


async def bytes_go_by(channel: str, client: Client) -> str:
    """Containers of one host hand each other KV and embeddings in memory, for they share the sockets' tmpfs; with TLS
    by a channel that encrypts."""
    pulls = await client.spans_of(names.TRANSFER_PULL)
    pulls += [span for span in client.spans() if span.name == names.EMBEDDING_PULL]
    channels = {str(span.attributes.get(names.TRANSFER_CHANNEL)) for span in pulls}
    assert channels == {channel}, channels
    moved = sum(span.attributes.get(names.TRANSFER_BYTES, 0) for span in pulls)
    return f"{len(pulls)} pulls, {moved / 1e6:.1f} MB, all by {channel}"


async def metrics_where_prometheus_looks(project: Project, scales: dict[str, int]) -> str:
    """From another container, by the names and ports of prometheus.yaml: every replica answers."""
    (observer,) = project.containers("jaeger")
    seen = []
    for job in yaml.safe_load((ROOT / "docker" / "prometheus.yaml").read_text())["scrape_configs"]:
        (source,) = job["dns_sd_configs"]
        (name,) = source["names"]
        found = json.loads(inside(observer.id, "python", "-c", _SCRAPE, name, str(source["port"])))
        assert len(found) == scales[name], (name, found)
        assert min(found.values()) > 0, (name, found)
        seen.append(f"{name} {len(found)}×{min(found.values())}")
    return "samples: " + ", ".join(seen)


def roles(project: Project) -> list[Container]:
    return [container for container in project.containers() if container.service in ROLES]
