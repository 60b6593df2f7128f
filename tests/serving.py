"""`epd up` in the background, as people start it, and what a client next to it has in its environment."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Self

from common.registry.local_etcd import free_port

ROOT = Path(__file__).parents[1]
SECONDS = 900.0  # a bound for broken code; models are read on two cores that others use, too
_NOT_OURS = ("EPD_ETCD", "EPD_ADDRESS", "EPD_CONFIG", "EPD_API_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL", "MODEL")


class Serving:
    """A mesh between `with` and its end; arguments are those of `epd up`."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self._arguments = arguments
        self.run_dir = directory / "run"
        self.address, self.http = f"127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
        cleared = {name: value for name, value in os.environ.items() if name not in _NOT_OURS}
        self.environment = cleared | {"EPD_RUN_DIR": str(self.run_dir), "COLUMNS": "120", "NO_COLOR": "1"}

    def epd(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "services.cli", *arguments]
        options = {"capture_output": True, "text": True, "timeout": SECONDS, "env": self.environment, "cwd": ROOT}
        return subprocess.run(command, **options)

    @property
    def client_environment(self) -> dict[str, str]:
        """Where the gateway is; the tools of our own environment first."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        names = {"EPD_ADDRESS": self.address, "EPD_HTTP": self.http, "OPENAI_BASE_URL": f"{self.http}/v1"}
        python = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        cache = os.environ.get("BUF_CACHE_DIR") or str(self.run_dir / "buf")
        return self.environment | names | {"PATH": path, "PYTHONPATH": python, "BUF_CACHE_DIR": cache}

    def __enter__(self) -> Self:
        ports = (self.address.rpartition(":")[2], self.http.rpartition(":")[2])
        started = self.epd("up", *self._arguments, "--detach", "--grpc-port", ports[0], "--http-port", ports[1])
        if started.returncode:
            self.__exit__()
            raise AssertionError(started.stdout + started.stderr)
        assert json.loads((self.run_dir / "state.json").read_text())["grpc"].endswith(ports[0])
        return self

    def __exit__(self, *_: object) -> None:
        self.epd("down")
