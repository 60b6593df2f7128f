"""`epd worker`, `epd gateway` and `epd etcd`: one role in the foreground, until SIGTERM or Ctrl-C."""

import asyncio
import os
import signal
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from common import config
from common.errors import Unavailable
from common.log import setup_logging
from common.models.fetch import find_model
from common.registry.settings import port_of


def worker(model: str, file: str, options: Mapping[str, Any]) -> None:
    """options: fields of WorkerSettings by dotted name."""
    from services.worker import run_worker
    from services.worker_settings import WorkerSettings

    chosen = dict(options)
    if model and options.get("engine.executor") != "timed":
        path = find_model(model)
        chosen["engine.model_dir"] = str(path)
        chosen["engine.served_name"] = options.get("engine.served_name") or path.name
    settings = config.load(WorkerSettings, "worker", file=file, options=chosen)
    _run("+".join(settings.roles), run_worker(settings))


def gateway(models: list[str], file: str, options: Mapping[str, Any]) -> None:
    """models: NAME=DIRECTORY, or a model as `epd models path` takes it."""
    from services.gateway.main import run_gateway
    from services.gateway.settings import GatewaySettings

    chosen = dict(options)
    if models:
        chosen["models"] = dict(_named(model) for model in models)
    _run("gateway", run_gateway(config.load(GatewaySettings, "gateway", file=file, options=chosen)))


def etcd(address: str, data_dir: Path) -> None:
    """The packaged etcd server on loopback, for one machine. Its data is wiped at each start."""
    port = port_of(address, "address")
    asyncio.run(_etcd(port, data_dir))


async def _etcd(port: int, data_dir: Path) -> None:
    from common.registry.local_etcd import LocalEtcd

    server = LocalEtcd(data_dir, client_port=port)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    await server.start()
    assert server.process is not None
    print(f"etcd serves {server.endpoint}", flush=True)
    ended = loop.create_task(server.process.wait())
    stopped = loop.create_task(stop.wait())
    await asyncio.wait((ended, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not stop.is_set():
        raise Unavailable(f"etcd ended with {ended.result()}; its log: {server.log_file}")
    await server.stop()


def _named(model: str) -> tuple[str, str]:
    name, given, path = model.partition("=")
    if not given:
        name, path = "", model
    directory = find_model(path)
    return name or directory.name, str(directory)


def _run(service: str, running: Coroutine[Any, Any, None]) -> None:
    """Runs a role; it installs its own signal handlers and returns when it has drained."""
    setup_logging(service, level=os.environ.get("EPD_LOG_LEVEL", "INFO"))
    asyncio.run(running)
