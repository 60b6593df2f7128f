"""compose.tls.yaml: everything by TLS, and each service with its own key alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
WORKERS = ("encode", "prefill", "decode")


@pytest.fixture(scope="module")
def services() -> dict:
    command = [str(Path(sys.executable).with_name("docker-compose"))]
    for file in ("compose.yaml", "compose.tls.yaml"):
        command += ["-f", str(ROOT / file)]
    done = subprocess.run(
        [*command, "config", "--format", "json"], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["services"]


def test_etcd_speaks_tls_to_clients_and_peers(services: dict) -> None:
    command = services["etcd"]["command"]
    assert not [word for word in command if "http://" in word]
    assert {"--client-cert-auth", "--peer-client-cert-auth"} <= set(command)


def test_everybody_waits_for_certificates_and_rights(services: dict) -> None:
    for name in ("gateway", *WORKERS):
        for first in ("certs", "rights"):
            assert services[name]["depends_on"][first]["condition"] == "service_completed_successfully"
        assert services[name]["environment"]["EPD_CERTS"] == "/certs"


def test_each_has_its_own_key_alone(services: dict) -> None:
    for name, service in services.items():
        mounted = {v["source"] for v in service.get("volumes", []) if v.get("source", "").startswith("certs-")}
        if name == "certs":
            assert len(mounted) == 7
        elif name == "rights":
            assert mounted == {"certs-ca"}
        elif name in ("etcd", "gateway", "prometheus", *WORKERS):
            assert mounted == {f"certs-{name}"}
        else:
            assert not mounted


def test_workers_have_the_ids_of_their_certificates(services: dict) -> None:
    issued = services["certs"]["command"][0]
    assert "for name in encode prefill decode; do issue worker" in issued
    for name in WORKERS:
        assert f"--worker-id={name}" in services[name]["command"]
        assert services[name]["healthcheck"]["test"][-2:] == ["--name", name]


def test_prometheus_knows_each_by_its_certificates_name(services: dict) -> None:
    (mounted,) = [v for v in services["prometheus"]["volumes"] if v["target"] == "/etc/prometheus/prometheus.yaml"]
    for job in yaml.safe_load(Path(mounted["source"]).read_text())["scrape_configs"]:
        name = job["job_name"]
        assert (job["scheme"], job["tls_config"]["server_name"]) == ("https", name)
        assert job["static_configs"][0]["targets"] == [f"{name}:{8000 if name == 'gateway' else 9100}"]
        assert ("cert_file" in job["tls_config"]) is (name != "gateway")
    assert "issue client prometheus" in services["certs"]["command"][0]
