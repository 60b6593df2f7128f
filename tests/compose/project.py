"""One project of Docker Compose, and what a test asks of its containers."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.compose.command import ROOT, run

COMPOSE = str(Path(sys.executable).with_name("docker-compose"))
FILES = Path("tests/compose/files")
OURS = "epd-mesh:local"
UP_SECONDS = 1500.0  # also for fetching and converting the models


@dataclass(frozen=True)
class Container:
    id: str
    name: str
    service: str
    state: str  # running, exited, ...
    health: str  # healthy, ...; empty where there is no check
    exit_code: int

    @property
    def host(self) -> str:
        """Its host name, which is in the ids of workers."""
        return self.id[:12]


class Project:
    """files: of compose, in rising order, relative to the root."""

    def __init__(self, name: str, files: Sequence[str | Path], environ: Mapping[str, str]) -> None:
        self.name = name
        self._files = [word for file in files for word in ("-f", str(ROOT / file))]
        self._environ = environ

    def compose(self, *words: str, seconds: float = 120.0) -> str:
        command = (COMPOSE, "--project-name", self.name, "--project-directory", str(ROOT), *self._files)
        return run(*command, *words, seconds=seconds, environ=self._environ)

    def config(self) -> dict[str, Any]:
        return dict(json.loads(self.compose("config", "--format", "json")))

    def up(self, *words: str) -> None:
        """Returns when all that runs is healthy."""
        wait = ("--wait", "--wait-timeout", str(int(UP_SECONDS)))
        self.compose("up", "--detach", "--no-build", *wait, *words, seconds=UP_SECONDS + 60)

    def down(self, *, volumes: bool) -> None:
        self.compose("down", "--remove-orphans", *(("--volumes",) if volumes else ()), seconds=300)

    def containers(self, service: str = "") -> list[Container]:
        """Of all services or one, also those that have ended, by name."""
        lines = self.compose("ps", "--all", "--format", "json", *((service,) if service else ())).splitlines()
        found = [
            Container(each["ID"], each["Name"], each["Service"], each["State"], each["Health"], int(each["ExitCode"]))
            for each in map(json.loads, lines)
        ]
        return sorted(found, key=lambda container: container.name)

    def address(self, service: str, port: int) -> str:
        """host:port that a port of a container is published at."""
        return self.compose("port", service, str(port)).strip()


def inside(container: str, *command: str, seconds: float = 60.0) -> str:
    """What a command prints in a container, by id or name."""
    return run("docker", "exec", container, *command, seconds=seconds)


def inspected(container: str) -> dict[str, Any]:
    return dict(json.loads(run("docker", "inspect", container))[0])
