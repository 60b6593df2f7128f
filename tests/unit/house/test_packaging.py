"""What ships: licence, versions, and a compose file that Compose accepts."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from common.config import load
from services.worker_settings import WorkerSettings

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = dict(
    line.lower().replace("_", "-").split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
)


def test_licence() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text


@pytest.mark.parametrize("extra", ["", "local", "dev"])
def test_constraints_pin_every_dependency(extra: str) -> None:
    wanted = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    for requirement in wanted:
        name, operator, version = re.fullmatch(r"([\w.-]+)(?:\[.*\])?(?:(==|>=)(.+))?", requirement).groups()
        if name == PROJECT["name"]:
            continue
        pinned = CONSTRAINTS[name.lower().replace("_", "-")]
        if operator == "==":
            assert pinned == version, name


def test_generated_code_is_not_newer_than_its_runtime() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    tools = next(requirement for requirement in build if requirement.startswith("grpcio-tools"))
    version = [int(part) for part in tools.split("==")[1].split(".")]
    assert version <= [int(part) for part in CONSTRAINTS["grpcio"].split(".")]


def test_the_changelog_knows_this_version() -> None:
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()


ROLES = {"gateway", "encode", "prefill", "decode"}
SHOWN = {"etcd", "jaeger", "otel-collector", "prometheus", "grafana"}


@pytest.fixture(scope="module")
def compose() -> dict:
    return configured("compose.yaml")


def configured(*files: str) -> dict:
    """What Compose makes of these files together."""
    command = [str(Path(sys.executable).with_name("docker-compose"))]
    for file in files:
        command += ["-f", str(ROOT / file)]
    done = subprocess.run(
        [*command, "config", "--format", "json"], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_compose_has_the_whole_mesh(compose: dict) -> None:
    services = compose["services"]
    assert set(services) == ROLES | SHOWN | {"model"}
    for role in ("etcd", "gateway", "encode", "prefill", "decode"):
        assert services[role]["healthcheck"]["test"][0] == "CMD"
    for role in ("gateway", "encode", "prefill", "decode"):
        assert services[role]["depends_on"]["etcd"]["condition"] == "service_healthy"
        assert services[role]["depends_on"]["model"]["condition"] == "service_completed_successfully"
        assert services[role]["environment"]["EPD_ETCD"] == "etcd:2379"
    for published in (port for service in services.values() for port in service.get("ports", [])):
        assert published["host_ip"] == "127.0.0.1"


def test_case_e4_roles_need_no_gpu_and_fetch_nothing(compose: dict) -> None:
    services = compose["services"]
    for role in ("gateway", "encode", "prefill", "decode"):
        assert not {"deploy", "devices", "gpus", "runtime"} & set(services[role])
        assert services[role]["read_only"] is True
        models = [each for each in services[role]["volumes"] if each["target"] == "/models"]
        assert [each["read_only"] for each in models] == [True]
    assert services["model"]["command"][:2] == ["models", "get"]
    assert services["model"]["restart"] == "no"
    assert "HF_HUB_OFFLINE=1" in (ROOT / "docker" / "Dockerfile").read_text()


def test_two_workers_of_each_role_unless_told_otherwise(compose: dict) -> None:
    assert {role: compose["services"][role].get("scale", 1) for role in ROLES} == {
        "gateway": 1,
        "encode": 2,
        "prefill": 2,
        "decode": 2,
    }
    assert {configured("compose.yaml", "compose.tls.yaml")["services"][role].get("scale", 1) for role in ROLES} == {1}


def test_nothing_runs_as_root_writes_its_image_or_takes_all_memory(compose: dict) -> None:
    for name, service in compose["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert int(service["mem_limit"]) > 0, name
        assert service["pids_limit"] > 0, name
        if service["image"] != "epd-mesh:local":  # whose Dockerfile says USER
            assert service["user"].partition(":")[0] not in ("", "0", "root"), name
    assert re.search(r"^USER 10001:10001$", (ROOT / "docker" / "Dockerfile").read_text(), re.MULTILINE)


def test_images_are_pinned(compose: dict) -> None:
    for name in SHOWN:
        image = compose["services"][name]["image"]
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", image), image


def test_workers_tell_their_metrics_where_prometheus_looks(compose: dict) -> None:
    scraped = yaml.safe_load((ROOT / "docker" / "prometheus.yaml").read_text())["scrape_configs"]
    ports = {job["job_name"]: job["dns_sd_configs"][0]["port"] for job in scraped}
    assert ports.keys() == ROLES
    for job in scraped:
        assert job["dns_sd_configs"][0]["names"] == [job["job_name"]]
    assert f"0.0.0.0:{ports.pop('gateway')}" in compose["services"]["gateway"]["command"]
    for role, port in ports.items():
        assert f"--metrics-port={port}" in compose["services"][role]["command"]


def test_gpus_are_an_override() -> None:
    services = configured("compose.yaml", "compose.cuda.yaml")["services"]
    for role in ("encode", "prefill", "decode"):
        (device,) = services[role]["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
        told = {name: value for name, value in services[role]["environment"].items() if name.startswith("EPD_WORKER")}
        settings = load(WorkerSettings, "worker", environ=told)
        assert (settings.engine.device, settings.engine.dtype) == ("cuda", "bfloat16")
    assert "deploy" not in services["gateway"]


def test_an_override_for_machines_that_pull_nothing() -> None:
    services = configured("compose.yaml", "docker/compose.local.yaml")["services"]
    assert set(services) == ROLES | {"etcd", "model"}
    assert {services[name]["image"] for name in services} == {"epd-mesh:local"}


def test_compose_pins_an_etcd_that_keeps_its_writes(compose: dict) -> None:
    tag = compose["services"]["etcd"]["image"].rpartition(":v")[2]
    assert tuple(map(int, tag.split("."))) >= (3, 5, 21)


def test_compose_commands_are_understood(compose: dict) -> None:
    """Every option that compose gives to a role is one the command has."""
    for role in ("model", "gateway", "encode", "prefill", "decode"):
        command = compose["services"][role]["command"]
        words = command[:1] if role != "model" else command[:2]
        shown = subprocess.run(
            [sys.executable, "-m", "services.cli", *words, "--help"],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=ROOT,
            env=os.environ | {"COLUMNS": "200", "NO_COLOR": "1"},
        )
        assert shown.returncode == 0
        for option in (word for word in command if word.startswith("--")):
            assert option.partition("=")[0] in shown.stdout
